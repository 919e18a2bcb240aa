"""The sampling seam: token ids in, token ids and log-probs out. Nothing above it can tell which engine it has.

Engines: ``train.local_engine.LocalEngine`` (this process, transformers) and ``train.vllm_engine.VllmEngine`` (stock
servers).
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one turn is sampled.

    Args:
        max_new_tokens: cut after this many tokens (``finish_reason="length"``).
        temperature: 0 = greedy. Log-probs are those of the distribution sampled from (logits / temperature; raw when
            greedy).
        stop: strings that end the turn, kept in the output tokens.
        seed: makes a sampled turn repeatable on the same engine.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sampled turn. ``token_ids`` end with the end-of-turn token when ``finish_reason == "stop"`` and no stop
    string hit.

    ``logprobs[i]`` is log pi(token_ids[i] | prompt, token_ids[:i]) at the sampling temperature, fp32.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


class Engine(Protocol):
    """Something that samples from the base model or from one named adapter on it.

    Raises ``game_registry.AgentError`` (kinds ``server``, ``timeout``, ``nonsense``) when it cannot answer, after its
    retries.
    """

    async def sample(self, prompt_ids: list[int], params: SamplingParams, adapter: str | None = None) -> Sample: ...

    async def load_adapter(self, name: str, folder: str) -> None:
        """Make the PEFT folder ``folder`` available under ``name`` (``<capability>@v<k>``; never reused for other
        weights)."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Forget ``name`` once its requests in flight are done."""
        ...

    async def close(self) -> None: ...
