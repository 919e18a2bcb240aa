"""The selection rule of stage 1, in exact rational arithmetic.

With LF, PF (LP, PP) the LACKING and PRESENT counts among failed (passed) trajectories of one run::

    Cov   = LF / |D-|                 all failed trajectories, NA included; 0 when |D-| = 0
    ER-   = LF / (LF + PF)            NA excluded; 0 when the denominator is 0
    ER+   = LP / (LP + PP)
    Delta = ER- - ER+
    a run passes  <=>  Cov >= rho and Delta >= delta;  selected  <=>  passes in at least K runs

In binary floats 21/30 - 15/30 >= 0.2 is False, so nothing is a float before it is reported.
Source: TRACE (arXiv 2604.05336), capability selection.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np

from pipeline.files import InputError
from pipeline.labels import ABSENT, LACKING, NA, PRESENT, LabelSet

MAX_EXAMPLES = 8


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """``rho`` on coverage, ``delta`` on the gap, both inclusive; ``k`` runs must pass."""

    rho: Fraction
    delta: Fraction
    k: int

    def __post_init__(self) -> None:
        if not 0 <= self.rho <= 1:
            raise InputError(f"rho: expected a share in [0, 1], found {self.rho}")
        if not -1 <= self.delta <= 1:
            raise InputError(f"delta: expected a difference in [-1, 1], found {self.delta}")
        if self.k < 1:
            raise InputError(f"k: expected at least 1 run, found {self.k}")


@dataclasses.dataclass(frozen=True)
class Counts:
    """Label counts of one capability in one run."""

    lacking_failed: int
    present_failed: int
    na_failed: int
    lacking_passed: int
    present_passed: int
    na_passed: int

    @property
    def coverage(self) -> Fraction:
        return _ratio(self.lacking_failed, self.lacking_failed + self.present_failed + self.na_failed)

    @property
    def error_rate_failed(self) -> Fraction:
        return _ratio(self.lacking_failed, self.lacking_failed + self.present_failed)

    @property
    def error_rate_passed(self) -> Fraction:
        return _ratio(self.lacking_passed, self.lacking_passed + self.present_passed)

    @property
    def gap(self) -> Fraction:
        """Delta."""
        return self.error_rate_failed - self.error_rate_passed

    def passes(self, thresholds: Thresholds) -> bool:
        return self.coverage >= thresholds.rho and self.gap >= thresholds.delta


def _ratio(numerator: int, denominator: int) -> Fraction:
    return Fraction(numerator, denominator) if denominator else Fraction(0)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One capability over all runs; ``counts`` has None for a run that lacks it (such a run does not pass)."""

    name: str
    counts: tuple[Counts | None, ...]
    example_failed: tuple[str, ...]

    @property
    def present(self) -> list[Counts]:
        return [c for c in self.counts if c is not None]

    @property
    def mean_coverage(self) -> Fraction:
        return mean([c.coverage for c in self.present])

    @property
    def mean_gap(self) -> Fraction:
        return mean([c.gap for c in self.present])

    @property
    def std_coverage(self) -> float:
        return population_std([c.coverage for c in self.present])

    @property
    def std_gap(self) -> float:
        return population_std([c.gap for c in self.present])

    def n_passed(self, thresholds: Thresholds) -> int:
        return sum(c.passes(thresholds) for c in self.present)

    def selected(self, thresholds: Thresholds) -> bool:
        return self.n_passed(thresholds) >= thresholds.k


def mean(values: list[Fraction]) -> Fraction:
    """The exact mean; 0 of nothing."""
    return sum(values, Fraction(0)) / len(values) if values else Fraction(0)


def population_std(values: list[Fraction]) -> float:
    """The population standard deviation; only the final square root is rounded."""
    centre = mean(values)
    return math.sqrt(mean([(v - centre) ** 2 for v in values]))


def counts(labels: LabelSet, run: int, capability: int) -> Counts | None:
    """The six counts of a run, None when the run lacks the capability."""
    codes = labels.codes[run, capability]
    if codes[0] == ABSENT:
        return None
    failed = np.bincount(codes[labels.failed], minlength=3)
    passed = np.bincount(codes[~labels.failed], minlength=3)
    order = (LACKING, PRESENT, NA)
    return Counts(*(int(failed[c]) for c in order), *(int(passed[c]) for c in order))


def candidates(labels: LabelSet) -> list[Candidate]:
    """Every labelled capability, best first: mean Delta descending, ties by name."""
    runs = range(len(labels.attempts))
    found = [
        Candidate(name, tuple(counts(labels, r, c) for r in runs), examples(labels, c))
        for c, name in enumerate(labels.capabilities)
    ]
    return ranked(found)


def ranked(found: list[Candidate]) -> list[Candidate]:
    return sorted(found, key=lambda candidate: (-candidate.mean_gap, candidate.name))


def domain_of(trajectory: str) -> str:
    """``airline:12`` -> ``airline``; ``django__django-10999`` -> ``django``; else the empty string."""
    for separator in (":", "__"):
        head, found, _ = trajectory.partition(separator)
        if found:
            return head
    return ""


def examples(labels: LabelSet, capability: int, limit: int = MAX_EXAMPLES) -> tuple[str, ...]:
    """At most ``limit`` failed ids with the most LACKING votes, dealt round-robin over the domains."""
    votes_I = (labels.codes[:, capability, :] == LACKING).sum(axis=0)
    voted_I = np.flatnonzero(labels.failed & (votes_I > 0))
    by_domain: dict[str, list[int]] = {}
    for i in voted_I[np.argsort(-votes_I[voted_I], kind="stable")]:  # ids are in natural order already
        by_domain.setdefault(domain_of(labels.ids[i]), []).append(int(i))
    queues = sorted(by_domain.values(), key=lambda queue: (-votes_I[queue[0]], queue[0]))
    dealt: list[int] = []
    for place in range(min(limit, max((len(q) for q in queues), default=0))):
        dealt += [queue[place] for queue in queues if place < len(queue)]
    return tuple(labels.ids[i] for i in dealt[:limit])
