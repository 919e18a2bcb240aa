"""Labels by a benchmark's own checks, without a model.

A checks module has ``CANDIDATES`` (a list of ``{"name", "description"}``) and ``capability_checks(seed, messages)``,
which gives each capability ``NA``, ``PRESENT`` or ``LACKING`` for one finished episode, from the task and the
transcript, never from the outcome. ``ENVIRONMENT``, where the module has it, is the name of the environment whose tasks
it knows: the seeds of another one mean other tasks, so its rollouts are refused.

What N runs mean here. The checks are deterministic, so N runs over the same trajectories are N equal files; that is
what is written, and each run says so (``labeler.deterministic``). K-of-N is then met or missed by all runs at once
and measures nothing about the labeller, which has no noise to measure. The uncertainty that remains is which episodes
were sampled; the bootstrap over trajectories in the selection report measures it. Giving each run other episodes
would break the rule that all runs speak of the same ids.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.files import InputError
from pipeline.label_output import Labelled
from pipeline.labels import LABELS, NAME
from pipeline.readers import rollouts
from pipeline.readers.sniff import detect
from pipeline.readers.trajectory import Trajectory
from pipeline.records import Outcome, read_summaries

Checks = Callable[[int, list[dict[str, Any]]], dict[str, str]]


@dataclasses.dataclass(frozen=True)
class ChecksModule:
    name: str
    described: dict[str, str]
    checks: Checks
    environment: str | None = None


def load_module(name: str) -> ChecksModule:
    """Import a checks module by its dotted name; the working folder is searched too.

    Raises:
        InputError: it cannot be imported or lacks one of the two names.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(name)
    except Exception as error:  # foreign code: whatever it raises is its fault and is named as such
        raise InputError(f"checks module {name}: import failed with {type(error).__name__}: {error}") from error
    described: dict[str, str] = {}
    raw = getattr(module, "CANDIDATES", None)
    if not isinstance(raw, list | tuple) or not raw:
        raise InputError(f"checks module {name}: expected CANDIDATES, a list of objects with name and description")
    for candidate in raw:
        if not isinstance(candidate, dict) or not NAME.fullmatch(str(candidate.get("name"))):
            raise InputError(f"checks module {name}: CANDIDATES: expected snake_case names, found {candidate!r:.80}")
        described[str(candidate["name"])] = str(candidate.get("description", ""))
    checks = getattr(module, "capability_checks", None)
    if not callable(checks):
        raise InputError(f"checks module {name}: expected a function capability_checks(seed, messages)")
    environment = getattr(module, "ENVIRONMENT", None)
    if environment is not None and not isinstance(environment, str):
        raise InputError(f"checks module {name}: ENVIRONMENT: expected a name, found {environment!r:.60}")
    return ChecksModule(name, described, checks, environment)


def trajectories(path: Path, threshold: float, part: str, module: ChecksModule) -> Iterator[Trajectory]:
    """The rollouts of a rollouts file, or those that a summaries file speaks of (of its ``part``, when it has a split).

    Raises:
        InputError: a source of the summaries is gone, or is not a rollouts file, or is one of another environment.
    """
    if detect(path) == "rollouts":
        refuse_others(module, path)
        yield from rollouts.read(path, threshold)
        return
    wanted: dict[str, Outcome] = {}
    sources: dict[str, None] = {}
    for record in read_summaries(path):
        if record.outcome is None or record.benchmark != "rollouts":
            raise InputError(f"summaries {path}: checks need rollouts with outcomes; {record.id} is not one")
        if record.split in (None, part):
            wanted[record.id] = record.outcome
            sources[record.source] = None
    for source in sources:
        refuse_others(module, Path(source))
        for trajectory in rollouts.read(Path(source), threshold):
            if trajectory.id in wanted:
                outcome = wanted.pop(trajectory.id)
                verdict = dataclasses.replace(trajectory.verdict, outcome=outcome)  # listed faults are in the summaries
                yield dataclasses.replace(trajectory, verdict=verdict)
    for missing in wanted:
        raise InputError(f"summaries {path}: {missing} is no longer in its rollouts file; summarize again")


@dataclasses.dataclass
class Skipped:
    """Rollouts that get no label, by reason."""

    infrastructure: int = 0
    hinted: int = 0


def refuse_others(module: ChecksModule, source: Path) -> None:
    """Refuse a rollouts file of an environment that ``module`` knows no tasks of.

    Raises:
        InputError: the file names its environment, and it is another one.
    """
    if module.environment is None:
        return
    if others := sorted(rollouts.recorded_environments(source) - {module.environment}):
        raise InputError(
            f"{source}: rollouts of {others[0]!r}, but {module.name} checks tasks of {module.environment!r}; "
            "give the checks module of that environment"
        )


def label(module: ChecksModule, found: Iterator[Trajectory], skipped: Skipped) -> list[Labelled]:
    """The labels of every scored, unhinted rollout.

    Raises:
        InputError: the checks fail or give anything but a label for each candidate.
    """
    labelled = []
    for trajectory in found:
        if trajectory.verdict.outcome not in ("passed", "failed"):
            skipped.infrastructure += 1
            continue
        if trajectory.task_id.endswith("+hint"):
            skipped.hinted += 1
            continue
        failed = trajectory.verdict.outcome == "failed"
        labels = _checked(module, trajectory)
        labelled.append(Labelled(trajectory.id, failed, trajectory.verdict.reward, labels))
    if not labelled:
        raise InputError("the input holds no scored rollout; collect rollouts first")
    return labelled


def _checked(module: ChecksModule, trajectory: Trajectory) -> dict[str, str]:
    where = f"checks module {module.name}: {trajectory.id}"
    try:
        seed = int(trajectory.task_id)
    except ValueError:
        raise InputError(f"{where}: task_id must be a seed (an integer)") from None
    try:
        labels = module.checks(seed, trajectory.messages)
    except Exception as error:  # foreign code, as above
        raise InputError(f"{where}: capability_checks raised {type(error).__name__}: {error}") from error
    if not isinstance(labels, dict) or labels.keys() != module.described.keys():
        raise InputError(f"{where}: expected a label for each of {', '.join(module.described)}, found {labels!r:.120}")
    for capability, value in labels.items():
        if value not in LABELS:
            raise InputError(f"{where}: {capability}: expected one of {', '.join(LABELS)}, found {value!r:.60}")
    return dict(labels)
