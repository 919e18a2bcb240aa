"""The interface of the helpdesk benchmark: tool schemas, prompt and example turns, and nothing of its simulator.

Capability environments speak the target's language but keep their own small state, so they take their interface
from here and never import ``games.helpdesk``. The prompt is the same for every seed of every environment and the
request comes last: samplers and trainers compute this prefix once.

The form was chosen by measurement on a 135M-parameter model (docs/helpdesk.md): one-word tools with one ``id``, bare
JSON, two example turns. Longer descriptions are of no use to that model; a larger one reads them in the schemas.
"""

from __future__ import annotations

from game_registry import Message
from games._tool_game import Tool, ToolGame, bare_call
from tool_calls import Action

_ID = {"id": {"type": "integer", "description": "number of the order", "minimum": 100, "maximum": 999}}

TOOLS = (
    Tool("cancel", "Cancel an order that is still pending.", _ID),
    Tool("track", "Send the customer the tracking link of an order.", _ID),
    Tool("return", "Start the return of an order that was delivered.", _ID),
    Tool("hold", "Hold an order at the depot until further notice.", _ID),
    Tool("deny", "Deny a request that the policy does not allow.", _ID),
)
TOOL_NAMES = tuple(tool.name for tool in TOOLS)
REQUESTS = ("cancel", "track", "return", "hold")  # what a customer may ask for

SYSTEM_PROMPT = (
    "You are a helpdesk agent. Call one tool as JSON.\n"
    "Tools with argument id:\n" + "\n".join(f"- {name}" for name in TOOL_NAMES) + "\n"
    "Policy: cancel only pending orders. Return only delivered orders. Else deny."
)

STATUS_REQUIRED = {"cancel": "pending", "return": "delivered"}  # the policy, as data
STATUSES = ("pending", "shipped", "delivered")

ITEM_WORDS = (
    "lamp desk sofa chair phone radio watch shirt clock mirror camera kettle blanket guitar bottle basket "
    "jacket carpet pillow candle helmet wallet ladder printer"
)
ITEMS = tuple(ITEM_WORDS.split())  # the benchmark sells other things

MAX_GEN_TOKENS = 32  # a call takes 18 or 19 tokens with its end-of-turn token


def table(rows: list[tuple[str, int]]) -> str:
    """Orders as the desk prints them, one ``id: item`` a line."""
    return "Orders:\n" + "\n".join(f"{number}: {item}" for item, number in rows)


def example_turns() -> list[Message]:
    """Two solved requests, as chat turns in plain text."""
    return [
        {"role": "user", "content": "Track order 276."},
        {"role": "assistant", "content": bare_call("track", id=276)},
        {"role": "user", "content": table([("hat", 583), ("bag", 412)]) + "\nReturn the bag."},
        {"role": "assistant", "content": bare_call("return", id=412)},
    ]


def opening(request: str) -> list[Message]:
    """The conversation that every episode starts with: the example turns, then the customer's request."""
    return [*example_turns(), {"role": "user", "content": request}]


def grade_call(found: tuple[str, int] | None, expected: tuple[str, int]) -> float:
    """Reward of one call: 1 when tool and id are right, 0.1 when one of them is, 0.05 for a valid call, else 0.

    Partial credit is small because guessing must not pay: a valid call with a random tool on a number copied from the
    request stays below 0.2 on average.
    """
    if found is None:
        return 0.0
    matches = (found[0] == expected[0]) + (found[1] == expected[1])
    return (0.05, 0.1, 1.0)[matches]


class OneCallGame(ToolGame):
    """A request that one call answers; the call ends the episode, so calls cannot be sprayed.

    ``draw_task`` sets ``expected`` through ``expect``.
    """

    system_prompt = SYSTEM_PROMPT
    tools = TOOLS

    def expect(self, tool: str, number: int) -> None:
        self.expected = (tool, number)
        self.found: tuple[str, int] | None = None

    def call(self, action: Action) -> str:
        self.found = (action["name"], action["arguments"]["id"])
        self.finished = True
        right_tool, right_number = (f == e for f, e in zip(self.found, self.expected, strict=True))
        self.reason = "solved" if right_tool and right_number else "wrong tool" if right_number else "wrong id"
        return "Done."

    def reward(self) -> float:
        return grade_call(self.found, self.expected)

    def solution(self) -> list[Action]:
        tool, number = self.expected
        return [{"name": tool, "arguments": {"id": number}}]
