"""Verdicts of SWE-bench runs: harness reports (keyed or flat), run summaries and predictions, joined by instance id.

"Submitted" is not a verdict. Ids under error or incomplete are infrastructure; they are in neither resolved nor
unresolved. An instance that appears in predictions or reports without a trajectory still becomes a record: errors
must not vanish.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictBool, StrictStr

from pipeline.files import InputError, check
from pipeline.readers.sniff import Format, outline
from pipeline.readers.stream import describe, items, json_lines, members, single
from pipeline.readers.trajectory import NO_VERDICT, Trajectory, Verdict, as_id

NAMES_SHOWN = 3

SYNONYMS = {
    "resolved": ("resolved_ids", "ids_resolved", "resolved"),
    "unresolved": ("unresolved_ids", "ids_unresolved", "unresolved"),
    "error": ("error_ids", "ids_error"),
    "incomplete": ("incomplete_ids", "ids_incomplete"),
    "empty": ("empty_patch_ids", "no_generation"),
    "submitted": ("submitted_ids", "ids_submitted"),
    "completed": ("completed_ids", "ids_completed"),
    "broken": ("infra_failure_ids",),
}
BROKEN = "the environment broke while the tests ran"
BROKEN_PERHAPS = "the harness' summary lists a broken environment"


class Tests(BaseModel):
    model_config = ConfigDict(extra="ignore")
    success: list[StrictStr] = []
    failure: list[StrictStr] = []


class Report(BaseModel):
    """The harness' record of one instance."""

    model_config = ConfigDict(extra="ignore")
    resolved: StrictBool | None = None
    patch_is_None: StrictBool | None = None
    patch_exists: StrictBool | None = None
    patch_successfully_applied: StrictBool | None = None
    infra_failure: StrictBool | None = None  # swebench 5: the log shows that the environment broke
    tests_status: dict[StrictStr, Tests] | None = None


class Prediction(BaseModel):
    model_config = ConfigDict(extra="ignore")
    instance_id: StrictStr | None = None
    model_patch: StrictStr | None


@dataclasses.dataclass
class Verdicts:
    """What is known of each instance; ``submitted`` lists those that become records even without a trajectory."""

    by_id: dict[str, tuple[Verdict, str]] = dataclasses.field(default_factory=dict)
    submitted: dict[str, str] = dataclasses.field(default_factory=dict)
    has_patch: dict[str, bool] = dataclasses.field(default_factory=dict)

    def add(self, instance: str, verdict: Verdict, source: str, *, submitted: bool = True) -> None:
        """Keep a verdict; of two that agree the one with the longer reason.

        Raises:
            InputError: two sources contradict each other.
        """
        if submitted:
            self.submitted.setdefault(instance, source)
        if instance in self.by_id:
            known, where = self.by_id[instance]
            if BROKEN_PERHAPS in (known.reason, verdict.reason) and known.outcome != verdict.outcome:
                # a summary looks for signs in every log; a report has weighed them against the tests' verdicts
                if known.reason == BROKEN_PERHAPS:
                    self.by_id[instance] = (verdict, source)
                return
            if known.outcome != verdict.outcome:
                raise InputError(
                    f"{instance} is {known.outcome} in {where} and {verdict.outcome} in {source}; "
                    "give the files of one run"
                )
            if len(known.reason) >= len(verdict.reason):
                return
        self.by_id[instance] = (verdict, source)

    def join(self, trajectory: Trajectory) -> Trajectory:
        """``trajectory`` with the verdict of the harness; its own one (an infrastructure fault) where there is none."""
        self.submitted.pop(trajectory.task_id, None)
        if trajectory.task_id not in self.by_id:
            return trajectory
        verdict, _ = self.by_id[trajectory.task_id]
        own = trajectory.verdict
        if verdict.outcome == "failed" and own.outcome == "infrastructure":
            verdict = own  # no patch because the run crashed: the harness cannot know
        return dataclasses.replace(trajectory, verdict=verdict)

    def without_trajectory(self) -> Iterator[Trajectory]:
        """Records for the instances that no trajectory claimed."""
        for instance, source in self.submitted.items():
            verdict, _ = self.by_id.get(instance, (NO_VERDICT, source))
            if verdict is NO_VERDICT and self.has_patch.get(instance) is False:
                verdict = Verdict("infrastructure", reason="empty patch, no trajectory tells why", fault="no_patch")
            verdict = dataclasses.replace(verdict, reason=f"{verdict.reason}; no trajectory".removeprefix("; "))
            yield Trajectory("swebench", repository(instance), instance, 0, verdict, [], source)


def repository(instance: str) -> str:
    """``django__django-10999`` -> ``django``."""
    head, found, _ = instance.partition("__")
    return head if found else ""


def read_verdicts(path: Path, name: Format, verdicts: Verdicts) -> None:
    """Add what a report, a summary or a predictions file says."""
    if name == "swebench-flat-report":
        if path.name != "report.json":
            raise InputError(f"report {path}: holds no instance id; it must be <instance id>/report.json")
        report = check(Report, single(path, ""), f"report {path}")
        verdicts.add(path.parent.name, _of_report(report), str(path))
    elif name == "swebench-report":
        for instance, raw in members(path):
            report = check(Report, raw, f"report {path}: {instance}")
            verdicts.add(as_id(instance, f"report {path}"), _of_report(report), str(path))
    elif name == "swebench-summary":
        _read_summary(path, verdicts)
    else:
        _read_predictions(path, verdicts)


def _of_report(report: Report) -> Verdict:
    if report.resolved:
        return Verdict("passed", 1.0)
    if report.resolved is None and not (report.patch_is_None or report.patch_exists is False):
        return Verdict("unknown", reason="the report has no resolved field")
    if report.infra_failure:
        return Verdict("infrastructure", reason=BROKEN, fault="harness")
    return Verdict("failed", 0.0, "; ".join(_components(report)) or "unresolved")


def _components(report: Report) -> list[str]:
    """Why an instance is unresolved: no patch, a patch that does not apply, tests that fail."""
    if report.patch_is_None or report.patch_exists is False:
        return ["no patch"]
    found = ["the patch does not apply"] if report.patch_successfully_applied is False else []
    groups = report.tests_status or {}
    for group, text in (("FAIL_TO_PASS", "still fail"), ("PASS_TO_PASS", "were broken")):
        failing = groups[group].failure if group in groups else []
        if failing:
            shown = ", ".join(failing[:NAMES_SHOWN]) + (" ..." if len(failing) > NAMES_SHOWN else "")
            found.append(f"{len(failing)} {group} tests {text}: {shown}")
    return found


def _read_summary(path: Path, verdicts: Verdicts) -> None:
    raw = single(path, "")
    where = f"summary {path}"
    groups = {group: _ids(raw, keys, where) for group, keys in SYNONYMS.items()}
    resolved = groups["resolved"]
    if resolved is None:
        raise InputError(f"{where}: expected a list resolved_ids, found {describe(raw)}")
    outside = {i for g in ("error", "incomplete", "empty") for i in groups[g] or []}
    unresolved = groups["unresolved"]
    if unresolved is None:
        unresolved = [i for i in groups["completed"] or groups["submitted"] or [] if i not in {*resolved, *outside}]
    for instance in set(resolved) & set(unresolved):
        raise InputError(f"{where}: {instance} is both resolved and unresolved; write the summary again")
    submitted, broken = groups["submitted"], groups["broken"] or []
    for ids, verdict in (
        (resolved, Verdict("passed", 1.0)),
        ([i for i in unresolved if i not in broken], Verdict("failed", 0.0, "unresolved")),
        ([i for i in unresolved if i in broken], Verdict("infrastructure", reason=BROKEN_PERHAPS, fault="harness")),
        (groups["empty"], Verdict("failed", 0.0, "empty patch")),
        (groups["error"], Verdict("infrastructure", reason="error in the harness", fault="harness")),
        (groups["incomplete"], Verdict("infrastructure", reason="not run to its end", fault="harness")),
    ):
        for instance in ids or []:
            if verdict.reason in ("empty patch", "not run to its end") and instance in verdicts.by_id:
                continue
            was_submitted = instance in submitted if submitted is not None else verdict.reason != "not run to its end"
            verdicts.add(instance, verdict, str(path), submitted=was_submitted)


def _ids(raw: Any, keys: tuple[str, ...], where: str) -> list[str] | None:
    """The first list under ``keys``; counts under the same name (``resolved: 8``) are passed over."""
    if not isinstance(raw, dict):
        raise InputError(f"{where}: expected an object, found {describe(raw)}")
    for key in keys:
        if isinstance(raw.get(key), list):
            return [as_id(i, f"{where}: {key}") for i in raw[key]]
    return None


def _read_predictions(path: Path, verdicts: Verdicts) -> None:
    for instance, raw, where in _predictions(path):
        prediction = check(Prediction, raw, where)
        name = as_id(instance or prediction.instance_id, f"{where}: instance_id")
        if name in verdicts.has_patch:
            raise InputError(f"{where}: a second prediction of {name}; give the predictions of one run")
        verdicts.has_patch[name] = bool((prediction.model_patch or "").strip())
        verdicts.submitted.setdefault(name, str(path))


def _predictions(path: Path) -> Iterator[tuple[str | None, Any, str]]:
    """(id or None, prediction, place) of a dictionary, a list or JSONL."""
    if path.suffix in (".jsonl", ".ndjson"):
        for number, raw in json_lines(path):
            yield None, raw, f"predictions {path} line {number}"
    elif outline(path).kind == "array":
        for n, raw in enumerate(items(path, "item")):
            yield None, raw, f"predictions {path}: {n}"
    else:
        for instance, raw in members(path):
            yield instance, raw, f"predictions {path}: {instance}"
