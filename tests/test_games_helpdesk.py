"""helpdesk: tasks, database, scripted customer, and what the capability checks mean."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from games_helpers import CAPABILITIES, call, numbers_in, play, policies, reward_of, text_agent

import games._desk as desk
from game_registry import Message, get_game, scripted_agent
from games import helpdesk
from tool_calls import Action

SPEC = get_game("helpdesk")
SDR, TCP, PV, MST = (
    "structured_data_reasoning",
    "tool_calling_precision",
    "precondition_verification",
    "multi_step_task_completion",
)
NEEDS = {
    "structured": {SDR, TCP},
    "precision": {TCP},
    "precondition": {PV, TCP},
    "multi_step": {MST, TCP},
}


def seed_of(kind: str, skip: int = 0, **wanted: Any) -> int:
    """A seed whose task is of ``kind``; ``allowed`` picks precondition tasks by their answer."""
    for seed in range(2000):
        task = helpdesk.draw_task(seed)
        allowed = task.calls[0][0] != "deny"
        if task.kind == kind and wanted.get("allowed", allowed) == allowed:
            if skip == 0:
                return seed
            skip -= 1
    raise AssertionError(kind)


def transcript(seed: int, *turns: Action | str) -> list[Message]:
    """The messages of an episode in which the agent says ``turns``."""
    texts = [turn if isinstance(turn, str) else json.dumps(turn) for turn in turns]
    queue = iter(texts)
    result = play(SPEC, text_agent(lambda turn: next(queue, "")), seed)
    return json.loads(json.dumps(result.messages))  # what a file would give back


def labels(seed: int, *turns: Action | str) -> dict[str, str]:
    return helpdesk.capability_checks(seed, transcript(seed, *turns))


def right_calls(seed: int) -> list[Action]:
    return [call(tool, number) for tool, number in helpdesk.draw_task(seed).calls]


# --------------------------------------------------------------------------- tasks


def test_kinds_come_in_their_shares() -> None:
    n = 3000
    kinds = Counter(helpdesk.draw_task(seed).kind for seed in range(n))
    for kind, tenths in helpdesk.KIND_WEIGHTS.items():
        assert abs(kinds[kind] / n - tenths / 10) < 0.03


def test_the_answer_can_be_found_in_the_request_and_the_policy() -> None:
    for seed in range(500):
        task = helpdesk.draw_task(seed)
        for tool, number in task.calls:
            assert number in task.orders and number in numbers_in(task.request)
            said = f"{task.request} {task.follow_up}".lower()
            assert tool in said or (tool == "deny" and task.kind == "precondition")
        if task.kind == "precondition":
            needed = desk.STATUS_REQUIRED[task.decided]
            number = task.calls[0][1]
            assert f"Order {number} is {task.orders[number].status}." in task.request
            assert (task.calls[0][0] == task.decided) == (task.orders[number].status == needed)


def test_requests_of_the_benchmark_share_no_item_with_the_capability_environments() -> None:
    assert not set(helpdesk.ITEMS) & set(desk.ITEMS)
    assert len(set(helpdesk.ITEMS)) == len(helpdesk.ITEMS) and len(set(desk.ITEMS)) == len(desk.ITEMS)


def test_no_task_of_the_benchmark_is_a_task_of_a_capability_environment() -> None:
    def requests(name: str) -> set[str]:
        env, found = get_game(name).make_env(), set()
        for seed in range(500):
            env.reset(seed)
            found.add(str([m["content"] for m in env.get_messages() if m["role"] == "user"][-1]))
        return found

    benchmark = requests("helpdesk")
    for name in CAPABILITIES:
        assert not benchmark & requests(name)


# --------------------------------------------------------------------------- database and grading


def test_tools_change_the_database_and_nothing_else() -> None:
    orders = {412: helpdesk.Order("lamp", "pending"), 305: helpdesk.Order("desk", "shipped")}
    for tool, field, value in [
        ("track", "link_sent", True),
        ("deny", "denied", True),
        ("hold", "status", "held"),
        ("cancel", "status", "cancelled"),
        ("return", "status", "return started"),
    ]:
        assert helpdesk.apply_call(orders, (tool, 412)) == "Done."
        assert getattr(orders[412], field) == value
        assert orders[305] == helpdesk.Order("desk", "shipped")
    before = {n: vars(order).copy() for n, order in orders.items()}
    assert "no order 999" in helpdesk.apply_call(orders, ("cancel", 999))
    assert {n: vars(order) for n, order in orders.items()} == before


def test_the_final_database_decides_not_the_text() -> None:
    for seed in range(60):
        task = helpdesk.draw_task(seed)
        wrong = [
            (tool, number) for number in task.orders for tool in desk.TOOL_NAMES if (tool, number) not in task.calls
        ]
        for action in wrong[:10]:
            result = play(SPEC, scripted_agent([call(*action), *right_calls(seed)]), seed)
            assert reward_of(result) == 0.0, action
            assert result.finish_reason == "done"
        claim = "I have done it. The order is cancelled."
        assert reward_of(play(SPEC, text_agent(lambda turn, c=claim: c), seed)) == 0.0  # type: ignore[misc]


def test_an_episode_does_not_leak_into_the_next() -> None:
    env = SPEC.make_env()
    for seed in range(50):
        for _ in range(2):
            env.reset(seed)
            assert not env.done
            for action in right_calls(seed):
                env.step(json.dumps(action))
            assert env.get_summary()["reward"] == 1.0


def test_the_customer_answers_text_and_the_second_turn_can_still_be_lost() -> None:
    seed = seed_of("multi_step")
    messages = transcript(seed, "Which order do you mean?", right_calls(seed)[0])
    answers = [m["content"] for m in messages if m["role"] == "user"]
    assert "one of your tools" in answers[-1]
    assert reward_of(play(SPEC, scripted_agent(right_calls(seed)[::-1]), seed)) == 0.0
    assert reward_of(play(SPEC, scripted_agent(right_calls(seed)[:1]), seed)) == 0.0


def test_the_customer_asks_for_the_second_thing_once_the_first_is_done() -> None:
    seed = seed_of("multi_step")
    task = helpdesk.draw_task(seed)
    (first_tool, first), (second_tool, second) = task.calls
    assert str(second) in task.request and second_tool not in task.request.split(".")[1]
    done = transcript(seed, call(first_tool, first))
    said = [m["content"] for m in done if m["role"] == "user"]
    assert said.count(task.follow_up) == 1 and f"{second_tool} the other order" in str(task.follow_up)
    for wrong in (call(first_tool, second), call(first_tool, "x"), "Hello."):
        assert task.follow_up not in [m["content"] for m in transcript(seed, wrong)]


def test_an_unknown_order_is_an_observation() -> None:
    seed = seed_of("multi_step")
    number = next(n for n in range(100, 1000) if n not in helpdesk.draw_task(seed).orders)
    messages = transcript(seed, call("hold", number))
    assert any(m["role"] == "tool" and f"no order {number}" in m["content"] for m in messages)


# --------------------------------------------------------------------------- capability checks


def test_candidates_are_the_shipped_capabilities_in_the_same_words() -> None:
    described = {f"capability_{c['name']}": c["description"] for c in helpdesk.CANDIDATES}
    assert described == {name: get_game(name).description for name in CAPABILITIES}


@pytest.mark.parametrize("kind", list(NEEDS))
def test_a_solved_task_shows_all_that_it_needs(kind: str) -> None:
    for skip in range(10):
        seed = seed_of(kind, skip)
        found = labels(seed, *right_calls(seed))
        assert {name for name, label in found.items() if label != "NA"} == NEEDS[kind]
        assert set(found.values()) <= {"NA", "PRESENT"}


@pytest.mark.parametrize("kind", list(NEEDS))
@pytest.mark.parametrize("turn", ["I cannot help.", '{"name": "track", "arguments": {"id": ', call("refund", 412)])
def test_without_a_valid_call_only_precision_is_blamed(kind: str, turn: Action | str) -> None:
    seed = seed_of(kind)
    found = labels(seed, turn)
    assert found.pop(TCP) == "LACKING"
    assert "LACKING" not in found.values()


def test_structured_blames_the_row_or_the_tool_each_for_itself() -> None:
    seed = seed_of("structured")
    task = helpdesk.draw_task(seed)
    tool, number = task.calls[0]
    other_row = next(n for n in numbers_in(task.request) if n != number)
    other_tool = next(t for t in desk.REQUESTS if t != tool)
    assert labels(seed, call(tool, other_row)) == {SDR: "LACKING", TCP: "PRESENT", PV: "NA", MST: "NA"}
    assert labels(seed, call(other_tool, number)) == {SDR: "PRESENT", TCP: "LACKING", PV: "NA", MST: "NA"}
    assert labels(seed, call(other_tool, other_row)) == {SDR: "LACKING", TCP: "LACKING", PV: "NA", MST: "NA"}


def test_precision_needs_tool_and_number() -> None:
    for skip in range(8):
        seed = seed_of("precision", skip)
        task = helpdesk.draw_task(seed)
        tool, number = task.calls[0]
        decoy = next(n for n in numbers_in(task.request) if n != number)
        for wrong in (call(tool, decoy), call("deny", number)):
            assert labels(seed, wrong) == {SDR: "NA", TCP: "LACKING", PV: "NA", MST: "NA"}


@pytest.mark.parametrize("allowed", [True, False])
def test_precondition_blames_the_decision_alone(allowed: bool) -> None:
    seed = seed_of("precondition", allowed=allowed)
    task = helpdesk.draw_task(seed)
    number = task.calls[0][1]
    opposite = "deny" if allowed else task.decided
    assert labels(seed, call(opposite, number)) == {SDR: "NA", TCP: "PRESENT", PV: "LACKING", MST: "NA"}
    assert labels(seed, call("track", number)) == {SDR: "NA", TCP: "LACKING", PV: "PRESENT", MST: "NA"}


def test_multi_step_blames_what_happens_after_the_first_part() -> None:
    seed = seed_of("multi_step")
    first, second = right_calls(seed)
    for turns, carried, precise in [
        ((first, second), "PRESENT", "PRESENT"),
        ((first, "All done, have a nice day!"), "LACKING", "LACKING"),
        ((first, first), "LACKING", "PRESENT"),
        ((second, first), "PRESENT", "PRESENT"),  # ended by the first call: nothing can be said of going on
        ((first, '{"name": "hold", '), "PRESENT", "LACKING"),
        (("Hello!", first), "PRESENT", "LACKING"),
    ]:
        found = labels(seed, *turns)
        assert (found[MST], found[TCP]) == (carried, precise), turns


def test_no_pass_is_ever_labelled_lacking_and_every_failure_but_a_swapped_order_has_a_reason() -> None:
    """Delta must come from what the agent did, so the checks may not contradict the database."""
    for seed in range(200):
        for name, agent in policies(seed).items():
            if name == "spray":  # may pass by luck with its first call, and still is not one precise call
                continue
            result = play(SPEC, agent, seed)
            found = helpdesk.capability_checks(seed, result.messages)
            assert set(found) == {c["name"] for c in helpdesk.CANDIDATES}
            lacking = [name for name, label in found.items() if label == "LACKING"]
            if reward_of(result) == 1.0:
                assert not lacking
            elif helpdesk.draw_task(seed).kind != "multi_step":
                assert lacking


def test_checks_do_not_see_the_outcome() -> None:
    seed = seed_of("structured")
    messages = transcript(seed, *right_calls(seed))
    for reward in (0.0, 1.0):
        marked = [{**m, "reward": reward, "reason": "solved"} for m in messages]
        assert helpdesk.capability_checks(seed, marked) == helpdesk.capability_checks(seed, messages)


def test_checks_accept_arguments_as_objects_and_as_text() -> None:
    seed = seed_of("precision")
    messages = transcript(seed, *right_calls(seed))
    for message in messages:
        for one in message.get("tool_calls", []):
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    assert helpdesk.capability_checks(seed, messages)[TCP] == "PRESENT"
