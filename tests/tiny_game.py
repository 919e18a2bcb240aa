"""A two-turn environment for tests: call ``answer`` with the number in the question; a second try is worth half.

A seed >= 9000 misbehaves in its own way, so that every fault of an environment can be provoked.
"""

from __future__ import annotations

import json
import time
from typing import Any

from game_registry import GameSpec, register_game

RAISES, STUCK, NAN_REWARD, SLOW_RESET = 9001, 9002, 9003, 9004

TOOL = {
    "type": "function",
    "function": {
        "name": "answer",
        "description": "Give the number.",
        "parameters": {"type": "object", "properties": {"value": {"type": "integer"}}, "required": ["value"]},
    },
}


class TinyGame:
    def __init__(self) -> None:
        self.done = False
        self.max_steps = 3

    def reset(self, seed: int) -> None:
        self.seed, self.done, self.reward, self.steps = seed, False, 0.0, 0
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": f"The number is {seed % 7}."}]

    def get_system_prompt(self) -> str:
        return 'Answer with {"name": "answer", "arguments": {"value": N}}.'

    def get_tool_schemas(self) -> list[dict[str, Any]]:
        return [TOOL]

    def get_messages(self) -> list[dict[str, Any]]:
        return self.messages

    def step(self, action_json: str) -> None:
        if self.seed == RAISES:
            raise KeyError("scripted fault")
        while self.seed == STUCK:
            time.sleep(0.01)
        action = json.loads(action_json)
        self.steps += 1
        self.messages.append({"role": "assistant", "content": action_json})
        if action["name"] != "answer":
            self.messages.append({"role": "user", "content": "Use the tool."})
        elif action["arguments"].get("value") == self.seed % 7:
            self.reward, self.done = 1.0 if self.steps == 1 else 0.5, True
            self.messages.append({"role": "tool", "content": "right"})
        else:
            self.messages.append({"role": "tool", "content": "wrong, try again"})

    def get_summary(self) -> dict[str, Any]:
        reward = float("nan") if self.seed == NAN_REWARD else self.reward
        return {"reward": reward, "steps": self.steps, "reason": "", "domain": "tiny"}


def oracle(seed: int) -> list[dict[str, Any]]:
    return [{"name": "answer", "arguments": {"value": seed % 7}}]


SPEC = register_game(
    GameSpec(
        name="capability_tiny",
        make_env=TinyGame,
        max_gen_tokens=48,
        hint_prompt="Hint: copy the number.",
        tools_in="system_prompt",
        oracle=oracle,
    )
)
