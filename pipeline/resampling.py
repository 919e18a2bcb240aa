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
BLOCK = 20_000_000  # weights held at once: 80 MB in float32, in which counts below 2**24 are exact
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
    """``coverage`` and ``gap`` [resamples, runs]; NaN in a run that lacks the capability."""

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


def _indicators(labels: LabelSet, capability: int) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """LACKING and PRESENT [ids, runs] as 0/1, and which runs have the capability."""
    codes_IR = labels.codes[:, capability, :].T
    has_R = codes_IR[0] != ABSENT
    return (codes_IR == LACKING).astype(np.float32), (codes_IR == PRESENT).astype(np.float32), has_R


def _divide(numerator: Floats, denominator: Floats) -> Floats:
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


def rates(failed_BI: Floats, passed_BI: Floats, lacking_IR: Floats, present_IR: Floats) -> Rates:
    """The rates of a capability for ``B`` weightings of failed and passed trajectories."""
    lacking_failed_BR = failed_BI @ lacking_IR
    lacking_passed_BR = passed_BI @ lacking_IR
    n_failed_B1 = np.broadcast_to(failed_BI.sum(axis=1, keepdims=True), lacking_failed_BR.shape)
    coverage = _divide(lacking_failed_BR, n_failed_B1)
    on_failed = _divide(lacking_failed_BR, lacking_failed_BR + failed_BI @ present_IR)
    on_passed = _divide(lacking_passed_BR, lacking_passed_BR + passed_BI @ present_IR)
    return Rates(coverage, on_failed - on_passed)


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
    failed_I = labels.failed.astype(np.float32)
    passed_I = 1 - failed_I
    parts = [_indicators(labels, c) for c in range(len(labels.capabilities))]
    boot: list[list[Rates]] = [[] for _ in parts]
    for weights_BI in bootstrap_weights(labels, n, rng):
        failed_BI, passed_BI = weights_BI * failed_I, weights_BI * passed_I
        for found, (lacking, present, has) in zip(boot, parts, strict=True):
            found.append(_mask(rates(failed_BI, passed_BI, lacking, present), has))
    exceed = np.zeros(len(parts))
    observed = [_mask(rates(failed_I[None], passed_I[None], *indicators), has) for *indicators, has in parts]
    for failed_BI in permuted_outcomes(labels, n, rng):
        for c, (lacking, present, has) in enumerate(parts):
            gap_B = np.nanmean(_mask(rates(failed_BI, 1 - failed_BI, lacking, present), has).gap, axis=1)
            exceed[c] += int((gap_B >= np.nanmean(observed[c].gap) - EDGE).sum())
    runs = _run_means(labels, observed, n, rng)
    return [
        _resampled(blocks, thresholds, Interval.of(over_runs), float((1 + e) / (1 + n)))
        for blocks, over_runs, e in zip(boot, runs, exceed, strict=True)
    ]


def _mask(found: Rates, has_R: npt.NDArray[np.bool_]) -> Rates:
    if has_R.all():
        return found
    return Rates(*(np.where(has_R, values, np.float32(np.nan)) for values in (found.coverage, found.gap)))


def _run_means(
    labels: LabelSet, observed: list[Rates], n: int, rng: np.random.Generator
) -> list[npt.NDArray[np.floating]]:
    """Means of Delta over bootstrap samples of runs."""
    drawn_BR = rng.integers(len(labels.attempts), size=(n, len(labels.attempts)))
    found = []
    for one in observed:
        gap_BR = one.gap[0][drawn_BR]
        some_B = ~np.isnan(gap_BR).all(axis=1)
        found.append(np.nanmean(gap_BR[some_B], axis=1) if some_B.any() else np.zeros(1))
    return found


def _resampled(blocks: list[Rates], thresholds: Thresholds, over_runs: Interval, p_value: float) -> Resampled:
    coverage_BR = np.concatenate([b.coverage for b in blocks])
    gap_BR = np.concatenate([b.gap for b in blocks])
    # NaN compares as False: a run without the capability does not pass
    passes_BR = (coverage_BR >= float(thresholds.rho) - EDGE) & (gap_BR >= float(thresholds.delta) - EDGE)
    return Resampled(
        coverage=Interval.of(np.nanmean(coverage_BR, axis=1)),
        gap=Interval.of(np.nanmean(gap_BR, axis=1)),
        gap_over_runs=over_runs,
        selected_share=float((passes_BR.sum(axis=1) >= thresholds.k).mean()),
        p_value=p_value,
    )
