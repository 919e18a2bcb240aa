"""Statistics of an evaluation: rates with intervals, paired differences, pass^k. Seeds are the unit, never episodes.

All systems play the same seeds, so differences are paired by seed; the trials of one seed are not independent tasks, so
the bootstrap draws seeds with replacement (percentile intervals, Efron 1979) and keeps a seed's trials together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
BOOTSTRAP = 10_000
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    """A point estimate with its interval at ``LEVEL``. ``n``: seeds that entered."""

    value: float
    low: float
    high: float
    n: int

    def to_json(self) -> dict[str, float]:
        return {"value": round(self.value, 6), "low": round(self.low, 6), "high": round(self.high, 6), "n": self.n}

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


SeedMeans = Mapping[int, float]  # seed -> mean over its scored trials


def resample(n: int, draws: int, seed: int) -> npt.NDArray[np.int64]:
    """Indices [draws, n] of bootstrap samples; equal for equal arguments, so intervals can be reproduced."""
    return np.random.default_rng([seed, n]).integers(0, n, size=(draws, n))


def bootstrap_mean(values: Sequence[float], draws: int = BOOTSTRAP, seed: int = 0) -> Interval:
    """Mean over seeds and its percentile interval.

    Raises:
        ValueError: no values.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        raise ValueError("no scored seed; nothing can be estimated")
    means = np.empty(draws)
    for start in range(0, draws, 1000):  # in blocks: 10,000 draws of 10,000 seeds would be 800 MB at once
        block = resample(data.size, min(1000, draws - start), seed + start)
        means[start : start + len(block)] = data[block].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(data.mean()), float(low), float(high), int(data.size))


def paired_difference(a: SeedMeans, b: SeedMeans, draws: int = BOOTSTRAP, seed: int = 0) -> Interval:
    """mean over common seeds of (a - b) with its interval.

    Raises:
        ValueError: no seed was scored in both.
    """
    common = sorted(a.keys() & b.keys())
    return bootstrap_mean([a[s] - b[s] for s in common], draws, seed)


def pass_hat_k(successes: Sequence[int], trials: Sequence[int], k: int) -> float | None:
    """pass^k: the probability that k trials of a task all succeed, mean over tasks of C(c, k) / C(n, k).

    Unbiased for each task with n >= k scored trials; None when there is none. Source: tau-bench (Yao et al. 2024).
    """
    values = [math.comb(c, k) / math.comb(n, k) for c, n in zip(successes, trials, strict=True) if n >= k]
    return float(np.mean(values)) if values else None


@dataclasses.dataclass(frozen=True)
class Trial:
    """One episode of an evaluation. ``reward`` is None when it failed for a reason that is not the policy's."""

    seed: int
    trial: int
    reward: float | None
    truncated: bool
    turns: int
    invalid_calls: int
    tokens: int
    error_kind: str | None = None


SUCCESS = 1.0 - 1e-9


def by_seed(trials: Sequence[Trial]) -> dict[int, list[float]]:
    """Rewards of the scored trials of each seed that has any."""
    rewards: dict[int, list[float]] = {}
    for trial in sorted(trials, key=lambda t: (t.seed, t.trial)):
        if trial.reward is not None:
            rewards.setdefault(trial.seed, []).append(trial.reward)
    return rewards


def seed_means(trials: Sequence[Trial], *, success: bool = False) -> dict[int, float]:
    """Mean reward (or success) of each seed over its scored trials."""
    rewards = by_seed(trials)
    if success:
        return {s: float(np.mean([x >= SUCCESS for x in r])) for s, r in rewards.items()}
    return {s: float(np.mean(r)) for s, r in rewards.items()}


def union_trials(systems: Mapping[str, Sequence[Trial]]) -> list[Trial]:
    """The ceiling of any choice among ``systems``: per seed and trial the best reward that one of them reached.

    At temperature 1 this is optimistic: with N systems it takes the best of N draws.
    """
    best: dict[tuple[int, int], Trial] = {}
    for trials in systems.values():
        for trial in trials:
            key = (trial.seed, trial.trial)
            held = best.get(key)
            if held is None or (trial.reward is not None and (held.reward is None or trial.reward > held.reward)):
                best[key] = trial
    return [best[key] for key in sorted(best)]


@dataclasses.dataclass(frozen=True)
class Summary:
    """One system on one environment in one mode."""

    reward: Interval | None
    success: Interval | None
    pass_hat: dict[int, float]
    n_episodes: int
    error_share: float
    truncation_share: float
    invalid_calls_per_turn: float
    mean_tokens: float
    error_kinds: dict[str, int]

    def to_json(self) -> dict[str, object]:
        data = dataclasses.asdict(self)
        data["reward"] = self.reward.to_json() if self.reward else None
        data["success"] = self.success.to_json() if self.success else None
        data["pass_hat"] = {str(k): round(v, 6) for k, v in self.pass_hat.items()}
        return data


def summarize(trials: Sequence[Trial], draws: int = BOOTSTRAP, seed: int = 0) -> Summary:
    """Rates over scored trials; shares over all of them."""
    rewards = by_seed(trials)
    n, turns = max(1, len(trials)), max(1, sum(t.turns for t in trials))
    kinds: dict[str, int] = {}
    for trial in trials:
        if trial.error_kind is not None:
            kinds[trial.error_kind] = kinds.get(trial.error_kind, 0) + 1
    successes = [sum(x >= SUCCESS for x in r) for r in rewards.values()]
    counts = [len(r) for r in rewards.values()]
    hats = {k: pass_hat_k(successes, counts, k) for k in range(1, max(counts, default=0) + 1)}
    return Summary(
        reward=bootstrap_mean(list(seed_means(trials).values()), draws, seed) if rewards else None,
        success=bootstrap_mean(list(seed_means(trials, success=True).values()), draws, seed) if rewards else None,
        pass_hat={k: v for k, v in hats.items() if v is not None},
        n_episodes=len(trials),
        error_share=sum(t.reward is None for t in trials) / n,
        truncation_share=sum(t.truncated for t in trials) / n,
        invalid_calls_per_turn=sum(t.invalid_calls for t in trials) / turns,
        mean_tokens=sum(t.tokens for t in trials) / n,
        error_kinds=kinds,
    )


def compare(
    systems: Mapping[str, Sequence[Trial]], baseline: str, singles: Sequence[str], draws: int = BOOTSTRAP, seed: int = 0
) -> dict[str, dict[str, object]]:
    """Paired differences of every system to the baseline and to the best single adapter (by mean reward here),
    of the mean reward and, with the prefix ``success_``, of the success rate.

    The best single adapter is picked on the same seeds, which favours it: a system that beats it does so honestly.
    """
    means = {name: seed_means(trials) for name, trials in systems.items()}
    successes = {name: seed_means(trials, success=True) for name, trials in systems.items()}
    ranked = [s for s in singles if means.get(s)]
    best = max(ranked, key=lambda s: (float(np.mean(list(means[s].values()))), s), default=None)
    result: dict[str, dict[str, object]] = {}
    for name in systems:
        row: dict[str, object] = {"best_single": best}
        for key, other in (("vs_base", baseline), ("vs_best_single", best)):
            for prefix, table in (("", means), ("success_", successes)):
                usable = other is not None and other != name and bool(table[name].keys() & table[other].keys())
                difference = paired_difference(table[name], table[other], draws, seed) if usable and other else None
                row[prefix + key] = difference.to_json() if difference else None
        result[name] = row
    return result
