"""The evidence behind a selection, as one JSON object: support, agreement, intervals, sensitivity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.agreement import agreement
from pipeline.labels import LACKING, LabelSet
from pipeline.resampling import Resampled, resample
from pipeline.selection import Candidate, Thresholds
from pipeline.sensitivity import jaccard, leave_one_run_out, marginal_coverage, selected, threshold_table

LOW_KAPPA = 0.4  # "fair" at most, after Landis and Koch (1977)
FEW_LACKING_PASSED = 0.01
FEW_SUPPORT = 5  # passed trajectories behind ER+


def build(
    labels: LabelSet, candidates: Sequence[Candidate], thresholds: Thresholds, *, resamples: int, seed: int
) -> dict[str, Any]:
    """All statistics.

    Returns:
        ``per_capability`` (by name), ``leave_one_run_out``, ``thresholds``, ``jaccard``, ``marginal_coverage``,
        ``labels_on_passed`` and ``warnings``, sentences that a reader of the selection must know.
    """
    found = dict(zip(labels.capabilities, resample(labels, thresholds, resamples, seed), strict=True))
    by_name = {c.name: c for c in candidates}
    adjusted = _adjusted([found[n].p_value for n in labels.capabilities])
    per_capability = {
        name: _one(labels, c, by_name[name], found[name]) | {"q_value": adjusted[c]}
        for c, name in enumerate(labels.capabilities)
    }
    names = [c.name for c in candidates if c.name in found]
    chosen = [n for n in selected(candidates, thresholds) if n in found]
    passed_codes = labels.codes[:, :, ~labels.failed]
    on_passed = {"lacking": int((passed_codes == LACKING).sum()), "labels": int((passed_codes >= 0).sum())}
    blind = [bool(labeler.get("blind")) for labeler in labels.labelers]
    deterministic = all(labeler.get("deterministic") for labeler in labels.labelers)
    return {
        "resamples": resamples,
        "seed": seed,
        "per_capability": per_capability,
        "leave_one_run_out": leave_one_run_out(candidates, thresholds, labels.attempts),
        "thresholds": threshold_table(candidates, thresholds, len(labels.attempts)),
        "jaccard": {"names": names, "matrix": jaccard(labels, names)},
        "marginal_coverage": marginal_coverage(labels, chosen),
        "labels_on_passed": on_passed,
        "blind_runs": sum(blind),
        "deterministic": deterministic,
        "warnings": _warnings(per_capability, chosen, on_passed, all(blind), deterministic),
    }


def _adjusted(p_values: list[float]) -> list[float]:
    """Benjamini-Hochberg q-values."""
    from scipy.stats import false_discovery_control  # half a second to import: only where it is used

    return [float(q) for q in false_discovery_control(p_values)] if p_values else []


def _one(labels: LabelSet, capability: int, candidate: Candidate, found: Resampled) -> dict[str, Any]:
    counts = candidate.present
    agreed = agreement(labels, capability)
    support = [c.lacking_passed + c.present_passed for c in counts]
    return {
        "er_failed": float(np.mean([float(c.error_rate_failed) for c in counts])),
        "er_passed": float(np.mean([float(c.error_rate_passed) for c in counts])),
        "er_passed_support": {"min": min(support), "mean": float(np.mean(support)), "max": max(support)},
        "lacking_passed": sum(c.lacking_passed for c in counts),
        "kappa": agreed.kappa,
        "observed_agreement": agreed.observed,
        "cov_interval": [found.coverage.low, found.coverage.high],
        "delta_interval": [found.gap.low, found.gap.high],
        "delta_interval_over_runs": [found.gap_over_runs.low, found.gap_over_runs.high],
        "selected_share": found.selected_share,
        "p_value": found.p_value,
    }


def _warnings(
    per: dict[str, dict[str, Any]], chosen: list[str], on_passed: dict[str, int], blind: bool, deterministic: bool
) -> list[str]:
    found = []
    lacking, total = on_passed["lacking"], on_passed["labels"]
    if not blind and total and lacking < FEW_LACKING_PASSED * total:
        found.append(
            f"{lacking} of {total} labels on passed trajectories are LACKING and the runs are not marked blind: the "
            "labellers probably saw the outcome, so Delta is nearly ER-"
        )
    if deterministic:
        found.append(
            "the labels are deterministic: all runs are equal, so K of N and kappa say nothing; see the intervals"
        )
    low = [n for n, e in per.items() if e["kappa"] is not None and e["kappa"] < LOW_KAPPA]
    if low:
        found.append(f"low agreement between runs (Fleiss kappa < {LOW_KAPPA}): {', '.join(low)}")
    thin = [n for n in chosen if per[n]["er_passed_support"]["mean"] < FEW_SUPPORT]
    if thin:
        found.append(f"ER+ rests on fewer than {FEW_SUPPORT} passed trajectories: {', '.join(thin)}")
    shaky = [n for n in chosen if per[n]["selected_share"] < 0.5]
    if shaky:
        found.append(f"selected in fewer than half of the bootstrap samples of trajectories: {', '.join(shaky)}")
    return found
