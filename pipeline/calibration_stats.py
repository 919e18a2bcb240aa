"""Statistics of calibration: rates with intervals, unbiased pass@k, shares of uninformative groups.

A group = the rollouts of one seed. Only scored rollouts enter any number here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

Z_95 = 1.959963984540054  # standard normal quantile of 0.975


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value with a 95 % interval and the number of units it rests on."""

    value: float
    low: float
    high: float
    n: int


@dataclasses.dataclass(frozen=True)
class PassAtK:
    """pass@k averaged over the groups that have at least k scored rollouts."""

    k: int
    estimate: Estimate
    groups_used: int


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """What calibration says about one set of groups (hinted or unhinted)."""

    n_rollouts: int
    n_groups: int
    smallest_group: int
    largest_group: int
    mean_reward: Estimate  # interval: bootstrap over groups
    success_rate: Estimate  # interval: Wilson over rollouts
    success_rate_by_group: Estimate  # the same value, interval: bootstrap over groups (seeds are correlated inside)
    all_success: Estimate  # shares of groups with at least two scored rollouts, Wilson
    all_zero: Estimate
    constant: Estimate
    pass_at_k: tuple[PassAtK, ...]
    reward_levels: int


def wilson(successes: int, n: int, z: float = Z_95) -> Estimate:
    """Wilson score interval of a binomial rate (Wilson 1927); ``n = 0`` gives nan with the interval [0, 1]."""
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half), n)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples succeeds, from c successes in n >= k samples.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, arXiv 2107.03374), in exact integers.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, found n={n} c={c} k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap_ratio(sums: Sequence[float], counts: Sequence[int], *, draws: int, seed: int) -> Estimate:
    """``sum(sums) / sum(counts)`` with a percentile interval from resampling the groups.

    Args:
        sums: per group, the sum over its rollouts.
        counts: per group, the number of rollouts.
    """
    sums_G, counts_G = np.asarray(sums, dtype=float), np.asarray(counts, dtype=float)
    n_groups = len(sums_G)
    value = float(sums_G.sum() / counts_G.sum())
    index_DG = np.random.default_rng(seed).integers(0, n_groups, size=(draws, n_groups))
    ratios_D = sums_G[index_DG].sum(axis=1) / counts_G[index_DG].sum(axis=1)
    low, high = np.quantile(ratios_D, [0.025, 0.975])
    return Estimate(value, float(low), float(high), n_groups)


def group_stats(
    groups: Mapping[str, Sequence[float]],
    *,
    success_at: float,
    ks: Sequence[int],
    draws: int = 2000,
    seed: int = 0,
    tolerance: float = 1e-6,
) -> GroupStats:
    """All statistics of one set of groups.

    Args:
        groups: task id -> rewards of its scored rollouts; no group is empty.
        success_at: a reward at or above it is a success.
        ks: for pass@k.
        tolerance: rewards closer than this are equal.
    """
    rewards = [list(r) for r in groups.values()]
    if not rewards or not all(rewards):
        raise ValueError("group_stats needs at least one group and no empty group")
    successes = [sum(r >= success_at - tolerance for r in group) for group in rewards]
    sizes = [len(group) for group in rewards]
    plural = [(group, wins) for group, wins in zip(rewards, successes, strict=True) if len(group) >= 2]
    everything = [r for group in rewards for r in group]
    return GroupStats(
        n_rollouts=len(everything),
        n_groups=len(rewards),
        smallest_group=min(sizes),
        largest_group=max(sizes),
        mean_reward=bootstrap_ratio([sum(group) for group in rewards], sizes, draws=draws, seed=seed),
        success_rate=wilson(sum(successes), len(everything)),
        success_rate_by_group=bootstrap_ratio(successes, sizes, draws=draws, seed=seed),
        all_success=wilson(sum(wins == len(group) for group, wins in plural), len(plural)),
        all_zero=wilson(sum(max(group) <= tolerance for group, _ in plural), len(plural)),
        constant=wilson(sum(max(group) - min(group) <= tolerance for group, _ in plural), len(plural)),
        pass_at_k=tuple(_pass_at(k, sizes, successes, draws, seed) for k in ks),
        reward_levels=len({round(r / tolerance) for r in everything}),
    )


def _pass_at(k: int, sizes: Sequence[int], successes: Sequence[int], draws: int, seed: int) -> PassAtK:
    values = [pass_at_k(n, c, k) for n, c in zip(sizes, successes, strict=True) if n >= k]
    if not values:
        return PassAtK(k, Estimate(math.nan, 0.0, 1.0, 0), 0)
    return PassAtK(k, bootstrap_ratio(values, [1] * len(values), draws=draws, seed=seed), len(values))
