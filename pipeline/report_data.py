"""What the selection report shows, as one JSON object: the aggregator's report, votes for each task, and quotes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictInt, StrictStr

from pipeline.files import InputError, check, read_json
from pipeline.labels import ABSENT, LACKING, LabelSet, find_runs, load_runs
from pipeline.records import Record, read_summaries
from pipeline.selection_export import read_entries, report_path

MAX_QUOTES = 4  # for each capability and outcome
MAX_TASKS = 500  # columns of the heat map


class ReportFile(BaseModel):
    """The parts of the aggregator's report that are needed here; the rest is shown as it is."""

    model_config = ConfigDict(extra="allow")
    schema_version: StrictInt
    thresholds: dict[StrictStr, Any]
    total_failed: StrictInt
    total_passed: StrictInt
    runs: list[dict[StrictStr, Any]]
    candidates: list[dict[StrictStr, Any]]
    evidence: dict[StrictStr, Any]
    summaries: dict[StrictStr, Any] | None = None


def build(selection: Path, runs: list[str] | None, summaries: str | None) -> dict[str, Any]:
    """Collect everything.

    Args:
        selection: the export of the aggregator; its report lies beside it.
        runs: label runs, when they are no longer where the report says.
        summaries: summaries file, when the report names none or it has moved.

    Raises:
        InputError: a file is missing, or the runs are not those of the report.
    """
    entries = read_entries(selection)
    beside = report_path(selection)
    report = check(ReportFile, read_json(beside, "selection report"), f"selection report {beside}")
    if {e.skill for e in entries} != {c["skill"] for c in report.candidates if c.get("selected")}:
        raise InputError(f"selection {selection} and {beside.name} do not belong together; run the aggregator again")
    labels = load_runs(find_runs(runs or [str(r.get("file")) for r in report.runs]))
    names = [str(c["skill"]) for c in report.candidates]
    if (labels.n_failed, labels.n_passed) != (report.total_failed, report.total_passed) or set(
        labels.capabilities
    ) - set(names):
        raise InputError(f"the label runs are not those of {beside}; run the aggregator again or give --runs")
    source = summaries or (report.summaries or {}).get("file")
    quotes = quotes_of(labels, names)
    records = cited_records(quotes, Path(source)) if source else {}
    return report.model_dump() | {
        "selection_file": str(selection),
        "status": {e.skill: {"status": e.status, "environment_path": e.environment_path} for e in entries},
        "votes": votes(labels, names),
        "quotes": quotes,
        "trajectories": {i: r.model_dump(mode="json") for i, r in records.items()},
    }


def votes(labels: LabelSet, names: list[str]) -> dict[str, Any]:
    """Share of the runs that label each failed trajectory LACKING; columns with the most votes first."""
    present = [n for n in names if n in labels.capabilities]
    index = [labels.capabilities.index(n) for n in present]
    codes_RCI = labels.codes[:, index, :][:, :, labels.failed]
    n_runs_CI = (codes_RCI != ABSENT).sum(axis=0)
    share_CI = (codes_RCI == LACKING).sum(axis=0) / n_runs_CI
    ids = [i for i, failed in zip(labels.ids, labels.failed, strict=True) if failed]
    order = sorted(range(len(ids)), key=lambda i: -float(share_CI[:, i].sum()))
    kept = order[:MAX_TASKS]
    return {
        "capabilities": present,
        "ids": [ids[i] for i in kept],
        "lacking_share": [[round(float(share_CI[c, i]), 4) for i in kept] for c in range(len(present))],
        "left_out": len(order) - len(kept),
    }


def quotes_of(labels: LabelSet, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Quotes behind the labels of each capability, LACKING on failed first; of each trajectory the first run's."""
    index = {i: n for n, i in enumerate(labels.ids)}
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        if name not in labels.capabilities:
            continue
        column = labels.capabilities.index(name)
        chosen: dict[tuple[bool, bool], dict[str, dict[str, Any]]] = {}
        for run, evidence in enumerate(labels.evidence):
            for trajectory, cited in evidence.get(name, {}).items():
                failed = bool(labels.failed[index[trajectory]])
                lacking = labels.codes[run, column, index[trajectory]] == LACKING
                group = chosen.setdefault((failed, bool(lacking)), {})
                if trajectory not in group and len(group) < MAX_QUOTES:
                    group[trajectory] = {
                        "id": trajectory,
                        "outcome": "failed" if failed else "passed",
                        "label": "LACKING" if lacking else "PRESENT",
                        "attempt": labels.attempts[run],
                        "message": cited.message,
                        "quote": cited.quote,
                    }
        groups = [chosen.get(key, {}) for key in ((True, True), (False, True), (False, False), (True, False))]
        found[name] = [q for group in groups for q in group.values()]
    return found


def cited_records(quotes: dict[str, list[dict[str, Any]]], summaries: Path) -> dict[str, Record]:
    """The trajectories that quotes come from."""
    wanted = {q["id"] for group in quotes.values() for q in group}
    return {r.id: r for r in read_summaries(summaries) if r.id in wanted} if wanted else {}
