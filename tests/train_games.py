"""Trivial environments for whole training runs on random models (module for ``TRACE_GAME_MODULES``).

The reward is the share of printable characters in what was said, so a random policy scores anywhere between 0 and 1 and
GRPO can raise it. Names say what else happens: stuck, raising, constant, half broken.
"""

from __future__ import annotations

import json
import time
from typing import Any

from game_registry import GameSpec, register_game


class PrintableGame:
    """One or two turns; each is worth the share of its characters in [lowest, highest]."""

    turns = 2
    lowest, highest = " ", "~"

    def __init__(self) -> None:
        self.done = False
        self.max_steps = self.turns

    def reset(self, seed: int) -> None:
        self.seed, self.done, self.rewards = seed, False, []  # type: ignore[var-annotated]
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": f"Say {seed % 10}."}]

    def get_system_prompt(self) -> str:
        return "Print."

    def get_tool_schemas(self) -> list[dict[str, Any]]:
        return []

    def get_messages(self) -> list[dict[str, Any]]:
        return self.messages

    def step(self, action_json: str) -> None:
        text = json.loads(action_json)["arguments"].get("text", "")
        self.rewards.append(sum(self.lowest <= c <= self.highest for c in text) / max(1, len(text)))
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
        self.done = len(self.rewards) == self.turns

    def get_summary(self) -> dict[str, Any]:
        reward = sum(self.rewards) / self.turns
        return {"reward": reward, "steps": len(self.rewards), "reason": "", "domain": "test"}


class DigitsGame(PrintableGame):
    turns = 1
    lowest, highest = "0", "Z"


class ConstantGame(PrintableGame):
    turns = 1

    def get_summary(self) -> dict[str, Any]:
        return super().get_summary() | {"reward": 0.25}


class SolvedGame(PrintableGame):
    turns = 1

    def get_summary(self) -> dict[str, Any]:
        return super().get_summary() | {"reward": 1.0}


class SometimesConstantGame(PrintableGame):
    """Every second seed gives a constant reward."""

    turns = 1

    def get_summary(self) -> dict[str, Any]:
        summary = super().get_summary()
        return summary | {"reward": 1.0} if self.seed % 2 else summary


class FlakyGame(PrintableGame):
    """Raises in every fourth episode of the process, so that groups close with k of n."""

    turns = 1
    n_episodes = 0

    def step(self, action_json: str) -> None:
        FlakyGame.n_episodes += 1
        if FlakyGame.n_episodes % 4 == 0:
            raise KeyError("scripted fault")
        super().step(action_json)


class StuckGame(PrintableGame):
    """Does not return from one step in four."""

    turns = 1
    n_steps = 0

    def step(self, action_json: str) -> None:
        StuckGame.n_steps += 1
        while StuckGame.n_steps % 4 == 0:
            time.sleep(0.005)
        super().step(action_json)


class RaisingGame(PrintableGame):
    def step(self, action_json: str) -> None:
        raise KeyError("scripted fault")


class UnmakeableGame(PrintableGame):
    def __init__(self) -> None:
        raise OSError("no licence")


GAMES = {
    "printable": PrintableGame, "digits": DigitsGame, "constant": ConstantGame, "sometimes": SometimesConstantGame,
    "solved": SolvedGame, "flaky": FlakyGame, "stuck": StuckGame, "raising": RaisingGame, "unmakeable": UnmakeableGame,
}  # fmt: skip


def say(text: str) -> str:
    return json.dumps({"name": "say", "arguments": {"text": text}})


SPECS = {
    name: register_game(
        GameSpec(f"capability_{name}", kind, say, max_gen_tokens=6, hint_prompt="Letters.", tools_in="system_prompt")
    )
    for name, kind in GAMES.items()
}
