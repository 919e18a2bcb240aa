"""What the selection depends on: each run, each threshold, and how the selected capabilities share the failures."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.labels import LACKING, LabelSet
from pipeline.selection import Candidate, Thresholds

RHOS = tuple(Fraction(n, 20) for n in (1, 2, 3, 4))  # 0.05 ... 0.20
DELTAS = tuple(Fraction(n, 10) for n in (1, 2, 3))  # 0.1 ... 0.3
K_BELOW = 3


def selected(candidates: Sequence[Candidate], thresholds: Thresholds) -> list[str]:
    return [c.name for c in candidates if c.selected(thresholds)]


def leave_one_run_out(
    candidates: Sequence[Candidate], thresholds: Thresholds, attempts: Sequence[int]
) -> list[dict[str, Any]]:
    """The selection without each run, with K scaled to N - 1 runs: ceil(K (N - 1) / N)."""
    n = len(attempts)
    if n < 2:
        return []
    base = set(selected(candidates, thresholds))
    fewer = dataclasses.replace(thresholds, k=max(1, math.ceil(Fraction(thresholds.k * (n - 1), n))))
    found = []
    for left_out, attempt in enumerate(attempts):
        rest = [dataclasses.replace(c, counts=c.counts[:left_out] + c.counts[left_out + 1 :]) for c in candidates]
        now = set(selected(rest, fewer))
        found.append({"without": attempt, "k": fewer.k, "added": sorted(now - base), "lost": sorted(base - now)})
    return found


def threshold_table(candidates: Sequence[Candidate], thresholds: Thresholds, n_runs: int) -> list[dict[str, Any]]:
    """The selection under neighbouring rho, delta and K, against the one that was asked for."""
    base = set(selected(candidates, thresholds))
    rhos = sorted({*RHOS, thresholds.rho})
    deltas = sorted({*DELTAS, thresholds.delta})
    ks = sorted({k for k in range(thresholds.k - K_BELOW, n_runs + 1) if k >= 1} | {thresholds.k})
    rows = []
    for rho, delta, k in itertools.product(rhos, deltas, ks):
        now = set(selected(candidates, Thresholds(rho, delta, k)))
        rows.append(
            {
                "rho": float(rho),
                "delta": float(delta),
                "k": k,
                "n_selected": len(now),
                "added": sorted(now - base),
                "lost": sorted(base - now),
            }
        )
    return rows


def _lacking_failed(labels: LabelSet, names: Sequence[str]) -> npt.NDArray[np.bool_]:
    """[capabilities, runs, failed ids]: LACKING?"""
    index = [labels.capabilities.index(n) for n in names]
    codes_CRI = labels.codes[:, index, :].transpose(1, 0, 2)[:, :, labels.failed]
    lacking: npt.NDArray[np.bool_] = codes_CRI == LACKING
    return lacking


def jaccard(labels: LabelSet, names: Sequence[str]) -> list[list[float]]:
    """Overlap of the failures that two capabilities explain: |A and B| / |A or B|, mean over runs."""
    sets_CRI = _lacking_failed(labels, names).astype(np.float32)
    both_RCC = np.einsum("cri,dri->rcd", sets_CRI, sets_CRI)
    size_RC = sets_CRI.sum(axis=2).T
    union_RCC = size_RC[:, :, None] + size_RC[:, None, :] - both_RCC
    ratio = np.divide(both_RCC, union_RCC, out=np.zeros_like(both_RCC), where=union_RCC > 0)
    found: list[list[float]] = ratio.mean(axis=0).round(6).tolist()
    return found


def marginal_coverage(labels: LabelSet, names: Sequence[str]) -> dict[str, Any]:
    """The share of the failures that each capability adds to those before it, mean over runs, and what is left."""
    if not names or not labels.n_failed:
        return {"added": [], "uncovered": 1.0}
    sets_CRI = _lacking_failed(labels, names)
    covered_RI = np.zeros(sets_CRI.shape[1:], dtype=np.bool_)
    added = []
    for name, set_RI in zip(names, sets_CRI, strict=True):
        new_RI = set_RI & ~covered_RI
        covered_RI |= set_RI
        added.append({"skill": name, "share": round(float(new_RI.mean()), 6)})
    return {"added": added, "uncovered": round(float(1 - covered_RI.mean()), 6)}
