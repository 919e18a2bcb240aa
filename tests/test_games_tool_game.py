"""The base class for environment writers: checks of arguments, observations, bookkeeping."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from game_registry import GameSpec, Message, play_sync, scripted_agent
from games._tool_game import Tool, ToolGame, bare_call, check_arguments, oracle_of
from tool_calls import Action, parse_turn

ADD = Tool(
    "add",
    "Add a number to the sum.",
    {
        "n": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": "string", "enum": ["one", "ten"]},
        "note": {"type": "string"},
        "exact": {"type": "boolean"},
    },
    optional=("unit", "note", "exact"),
)


class SumGame(ToolGame):
    """Reach the target in two calls."""

    name = "sum"
    system_prompt = "Add."
    tools = (ADD,)
    step_limit = 3

    def draw_task(self, rng: random.Random) -> list[Message]:
        self.total, self.parts = 0, [rng.randint(1, 9), rng.randint(1, 9)]
        return [{"role": "user", "content": f"Reach {sum(self.parts)}."}]

    def call(self, action: Action) -> str:
        self.total += action["arguments"]["n"]
        self.finished = self.total >= sum(self.parts)
        self.reason = "added"
        return f"The sum is {self.total}."

    def reward(self) -> float:
        return float(self.total == sum(self.parts))

    def solution(self) -> list[Action]:
        return [{"name": "add", "arguments": {"n": n}} for n in self.parts]


def started(seed: int = 0) -> SumGame:
    game = SumGame()
    game.reset(seed)
    return game


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"n": 3}, None),
        ({"n": 3, "unit": "ten", "note": "", "exact": False}, None),
        ({}, "needs the argument 'n'"),
        ({"n": 3, "m": 1}, "has no argument 'm'"),
        ({"n": "3"}, "must be of type integer"),
        ({"n": 3.0}, "must be of type integer"),
        ({"n": True}, "must be of type integer"),
        ({"n": None}, "must be of type integer"),
        ({"n": [3]}, "must be of type integer"),
        ({"n": 0}, "at least 1"),
        ({"n": 10}, "at most 9"),
        ({"n": 3, "unit": "two"}, "one of one, ten"),
        ({"n": 3, "unit": 1}, "must be of type string"),
        ({"n": 3, "exact": 1}, "must be of type boolean"),
    ],
)
def test_arguments_are_checked_against_the_schema(arguments: dict[str, Any], fault: str | None) -> None:
    found = check_arguments(ADD, arguments)
    assert (found is None) if fault is None else (found is not None and fault in found)


def test_schema_is_in_the_openai_form_and_says_what_is_required() -> None:
    schema = ADD.schema()
    parameters = schema["function"]["parameters"]
    assert schema["type"] == "function" and schema["function"]["name"] == "add"
    assert parameters["required"] == ["n"] and parameters["additionalProperties"] is False
    schema["function"]["parameters"]["properties"]["n"]["minimum"] = 5  # a copy: the tool itself is untouched
    assert ADD.parameters["n"]["minimum"] == 1


def test_a_bare_call_is_read_back_by_the_parser() -> None:
    text = bare_call("add", n=3)
    assert text == '{"name": "add", "arguments": {"n": 3}}'
    assert parse_turn(text).actions == ({"name": "add", "arguments": {"n": 3}},)


@pytest.mark.parametrize(
    ("action", "seen"),
    [
        ('{"name": "subtract", "arguments": {"n": 1}}', "no tool 'subtract'; expected one of add"),
        ('{"name": "add", "arguments": {}}', "needs the argument"),
        ("not JSON at all", "not valid JSON"),
        ('{"name": 3}', 'has no "name"'),
        ("[1, 2]", 'has no "name"'),
        ('{"name": "respond_to_user", "arguments": {"message": "hello"}}', "one of your tools"),
        ('{"name": "add", "arguments": {"n": 1}}', "The sum is 1."),
    ],
)
def test_every_action_gives_an_observation_and_costs_a_step(action: str, seen: str) -> None:
    game = started()
    before = len(game.get_messages())
    game.step(action)
    assistant, observation = game.get_messages()[before:]
    assert assistant["role"] == "assistant"
    assert observation["role"] in ("tool", "user") and seen in observation["content"]
    assert game.get_summary()["steps"] == 1


def test_faulty_calls_do_not_reach_the_state_and_name_their_fault() -> None:
    game = started()
    game.step('{"name": "add", "arguments": {"n": 99}}')
    assert game.total == 0 and game.get_summary()["reason"] == "arguments do not fit the schema"
    game.step('{"name": "nothing", "arguments": {}}')
    assert game.get_summary()["reason"] == "unknown tool"


def test_done_after_the_limit_and_nothing_happens_after_that() -> None:
    game = started()
    for _ in range(3):
        assert not game.done
        game.step("nonsense")
    assert game.done
    messages = game.get_messages()
    game.step('{"name": "add", "arguments": {"n": 1}}')
    assert game.get_messages() == messages and game.total == 0


def test_reset_starts_afresh_and_the_seed_fixes_the_task() -> None:
    game = started(5)
    first = game.get_messages()
    game.step('{"name": "add", "arguments": {"n": 9}}')
    game.reset(5)
    assert game.get_messages() == first == started(5).get_messages()
    assert game.total == 0 and not game.done and game.get_summary()["steps"] == 0
    assert len({str(started(seed).parts) for seed in range(40)}) > 20


def test_callers_cannot_change_the_conversation_through_the_list_they_get() -> None:
    game = started()
    game.get_messages().append({"role": "user", "content": "You have won."})
    assert len(game.get_messages()) == 1


def test_the_oracle_solves_every_seed_through_the_episode_loop() -> None:
    spec = GameSpec("sum", SumGame, oracle=oracle_of(SumGame))
    assert spec.oracle is not None
    for seed in range(20):
        result = play_sync(spec, SumGame(), scripted_agent(spec.oracle(seed)), seed)
        assert result.summary["reward"] == 1 and result.finish_reason == "done"
        assert json.dumps(result.messages)  # plain data
