"""Stage 1 on the shipped benchmark without a model: scripted agents, labels by its own checks, selection, report."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from stage1_helpers import run_main

from game_registry import Scored, get_game, play_sync, scripted_agent
from pipeline import _summarize, aggregate_capabilities, label_capabilities, report
from pipeline.checks_labeler import load_module
from pipeline.labels import LABELS

MODULE = "games.helpdesk"
N_SEEDS = 60


def episode(seed: int, rng: random.Random, p_error: float) -> dict[str, Any]:
    """One rollout of the oracle, whose arguments are spoiled with probability ``p_error``."""
    spec = get_game("helpdesk")
    assert spec.oracle is not None
    actions = [dict(a) for a in spec.oracle(seed)]
    if rng.random() < p_error:
        spoiled = dict(actions[0]["arguments"])
        spoiled = {k: "000" if isinstance(v, str) else 0 for k, v in spoiled.items()}
        actions[0] = {"name": actions[0]["name"], "arguments": spoiled}
    done = play_sync(spec, spec.make_env(), scripted_agent(actions), seed)
    assert isinstance(done.outcome, Scored)
    return {
        "task_id": str(seed),
        "sample_idx": 0,
        "outcome": "scored",
        "reward_info": {"reward": done.outcome.reward},
        "finish_reason": done.finish_reason,
        "messages": done.messages,
    }


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("helpdesk") / "rollouts.json"
    simulations = [episode(seed, rng, 0.5) for seed in range(N_SEEDS)]
    path.write_text(json.dumps({"info": {"env": "helpdesk"}, "simulations": simulations}))
    return path


def test_the_module_keeps_the_contract() -> None:
    module = load_module(MODULE)
    expected = {"structured_data_reasoning", "tool_calling_precision", "precondition_verification"}
    assert module.described.keys() == expected | {"multi_step_task_completion"}
    assert all(len(d) > 20 for d in module.described.values())


def test_the_oracle_lacks_nothing_that_its_tasks_need() -> None:
    module = load_module(MODULE)
    for seed in range(20):
        entry = episode(seed, random.Random(0), 0.0)
        assert entry["reward_info"]["reward"] == 1.0
        labels = module.checks(seed, entry["messages"])
        assert set(labels.values()) <= set(LABELS) and "LACKING" not in labels.values(), (seed, labels)
        assert "PRESENT" in labels.values()


def test_from_rollouts_to_a_selection_and_its_report(rollouts: Path) -> None:
    folder = rollouts.parent
    summaries, labels, export = folder / "summaries.json", folder / "labels", folder / "selected.json"
    assert run_main(_summarize.main, "--input", rollouts, "--output", summaries).returncode == 0
    checks = ["--labeler", "checks", "--checks-module", MODULE, "--input", summaries, "--output-dir", labels]
    assert run_main(label_capabilities.main, *checks).returncode == 0
    chosen = ["--runs", str(labels / "run_*.json"), "--candidates", labels / "candidate_capabilities.json"]
    chosen += ["--summaries", summaries, "--export", export, "--resamples", "200"]
    done = run_main(aggregate_capabilities.main, *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deterministic" in done.stdout
    skills = [e["skill"] for e in json.loads(export.read_text())]
    assert "tool_calling_precision" in skills  # what the spoiled arguments lack
    page = folder / "report.html"
    assert run_main(report.main, "--selection", export, "--output", page).returncode == 0
    assert "tool_calling_precision" in page.read_text()
