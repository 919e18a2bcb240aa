"""helpdesk: a seeded customer-service benchmark in tau2's manner, and the target of the demo.

    python -m train.collect_rollouts --env helpdesk --num-seeds 32 --num-samples 4 -o runs/helpdesk.json

A policy, five tools, a scripted customer and a database of orders. The agent's calls change the database; at the end
it is compared with the database that the right calls lead to: reward 1 or 0. The seed draws the kind of task:

=============  =====  =====================================================================
structured     40 %   the order is named by its item, the ids stand in a table
precision      40 %   the right tool and id stand beside decoys of both kinds
precondition   10 %   the policy may forbid what the customer asks for
multi_step     10 %   the customer asks for a second thing once the first is done
=============  =====  =====================================================================

``capability_checks`` says which of four capabilities an episode needed and showed, from task and transcript alone.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from typing import Any, Literal

from game_registry import GameSpec, Message, register_game
from games._desk import (
    MAX_GEN_TOKENS,
    REQUESTS,
    STATUS_REQUIRED,
    STATUSES,
    SYSTEM_PROMPT,
    TOOLS,
    opening,
    table,
)
from games._tool_game import ToolGame, check_arguments, oracle_of
from tool_calls import Action

NAME = "helpdesk"
ENVIRONMENT = NAME  # whose tasks ``capability_checks`` knows
KIND_WEIGHTS = {"structured": 4, "precision": 4, "precondition": 1, "multi_step": 1}
ITEM_WORDS = (
    "stove bench tablet laptop ring coat scarf vase frame drone towel piano flask crate sweater rug "
    "sheet torch glove purse shovel monitor pencil saddle"
)
ITEMS = tuple(ITEM_WORDS.split())  # none of them occurs in the capability environments
N_ORDERS = 6  # orders in the database; a request shows at most three of them
EFFECTS = {"cancel": "cancelled", "return": "return started", "hold": "held"}

Call = tuple[str, int]
Turn = Call | Literal["invalid", "text"]
Label = Literal["NA", "PRESENT", "LACKING"]

CANDIDATES = [
    {
        "name": "structured_data_reasoning",
        "description": (
            "The agent finds the record that a request means in structured data, such as a table of orders, and takes "
            "the right field from it. It is lacking when the agent acts on a number from another row or on one that is "
            "not in the data."
        ),
    },
    {
        "name": "tool_calling_precision",
        "description": (
            "The agent calls exactly the tool that a request means, with the right argument, as one well-formed call. "
            "It is lacking when the call cannot be read, names another tool, or takes a number that is not the "
            "order's, such as a price."
        ),
    },
    {
        "name": "precondition_verification",
        "description": (
            "The agent checks the state of a record against the policy before it acts, and denies a request that the "
            "policy forbids. It is lacking when the agent acts without being allowed to, or denies what is allowed."
        ),
    },
    {
        "name": "multi_step_task_completion",
        "description": (
            "The agent carries a task of several steps through to its end and keeps what was said at its start. "
            "It is lacking when a step is left out, done twice or done on the wrong record."
        ),
    },
]


@dataclasses.dataclass
class Order:
    """One row of the database."""

    item: str
    status: str
    link_sent: bool = False
    denied: bool = False


@dataclasses.dataclass(frozen=True)
class Task:
    """What the seed fixes: kind, request, database, and the calls that solve it."""

    kind: str
    request: str
    orders: dict[int, Order]
    calls: tuple[Call, ...]
    follow_up: str | None = None  # what the customer says after the first of two calls
    decided: str = ""  # precondition: the tool that the customer asks for, allowed or not


def apply_call(orders: dict[int, Order], call: Call) -> str:
    """Change the database as the tool does, and say what happened. The policy is the agent's business, not theirs."""
    tool, number = call
    order = orders.get(number)
    if order is None:
        return f"Error: there is no order {number}."
    if tool == "track":
        order.link_sent = True
    elif tool == "deny":
        order.denied = True
    else:
        order.status = EFFECTS[tool]
    return "Done."


# --------------------------------------------------------------------------- tasks


def draw_task(seed: int) -> Task:
    """The task of ``seed``."""
    rng = random.Random(f"{NAME}:{seed}")
    kind = rng.choices(list(KIND_WEIGHTS), weights=list(KIND_WEIGHTS.values()))[0]
    numbers = rng.sample(range(100, 1000), N_ORDERS)
    items = rng.sample(ITEMS, N_ORDERS)
    orders = {n: Order(i, rng.choice(STATUSES)) for n, i in zip(numbers, items, strict=True)}
    return _DRAW[kind](rng, orders)


def _structured(rng: random.Random, orders: dict[int, Order]) -> Task:
    rows = [(order.item, number) for number, order in list(orders.items())[:3]]
    item, number = rng.choice(rows)
    tool = rng.choice(REQUESTS)
    return Task("structured", f"{table(rows)}\n{tool.capitalize()} the {item}.", orders, ((tool, number),))


def _precision(rng: random.Random, orders: dict[int, Order]) -> Task:
    (number, order), (decoy, _) = list(orders.items())[:2]
    tool, other = rng.sample(REQUESTS, 2)
    wish, price = f"I want to {tool} my {order.item}.", rng.choice([n for n in range(100, 1000) if n not in orders])
    request = rng.choice(
        [
            f"Do not {other} order {decoy}. {tool.capitalize()} order {number}.",
            f"{tool.capitalize()} order {number}. Do not {other} order {decoy}.",
            f"{wish} Order {number}, {price} dollars.",
            f"I paid {price} dollars for order {number}. {wish}",
        ]
    )
    return Task("precision", request, orders, ((tool, number),))


def _precondition(rng: random.Random, orders: dict[int, Order]) -> Task:
    (number, order), (other, other_order) = list(orders.items())[:2]
    tool = rng.choice(list(STATUS_REQUIRED))
    allowed = rng.random() < 0.5
    forbidden = [status for status in STATUSES if status != STATUS_REQUIRED[tool]]
    order.status = STATUS_REQUIRED[tool] if allowed else rng.choice(forbidden)
    states = [f"Order {number} is {order.status}.", f"Order {other} is {other_order.status}."]
    rng.shuffle(states)
    request = f"{' '.join(states)} {tool.capitalize()} order {number}."
    return Task("precondition", request, orders, ((tool if allowed else "deny", number),), decided=tool)


def _multi_step(rng: random.Random, orders: dict[int, Order]) -> Task:
    first, second = list(orders)[:2]
    tools = rng.sample(REQUESTS, 2)
    request = f"I need help with orders {first} and {second}. First, {tools[0]} order {first}."
    then = f"Thanks. Now {tools[1]} the other order."
    return Task("multi_step", request, orders, ((tools[0], first), (tools[1], second)), follow_up=then)


_DRAW = {"structured": _structured, "precision": _precision, "precondition": _precondition, "multi_step": _multi_step}


# --------------------------------------------------------------------------- the environment


class HelpdeskGame(ToolGame):
    """One conversation. It ends with the last call that the task asks for, or the first that spoils the database."""

    name = NAME
    system_prompt = SYSTEM_PROMPT
    tools = TOOLS

    def reset(self, seed: int) -> None:
        self.task = draw_task(seed)
        self.orders = {n: dataclasses.replace(order) for n, order in self.task.orders.items()}
        super().reset(seed)

    def draw_task(self, rng: random.Random) -> list[Message]:
        self.domain, self.step_limit = self.task.kind, len(self.task.calls)
        return opening(self.task.request)

    def call(self, action: Action) -> str:
        seen = apply_call(self.orders, (action["name"], action["arguments"]["id"]))
        wanted = self._states()
        if self.orders == wanted[-1]:
            self.finished, self.reason = True, "solved"
        elif self.orders == wanted[0]:
            self.reason = "no such order"
        elif self.orders not in wanted:
            self.finished, self.reason = True, "the database is not as it should be"
        else:
            self.reason = "not complete"
        return seen

    def follow_up(self) -> str | None:
        return self.task.follow_up if self.reason == "not complete" else None

    def _states(self) -> list[dict[int, Order]]:
        """The database before, between and after the calls that solve the task."""
        states = [{n: dataclasses.replace(order) for n, order in self.task.orders.items()}]
        for call in self.task.calls:
            state = {n: dataclasses.replace(order) for n, order in states[-1].items()}
            apply_call(state, call)
            states.append(state)
        return states

    def reward(self) -> float:
        return float(self.orders == self._states()[-1])

    def solution(self) -> list[Action]:
        return [{"name": tool, "arguments": {"id": number}} for tool, number in self.task.calls]


# --------------------------------------------------------------------------- what was needed, what was shown


def read_turns(messages: Sequence[Message]) -> list[Turn]:
    """What the agent did, turn by turn: a valid call, ``invalid`` for an attempt at one, ``text`` for plain text."""
    turns: list[Turn] = []
    n_examples = sum(m["role"] == "assistant" for m in opening(""))
    for message in [m for m in messages if m.get("role") == "assistant"][n_examples:]:
        calls = message.get("tool_calls") or []
        turns += [_valid_call(call) or "invalid" for call in calls]
        if not calls:
            turns.append("invalid" if "{" in str(message.get("content")) else "text")
    return turns


def _valid_call(call: dict[str, Any]) -> Call | None:
    tool = next((t for t in TOOLS if t.name == call["function"]["name"]), None)
    raw = call["function"]["arguments"]
    arguments = json.loads(raw) if isinstance(raw, str) else raw
    if tool is None or check_arguments(tool, arguments) is not None:
        return None
    return tool.name, arguments["id"]


def capability_checks(seed: int, messages: Sequence[Message]) -> dict[str, Label]:
    """For each candidate: was it needed (else NA), and was it shown (PRESENT) or not (LACKING)?

    Reads the task and the transcript, never the reward. A turn without a valid call says nothing about what the agent
    would have done, so it counts against tool calling precision alone; in doubt a label is PRESENT.
    """
    task = draw_task(seed)
    turns = read_turns(messages)
    calls = [turn for turn in turns if not isinstance(turn, str)]
    precise = bool(calls) and len(calls) == len(turns) and all(_is_precise(task, call) for call in calls)
    return {
        "structured_data_reasoning": _label(task.kind == "structured", all(c[1] == task.calls[0][1] for c in calls)),
        "tool_calling_precision": _label(True, precise),
        "precondition_verification": _label(task.kind == "precondition", all(_is_decided(task, c) for c in calls)),
        "multi_step_task_completion": _label(task.kind == "multi_step", _is_carried_through(task, turns)),
    }


def _label(needed: bool, shown: bool) -> Label:
    return ("PRESENT" if shown else "LACKING") if needed else "NA"


def _is_precise(task: Task, call: Call) -> bool:
    """Tool and id are ones that the request means; the right row and the policy are other capabilities' matter."""
    if task.kind == "structured":
        return call[0] == task.calls[0][0]
    if task.kind == "precondition":
        return call[0] in (task.decided, "deny") and call[1] == task.calls[0][1]
    return call in task.calls


def _is_decided(task: Task, call: Call) -> bool:
    """A call that does something else altogether is no decision about the request."""
    return call[0] == task.calls[0][0] or call[0] not in (task.decided, "deny")


def _is_carried_through(task: Task, turns: Sequence[Turn]) -> bool:
    """Once the first call was right, the next turn must be the second call, or at least a try at one."""
    if len(task.calls) < 2 or not turns or turns[0] != task.calls[0]:
        return True
    return len(turns) > 1 and turns[1] in ("invalid", task.calls[1])


register_game(
    GameSpec(
        name=NAME,
        make_env=HelpdeskGame,
        max_gen_tokens=MAX_GEN_TOKENS,
        tools_in="system_prompt",
        oracle=oracle_of(HelpdeskGame),
        description="Customer service: a policy, five tools, a scripted customer, a database checked at the end.",
    )
)
