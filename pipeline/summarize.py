"""Trajectories of any benchmark to records: compaction, split, faults and counts. The command is ``_summarize.py``."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from environment_calls import as_unicode
from pipeline.files import InputError, check
from pipeline.readers.trajectory import Limits, Tally, Trajectory, Verdict, clean, compact_message
from pipeline.records import Record
from pipeline.split import part_of


@dataclasses.dataclass
class Summary:
    """What ``summarize`` counted on its way."""

    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    faults: Counter[str] = dataclasses.field(default_factory=Counter)
    domains: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    parts: Counter[str] = dataclasses.field(default_factory=Counter)
    cut_chars: int = 0
    redacted: int = 0

    def add(self, record: Record) -> None:
        outcome = str(record.outcome)
        self.outcomes[outcome] += 1
        self.domains.setdefault(record.domain, Counter())[outcome] += 1
        if record.fault:
            self.faults[record.fault] += 1
        if record.split:
            self.parts[record.split] += 1
        self.cut_chars += record.cut_chars
        self.redacted += record.redacted

    def as_json(self) -> dict[str, Any]:
        return {
            "total": self.outcomes.total(),
            **{name: self.outcomes[name] for name in ("passed", "failed", "infrastructure", "unknown")},
            "faults": dict(sorted(self.faults.items())),
            "domains": {d: dict(sorted(c.items())) for d, c in sorted(self.domains.items())},
            "parts": dict(sorted(self.parts.items())),
            "cut_chars": self.cut_chars,
            "redacted_secrets": self.redacted,
        }

    def line(self) -> str:
        o = self.outcomes
        faults = f" ({', '.join(f'{n} {k}' for k, n in sorted(self.faults.items()))})" if self.faults else ""
        return (
            f"{o.total()} trajectories: {o['passed']} passed, {o['failed']} failed; outside every rate: "
            f"{o['infrastructure']} infrastructure{faults}, {o['unknown']} without a verdict"
        )


def to_record(trajectory: Trajectory, limits: Limits, mine: Fraction | None, faults: Mapping[str, str]) -> Record:
    """One record; ``faults`` maps ids that a person found not to be the agent's fault to the reason."""
    tally = Tally()
    where = f"{trajectory.source}: {trajectory.id}"
    messages = [compact_message(m, i, limits, tally, where) for i, m in enumerate(trajectory.messages) if m is not None]
    verdict = trajectory.verdict
    if trajectory.id in faults:
        verdict = Verdict("infrastructure", verdict.reward, faults[trajectory.id], "listed")
    return check(
        Record,
        {
            "id": trajectory.id,
            "benchmark": trajectory.benchmark,
            "domain": as_unicode(trajectory.domain),
            "task_id": trajectory.task_id,
            "trial": trajectory.trial,
            "split": part_of(trajectory.domain, trajectory.task_id, mine) if mine is not None else None,
            "outcome": verdict.outcome,
            "reward": verdict.reward,
            "fault": as_unicode(verdict.fault),
            "reason": clean(verdict.reason, tally),
            "messages": messages,
            "cut_chars": tally.cut_chars,
            "redacted": tally.redacted,
            "source": trajectory.source,
        },
        where,
    )


def summarize(
    found: Iterable[Trajectory],
    limits: Limits,
    summary: Summary,
    *,
    mine: Fraction | None = None,
    faults: Mapping[str, str] | None = None,
) -> Iterator[Record]:
    """Records one at a time; ``summary`` is filled on the way.

    Raises:
        InputError: two trajectories have one id, nothing was found, or ``faults`` names an id that is not there.
    """
    sources: dict[str, str] = {}
    for trajectory in found:
        if trajectory.id in sources:
            raise InputError(
                f"id {trajectory.id!r} appears twice: in {sources[trajectory.id]} and in {trajectory.source}; "
                "summarize one run of the benchmark at a time"
            )
        sources[trajectory.id] = trajectory.source
        record = to_record(trajectory, limits, mine, faults or {})
        summary.add(record)
        yield record
    if not sources:
        raise InputError("the input holds no trajectory; check --input")
    for unknown in (faults or {}).keys() - sources.keys():
        raise InputError(f"faults: id {unknown!r} is not among the trajectories")
