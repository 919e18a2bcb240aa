"""What the paper claims and what this run measured, row by row, including what does not hold."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plan

from pipeline.files import read_json
from train.evaluate import trials_of
from train.evaluation_stats import Interval, paired_difference, seed_means

MODE = "sampled"  # what the paper reports: several trials at temperature


def selection_agreement(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Do two mining runs on different tasks select the same? Jaccard index of the sets, rank correlation of Delta."""
    sets = [{str(e["skill"]) for e in entries if e["selected"]} for entries in (first, second)]
    deltas = [{str(e["skill"]): float(e["mean_delta"]) for e in entries} for entries in (first, second)]
    common = sorted(deltas[0].keys() & deltas[1].keys())
    ranks = [np.argsort(np.argsort([d[name] for name in common])) for d in deltas]
    union = sets[0] | sets[1]
    return {
        "selected": [sorted(s) for s in sets],
        "jaccard": len(sets[0] & sets[1]) / len(union) if union else 1.0,
        "delta": [{name: round(d[name], 4) for name in common} for d in deltas],
        "spearman": float(np.corrcoef(*ranks)[0, 1]) if len(common) > 2 else None,
    }


def success_of(run: Path, folder: str, system: str, mode: str = MODE) -> dict[int, float]:
    """Success of each score seed, mean over its trials."""
    path = run / folder / "rollouts" / f"{system}.{plan.TARGET}.{mode}.json"
    return seed_means(trials_of(read_json(path, "rollouts file")["simulations"]), success=True)


def difference(run: Path, a: str, b: str, draws: int, folders: tuple[str, str] = ("score", "score")) -> Interval:
    """Success of system ``a`` minus that of ``b``, paired by seed."""
    return paired_difference(success_of(run, folders[0], a), success_of(run, folders[1], b), draws)


def claims(run: Path, names: Sequence[str], size: plan.Size) -> list[dict[str, Any]]:
    """Each claim with the interval of the difference that decides it. ``verdict``: yes / no by the point estimate, with
    "(unsure)" when the interval holds both."""
    draws, found = size.bootstrap, []
    results = read_json(run / "score" / "evaluation.json", "evaluation")["results"][plan.TARGET][MODE]
    best = results["routed"]["best_single"]

    def add(claim: str, paper: str, value: Interval, wanted: str = "positive") -> None:
        found.append({"claim": claim, "paper": paper, "interval": value.to_json(), **_verdict(value, wanted)})

    def against(a: str, b: str) -> Interval:
        return difference(run, a, b, draws)

    add("routed beats the base", "+15.3 points on tau2", against("routed", "base"))
    add(f"routed beats the best single adapter ({best})", "yes", against("routed", best))
    add("the linear merge does not beat the best single adapter", "yes", against("merge", best), "not positive")
    add("routed beats the linear merge", "yes", against("routed", "merge"))
    add("routed beats TIES", "not reported", against("routed", "ties"))
    add("routed beats the prompt-chosen adapter", "yes", against("routed", "chosen"))
    add("routed beats the soft gate", "not reported", against("routed", "soft"))
    add("routed beats GRPO on the target at equal rollouts", "about +10 points", against("routed", "direct"))
    add("routed beats one adapter on everything at equal rollouts", "+7.9 points on tau2", against("routed", "joint"))
    if "routed_grpo" in results:
        add("GRPO of the gate does not lose", "optional step", against("routed_grpo", "routed"), "not negative")
    found += _steps(run, names, draws, results) + _filter(run, names, draws, results)
    found.append(_diagonal(run, names))
    if (run / "score_vllm" / "evaluation.json").exists():
        value = difference(run, "routed", "routed", draws, ("score_vllm", "score"))
        add("vLLM plugin and transformers agree within noise", "-", value, "zero")
    return found


def _verdict(value: Interval, wanted: str) -> dict[str, str]:
    """Percentage points, and whether the claim holds.

    ``zero``: the interval must hold 0. Others: the sign of the estimate, unsure when the interval holds 0 inside.
    """
    measured = f"{100 * value.value:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}] points"
    if wanted == "zero":
        return {"measured": measured, "verdict": "no" if value.excludes_zero else "yes"}
    holds = {"positive": value.value > 0, "not positive": value.value <= 0, "not negative": value.value >= 0}[wanted]
    return {"measured": measured, "verdict": ("yes" if holds else "no") + ("" if value.excludes_zero else " (unsure)")}


def _steps(run: Path, names: Sequence[str], draws: int, results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every further capability adds something."""
    gates = [f"first_{k}" for k in range(1, len(names))] + ["routed"]
    if any(gate not in results for gate in gates) or len(gates) < 2:
        return []
    rates = [results[gate]["success"]["value"] for gate in gates]
    total = difference(run, gates[-1], gates[0], draws)
    return [
        {
            "claim": f"success grows with the number of capabilities (1 to {len(gates)})",
            "paper": "monotone",
            "interval": total.to_json(),
            "measured": " -> ".join(f"{100 * rate:.1f}" for rate in rates) + " %",
            "verdict": "yes" if all(a <= b for a, b in itertools.pairwise(rates)) else "no",
        }
    ]


def _filter(run: Path, names: Sequence[str], draws: int, results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The two of the highest Delta against a random pair of the candidates (the mean over all other pairs)."""
    others = [gate for gate, members in plan.subsets(names).items() if gate.startswith("pair_") and gate in results]
    if not others or "first_2" not in results:
        return []
    top = success_of(run, "score", "first_2")
    rates = [success_of(run, "score", gate) for gate in others]
    mean = {seed: float(np.mean([r[seed] for r in rates])) for seed in top if all(seed in r for r in rates)}
    value = paired_difference(top, mean, draws)
    text = "the two capabilities of the highest Delta beat a random other pair"
    return [{"claim": text, "paper": "yes", "interval": value.to_json(), **_verdict(value, "positive")}]


def _diagonal(run: Path, names: Sequence[str]) -> dict[str, Any]:
    """Each adapter is the best one in its own environment."""
    results = read_json(run / "transfer" / "evaluation.json", "evaluation")["results"]
    own = []
    for name in names:
        rates = {a: results[f"capability_{name}"][MODE][a]["success"]["value"] for a in names}
        own.append(rates[name] >= max(rates.values()))
    return {
        "claim": "each adapter is the best one in its own environment",
        "paper": "yes",
        "interval": None,
        "measured": f"{sum(own)} of {len(own)}",
        "verdict": "yes" if all(own) else "no",
    }
