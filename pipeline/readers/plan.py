"""From the inputs that a user names to trajectories: detection, override, folders, and the join with verdict files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.files import InputError
from pipeline.readers import chat, coding_agents, inspect_log, rollouts, swebench, tau1, tau2, toolsandbox
from pipeline.readers.sniff import FAMILIES, Format, detect
from pipeline.readers.trajectory import Trajectory

Reader = Callable[[Path, float], Iterator[Trajectory]]

READERS: dict[Format, Reader] = {
    "tau2": tau2.read_file,
    "tau2_dir": tau2.read_folder,
    "tau2_rollout": tau2.read_rollout,
    "tau-bench": tau1.read,
    "rollouts": rollouts.read,
    "mini-swe-agent": coding_agents.read_mini,
    "swe-agent": coding_agents.read_swe_agent,
    "toolsandbox": toolsandbox.read,
    "inspect": inspect_log.read,
    "openai": chat.read,
}
SUFFIXES = (".json", ".jsonl", ".ndjson", ".traj", ".eval")
PARTS_OF_OTHERS = ("conversation.json", "execution_context.json")  # ToolSandbox: read through its result_summary.json


@dataclasses.dataclass(frozen=True)
class Plan:
    """The files to read with their formats, and the files of a folder that are none of ours."""

    inputs: tuple[tuple[Path, Format], ...]
    skipped: tuple[Path, ...]


def make_plan(inputs: list[str], family: str | None) -> Plan:
    """Detect the format of every input.

    Args:
        family: a key of ``FAMILIES``, or None to accept all.

    Raises:
        InputError: an input is missing or of no known format, or a folder holds nothing readable.
    """
    found: list[tuple[Path, Format]] = []
    skipped: list[Path] = []
    for name in inputs:
        path = Path(name)
        if not path.exists():
            raise InputError(f"input {name}: not found; check --input")
        if not path.is_dir() or detect(path) is not None:
            found.append((path, _format(path, family)))
            continue
        files = list(_walk(path))
        known = [(p, f) for p in files if (f := detect(p)) is not None and (family is None or f in FAMILIES[family])]
        if not known:
            raise InputError(
                f"input {name}: the folder holds no results file of a known format; see --help for the formats"
            )
        found += known
        skipped += [p for p in files if p not in {k for k, _ in known}]
    return Plan(tuple(found), tuple(skipped))


def _format(path: Path, family: str | None) -> Format:
    detected = detect(path)
    if family is not None:
        # the user knows better: read it as that benchmark and let its schema say what is wrong
        return detected if detected in FAMILIES[family] and detected is not None else FAMILIES[family][0]
    if detected is None:
        raise InputError(
            f"input {path}: no known format; expected one of {', '.join(FAMILIES)}; name it with --benchmark"
        )
    return detected


def _walk(folder: Path) -> Iterator[Path]:
    """Files to look at, in order; a tau2 folder is one input; hidden and temporary names are passed over."""
    if folder.name.startswith("."):
        return
    if detect(folder) is not None:
        yield folder
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _walk(path)
        elif path.suffix in SUFFIXES and not path.name.startswith(".") and path.name not in PARTS_OF_OTHERS:
            yield path


def trajectories(plan: Plan, threshold: float) -> Iterator[Trajectory]:
    """Every trajectory of the plan, one at a time; SWE-bench verdicts are read first and joined."""
    verdicts = swebench.Verdicts()
    for path, name in plan.inputs:
        if name not in READERS:
            swebench.read_verdicts(path, name, verdicts)
    for path, name in plan.inputs:
        if name in READERS:
            for trajectory in READERS[name](path, threshold):
                yield verdicts.join(trajectory) if trajectory.benchmark == "swebench" else trajectory
    yield from verdicts.without_trajectory()
