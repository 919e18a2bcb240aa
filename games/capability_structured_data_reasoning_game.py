"""Structured data reasoning: find the record that a request means and act on its id.

    python pipeline/validate_environment.py games/capability_structured_data_reasoning_game.py

The customer's orders stand in a table of three rows; the request names a tool by its own word and an order only by its
item, so everything but the look-up is given. One turn: the call ends the episode.
"""

from __future__ import annotations

import random

from game_registry import GameSpec, Message, register_game
from games._desk import ITEMS, MAX_GEN_TOKENS, REQUESTS, OneCallGame, opening, table
from games._tool_game import oracle_of

NAME = "capability_structured_data_reasoning"
ROWS = 3


class StructuredDataReasoningGame(OneCallGame):
    """``lookup``: item -> id in a table, then the tool that the request names."""

    name = NAME

    def draw_task(self, rng: random.Random) -> list[Message]:
        items = rng.sample(ITEMS, ROWS)
        numbers = rng.sample(range(100, 1000), ROWS)
        chosen = rng.randrange(ROWS)
        tool = rng.choice(REQUESTS)
        self.domain = "lookup"
        self.expect(tool, numbers[chosen])
        rows = list(zip(items, numbers, strict=True))
        return opening(f"{table(rows)}\n{tool.capitalize()} the {items[chosen]}.")


register_game(
    GameSpec(
        name=NAME,
        make_env=StructuredDataReasoningGame,
        max_gen_tokens=MAX_GEN_TOKENS,
        tools_in="system_prompt",
        oracle=oracle_of(StructuredDataReasoningGame),
        hint_prompt="Hint: find the line of the named item and copy the number at its start.",
        description=(
            "The agent finds the record that a request means in structured data, such as a table of orders, and takes "
            "the right field from it. It is lacking when the agent acts on a number from another row or on one that is "
            "not in the data."
        ),
    )
)
