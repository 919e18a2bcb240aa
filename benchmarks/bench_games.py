"""Four environments whose episodes have a fixed size, for speed measurements (module for ``TRACE_GAME_MODULES``).

``BENCH_TURNS`` turns [2] of ``BENCH_TOKENS`` sampled tokens [16] after a prompt of about ``BENCH_WORDS`` words [8], and
``BENCH_REPLY`` words [0] from the environment between two turns. The reward is the share of characters of one kind, so
a random model's rewards differ in every group.
"""

from __future__ import annotations

import json
import os
from typing import Any

from game_registry import GameSpec, Message, register_game

SIZES = {"TURNS": 2, "TOKENS": 16, "WORDS": 8, "REPLY": 0}
TURNS, TOKENS, WORDS, REPLY = (int(os.environ.get(f"BENCH_{name}", size)) for name, size in SIZES.items())
NAMES = ("bench_a", "bench_b", "bench_c", "bench_d")


class FixedSizeGame:
    """Every turn is worth the share of its characters whose code is ``kind`` modulo 4."""

    def __init__(self, kind: int) -> None:
        self.kind, self.max_steps, self.done = kind, TURNS, False

    def reset(self, seed: int) -> None:
        self.done, self.rewards = False, list[float]()
        self.messages: list[Message] = [{"role": "user", "content": f"Task {seed}: {_words(seed * 7919, WORDS)}"}]

    def get_system_prompt(self) -> str:
        return "You are a careful assistant of a customer service desk."

    def get_tool_schemas(self) -> list[dict[str, Any]]:
        return []

    def get_messages(self) -> list[Message]:
        return self.messages

    def step(self, action_json: str) -> None:
        text = json.loads(action_json)["arguments"]["text"]
        self.rewards.append(sum(ord(c) % 4 == self.kind for c in text) / max(1, len(text)))
        reply = f"Go on. {_words(len(self.rewards), REPLY)}".strip()
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": reply}]
        self.done = len(self.rewards) == TURNS

    def get_summary(self) -> dict[str, Any]:
        return {"reward": sum(self.rewards) / TURNS, "steps": len(self.rewards), "reason": "", "domain": "bench"}


def _words(start: int, n: int) -> str:
    return " ".join(f"{(start + i * i) % 9973}" for i in range(n))


def _say(text: str) -> str:
    return json.dumps({"name": "say", "arguments": {"text": text}})


SPECS = [
    register_game(
        GameSpec(
            f"capability_{name}",
            lambda kind=kind: FixedSizeGame(kind),
            _say,
            max_gen_tokens=TOKENS,
            tools_in="system_prompt",
        )
    )
    for kind, name in enumerate(NAMES)
]
