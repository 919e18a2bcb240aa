"""Label runs: the strict check of ``run_NN.json`` files before any arithmetic.

A run holds, for each capability, six lists that partition the trajectory ids by label (LACKING, PRESENT, NA) and by
outcome (failed, passed). Nothing about a run is trusted: overlapping lists, wrong totals, unknown or missing ids,
duplicate attempts are errors that name run, capability and id.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from environment_calls import as_unicode
from pipeline.command_line import natural_key
from pipeline.files import InputError, check, read_json, resolved

LABELS = ("NA", "PRESENT", "LACKING")  # a label's code is its place here
NA, PRESENT, LACKING = range(3)
ABSENT = -1  # code of every id for a capability that a run does not have
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")  # becomes capability_<name>_game.py, so nothing else may be in it


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Lists(_Strict):
    """The six lists of one capability; together they hold every id once."""

    lacking_failed: list[StrictStr]
    present_failed: list[StrictStr]
    na_failed: list[StrictStr]
    lacking_passed: list[StrictStr]
    present_passed: list[StrictStr]
    na_passed: list[StrictStr]

    def items(self) -> list[tuple[str, int, bool, list[str]]]:
        """(list name, label code, failed?, ids), six of them."""
        return [
            (f"{LABELS[code].lower()}_{side}", code, side == "failed", getattr(self, f"{LABELS[code].lower()}_{side}"))
            for side in ("failed", "passed")
            for code in (LACKING, PRESENT, NA)
        ]


class Totals(_Strict):
    total_failed: StrictInt = Field(ge=0)
    total_passed: StrictInt = Field(ge=0)


class Evidence(_Strict):
    """Where the labeller saw it: the message index in the trajectory and a verbatim quote from that message."""

    message: StrictInt = Field(ge=0)
    quote: StrictStr = Field(min_length=1)


class RunFile(_Strict):
    """One ``run_NN.json``."""

    schema_version: StrictInt = 1
    attempt: StrictInt = Field(ge=1)
    totals: Totals
    labels: dict[StrictStr, Lists] = Field(min_length=1)
    evidence: dict[StrictStr, dict[StrictStr, Evidence]] = {}
    labeler: dict[StrictStr, Any] = {}  # who labelled: kind, model, blind or not, token counts


@dataclasses.dataclass(frozen=True)
class LabelSet:
    """All runs as one array.

    ``codes`` [runs, capabilities, ids] int8 holds label codes, ``ABSENT`` where a run lacks the capability; ``failed``
    [ids] bool tells D- from D+. Runs are in order of attempt, capabilities by name, ids in natural order.
    """

    ids: tuple[str, ...]
    failed: npt.NDArray[np.bool_]
    attempts: tuple[int, ...]
    sources: tuple[str, ...]
    capabilities: tuple[str, ...]
    codes: npt.NDArray[np.int8]
    evidence: tuple[dict[str, dict[str, Evidence]], ...]
    labelers: tuple[dict[str, Any], ...]

    @property
    def n_failed(self) -> int:
        return int(self.failed.sum())

    @property
    def n_passed(self) -> int:
        return len(self.ids) - self.n_failed


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """The files that ``patterns`` (paths or globs) match, each once.

    Raises:
        InputError: a pattern matches nothing.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        matches = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern), key=natural_key)
        if not matches:
            raise InputError(f"label runs: {pattern!r} matches no file; expected run_01.json ..., check --runs")
        for match in matches:
            found.setdefault(resolved(match, "label run"), Path(match))
    return list(found.values())


def load_runs(paths: Iterable[Path]) -> LabelSet:
    """Read and check label runs.

    Raises:
        InputError: any violation of the schema or of the partition; names run, capability and id.
    """
    runs: dict[int, tuple[Path, RunFile]] = {}
    for path in paths:
        run = check(RunFile, read_json(path, "label run"), f"label run {path}")
        if run.attempt in runs:
            raise InputError(
                f"label run {path}: attempt {run.attempt} is also in {runs[run.attempt][0]}; "
                "each run needs its own number"
            )
        runs[run.attempt] = (path, run)
    return label_set([(str(path), run) for _, (path, run) in sorted(runs.items())])


def label_set(runs: Sequence[tuple[str, RunFile]]) -> LabelSet:
    """Checked runs, each with the name that errors call it by, as one ``LabelSet``."""
    if not runs:
        raise InputError("label runs: none given; expected at least one run_NN.json")
    first_source, first = runs[0]
    first_capability = next(iter(first.labels))
    sides = _sides(first_source, first, first_capability)
    if not sides:
        raise InputError(f"label run {first_source}: holds no trajectory; label at least one")
    ids = tuple(sorted(sides, key=natural_key))
    index = {trajectory: i for i, trajectory in enumerate(ids)}
    capabilities = tuple(sorted({c for _, run in runs for c in run.labels}))
    codes = np.full((len(runs), len(capabilities), len(ids)), ABSENT, dtype=np.int8)
    for r, (source, run) in enumerate(runs):
        for c, capability in enumerate(capabilities):
            if capability not in run.labels:
                continue
            _check_same(source, capability, _sides(source, run, capability), sides, first_source)
            for _, code, _, members in run.labels[capability].items():
                codes[r, c, [index[m] for m in members]] = code
        _check_evidence(source, run, sides)
    return LabelSet(
        ids=ids,
        failed=np.array([sides[i] for i in ids], dtype=np.bool_),
        attempts=tuple(run.attempt for _, run in runs),
        sources=tuple(source for source, _ in runs),
        capabilities=capabilities,
        codes=codes,
        evidence=tuple(run.evidence for _, run in runs),
        labelers=tuple(run.labeler for _, run in runs),
    )


def _sides(source: str, run: RunFile, capability: str) -> dict[str, bool]:
    """id -> failed?, after checking that the six lists are disjoint and sum to the totals."""
    if not NAME.fullmatch(capability):
        raise InputError(f"label run {source}: capability {capability!r}: expected a snake_case name (a-z, 0-9, _)")
    lists = run.labels[capability].items()
    sides: dict[str, bool] = {}
    for _, _, failed, members in lists:
        sides.update(dict.fromkeys(members, failed))
    if len(sides) != sum(len(members) for *_, members in lists):
        _name_duplicate(source, capability, lists)
    if "" in sides:
        raise InputError(f"label run {source}: capability {capability}: an id is empty")
    _check_text(source, capability, sides)
    for side, expected in (("failed", run.totals.total_failed), ("passed", run.totals.total_passed)):
        found = sum(len(members) for _, _, failed, members in lists if failed == (side == "failed"))
        if found != expected:
            raise InputError(
                f"label run {source}: capability {capability}: totals.total_{side} is {expected}, its three "
                f"*_{side} lists hold {found} ids; label every trajectory once and correct the totals"
            )
    return sides


def _check_text(source: str, capability: str, sides: Mapping[str, bool]) -> None:
    try:
        "".join(sides).encode()
    except UnicodeEncodeError:  # a lone surrogate, as broken JSON escapes make it, cannot be written again
        bad = next(m for m in sides if m != as_unicode(m))
        raise InputError(f"label run {source}: capability {capability}: id {bad!r} is not text; rename it") from None


def _name_duplicate(source: str, capability: str, lists: list[tuple[str, int, bool, list[str]]]) -> NoReturn:
    seen: dict[str, str] = {}
    for name, _, _, members in lists:
        for member in members:
            if member in seen:
                where = f"twice in {name}" if seen[member] == name else f"in both {seen[member]} and {name}"
                raise InputError(f"label run {source}: capability {capability}: id {member!r} is {where}; keep one")
            seen[member] = name
    raise AssertionError("called without a duplicate")


def _check_same(
    source: str, capability: str, sides: Mapping[str, bool], expected: Mapping[str, bool], reference: str
) -> None:
    if sides == expected:
        return
    where = f"label run {source}: capability {capability}"
    for member in sorted(expected.keys() - sides.keys(), key=natural_key):
        raise InputError(f"{where}: id {member!r} is missing (it is in {reference}); label every trajectory")
    for member in sorted(sides.keys() - expected.keys(), key=natural_key):
        raise InputError(f"{where}: unknown id {member!r} (not in {reference}); all runs must speak of the same ids")
    for member in sorted(expected, key=natural_key):
        if sides[member] != expected[member]:
            names = {True: "failed", False: "passed"}
            raise InputError(
                f"{where}: id {member!r} is {names[sides[member]]} here and {names[expected[member]]} in {reference}"
            )


def _check_evidence(source: str, run: RunFile, sides: Mapping[str, bool]) -> None:
    for capability, cited in run.evidence.items():
        if capability not in run.labels:
            raise InputError(f"label run {source}: evidence for {capability!r}, which the run does not label")
        for member in cited:
            if member not in sides:
                raise InputError(f"label run {source}: capability {capability}: evidence for unknown id {member!r}")


def run_file(
    attempt: int, outcome: Mapping[str, bool], labels: Mapping[str, Mapping[str, str]], **extra: Any
) -> dict[str, Any]:
    """A ``run_NN.json`` object.

    Args:
        outcome: id -> failed?, in the order in which ids are to be listed.
        labels: capability -> id -> ``"NA" | "PRESENT" | "LACKING"``, for every id of ``outcome``.
        extra: ``evidence`` and ``labeler``.
    """
    lists: dict[str, dict[str, list[str]]] = {}
    for capability, by_id in labels.items():
        lists[capability] = {
            f"{label}_{side}": [] for side in ("failed", "passed") for label in ("lacking", "present", "na")
        }
        for member, failed in outcome.items():
            lists[capability][f"{by_id[member].lower()}_{'failed' if failed else 'passed'}"].append(member)
    n_failed = sum(outcome.values())
    totals = {"total_failed": n_failed, "total_passed": len(outcome) - n_failed}
    return {"schema_version": 1, "attempt": attempt, "totals": totals, "labels": lists, **extra}
