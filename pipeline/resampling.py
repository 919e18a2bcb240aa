"""How far the gap of a capability could be chance: bootstrap intervals and a permutation test.

All statistics are means over runs of the per-run rates of ``selection`` (denominator 0 gives 0), computed for many
resamples at once as matrix products of resampling weights with the label indicators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pipeline.labels import ABSENT, LACKING, PRESENT, LabelSet
from pipeline.selection import Thresholds

Floats = npt.NDArray[np.float32]
BLOCK = 4_000_000  # weights held at once: 16 MB in float32, in which counts below 2**24 are exact
EDGE = 1e-6  # a rate within this of its threshold reaches it: the exact rule is in ``selection``


@dataclasses.dataclass(frozen=True)
class Interval:
    """A percentile interval."""

    low: float
    high: float

    @classmethod
    def of(cls, values: npt.NDArray[np.floating], level: float = 0.95) -> Interval:
        low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
        return cls(float(low), float(high))


@dataclasses.dataclass(frozen=True)
class Rates:
    """``coverage`` and ``gap`` [samples, runs, capabilities]; NaN where a run lacks the capability."""

    coverage: Floats
    gap: Floats


@dataclasses.dataclass(frozen=True)
class Resampled:
    """What resampling says of one capability.

    ``selected_share``: in how many bootstrap samples of trajectories the selection rule still holds.
    ``p_value``: of Delta under exchangeable outcomes, one-sided, (1 + exceedances) / (1 + permutations).
    """

    coverage: Interval
    gap: Interval
    gap_over_runs: Interval
    selected_share: float
    p_value: float


def task_of(trajectory: str) -> str:
    """The task of an id: trials of one task (``task#1``) are resampled together."""
    return trajectory.partition("#")[0]


def _divide(numerator: Floats, denominator: Floats) -> Floats:
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


def rates(
    lacking_failed: Floats, present_failed: Floats, lacking_passed: Floats, present_passed: Floats, n_failed: Floats
) -> Rates:
    """The rates from counts [B, runs, capabilities] of ``B`` samples; ``n_failed`` [B] is the size of D-."""
    coverage = _divide(lacking_failed, np.broadcast_to(n_failed[:, None, None], lacking_failed.shape))
    on_failed = _divide(lacking_failed, lacking_failed + present_failed)
    on_passed = _divide(lacking_passed, lacking_passed + present_passed)
    return Rates(coverage, on_failed - on_passed)


class Counter:
    """Label counts of many samples at once: one matrix product of weights with the 0/1 indicators of all labels.

    ``has`` [runs, capabilities] tells which runs have a capability; the rates of the others are NaN.
    """

    def __init__(self, labels: LabelSet) -> None:
        self.shape = labels.codes.shape[:2]
        self.has = labels.codes[:, :, 0] != ABSENT
        flat_IX = labels.codes.reshape(-1, len(labels.ids)).T
        self.indicators = np.concatenate([flat_IX == LACKING, flat_IX == PRESENT], axis=1).astype(np.float32)
        self.failed = labels.failed.astype(np.float32)
        on_failed = self.indicators * self.failed[:, None]
        self._by_side = np.concatenate([on_failed, self.indicators - on_failed], axis=1)

    def weighted(self, weights_BI: Floats) -> Rates:
        """Rates when each trajectory counts as often as its weight says."""
        counts = np.split(weights_BI @ self._by_side, 4, axis=1)
        return self._rates(counts, weights_BI @ self.failed)

    def dealt(self, failed_BI: Floats) -> Rates:
        """Rates when the outcomes are those of ``failed_BI`` (0/1) and the labels stay where they are."""
        on_failed = failed_BI @ self.indicators
        counts = [*np.split(on_failed, 2, axis=1), *np.split(self.indicators.sum(axis=0) - on_failed, 2, axis=1)]
        return self._rates(counts, failed_BI.sum(axis=1))

    def _rates(self, counts: list[Floats], n_failed_B: Floats) -> Rates:
        lacking_failed, present_failed, lacking_passed, present_passed = (c.reshape(-1, *self.shape) for c in counts)
        found = rates(lacking_failed, present_failed, lacking_passed, present_passed, n_failed_B)
        if self.has.all():
            return found
        return Rates(*(np.where(self.has, v, np.float32(np.nan)) for v in (found.coverage, found.gap)))


def bootstrap_weights(labels: LabelSet, n: int, rng: np.random.Generator) -> Iterator[Floats]:
    """Blocks [B, ids] of how often each trajectory is in a bootstrap sample; tasks are drawn, with all their trials."""
    tasks, task_I = np.unique([task_of(i) for i in labels.ids], return_inverse=True)
    for size in _blocks(n, len(labels.ids)):
        drawn_BT = rng.integers(len(tasks), size=(size, len(tasks)))
        offset_B1 = np.arange(size)[:, None] * len(tasks)
        counts = np.bincount((drawn_BT + offset_B1).ravel(), minlength=size * len(tasks)).reshape(size, len(tasks))
        yield counts[:, task_I].astype(np.float32)


def permuted_outcomes(labels: LabelSet, n: int, rng: np.random.Generator) -> Iterator[Floats]:
    """Blocks [B, ids] of 0/1: which trajectories failed, with the outcomes dealt at random."""
    failed_I = labels.failed.astype(np.float32)
    for size in _blocks(n, len(labels.ids)):
        yield rng.permuted(np.tile(failed_I, (size, 1)), axis=1)


def _blocks(n: int, width: int) -> Iterator[int]:
    step = max(1, min(n, BLOCK // max(1, width)))
    for start in range(0, n, step):
        yield min(step, n - start)


def resample(labels: LabelSet, thresholds: Thresholds, n: int, seed: int) -> list[Resampled]:
    """Intervals and p-values of every capability, in the order of ``labels.capabilities``.

    Args:
        n: bootstrap samples, and permutations.
        seed: of the generator; the same seed gives the same numbers.
    """
    rng = np.random.default_rng(seed)
    counter = Counter(labels)
    boot = [counter.weighted(weights) for weights in bootstrap_weights(labels, n, rng)]
    coverage_BRC = np.concatenate([b.coverage for b in boot])
    gap_BRC = np.concatenate([b.gap for b in boot])
    observed_RC = counter.weighted(np.ones((1, len(labels.ids)), np.float32)).gap[0]
    exceed_C = np.zeros(len(labels.capabilities), dtype=np.int64)
    for failed_BI in permuted_outcomes(labels, n, rng):
        dealt_BC = np.nanmean(counter.dealt(failed_BI).gap, axis=1)
        exceed_C += (dealt_BC >= np.nanmean(observed_RC, axis=0) - EDGE).sum(axis=0)
    drawn_BR = rng.integers(len(labels.attempts), size=(n, len(labels.attempts)))
    # NaN compares as False: a run without the capability does not pass
    passes_BRC = (coverage_BRC >= float(thresholds.rho) - EDGE) & (gap_BRC >= float(thresholds.delta) - EDGE)
    selected_C = (passes_BRC.sum(axis=1) >= thresholds.k).mean(axis=0)
    return [
        Resampled(
            coverage=Interval.of(np.nanmean(coverage_BRC[:, :, c], axis=1)),
            gap=Interval.of(np.nanmean(gap_BRC[:, :, c], axis=1)),
            gap_over_runs=_over_runs(observed_RC[:, c], drawn_BR),
            selected_share=float(selected_C[c]),
            p_value=float((1 + exceed_C[c]) / (1 + n)),
        )
        for c in range(len(labels.capabilities))
    ]


def _over_runs(gap_R: Floats, drawn_BR: npt.NDArray[np.int64]) -> Interval:
    """The interval of the mean of Delta over bootstrap samples of runs that hold it at least once."""
    gap_BR = gap_R[drawn_BR]
    some_B = ~np.isnan(gap_BR).all(axis=1)
    return Interval.of(np.nanmean(gap_BR[some_B], axis=1)) if some_B.any() else Interval(0.0, 0.0)
