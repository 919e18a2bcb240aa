"""What the paper claims and what this run measured, row by row, including what does not hold.

A claim whose systems were not run (the time was up) says so; it is never left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plan
from scheduler import record_of
from scipy.stats import rankdata
from sizes import Size

from pipeline.files import read_json
from train.evaluate import trials_of
from train.evaluation_stats import Interval, paired_difference, seed_means

MODE = "sampled"  # what the paper reports: several trials at temperature
NOT_RUN = {"interval": None, "measured": "not run", "verdict": "open"}


def selection_agreement(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Do two mining runs on different tasks select the same? Jaccard index of the sets, and Spearman's correlation of
    Delta (equal values share their mean rank; None when all are equal)."""
    sets = [{str(e["skill"]) for e in entries if e["selected"]} for entries in (first, second)]
    deltas = [{str(e["skill"]): float(e["mean_delta"]) for e in entries} for entries in (first, second)]
    common = sorted(deltas[0].keys() & deltas[1].keys())
    ranks = [rankdata([d[name] for name in common]) for d in deltas]
    spread = len(common) > 2 and all(np.ptp(r) > 0 for r in ranks)
    union = sets[0] | sets[1]
    return {
        "selected": [sorted(s) for s in sets],
        "jaccard": len(sets[0] & sets[1]) / len(union) if union else 1.0,
        "delta": [{name: round(d[name], 4) for name in common} for d in deltas],
        "spearman": float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if spread else None,
    }


def rollouts_file(run: Path, folder: str, system: str, mode: str = MODE) -> Path:
    return run / folder / "rollouts" / f"{system}.{plan.TARGET}.{mode}.json"


def success_of(run: Path, folder: str, system: str, mode: str = MODE) -> dict[int, float]:
    """Success of each score seed, mean over its trials."""
    data = read_json(rollouts_file(run, folder, system, mode), "rollouts file")
    return seed_means(trials_of(data["simulations"]), success=True)


def difference(
    run: Path, a: str, b: str, draws: int, folders: tuple[str, str] = ("score", "score"), mode: str = MODE
) -> Interval | None:
    """Success of system ``a`` minus that of ``b``, paired by seed; None when one was not run."""
    if not all(rollouts_file(run, folder, name, mode).exists() for folder, name in zip(folders, (a, b), strict=True)):
        return None
    return paired_difference(success_of(run, folders[0], a, mode), success_of(run, folders[1], b, mode), draws)


def claims(run: Path, names: Sequence[str], size: Size, results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each claim with the interval of the difference that decides it. ``verdict``: yes / no by the point estimate, with
    "(unsure)" when the interval holds both; open when it was not run.

    Args:
        results: ``results[mode][system]`` on the target.
    """
    draws, found = size.bootstrap, []
    scores = results.get(MODE, {})
    best = next((row["best_single"] for row in scores.values() if row.get("best_single")), None)

    def add(claim: str, paper: str, value: Interval | None, wanted: str = "positive") -> None:
        found.append({"claim": claim, "paper": paper, **_verdict(value, wanted)})

    def against(a: str, b: str | None) -> Interval | None:
        return difference(run, a, b, draws) if b else None

    add("routed beats the base", "+15.3 points on tau2", against("routed", "base"))
    known = f" ({best})" if best else ""
    add(f"routed beats the best single adapter{known}", "yes", against("routed", best))
    add("the linear merge does not beat the best single adapter", "yes", against("merge", best), "not positive")
    add("routed beats the linear merge", "yes", against("routed", "merge"))
    add("routed beats TIES", "not reported", against("routed", "ties"))
    add("routed beats the prompt-chosen adapter", "yes", against("routed", "chosen"))
    add("routed beats the soft gate", "not reported", against("routed", "soft"))
    budget = "at the same budget of rollouts"  # what each used is in the costs
    add(f"routed beats GRPO on the target {budget}", "about +10 points", against("routed", "direct"))
    add(f"routed beats one adapter on everything {budget}", "+7.9 points on tau2", against("routed", "joint"))
    add("GRPO of the gate does not lose", "optional step", against("routed_grpo", "routed"), "not negative")
    found += [_steps(run, names, draws, scores), *_filter(run, names, size), _diagonal(run, names)]
    folders = ("score_vllm", "score")
    for mode in ("sampled", "greedy"):
        value = difference(run, "routed", "routed", draws, folders, mode)
        add(f"routed, {mode}: vLLM plugin and transformers agree within noise", "-", value, "zero")
    if served(run):
        text = "base: transformers and the vLLM server agree within noise"
        add(text, "-", difference(run, "base", "base", draws, folders), "zero")
    return found


def served(run: Path) -> bool:
    """Whether the rollouts of the base came from a server."""
    file = rollouts_file(run, "score", "base")
    return file.exists() and read_json(file, "rollouts file")["info"]["settings"]["model"] != _local_model(run)


def model_name(run: Path) -> str | None:
    """Of the base on the score seeds, whatever a server calls it; None before it was scored."""
    local = _local_model(run)
    return Path(local).name if local and rollouts_file(run, "score", "base").exists() else None


def _local_model(run: Path) -> str | None:
    record = record_of(run, "10_score_base")
    command = read_json(record, "stage record")["command"] if record.exists() else []
    return str(command[command.index("--model") + 1]) if "--model" in command else None


def _verdict(value: Interval | None, wanted: str) -> dict[str, Any]:
    """Percentage points, and whether the claim holds.

    ``zero``: the interval must hold 0. Others: the sign of the estimate, unsure when the interval holds 0 inside.
    """
    if value is None:
        return dict(NOT_RUN)
    measured = f"{100 * value.value:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}] points"
    found = {"interval": value.to_json(), "measured": measured}
    if wanted == "zero":
        return found | {"verdict": "no" if value.excludes_zero else "yes"}
    holds = {"positive": value.value > 0, "not positive": value.value <= 0, "not negative": value.value >= 0}[wanted]
    return found | {"verdict": ("yes" if holds else "no") + ("" if value.excludes_zero else " (unsure)")}


def _steps(run: Path, names: Sequence[str], draws: int, scores: Mapping[str, Any]) -> dict[str, Any]:
    """Every further capability adds something; unsure where the interval of a step's own gain holds 0."""
    gates = [f"first_{k}" for k in range(1, len(names))] + ["routed"]
    found = {"claim": f"success grows with the number of capabilities (1 to {len(gates)})", "paper": "monotone"}
    if any(gate not in scores for gate in gates):
        return found | NOT_RUN
    rates = [scores[gate]["success"]["value"] for gate in gates]
    total = difference(run, gates[-1], gates[0], draws)
    assert total is not None
    gains = [difference(run, after, before, draws) for before, after in itertools.pairwise(gates)]
    grows = rates[0] < rates[-1] and all(a <= b for a, b in itertools.pairwise(rates))
    unsure = any(gain is not None and not gain.excludes_zero for gain in gains)
    return found | {
        "interval": total.to_json(),
        "measured": " -> ".join(f"{100 * rate:.1f}" for rate in rates) + " %",
        "verdict": ("yes (unsure)" if unsure else "yes") if grows else "no",
    }


def _filter(run: Path, names: Sequence[str], size: Size) -> list[dict[str, Any]]:
    """The capabilities of the highest Delta against the other candidates, and against random choices of all candidates
    (their mean)."""
    draws = [gate for gate in plan.gate_members(names, size) if gate.startswith("random_")]
    found, others = [], len(plan.rejected_names(names))
    for text, gates in (
        (f"the {len(names)} candidates of the highest Delta beat the other {others}", ["rejected"]),
        (f"they beat {len(names)} random candidates (mean of {len(draws)} draw{'s' * (len(draws) > 1)})", draws),
    ):
        value = None
        if gates and all(rollouts_file(run, "score", gate).exists() for gate in [*gates, "routed"]):
            top = success_of(run, "score", "routed")
            rates = [success_of(run, "score", gate) for gate in gates]
            mean = {seed: float(np.mean([r[seed] for r in rates])) for seed in top if all(seed in r for r in rates)}
            value = paired_difference(top, mean, size.bootstrap)
        found.append({"claim": text, "paper": "yes", **_verdict(value, "positive")})
    return found


def _diagonal(run: Path, names: Sequence[str]) -> dict[str, Any]:
    """Each adapter is the best one in its own environment; unsure where the interval of another one reaches it."""
    found = {"claim": "each adapter is the best one in its own environment", "paper": "yes"}
    if not (run / "transfer" / "evaluation.json").exists():
        return found | NOT_RUN
    results = read_json(run / "transfer" / "evaluation.json", "evaluation")["results"]
    own, clear = [], []
    for name in names:
        rates = {a: results[f"capability_{name}"][MODE][a]["success"] for a in names}
        others = [rate for other, rate in rates.items() if other != name]
        own.append(all(rates[name]["value"] > rate["value"] for rate in others))  # as good is not best
        clear.append(all(rates[name]["low"] > rate["high"] for rate in others))
    measured = f"{sum(own)} of {len(own)}" + (f", {sum(clear)} beyond the intervals" if sum(clear) < sum(own) else "")
    verdict = ("yes" if all(clear) else "yes (unsure)") if all(own) else "no"
    return found | {"interval": None, "measured": measured, "verdict": verdict}
