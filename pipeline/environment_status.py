"""Which capability needs an environment next, and mark one as done when its evidence holds.

    python pipeline/environment_status.py next --capabilities pipeline/selected_capabilities.json
    python pipeline/environment_status.py done --capabilities F --skill S --environment capability_S_game.py \
        --panel panel.json --calibration calibration.json

``done`` checks that the panel passed on exactly this source, that calibration accepted rollouts of exactly this
environment, and only then sets DONE and ``environment_path``. For SWE scenarios, ``--scenarios F`` stands in place of
environment, panel and calibration: it wants accepted scenarios with a measured pass rate. Exit 0 = printed or marked,
1 = nothing is pending or the evidence does not hold, 2 = bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.command_line import Parser, positive_int
from pipeline.files import InputError, read_json, run_cli, write_json
from pipeline.remote_game import SandboxedEnvironment
from pipeline.scenarios import load_scenarios
from pipeline.validate_environment import content_hash

MAX_SCENARIO_RATE = 0.5
N_SCENARIOS = 10  # of one capability


def load_selection(path: str) -> list[dict[str, Any]]:
    """The entries of a selection file, as they are.

    Raises:
        InputError: not an array of objects with skill, status and mean_delta.
    """
    data = read_json(path, "selection file")
    if not isinstance(data, list) or not data:
        raise InputError(
            f"selection file {path}: expected a non-empty array, found {str(data)[:40]!r}; run stage 1 first"
        )
    for index, entry in enumerate(data):
        good = isinstance(entry, dict) and isinstance(entry.get("skill"), str)
        if not good or entry.get("status") not in ("PENDING", "DONE"):
            raise InputError(f"selection file {path}: [{index}]: expected skill and status PENDING or DONE")
        delta = entry.get("mean_delta")
        if isinstance(delta, bool) or not isinstance(delta, int | float):
            raise InputError(f"selection file {path}: [{index}]: expected a number mean_delta, found {delta!r:.40}")
    return data


def next_pending(entries: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The PENDING entry with the highest mean Delta; ties by name."""
    pending = [e for e in entries if e["status"] == "PENDING"]
    return min(pending, key=lambda e: (-e["mean_delta"], e["skill"])) if pending else None


def game_faults(environment: str, panel: Any, calibration: Any, isolation: str, packages: bool) -> list[str]:
    """What is missing before an environment may be called done."""
    with SandboxedEnvironment(environment, isolation=isolation, packages=packages) as loaded:
        name, digest = loaded.spec.name, content_hash(loaded.files())
    faults = []
    if _get(panel, "verdict") != "pass":
        faults.append(f"the panel's verdict is {_get(panel, 'verdict')!r}, not pass")
    if _get(panel, "content_hash") != digest:
        faults.append("the panel judged another version of the source; validate again")
    if _get(calibration, "verdict") != "accept":
        faults.append(f"the calibration's verdict is {_get(calibration, 'verdict')!r}, not accept")
    played = _get(calibration, "info", "settings", "env")
    if played is not None and played != name:
        faults.append(f"the calibration is about {played}, the environment is {name}")
    return faults


def scenario_faults(path: str, wanted: int) -> list[str]:
    """What is missing before a scenario set may be called done."""
    scenarios = load_scenarios(path)
    good = [s for s in scenarios if s.pass_rate is not None and 0 < s.pass_rate <= MAX_SCENARIO_RATE]
    if len(good) >= wanted:
        return []
    return [f"{len(good)} scenarios have a pass rate above 0 and at most {MAX_SCENARIO_RATE}; expected {wanted}"]


def _get(data: Any, *keys: str) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _next(args: argparse.Namespace) -> int:
    entry = next_pending(load_selection(args.capabilities))
    if entry is None:
        sys.stdout.write("every capability is DONE\n")
        return 1
    sys.stdout.write(f"{entry['skill']}\n{entry.get('description', '')}\n")
    examples = entry.get("example_failed_cases") or []
    sys.stdout.write(
        f"mean Delta {entry['mean_delta']:.3f}; failed examples: {', '.join(map(str, examples)) or 'none'}\n"
    )
    return 0


def _done(args: argparse.Namespace) -> int:
    entries = load_selection(args.capabilities)
    entry = next((e for e in entries if e["skill"] == args.skill), None)
    if entry is None:
        raise InputError(f"no skill {args.skill!r}; expected one of {', '.join(e['skill'] for e in entries)}")
    if args.scenarios:
        faults, path = scenario_faults(args.scenarios, args.n_scenarios), args.scenarios
    elif args.environment and args.panel and args.calibration:
        reports = read_json(args.panel, "panel report"), read_json(args.calibration, "calibration report")
        faults = game_faults(args.environment, *reports, args.isolation, args.packages)
        path = args.environment
    else:
        raise InputError("done needs --scenarios, or all of --environment, --panel and --calibration")
    if faults:
        sys.stdout.write("".join(f"not done: {fault}\n" for fault in faults))
        return 1
    entry |= {"status": "DONE", "environment_path": str(Path(path))}
    write_json(args.capabilities, entries)
    sys.stdout.write(f"{args.skill}: DONE, {path}\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("command", choices=("next", "done"), help="what to do")
    add("--capabilities", default="pipeline/selected_capabilities.json", metavar="F", help="selection file")
    add("--skill", help="done: the capability")
    add("--environment", metavar="F", help="done: environment file")
    add("--panel", metavar="R", help="done: report of validate_environment.py")
    add("--calibration", metavar="R", help="done: report of calibrate_environment.py")
    add("--scenarios", metavar="F", help="done: scenario file, for SWE capabilities")
    add("--n-scenarios", type=positive_int, default=N_SCENARIOS, help="done: scenarios that must be there")
    add("--isolation", default="auto", choices=("auto", "bwrap", "process"), help="how the environment is shut in")
    add("--packages", action="store_true", help="installed third-party packages are visible to the environment")
    args = parser.parse_args(argv)
    return _next(args) if args.command == "next" else _done(args)


if __name__ == "__main__":
    run_cli(main)
