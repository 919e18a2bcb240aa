"""Multi-step task completion: carry a request of two parts through, one call after the other.

    python pipeline/validate_environment.py games/capability_multi_step_task_completion_game.py

The customer names two orders and wants the first one dealt with; once that is done, the customer asks for something
else on "the other order", whose id was said only at the start. Nothing has to be looked up in a table or refused. The
first call that was not asked for ends the episode.

Curriculum: ``start`` says which seeds open after the first call, which then stands in the conversation as done. ``odd``
(the registered form) shortens every second seed, so that a policy that never finishes two calls in a row still sees
reward; ``never`` is the full task, ``always`` the last step alone.
"""

from __future__ import annotations

import random
from typing import Literal

from game_registry import GameSpec, Message, register_game
from games._desk import MAX_GEN_TOKENS, REQUESTS, SYSTEM_PROMPT, TOOLS, grade_call, opening
from games._tool_game import ToolGame, bare_call, oracle_of
from tool_calls import Action

NAME = "capability_multi_step_task_completion"
FIRST_DONE = 0.3  # reward of the first call alone: less than half, since stopping there is what is to be unlearned
DONE = "Done."


class MultiStepGame(ToolGame):
    """``two_calls``: both of them; ``second_call``: the first is already made."""

    name = NAME
    system_prompt = SYSTEM_PROMPT
    tools = TOOLS

    def __init__(self, start: Literal["odd", "never", "always"] = "odd") -> None:
        super().__init__()
        self.start = start

    def reset(self, seed: int) -> None:
        self._second_only = self.start == "always" or (self.start == "odd" and seed % 2 == 1)
        super().reset(seed)

    def draw_task(self, rng: random.Random) -> list[Message]:
        numbers, tools = rng.sample(range(100, 1000), 2), rng.sample(REQUESTS, 2)
        self.expected = list(zip(tools, numbers, strict=True))
        self.found: list[tuple[str, int]] = []
        self._then = f"Thanks. Now {tools[1]} the other order."
        first, second = numbers
        messages = opening(f"I need help with orders {first} and {second}. First, {tools[0]} order {first}.")
        if self._second_only:
            messages += [
                {"role": "assistant", "content": bare_call(tools[0], id=first)},
                {"role": "tool", "content": DONE},
                {"role": "user", "content": self._then},
            ]
            del self.expected[0]
        self.domain = "second_call" if self._second_only else "two_calls"
        self.step_limit = len(self.expected)
        return messages

    def call(self, action: Action) -> str:
        self.found.append((action["name"], action["arguments"]["id"]))
        right = self.found[-1] == self.expected[len(self.found) - 1]
        self.finished = not right or len(self.found) == len(self.expected)
        self.reason = ("solved" if self.finished else "not complete") if right else "a call that was not asked for"
        return DONE

    def follow_up(self) -> str | None:
        return self._then if self.found else None

    def reward(self) -> float:
        """Per call as ``grade_call``; the first of two is worth ``FIRST_DONE`` and the second what is left."""
        grades = [grade_call(found, expected) for found, expected in zip(self.found, self.expected, strict=False)]
        grades += [0.0] * (len(self.expected) - len(grades))
        weights = [1.0] if len(self.expected) == 1 else [FIRST_DONE, 1.0 - FIRST_DONE]
        return 1.0 if all(g == 1.0 for g in grades) else sum(w * g for w, g in zip(weights, grades, strict=True))

    def solution(self) -> list[Action]:
        return [{"name": tool, "arguments": {"id": number}} for tool, number in self.expected]


register_game(
    GameSpec(
        name=NAME,
        make_env=MultiStepGame,
        max_gen_tokens=MAX_GEN_TOKENS,
        tools_in="system_prompt",
        oracle=oracle_of(MultiStepGame),
        hint_prompt="Hint: after the first call, look back for the order that is left.",
        description=(
            "The agent carries a task of several steps through to its end and keeps what was said at its start. "
            "It is lacking when a step is left out, done twice or done on the wrong record."
        ),
    )
)
