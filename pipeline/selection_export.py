"""``selected_capabilities.json`` and the report beside it.

Stage 2 marks an entry DONE and adds ``environment_path``; a re-run keeps both. A failed run renames the old export to
``<export>.stale``, so that it never looks new; the next good run takes the status from there and removes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, StrictStr, TypeAdapter, ValidationError

from pipeline.candidates import CandidateFile
from pipeline.files import InputError, describe_validation, read_json, write_json
from pipeline.selection import Candidate, Counts, Thresholds


class Entry(BaseModel):
    """What a re-run needs of an entry; whoever added other keys keeps them in their own file."""

    model_config = ConfigDict(extra="ignore")
    skill: StrictStr
    description: StrictStr = ""
    status: Literal["PENDING", "DONE"] = "PENDING"
    environment_path: StrictStr | None = None


_ENTRIES = TypeAdapter(list[Entry])


def report_path(export: Path) -> Path:
    """``selected_capabilities.json`` -> ``selected_capabilities.report.json``."""
    return (
        export.with_suffix(".report.json")
        if export.suffix == ".json"
        else export.with_name(export.name + ".report.json")
    )


def stale_path(export: Path) -> Path:
    return export.with_name(export.name + ".stale")


def read_entries(path: Path) -> list[Entry]:
    """The entries of an export.

    Raises:
        InputError: the file is not a selection array.
    """
    data = read_json(path, "selection")
    try:
        return _ENTRIES.validate_python(data)
    except ValidationError as error:
        raise InputError(
            f"selection {path}: not a selection array ({describe_validation(error)}); "
            "move it away or give another --export"
        ) from None


def previous_entries(export: Path) -> dict[str, Entry]:
    """Entries of earlier runs by skill: from the export, its stale copy, and DONE ones that a report remembers."""
    known: dict[str, Entry] = {}
    report = report_path(export)
    if report.exists():
        data = read_json(report, "selection report")
        remembered = data.get("done") if isinstance(data, dict) else None
        if not isinstance(remembered, list):
            raise InputError(f"selection report {report}: not a report of this program; move it away")
        known |= {e.skill: e for e in _validated(remembered, report)}
    for path in (stale_path(export), export):
        if path.exists():
            known |= {e.skill: e for e in read_entries(path)}
    return known


def _validated(data: list[Any], path: Path) -> list[Entry]:
    try:
        return _ENTRIES.validate_python(data)
    except ValidationError as error:
        raise InputError(f"selection report {path}: done: {describe_validation(error)}; move it away") from None


def retire(export: Path) -> Path | None:
    """Rename an export that a failed run leaves behind; None when there is none or it is somebody else's file."""
    if not export.is_file():
        return None
    try:
        read_entries(export)
    except InputError:
        return None
    return export.replace(stale_path(export))


def entry(
    candidate: Candidate, thresholds: Thresholds, previous: Entry | None, descriptions: dict[str, str]
) -> dict[str, Any]:
    """One element of the export, with the published keys."""
    kept = previous or Entry(skill=candidate.name)
    found: dict[str, Any] = {
        "skill": candidate.name,
        "description": descriptions.get(candidate.name, kept.description),
        "mean_cov": float(candidate.mean_coverage),
        "std_cov": candidate.std_coverage,
        "mean_delta": float(candidate.mean_gap),
        "std_delta": candidate.std_gap,
        "n_runs_passed": candidate.n_passed(thresholds),
        "n_runs_total": len(candidate.counts),
        "passes_consistency": candidate.selected(thresholds),
        "example_failed_cases": list(candidate.example_failed),
        "status": kept.status,
    }
    if kept.environment_path is not None:
        found["environment_path"] = kept.environment_path
    return found


def statistics(candidate: Candidate, thresholds: Thresholds, attempts: tuple[int, ...]) -> dict[str, Any]:
    """Every number of a candidate, selected or not, with the counts behind each rate of each run."""
    return {
        "skill": candidate.name,
        "selected": candidate.selected(thresholds),
        "mean_cov": float(candidate.mean_coverage),
        "std_cov": candidate.std_coverage,
        "mean_delta": float(candidate.mean_gap),
        "std_delta": candidate.std_gap,
        "n_runs_labelled": len(candidate.present),
        "n_runs_passed": candidate.n_passed(thresholds),
        "n_runs_total": len(candidate.counts),
        "runs": [_run(a, c, thresholds) for a, c in zip(attempts, candidate.counts, strict=True)],
    }


def _run(attempt: int, counts: Counts | None, thresholds: Thresholds) -> dict[str, Any]:
    if counts is None:
        return {"attempt": attempt, "labelled": False, "passes": False}
    return {
        "attempt": attempt,
        "labelled": True,
        "passes": counts.passes(thresholds),
        "cov": float(counts.coverage),
        "er_failed": float(counts.error_rate_failed),
        "er_passed": float(counts.error_rate_passed),
        "delta": float(counts.gap),
        "lacking_failed": counts.lacking_failed,
        "present_failed": counts.present_failed,
        "na_failed": counts.na_failed,
        "lacking_passed": counts.lacking_passed,
        "present_passed": counts.present_passed,
        "na_passed": counts.na_passed,
    }


def descriptions_of(candidates: CandidateFile | None) -> dict[str, str]:
    return {c.name: c.description for c in candidates.candidates} if candidates else {}


def write_export(export: Path, entries: list[dict[str, Any]], report: dict[str, Any]) -> None:
    """The report first, then the export, then the stale copy goes: a kill in between leaves nothing that looks new."""
    write_json(report_path(export), report)
    write_json(export, entries)
    stale_path(export).unlink(missing_ok=True)
