"""SWE scenarios as a game: both ways to act, typed errors, grading only when there is something to grade."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stage2_helpers import ISOLATION, MODULE, scenario

from game_registry import Failed, GameSpec, Reply, Scored, Turn, play, play_sync, scripted_agent
from pipeline import swe_game
from pipeline.files import ServerError
from pipeline.scenarios import save_scenarios
from pipeline.swe_game import MAX_STEPS, ScenarioGame, oracle_text, register_folder, scenario_spec
from pipeline.swe_grading import Grade

ROOT = Path(__file__).resolve().parents[1]
EDIT = {"path": "fees.py", "search": "    rate = 2", "replace": "    rate = 3"}


@pytest.fixture
def spec() -> GameSpec:
    return scenario_spec("capability_fees", [scenario(), scenario(name="second_one")], ISOLATION.kind)


@pytest.fixture
def graded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grading replaced by a rule, for tests about the game alone: the module that says 3 is right."""
    seen: list[str] = []

    def grade(one: Any, code: str, **_: Any) -> Grade:
        seen.append(code)
        return Grade({"right": "passed" if "rate = 3" in code else "failed"}, {}, 0.0)

    monkeypatch.setattr(swe_game, "grade", grade)
    monkeypatch.setattr(swe_game, "reward", lambda one, result, isolation: float(result.passed("right")))
    return seen


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def text(message: str) -> dict[str, Any]:
    return call("respond_to_user", message=message)


def played(spec: GameSpec, *actions: dict[str, Any]) -> Any:
    return play_sync(spec, spec.make_env(), scripted_agent(actions), 0)


def seen_by_policy(result: Any) -> list[str]:
    return [str(m["content"]) for m in result.messages if m["role"] in ("tool", "user")]


def test_tools_over_several_turns(spec: GameSpec, graded: list[str]) -> None:
    result = played(spec, call("view_file", path="fees.py"), call("replace_text", **EDIT), call("submit"))
    assert result.outcome == Scored(1.0) and result.turns == 3 and len(graded) == 1
    assert seen_by_policy(result)[1:] == [MODULE, "Replaced.", "Submitted."]


def test_one_answer_with_a_block(spec: GameSpec, graded: list[str]) -> None:
    result = played(spec, text("The rate is wrong.\n" + oracle_text(scenario())))
    assert result.outcome == Scored(1.0) and result.turns == 1 and result.finish_reason == "done"


def test_really_graded(spec: GameSpec) -> None:
    assert spec.oracle is not None
    assert played(spec, *spec.oracle(0)).outcome == Scored(1.0)
    comment = text("<<<<<<< SEARCH\n    rate = 2\n=======\n    rate = 2  # checked\n>>>>>>> REPLACE")
    assert played(spec, comment).outcome == Scored(0.0), "a useless edit earns nothing"


def test_an_unchanged_module_is_not_graded(spec: GameSpec, graded: list[str]) -> None:
    assert played(spec, call("submit")).outcome == Scored(0.0) and graded == []
    undo = {**EDIT, "search": EDIT["replace"], "replace": EDIT["search"]}
    assert played(spec, call("replace_text", **EDIT), call("replace_text", **undo), call("submit")).outcome == Scored(
        0.0
    )
    assert graded == []


def test_mistakes_are_told_and_cost_a_turn(spec: GameSpec, graded: list[str]) -> None:
    result = played(
        spec,
        call("replace_text", **{**EDIT, "search": "nowhere"}),
        call("replace_text", **{**EDIT, "path": "/etc/passwd"}),
        call("replace_text", path="fees.py"),
        call("open", path="fees.py"),
        text("What is wrong?"),
        call("replace_text", **EDIT),
        call("submit"),
    )
    said = seen_by_policy(result)[1:]
    assert "occurs 0 times" in said[0] and "no such file" in said[1] and "needs the text arguments" in said[2]
    assert "unknown tool" in said[3] and "SEARCH/REPLACE" in said[4]
    assert result.outcome == Scored(1.0)


def test_a_block_that_does_not_fit_changes_nothing(spec: GameSpec, graded: list[str]) -> None:
    two = oracle_text(scenario()) + "\n<<<<<<< SEARCH\nnowhere\n=======\nx\n>>>>>>> REPLACE"
    env = spec.make_env()
    env.reset(0)
    env.step(json.dumps(text(two)))
    assert isinstance(env, ScenarioGame) and env.code == MODULE and not env.done


def test_out_of_turns_submits_what_is_there(spec: GameSpec, graded: list[str]) -> None:
    views = [call("view_file", path="fees.py")] * (MAX_STEPS - 1)
    result = played(spec, call("replace_text", **EDIT), *views)
    assert result.outcome == Scored(1.0) and result.finish_reason == "done" and len(graded) == 1


def test_the_agent_sees_no_test_and_no_verdict(spec: GameSpec) -> None:
    result = played(spec, text("<<<<<<< SEARCH\n    rate = 2\n=======\n    rate = 9\n>>>>>>> REPLACE"))
    shown = json.dumps(result.messages)
    assert "def test_" not in shown and "assert" not in shown and "failed" not in shown


def test_seeds_choose_scenarios(spec: GameSpec) -> None:
    env = spec.make_env()
    names = []
    for seed in range(4):
        env.reset(seed)
        names.append(env.get_summary()["scenario"])
    assert names == ["fee_rate", "second_one", "fee_rate", "second_one"]


def test_a_sandbox_that_fails_is_no_failed_rollout(spec: GameSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Grade:
        raise ServerError("no processes left")

    monkeypatch.setattr(swe_game, "grade", broken)
    result = played(spec, text(oracle_text(scenario())))
    assert isinstance(result.outcome, Failed) and "no processes left" in result.outcome.detail


def test_grading_does_not_stop_other_episodes(spec: GameSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    inside, go_on = threading.Event(), threading.Event()

    def slow(one: Any, code: str, **_: Any) -> Grade:
        inside.set()
        assert go_on.wait(20)
        return Grade({}, {}, 0.0)

    monkeypatch.setattr(swe_game, "grade", slow)
    monkeypatch.setattr(swe_game, "reward", lambda *_: 0.5)

    async def both() -> Any:
        first = asyncio.create_task(play(spec, spec.make_env(), scripted_agent([text(oracle_text(scenario()))]), 0))
        while not inside.is_set():
            await asyncio.sleep(0.01)

        async def looks(turn: Turn) -> Reply:
            return Reply(text=json.dumps(call("submit")))

        second = await play(spec, spec.make_env(), looks, 0)
        assert not first.done()
        go_on.set()
        return (await first).outcome, second.outcome

    assert asyncio.run(both()) == (Scored(0.5), Scored(0.0))


def test_a_folder_becomes_games(tmp_path: Path) -> None:
    for name in ("skill_b", "skill_a"):
        save_scenarios(tmp_path / name / "scenarios_parsed.json", [scenario()])
    specs: list[GameSpec] = []

    def keep(spec: GameSpec) -> GameSpec:
        specs.append(spec)
        return spec

    assert register_folder(tmp_path, keep) == ["capability_skill_a", "capability_skill_b"]
    assert [s.name for s in specs] == ["capability_skill_a", "capability_skill_b"]


def test_the_shipped_sets_are_found_through_the_variable() -> None:
    code = "from game_registry import get_game; print(get_game('capability_semantic_logic_precision').description)"
    environment = {"TRACE_GAME_MODULES": "pipeline.swe_game", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "5 scenarios" in done.stdout, done.stderr


def test_another_folder_of_sets_takes_their_place(tmp_path: Path) -> None:
    save_scenarios(tmp_path / "skill_a" / "scenarios_parsed.json", [scenario()])
    code = "import game_registry as g; print(sorted(n for n in g.discover() if 'skill_a' in n or 'semantic' in n))"
    environment = {"TRACE_GAME_MODULES": "pipeline.swe_game", "TRACE_SCENARIOS": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "['capability_skill_a']", done.stderr
