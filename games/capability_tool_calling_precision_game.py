"""Tool calling precision: exactly the tool and the argument that the request means, beside decoys of both kinds.

    python pipeline/validate_environment.py games/capability_tool_calling_precision_game.py

Half of the requests name a second tool and order that must be left alone, half carry a price beside the order number.
Nothing has to be looked up. One turn: the call ends the episode.
"""

from __future__ import annotations

import random

from game_registry import GameSpec, Message, register_game
from games._desk import ITEMS, MAX_GEN_TOKENS, REQUESTS, OneCallGame, opening
from games._tool_game import oracle_of

NAME = "capability_tool_calling_precision"


def decoy_tool_request(rng: random.Random, tool: str, number: int, decoy: int) -> str:
    """Two tools and two orders, one pair of them ruled out."""
    other = rng.choice([name for name in REQUESTS if name != tool])
    parts = [f"Do not {other} order {decoy}.", f"{tool.capitalize()} order {number}."]
    rng.shuffle(parts)
    return " ".join(parts)


def decoy_number_request(rng: random.Random, tool: str, number: int, decoy: int) -> str:
    """One tool and one order, and a price that looks like an order number."""
    wish = f"I want to {tool} my {rng.choice(ITEMS)}."
    if rng.random() < 0.5:
        return f"{wish} Order {number}, {decoy} dollars."
    return f"I paid {decoy} dollars for order {number}. {wish}"


KINDS = {"decoy_tool": decoy_tool_request, "decoy_number": decoy_number_request}


class ToolCallingPrecisionGame(OneCallGame):
    """``exact``: the tool and the id that the request means."""

    name = NAME

    def draw_task(self, rng: random.Random) -> list[Message]:
        tool = rng.choice(REQUESTS)
        number, decoy = rng.sample(range(100, 1000), 2)
        self.domain = rng.choice(list(KINDS))
        self.expect(tool, number)
        return opening(KINDS[self.domain](rng, tool, number, decoy))


register_game(
    GameSpec(
        name=NAME,
        make_env=ToolCallingPrecisionGame,
        max_gen_tokens=MAX_GEN_TOKENS,
        tools_in="system_prompt",
        oracle=oracle_of(ToolCallingPrecisionGame),
        hint_prompt="Hint: call the tool that the customer asks for, on the order that the customer means.",
        description=(
            "The agent calls exactly the tool that a request means, with the right argument, as one well-formed call. "
            "It is lacking when the call cannot be read, names another tool, or takes a number that is not the "
            "order's, such as a price."
        ),
    )
)
