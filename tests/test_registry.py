"""Floor 0: registration, discovery, mixes, the parser and the episode loop on messages."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import game_registry as registry
from game_registry import (
    AgentError,
    Failed,
    GameError,
    GameMix,
    GameSpec,
    Reply,
    Scored,
    Turn,
    load_game_file,
    play,
    play_sync,
    register_game,
    scripted_agent,
)
from tool_calls import RESPOND, parse_turn

ROOT = Path(__file__).parent.parent
ADD = {"name": "add", "arguments": {"n": 3}}
CALL = json.dumps(ADD)


class Adder:
    """Adds up to five; a user turn asks, a tool turn answers."""

    max_steps = 4

    def __init__(self) -> None:
        self.total, self.done = 0, False

    def reset(self, seed: int) -> None:
        self.total, self.done = 0, False
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": f"Reach {5 + seed}."}]

    def get_system_prompt(self) -> str:
        return "Add numbers."

    def get_tool_schemas(self) -> list[dict[str, Any]]:
        parameters = {"properties": {"n": {"type": "integer"}}}
        return [{"type": "function", "function": {"name": "add", "parameters": parameters}}]

    def get_messages(self) -> list[dict[str, Any]]:
        return self.messages

    def step(self, action_json: str) -> None:
        action = json.loads(action_json)
        self.messages.append({"role": "assistant", "content": action_json})
        if action["name"] == RESPOND:
            self.messages.append({"role": "user", "content": "Use the tool."})
            return
        self.total += action["arguments"]["n"]
        self.done = self.total >= 5
        self.messages.append({"role": "tool", "content": str(self.total)})

    def get_summary(self) -> dict[str, Any]:
        return {"reward": float(self.total == 6), "steps": 1, "reason": "", "domain": "test"}


SPEC = GameSpec("adder_of_tests", Adder, hint_prompt="Twice three.")


# ------------------------------------------------------------------ the loop


def test_an_episode_links_calls_and_results_and_ends_when_done() -> None:
    result = play_sync(SPEC, Adder(), scripted_agent([ADD, ADD]), 0)
    assert result.outcome == Scored(1.0) and result.finish_reason == "done" and result.turns == 2
    assert [m["role"] for m in result.messages] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert result.messages[3]["tool_call_id"] == result.messages[2]["tool_calls"][0]["id"]
    assert result.messages[2]["raw_content"] == CALL and result.messages[2]["content"] == ""


@pytest.mark.parametrize(
    "text", ["<tool_call>not JSON</tool_call>", "<tool_call>", json.dumps({"name": "add", "arguments": 3})]
)
def test_an_invalid_call_is_an_observation_and_a_count(text: str) -> None:
    seen: list[list[dict[str, Any]]] = []

    async def agent(turn: Turn) -> Reply:
        seen.append(list(turn.new_messages))
        return Reply(text)

    result = play_sync(SPEC, Adder(), agent, 0)
    assert result.invalid_calls == 4 and result.outcome == Scored(0.0) and result.finish_reason == "max_steps"
    assert seen[1][0]["role"] == "user" and seen[1][0]["content"].startswith("Error: ")


def test_a_cut_turn_is_counted_and_not_taken_for_an_answer() -> None:
    async def agent(turn: Turn) -> Reply:
        return Reply("I think that", "length")

    result = play_sync(SPEC, Adder(), agent, 0)
    assert result.truncated_turns == 4 and result.invalid_calls == 4
    assert "cut at the token limit" in result.messages[3]["content"]


def test_hints_are_added_to_the_system_prompt_only_when_asked() -> None:
    agent = scripted_agent([])
    assert play_sync(SPEC, Adder(), agent, 0).messages[0]["content"] == "Add numbers."
    assert play_sync(SPEC, Adder(), agent, 0, hinted=True).messages[0]["content"].endswith("Twice three.")


class Raising(Adder):
    where = ""

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "where"):
            raise KeyError("scripted")
        return super().__getattribute__(name)


@pytest.mark.parametrize("where", ["done", "max_steps"])
def test_a_property_that_raises_is_a_fault_of_the_environment(where: str) -> None:
    env = Raising()
    env.where = where
    outcome = asyncio.run(play(SPEC, env, scripted_agent([ADD]), 0)).outcome
    assert isinstance(outcome, Failed) and outcome.kind == "environment" and "KeyError" in outcome.detail


@pytest.mark.parametrize("method", ["reset", "get_system_prompt", "get_messages", "step", "get_summary"])
def test_a_method_that_raises_is_a_fault_of_the_environment(method: str) -> None:
    def fail(*args: Any) -> Any:
        raise KeyError("scripted")

    env = Adder()
    setattr(env, method, fail)
    result = asyncio.run(play(SPEC, env, scripted_agent([ADD]), 0))
    assert isinstance(result.outcome, Failed) and result.outcome.kind == result.finish_reason == "environment"
    assert "KeyError" in result.outcome.detail


@pytest.mark.parametrize("reward", [float("nan"), 1.5, -0.1, None, True, "1"])
def test_a_reward_that_is_none_is_a_fault_never_zero(reward: Any) -> None:
    env = Adder()
    env.get_summary = lambda: {"reward": reward}  # type: ignore[method-assign]
    result = play_sync(SPEC, env, scripted_agent([]), 0)
    assert isinstance(result.outcome, Failed) and "finite number in [0, 1]" in result.outcome.detail


def test_server_faults_and_deadlines_are_outcomes_of_their_own() -> None:
    async def dead(turn: Turn) -> Reply:
        raise AgentError("server", "gone")

    async def slow(turn: Turn) -> Reply:
        await asyncio.sleep(5)
        return Reply("")

    assert play_sync(SPEC, Adder(), dead, 0).outcome == Failed("server", "gone")
    outcome = play_sync(SPEC, Adder(), slow, 0, deadline_s=0.02).outcome
    assert isinstance(outcome, Failed) and outcome.kind == "timeout"


# ------------------------------------------------------------------ the parser


def test_hermes_xml_and_bare_json_are_one_action() -> None:
    tools = Adder().get_tool_schemas()
    forms = [
        CALL,
        f"<tool_call>\n{CALL}\n</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
        f"<think>no call yet</think><tool_call>{CALL}</tool_call>",
        json.dumps({"name": "add", "arguments": json.dumps({"n": 3})}),
    ]
    for text in forms:
        parsed = parse_turn(text, tools)
        assert parsed.actions == (ADD,) and parsed.error is None, text


def test_xml_values_of_string_parameters_stay_strings() -> None:
    text = "<tool_call><function=add><parameter=n>3</parameter><parameter=s>3</parameter></function></tool_call>"
    types = {"n": {"type": "integer"}, "s": {"type": "string"}}
    tools = [{"function": {"name": "add", "parameters": {"properties": types}}}]
    assert parse_turn(text, tools).actions[0]["arguments"] == {"n": 3, "s": "3"}


def test_text_is_a_response_and_several_calls_keep_their_order() -> None:
    assert parse_turn("Hello.").actions == ({"name": RESPOND, "arguments": {"message": "Hello."}},)
    other = json.dumps({"name": "add", "arguments": {"n": 4}})
    two = parse_turn(f"On it. <tool_call>{CALL}</tool_call><tool_call>{other}</tool_call>")
    assert [a["arguments"]["n"] for a in two.actions] == [3, 4] and two.content == "On it."
    assert parse_turn("<think>never closed").error is not None


@pytest.mark.parametrize("text", ["[" * 3000 + '"name"', '{"name": ' + "[" * 3000, '{"name": 3}'])
def test_hostile_text_never_raises(text: str) -> None:
    parsed = parse_turn(text)
    assert parsed.error is not None or parsed.actions[0]["name"] == RESPOND


# ------------------------------------------------------------------ registry, discovery, mixes


def write_game(folder: Path, name: str, body: str = "") -> Path:
    path = folder / f"{name}_game.py"
    path.write_text(
        f"{body}\nfrom game_registry import GameSpec, register_game\n"
        f"register_game(GameSpec(name={name!r}, make_env=lambda: None))\n"
    )
    return path


def test_files_register_and_unknown_names_list_the_nearest(tmp_path: Path) -> None:
    write_game(tmp_path, "capability_of_this_test")
    assert registry.get_game("capability_of_this_test", tmp_path).name == "capability_of_this_test"
    with pytest.raises(GameError, match=r"unknown game 'capability_of_this_tes'; .*capability_of_this_test"):
        registry.get_game("capability_of_this_tes", tmp_path)


def test_a_file_that_fails_to_import_is_named_when_its_game_is_asked_for(tmp_path: Path) -> None:
    path = write_game(tmp_path, "capability_broken_import", "import no_such_module_here")
    with pytest.raises(GameError, match=r"capability_broken_import_game.py: import failed with ModuleNotFoundError"):
        registry.get_game("capability_broken_import", tmp_path)
    with pytest.raises(GameError, match="import failed"):
        load_game_file(path)


def test_duplicates_and_useless_files_are_errors(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    first, second = (write_game(tmp_path / folder, "capability_twice_here") for folder in "ab")
    load_game_file(first)
    with pytest.raises(GameError, match=r"registered twice: in .*/a/.* and in .*/b/"):
        load_game_file(second)
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(GameError, match="registers no game"):
        load_game_file(tmp_path / "empty.py")
    with pytest.raises(GameError, match="not found"):
        load_game_file(tmp_path / "none.py")


@pytest.mark.parametrize(
    "change", [{"name": "Bad Name"}, {"max_gen_tokens": 0}, {"make_env": 3}, {"tools_in": "nowhere"}]
)
def test_a_spec_that_cannot_work_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(GameError):
        GameSpec(**{"name": "fine", "make_env": Adder, **change})


def test_no_default_cuts_a_turn_to_nothing() -> None:
    assert GameSpec("fine", Adder).max_gen_tokens >= 512


def test_shipped_games_are_listed_by_the_module_without_torch() -> None:
    done = subprocess.run([sys.executable, "-m", "game_registry"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in ("helpdesk", "capability_tool_calling_precision", "capability_structured_data_reasoning"):
        assert name in done.stdout
    code = "import sys, game_registry, pipeline.files; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_mix_gives_every_game_its_share_within_one_group() -> None:
    mix = GameMix.parse("a:8,b:1,c:1")
    counts: Counter[str] = Counter()
    for deal in range(1, 41):
        counts.update(mix.deal(4))
        for name, weight in {"a": 0.8, "b": 0.1, "c": 0.1}.items():
            assert abs(counts[name] - weight * 4 * deal) <= 1.0 + 1e-9
    again = GameMix.parse("a:8,b:1,c:1")
    again.state = dict(mix.state)
    assert again.deal(7) == mix.deal(7)


@pytest.mark.parametrize("text", ["", "a:x", "a:0", "a:nan", "a,a", "a:-1"])
def test_bad_mixes_are_refused(text: str) -> None:
    with pytest.raises(GameError):
        GameMix.parse(text)


def test_one_module_may_register_its_game_again() -> None:
    spec = GameSpec("capability_again_in_tests", Adder)
    assert register_game(spec) is spec and register_game(spec) is spec


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("get_messages", None), ("get_messages", [5]), ("get_messages", [{"role": "martian", "content": ""}]),
        ("get_messages", [{"role": "user", "content": 5}]), ("get_messages", [{"content": "x"}]),
        ("get_tool_schemas", None), ("get_tool_schemas", [{"x": 1}]), ("get_system_prompt", None),
    ],
)  # fmt: skip
def test_what_breaks_the_contract_is_a_fault_of_the_environment(method: str, value: Any) -> None:
    env = Adder()

    def replaced() -> Any:
        return value

    setattr(env, method, replaced)
    outcome = play_sync(SPEC, env, scripted_agent([ADD]), 0).outcome
    assert isinstance(outcome, Failed) and outcome.kind == "environment"


def test_exits_huge_rewards_and_odd_limits_are_faults_of_the_environment() -> None:
    def leave(action_json: str) -> None:
        raise SystemExit(0)

    leaving, huge, odd = Adder(), Adder(), Adder()
    leaving.step = leave  # type: ignore[method-assign]
    huge.get_summary = lambda: {"reward": 10**400}  # type: ignore[method-assign]
    odd.max_steps = "3"  # type: ignore[assignment]
    for env in (leaving, huge, odd):
        outcome = play_sync(SPEC, env, scripted_agent([ADD]), 0).outcome
        assert isinstance(outcome, Failed) and outcome.kind == "environment"
