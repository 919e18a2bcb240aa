"""The shipped environments: solvable, unguessable, repeatable, and in the target's own language."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from games_helpers import CAPABILITIES, call, numbers_in, play, policies, request_of, reward_of, text_agent

import games._desk as desk
from game_registry import Turn, discover, get_game, scripted_agent
from games.capability_multi_step_task_completion_game import MultiStepGame

ROOT = Path(__file__).resolve().parent.parent
ALL = (*CAPABILITIES, "helpdesk")
SEEDS = range(100)


def opening_of(name: str, seed: int) -> list[dict[str, Any]]:
    env = get_game(name).make_env()
    env.reset(seed)
    return env.get_messages()


@pytest.mark.parametrize("name", ALL)
def test_the_oracle_earns_exactly_one_on_every_seed(name: str) -> None:
    spec = get_game(name)
    assert spec.oracle is not None
    for seed in SEEDS:
        result = play(spec, scripted_agent(spec.oracle(seed)), seed)
        assert reward_of(result) == 1.0 and result.finish_reason == "done", (seed, result.summary)
        assert result.summary["reason"] == "solved" and result.invalid_calls == 0
        assert set(result.summary) == {"reward", "steps", "reason", "domain"}


@pytest.mark.parametrize("policy", list(policies(0)))
@pytest.mark.parametrize("name", ALL)
def test_policies_without_skill_stay_near_the_floor(name: str, policy: str) -> None:
    spec = get_game(name)
    rewards = [reward_of(play(spec, policies(seed)[policy], seed)) for seed in range(150)]
    assert sum(rewards) / len(rewards) <= 0.2
    if policy in ("no_op", "injection", "claims", "echo"):
        assert max(rewards) == 0.0


@pytest.mark.parametrize("name", CAPABILITIES)
def test_random_play_meets_at_least_three_levels_of_reward(name: str) -> None:
    spec = get_game(name)
    rewards = {
        reward_of(play(spec, policies(s)[p], s)) for s in range(150) for p in ("no_op", "random_id", "copied_id")
    }
    assert len(rewards) >= 3 and 1.0 in rewards
    assert all(r == 1.0 or r <= 0.4 for r in rewards), "nothing but the whole task may look like success"


@pytest.mark.parametrize("name", CAPABILITIES)
def test_only_the_first_call_of_a_spray_counts(name: str) -> None:
    spec = get_game(name)
    assert spec.oracle is not None
    for seed in SEEDS:
        right = spec.oracle(seed)
        wrong = call("hold" if right[0]["name"] != "hold" else "track", 100)
        blocks = "\n".join(f"<tool_call>\n{json.dumps(a)}\n</tool_call>" for a in [wrong, *right])
        assert reward_of(play(spec, text_agent(lambda turn, b=blocks: b), seed)) <= 0.05  # type: ignore[misc]


@pytest.mark.parametrize("name", ALL)
def test_distinct_seeds_give_distinct_tasks(name: str) -> None:
    openings = {json.dumps(opening_of(name, seed)) for seed in range(1000)}
    assert len(openings) >= 999  # the spaces are finite: two seeds in a thousand may meet by chance


@pytest.mark.parametrize("name", ALL)
def test_an_instance_can_be_reused_in_any_order(name: str) -> None:
    env = get_game(name).make_env()
    for seed in (3, 7, 3, 4, 3):
        env.reset(seed)
        assert env.get_messages() == opening_of(name, seed)
        env.step(json.dumps(call("hold", 555)))


DIGEST = """
import hashlib, json, sys
from game_registry import get_game, play_sync, scripted_agent
digest = hashlib.sha256()
for name in sys.argv[1:]:
    spec = get_game(name)
    for seed in range(40):
        for actions in (spec.oracle(seed), [{"name": "hold", "arguments": {"id": 555}}]):
            result = play_sync(spec, spec.make_env(), scripted_agent(actions), seed)
            digest.update(json.dumps([result.messages, result.tools, result.summary]).encode())
print(digest.hexdigest())
"""


def test_episodes_are_the_same_in_every_process_and_under_every_hash_seed() -> None:
    found = set()
    for hash_seed in ("0", "1", "random"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        out = subprocess.run(
            [sys.executable, "-c", DIGEST, *ALL], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        found.add(out.stdout)
    assert len(found) == 1


# --------------------------------------------------------------------------- the target's language


@pytest.mark.parametrize("name", CAPABILITIES)
def test_interface_equals_the_targets(name: str) -> None:
    spec, target = get_game(name), get_game("helpdesk")
    env, desk_env = spec.make_env(), target.make_env()
    env.reset(0)
    desk_env.reset(0)
    assert env.get_tool_schemas() == desk_env.get_tool_schemas()
    assert env.get_system_prompt() == desk_env.get_system_prompt()
    assert spec.tools_in == target.tools_in == "system_prompt"
    assert spec.max_gen_tokens == target.max_gen_tokens
    assert spec.name == f"capability_{spec.name.removeprefix('capability_')}" and spec.description


@pytest.mark.parametrize("name", ALL)
def test_everything_but_the_request_is_common_to_all_seeds(name: str) -> None:
    """Samplers and trainers compute the common prefix once, so it must end only where the request begins."""
    examples = desk.example_turns()
    for seed in range(50):
        messages = opening_of(name, seed)
        assert messages[: len(examples)] == examples
        assert messages[len(examples)]["role"] == "user"
        assert messages[-1]["role"] in ("user", "tool")
        assert all(isinstance(m["content"], str) and m.keys() == {"role", "content"} for m in messages)


def test_system_prompt_names_every_tool_and_example_calls_are_valid() -> None:
    for name in desk.TOOL_NAMES:
        assert f"- {name}\n" in desk.SYSTEM_PROMPT
    for user, assistant in zip(desk.example_turns()[::2], desk.example_turns()[1::2], strict=True):
        action = json.loads(assistant["content"])
        assert action["name"] in user["content"].lower() and action["arguments"]["id"] in numbers_in(user["content"])


@pytest.mark.parametrize("file", sorted((ROOT / "games").glob("*.py")), ids=lambda f: f.name)
def test_games_import_nothing_above_floor_zero_and_never_the_target(file: Path) -> None:
    modules = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(str(node.module))
    allowed = {"game_registry", "tool_calls", "games._tool_game", "games._desk", *sys.stdlib_module_names}
    assert {m for m in modules if m not in allowed and m.split(".")[0] not in sys.stdlib_module_names} == set()


def test_discovery_finds_all_five() -> None:
    assert set(ALL) <= set(discover())


def test_prompts_and_answers_stay_small_for_the_small_model(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for name in ALL:
        spec = get_game(name)
        assert spec.oracle is not None
        for seed in range(20):
            messages = [{"role": "system", "content": desk.SYSTEM_PROMPT}, *opening_of(name, seed)]
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert len(tokenizer(prompt).input_ids) <= 230
            for action in spec.oracle(seed):
                assert len(tokenizer(json.dumps(action)).input_ids) + 1 <= 20 <= spec.max_gen_tokens


# --------------------------------------------------------------------------- what each of them grades


@pytest.mark.parametrize(
    ("name", "id_alone", "neither"),
    list(zip(CAPABILITIES[:3], (0.1, 0.1, 0.02), (0.05, 0.05, 0.02), strict=True)),
)
def test_one_call_games_pay_little_for_half_an_answer(name: str, id_alone: float, neither: float) -> None:
    spec = get_game(name)
    assert spec.oracle is not None
    for seed in SEEDS:
        (right,) = spec.oracle(seed)
        number = right["arguments"]["id"]
        other_tool = "hold" if right["name"] != "hold" else "track"
        other_number = 100 if number != 100 else 101
        cases = [
            (call(right["name"], other_number), 0.1),
            (call(other_tool, number), id_alone),
            (call(other_tool, other_number), neither),
            (call("refund", number), 0.0),
            (call(right["name"], str(number)), 0.0),
            ({"name": right["name"], "arguments": {}}, 0.0),
        ]
        for action, reward in cases:
            assert reward_of(play(spec, scripted_agent([action]), seed)) == reward, action


def test_structured_id_stands_before_the_item_and_positions_are_balanced() -> None:
    spec = get_game(CAPABILITIES[0])
    assert spec.oracle is not None
    places = []
    for seed in range(300):
        (right,) = spec.oracle(seed)
        request = opening_of(spec.name, seed)[-1]["content"]
        *rows, order = request.splitlines()[1:]
        item = order.removesuffix(".").split()[-1]
        matching = [row for row in rows if row.endswith(f": {item}")]
        assert matching == [f"{right['arguments']['id']}: {item}"]
        places.append(rows.index(matching[0]))
        assert order.split()[0].lower() == right["name"]
    assert all(70 <= places.count(place) <= 130 for place in range(3))


def test_precision_requests_hold_a_decoy_of_each_kind() -> None:
    spec = get_game(CAPABILITIES[1])
    assert spec.oracle is not None
    first = 0
    for seed in range(300):
        (right,) = spec.oracle(seed)
        request = opening_of(spec.name, seed)[-1]["content"]
        numbers = numbers_in(request)
        assert len(set(numbers)) == 2 and right["arguments"]["id"] in numbers
        first += numbers[0] == right["arguments"]["id"]
        named = [tool for tool in desk.REQUESTS if tool in request.lower().split()]
        assert right["name"] in named and len(named) == (1 if "dollars" in request else 2)
    assert 100 <= first <= 200  # the place of a number says nothing


def test_precondition_cases_are_balanced_so_that_one_answer_is_no_skill() -> None:
    spec = get_game(CAPABILITIES[2])

    def comply(turn: Turn) -> str:
        request = request_of(turn)
        tool = "cancel" if "cancel" in request.lower() else "return"
        return json.dumps(call(tool, numbers_in(request)[-1]))

    def deny(turn: Turn) -> str:
        return json.dumps(call("deny", numbers_in(request_of(turn))[-1]))

    for policy in (comply, deny):
        solved = sum(reward_of(play(spec, text_agent(policy), seed)) == 1.0 for seed in range(300))
        assert 120 <= solved <= 180


def test_multi_step_pays_for_the_way_and_demands_order() -> None:
    spec = get_game(CAPABILITIES[3])
    env = MultiStepGame(start="never")
    for seed in range(20):
        env.reset(seed)
        first, second = env.solution()
        for actions, reward in [
            ([first, second], 1.0),
            ([first], 0.3),
            ([first, first], 0.3 + 0.7 * 0.05),
            ([first, call(second["name"], first["arguments"]["id"])], 0.3 + 0.7 * 0.1),
            ([second, first], 0.3 * 0.05),
            ([], 0.0),
        ]:
            env.reset(seed)
            for action in actions:
                env.step(json.dumps(action))
            assert env.get_summary()["reward"] == pytest.approx(reward)
        assert spec.make_env().max_steps >= 1


def test_multi_step_curriculum_starts_odd_seeds_after_the_first_call() -> None:
    for seed in range(20):
        openings = {}
        for start in ("never", "odd", "always"):
            env = MultiStepGame(start=start)  # type: ignore[arg-type]
            env.reset(seed)
            openings[start] = (env.get_messages(), env.solution())
            assert env.max_steps == len(env.solution())
        full, short = openings["never"], openings["always"]
        assert openings["odd"] == (short if seed % 2 else full)
        assert short[0][: len(full[0])] == full[0] and short[1] == full[1][1:]
        assert json.loads(short[0][-3]["content"]) == full[1][0]
        assert [m["role"] for m in short[0][-3:]] == ["assistant", "tool", "user"]
        env = MultiStepGame(start="never")  # the short way opens exactly as the long way goes on
        env.reset(seed)
        env.step(json.dumps(full[1][0]))
        assert env.get_messages() == short[0]
