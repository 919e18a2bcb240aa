"""From the episodes of the score seeds to rates, intervals and paired differences: of every system that was run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import findings
import plan
from sizes import Size

from pipeline.files import read_json
from train.evaluate import evaluate_entries, routing_file
from train.systems import MODES, System
from train.systems import Plan as EvaluationPlan


def evaluation_plan(size: Size) -> EvaluationPlan:
    first, end = map(int, size.score_seeds.split(":"))
    return EvaluationPlan(range(first, end), size.trials, tuple(MODES), None, 1, 1.0, 0, 1)


def episodes(run: Path, system: str, mode: str, wanted: int) -> list[dict[str, Any]] | None:
    """All episodes of one system in one mode; None when it was not run to its end."""
    path = findings.rollouts_file(run, "score", system, mode)
    if not path.exists():
        return None
    found = list(read_json(path, "rollouts file")["simulations"])
    return found if len(found) == wanted else None


def results(run: Path, size: Size, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``results[mode][system]`` as in an evaluation, of the systems that have all their episodes."""
    setup = evaluation_plan(size)
    entries: dict[tuple[str, str, str], Sequence[dict[str, Any]]] = {}
    systems = []
    for name, kind in plan.systems(names, size).items():
        found = {mode: episodes(run, name, mode, len(setup.jobs(mode))) for mode in setup.modes}
        if all(part is not None for part in found.values()):
            entries |= {(name, plan.TARGET, mode): part for mode, part in found.items() if part is not None}
            systems.append(System(name, kind))  # type: ignore[arg-type]
    if "base" not in [s.name for s in systems]:
        return {}
    return dict(evaluate_entries(entries, systems, setup, size.bootstrap, 0)["results"][plan.TARGET])


def routing(run: Path, size: Size, names: Sequence[str]) -> dict[str, Any]:
    """Gate -> shares of its slots among the sampled tokens, of the gates that are here."""
    folders = {"soft": "routed", "routed_grpo": "grpo"}
    found = {}
    for name, kind in plan.systems(names, size).items():
        gate = run / "gates" / folders.get(name, name) / plan.GATE_FILE
        if kind == "routed" and gate.exists():
            system = System(name, "routed", gate=str(gate), routing_mode="soft" if name == "soft" else None)
            path = routing_file(run / "score", plan.TARGET, system)
            if path.exists():
                found[name] = read_json(path, "routing statistics")
    return found


def choice(run: Path) -> dict[str, Any] | None:
    """How often the base picked each adapter, and the share of replies that named none."""
    path = run / "score" / "rollouts" / f"chosen.{plan.TARGET}.picks.json"
    if not path.exists():
        return None
    picks = read_json(path, "picks")["picks"].values()
    counts = Counter(str(p["option"] or "base") for p in picks)
    invalid = sum(not p["valid"] for p in picks) / len(picks)
    return {"picks": dict(sorted(counts.items())), "invalid_share": invalid, "tasks": len(picks)}


def gate_reports(run: Path, size: Size, names: Sequence[str]) -> Mapping[str, Any]:
    """Validation accuracy and label counts of every gate that was trained: the first thing to look at when routing
    does not pay."""
    found = {}
    for name in ["routed", *plan.gate_members(names, size), *(f"routed_{b}" for b in size.budgets[:-1])]:
        path = run / "gates" / name / "report.json"
        if path.exists():
            report = json.loads(path.read_text(encoding="utf-8"))
            keys = ("slot_names", "train_episodes", "validation_accuracy", "confusion")
            found[name] = {key: report[key] for key in keys}
    return found
