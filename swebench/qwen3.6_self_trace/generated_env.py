"""The generated environments of a run as games: what the scenario sets need to be sampled and trained on.

    eval "$(python swebench/qwen3.6_self_trace/generated_env.py --run-name NAME)"      # then, by hand:
    python -m train --game capability_deep_call_graph_traversal --model M

A scenario set ``<folder>/<capability>/scenarios_parsed.json`` becomes the game ``capability_<capability>`` of
``pipeline.swe_game`` in every command that is started with the variables of ``environment``: collection, training,
evaluation and replay play it by the same loop.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
from pathlib import Path

from run_folder import RunFolder, open_phase, phase_parser

from pipeline.files import InputError, read_text, run_cli
from pipeline.scenarios import Scenario, load_scenarios

MODULE = "pipeline.swe_game"
FILE = "scenarios_parsed.json"


def environment(folder: Path) -> dict[str, str]:
    """Variables that make the sets below ``folder`` games; other modules that the user named stay."""
    named = [m.strip() for m in os.environ.get("TRACE_GAME_MODULES", "").split(",") if m.strip()]
    modules = [*(m for m in named if m != MODULE), MODULE]
    return {"TRACE_GAME_MODULES": ",".join(modules), "TRACE_SCENARIOS": str(folder)}


def game_of(capability: str) -> str:
    return f"capability_{capability}"


def validated(folder: RunFolder) -> Path:
    """Where phase 4 leaves the sets to train on."""
    return folder.phase4 / "scenarios"


def set_path(folder: Path, capability: str) -> Path:
    return folder / capability / FILE


def read_set(folder: Path, capability: str) -> list[Scenario]:
    """The scenarios of a set.

    Raises:
        InputError: it is missing or damaged.
    """
    return load_scenarios(set_path(folder, capability))


def full_digest_of(folder: Path, capability: str) -> str:
    """SHA-256 of the set's file.

    Raises:
        InputError: it cannot be read.
    """
    return hashlib.sha256(read_text(set_path(folder, capability), "scenarios").encode()).hexdigest()


def digest_of(folder: Path, capability: str) -> str:
    """Eight digits that change with the set: rollouts of another set must not be taken for this one's."""
    return full_digest_of(folder, capability)[:8]


def sets_in(folder: Path) -> list[str]:
    """Capabilities that have a set below ``folder``, by name."""
    return sorted(path.parent.name for path in folder.glob(f"*/{FILE}"))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = phase_parser(__doc__)
    parser.add_argument("--of", choices=["phase3", "phase4"], default="phase4", help="whose scenario sets")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse_arguments()
    _, folder = open_phase(args)
    place = validated(folder) if args.of == "phase4" else folder.phase3
    if not sets_in(place):
        raise InputError(f"{place}: holds no {FILE}; run phase 3 and then phase 4, or give --of phase3")
    for name, value in environment(place).items():
        print(f"export {name}={shlex.quote(value)}")
    for capability in sets_in(place):
        print(f"# {game_of(capability)}: {len(read_set(place, capability))} scenarios")
    return 0


if __name__ == "__main__":
    run_cli(main)
