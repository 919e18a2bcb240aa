"""Phase 4: the panel on scenario sets, fresh rollouts, the verdict, and the games that come out of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import generated_env
import phase4_env_validation as phase4
import pytest
import scenario_panel
import swe_phase_helpers as helpers
from run_settings import load_settings
from scripted_server import ScriptedServer
from stage2_helpers import ISOLATION
from stage2_helpers import scenario as small
from swe_phase_helpers import ROOT, Run

from pipeline import swe_game
from pipeline.files import InputError, ServerError
from pipeline.panel_checks import Check
from pipeline.scenarios import Scenario, load_scenarios, save_scenarios, scenario_path
from pipeline.swe_grading import Grade

DEEP = "deep_call_graph_traversal"


def fill(run: Run, n: int = 1, capability: str = DEEP) -> list[Scenario]:
    """Phases 2 and 3 as done: a selection and ``n`` shipped scenarios with a measured pass rate."""
    entry = {"skill": capability, "description": "d", "mean_delta": 0.5, "status": "PENDING"}
    helpers.write(run.folder.selected, [entry])
    scenarios = [s.model_copy(update={"pass_rate": 0.3}) for s in load_scenarios(scenario_path(capability))[:n]]
    save_scenarios(run.folder.scenarios(capability), scenarios)
    return scenarios


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(model=helpers.MODEL) as running:
        yield running


# --------------------------------------------------------------------------- games of a run


def _registered(variables: dict[str, str]) -> dict[str, str]:
    """Name -> description of what a command that is started with these variables can play."""
    code = "import json, game_registry as g; print(json.dumps({n: s.description for n, s in g.discover().items()}))"
    env = os.environ | variables
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_the_sets_of_a_run_take_the_place_of_those_that_ship(tmp_path: Path) -> None:
    save_scenarios(tmp_path / "my_own_skill" / "scenarios_parsed.json", [small(), small(name="second_one")])
    found = _registered(generated_env.environment(tmp_path))
    assert found["capability_my_own_skill"] == "Repair modules of 2 scenarios."
    assert f"capability_{DEEP}" not in found


def test_modules_that_the_user_named_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE_GAME_MODULES", "mine, pipeline.swe_game")
    assert generated_env.environment(Path("x"))["TRACE_GAME_MODULES"] == "mine,pipeline.swe_game"


# --------------------------------------------------------------------------- panel


@pytest.fixture
def by_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grading by a rule, for tests about the panel alone."""
    monkeypatch.setattr(scenario_panel, "self_test", lambda *_: [])
    monkeypatch.setattr(
        swe_game, "grade", lambda one, code, **_: Grade({"x": "passed"} if one.oracle_replace in code else {}, {}, 0.0)
    )
    monkeypatch.setattr(swe_game, "reward", lambda one, result, isolation: float(result.passed("x")))


def verdicts(scenarios: list[Scenario]) -> dict[str, Check]:
    return {c.name: c for c in scenario_panel.Panel(scenarios, ISOLATION, 0.2).checks()}


def test_the_panel_passes_good_scenarios(by_rule: None) -> None:
    found = verdicts([small(), small(name="other_rate", oracle_replace="    rate = 33", pr_description="Other.")])
    assert all(check.passed is not False for check in found.values()), scenario_panel.table(list(found.values()))
    assert found["oracle"].found == "1 on 2"


def test_a_reward_for_any_edit_is_found(by_rule: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swe_game, "reward", lambda *_: 0.6)
    found = verdicts([small()])
    assert found["oracle"].passed is False and found["forgery"].passed is False and found["no_op"].passed is True


def test_a_reward_that_changes_is_found(by_rule: None, monkeypatch: pytest.MonkeyPatch) -> None:
    paid = iter(range(10_000))
    monkeypatch.setattr(swe_game, "reward", lambda *_: next(paid) / 10_000)
    assert verdicts([small()])["determinism"].passed is False


def test_one_answer_for_all_scenarios_is_found(by_rule: None) -> None:
    """Two scenarios under two names that one edit repairs: the first one's oracle is paid on the second."""
    found = verdicts([small(), small(name="same_again")])
    assert found["constant"].passed is False and "first oracle" in found["constant"].found
    assert found["diversity"].passed is False


def test_an_unsound_scenario_is_found() -> None:
    broken = small(oracle_replace="    rate = 2  # nothing is repaired")
    check = scenario_panel.Panel([broken], ISOLATION, 0.2)._sound()
    assert check.passed is False and "fee_rate" in check.found


def test_forged_verdicts_earn_nothing() -> None:
    if ISOLATION.kind != "bwrap":
        pytest.skip("no bubblewrap: the attacks would do harm")
    panel = scenario_panel.Panel([small()], ISOLATION, 0.2)
    assert panel._floor("forgery", panel._policies()["forgery"]).passed is True
    assert panel.rewards == {0.0}


# --------------------------------------------------------------------------- rates and verdict


def rollouts(path: Path, rewards: dict[int, list[float | None]]) -> Path:
    entries = [
        {"task_id": str(seed), "outcome": "error", "reward_info": None}
        if reward is None
        else {"task_id": str(seed), "outcome": "scored", "reward_info": {"reward": reward}}
        for seed, values in rewards.items()
        for reward in values
    ]
    helpers.write(path, {"info": {}, "simulations": entries})
    return path


def test_rates_leave_errors_out(tmp_path: Path) -> None:
    path = rollouts(tmp_path / "r.json", {0: [1.0, 0.0, 0.99, None], 1: [0.0, 0.0, 0.0, 0.0]})
    first, second = phase4.rates_of(path, [small(), small(name="other")], 4)
    assert (first.passed, first.scored, first.errors) == (1, 3, 1) and first.value == pytest.approx(1 / 3)
    assert second.value == 0.0


def test_a_dead_server_is_no_hard_scenario(tmp_path: Path) -> None:
    path = rollouts(tmp_path / "r.json", {0: [0.0, None, None, None]})
    with pytest.raises(ServerError, match="3 of 4"):
        phase4.rates_of(path, [small()], 4)
    assert not path.exists()  # the next start draws them again


def test_a_missing_reward_is_an_error(tmp_path: Path) -> None:
    helpers.write(tmp_path / "r.json", {"simulations": [{"task_id": "0", "outcome": "scored"}]})
    with pytest.raises(InputError, match="reward"):
        phase4.rates_of(tmp_path / "r.json", [small()], 1)


@pytest.mark.parametrize("entry", [{"outcome": "scored"}, {"task_id": "7", "outcome": "scored"}, "text"])
def test_damaged_rollouts_are_named(tmp_path: Path, entry: Any) -> None:
    helpers.write(tmp_path / "r.json", {"simulations": [entry]})
    with pytest.raises(InputError, match=r"simulations\[0\]"):
        phase4.rates_of(tmp_path / "r.json", [small()], 1)


GOOD = [{"name": "oracle", "passed": True, "found": "", "expected": "", "advice": ""}]
BAD = [GOOD[0] | {"passed": False}]


@pytest.mark.parametrize(
    ("passed", "checks", "confirmed", "verdict"),
    [
        ([3, 5, 1], GOOD, 3, "pass"),
        ([0, 5, 1], GOOD, 2, "pass"),  # nobody learns from what nobody solves
        ([0, 6, 1], GOOD, 1, "fail"),  # 0.6 is above 0.5
        ([3, 5, 1], BAD, 3, "fail"),
    ],
)
def test_the_verdict(
    tmp_path: Path, passed: list[int], checks: list[dict[str, Any]], confirmed: int, verdict: str
) -> None:
    run = Run(tmp_path, "http://x", validation={"min_confirmed": 2})
    scenarios = [small(name=f"number_{i}") for i in range(3)]
    found = phase4.report(DEEP, scenarios, [phase4.Rate(n, 10, 0) for n in passed], checks, load_settings(run.config))
    assert (found["confirmed"], found["verdict"]) == (confirmed, verdict)
    assert found["scenarios"][1]["interval"][0] < passed[1] / 10 < found["scenarios"][1]["interval"][1]


def finished(monkeypatch: pytest.MonkeyPatch, rates: list[phase4.Rate]) -> None:
    monkeypatch.setattr(phase4, "panel_of", lambda *_: GOOD)
    monkeypatch.setattr(phase4, "run_steps", lambda *_: 0)
    monkeypatch.setattr(phase4, "rates_of", lambda *_: rates)


def test_unconfirmed_scenarios_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, "http://x")
    scenarios = fill(run, n=3)
    finished(monkeypatch, [phase4.Rate(0, 10, 0), phase4.Rate(2, 10, 0), phase4.Rate(9, 10, 0)])
    code, _ = phase4.validate(DEEP, run.folder, load_settings(run.config))
    kept = generated_env.read_set(generated_env.validated(run.folder), DEEP)
    assert code == 0 and [s.name for s in kept] == [scenarios[1].name]


def test_a_set_that_fails_now_is_no_longer_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, "http://x")
    fill(run)
    settings = load_settings(run.config)
    for rate, there in ((phase4.Rate(2, 10, 0), True), (phase4.Rate(0, 10, 0), False)):
        finished(monkeypatch, [rate])
        phase4.validate(DEEP, run.folder, settings)
        assert generated_env.set_path(generated_env.validated(run.folder), DEEP).exists() is there


def test_fresh_rollouts_are_sampled_by_the_trainers_own_loop(tmp_path: Path) -> None:
    """Collect, calibrate, train and evaluate must not have two loops or two parsers."""
    run = Run(tmp_path, "http://x", training={"base_model": "folder"})
    fill(run)
    step, _ = phase4.rollouts_step(DEEP, run.folder, load_settings(run.config), 7)
    assert step.command[:2] == ("-m", "train.collect_rollouts")
    flags = dict(zip(step.command[2::2], step.command[3::2], strict=True))
    assert (flags["--env"], flags["--num-seeds"], flags["--num-samples"]) == (f"capability_{DEEP}", "7", "3")
    assert (flags["--model"], step.environment["VLLM_MODEL"]) == ("folder", helpers.MODEL)
    assert step.environment["TRACE_SCENARIOS"] == str(run.folder.phase3)
    assert int(flags["--seed"]) != load_settings(run.config).synthesis.seed


def test_rollouts_of_another_set_are_not_taken(tmp_path: Path) -> None:
    run = Run(tmp_path, "http://x")
    fill(run, n=1)
    settings = load_settings(run.config)
    _, first = phase4.rollouts_step(DEEP, run.folder, settings, 1)
    fill(run, n=2)
    _, second = phase4.rollouts_step(DEEP, run.folder, settings, 2)
    assert first != second


# --------------------------------------------------------------------------- faults


def test_missing_scenarios_name_their_command(tmp_path: Path) -> None:
    run = Run(tmp_path, "http://127.0.0.1:9")
    done = run.here(phase4.main)
    assert done.returncode == 2 and "phase3_synthesis.py --all-selected --run-dir" in done.stderr
    fill(run)
    done = run.here(phase4.main, "--capabilities", "another_skill")
    assert done.returncode == 2 and "phase3_synthesis.py --capability another_skill" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_dry_run(tmp_path: Path, server: ScriptedServer) -> None:
    run = Run(tmp_path, server.url, model={"name": "not-served", "base_url": server.url})
    fill(run)
    done = run.here(phase4.main, "--dry-run")
    lines = {line[6:].split(":")[0]: line[:4].strip() for line in done.stdout.splitlines()}
    assert lines == {"scenario sets": "OK", "sandbox": "OK", "solving model": "FAIL", "disk": "OK"}
    assert done.returncode == 2 and f"serves {helpers.MODEL}, not not-served" in done.stdout
    assert not run.folder.phase4.exists()
