"""An engine whose policy is a function from the prompt's text to the answer's: deterministic, no model, no server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from train.chat import ChatCodec
from train.engine import Sample, SamplingParams

Policy = Callable[[str, SamplingParams], str | list[int]]


class ScriptedEngine:
    """``Engine`` for tests. ``policy`` answers with text (the end-of-turn token is added) or with token ids."""

    def __init__(self, codec: ChatCodec, policy: Policy, delay_s: float = 0.0) -> None:
        self.codec, self.policy, self.delay_s = codec, policy, delay_s
        self.prompts: list[list[int]] = []
        self.adapters: dict[str, str] = {}
        self.by_adapter: dict[str, Policy] = {}  # for adapters whose name begins so
        self.asked: list[tuple[str | None, SamplingParams]] = []
        self.in_flight = self.max_in_flight = self.n_sampled_tokens = 0

    async def sample(self, prompt_ids: list[int], params: SamplingParams, adapter: str | None = None) -> Sample:
        self.prompts.append(list(prompt_ids))
        self.asked.append((adapter, params))
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.in_flight -= 1
        policy = next((p for name, p in self.by_adapter.items() if (adapter or "").startswith(name)), self.policy)
        answer = policy(self.codec.tokenizer.decode(prompt_ids), params)
        ids = answer if isinstance(answer, list) else [*self.codec._encode(answer), self.codec.end_of_turn]
        cut = len(ids) > params.max_new_tokens
        ids = ids[: params.max_new_tokens]
        self.n_sampled_tokens += len(ids)
        return Sample(tuple(ids), tuple(-0.25 for _ in ids), "length" if cut else "stop")

    async def load_adapter(self, name: str, folder: str) -> None:
        self.adapters[name] = folder

    async def unload_adapter(self, name: str) -> None:
        self.adapters.pop(name, None)

    async def close(self) -> None:
        self.adapters.clear()


def right_answer(prompt: str, params: SamplingParams) -> str:
    """The policy that solves ``capability_tiny``."""
    number = prompt.rpartition("The number is ")[2].partition(".")[0]
    return '{"name": "answer", "arguments": {"value": ' + number + "}}"
