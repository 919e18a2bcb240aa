"""Several adapters on one real server: versions come and go while turns run and are cancelled.

This once killed servers: prompt log-probs (the canary of one adapter) beside turns of others make vLLM's LoRA kernel of
the logits take rows of the batch for rows of the prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from train.chat import ChatCodec
from train.delivery import AdapterDelivery, Canary, adapter_name
from train.engine import SamplingParams
from train.local_engine import load_model
from train.lora import activate, attach_adapter, lora_config, write_adapter_folder
from train.vllm_engine import VllmEngine

pytestmark = [pytest.mark.server, pytest.mark.slow]

CAPABILITIES, VERSIONS, TURNS, TOKENS = ("stress_a", "stress_b"), 3, 3, 8
SPREAD = 0.06  # of B: log-probs of two versions differ by about a nat per token, rounding by some hundredths


@dataclasses.dataclass
class Turn:
    capability: str
    version: int
    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]


class Reference:
    """All versions of all adapters on one base in this process, and what they say about given tokens."""

    def __init__(self, smollm2: Path, folder: Path) -> None:
        self.model: Any = load_model(str(smollm2), "bfloat16", "cpu")
        self.folder = folder
        generator = torch.Generator().manual_seed(7)
        for index, name in enumerate(self.names()):
            config = lora_config(8, 16, ("q_proj", "v_proj", "down_proj"))
            self.model = attach_adapter(self.model, name, config, seed=index)
            for key, parameter in self.model.named_parameters():
                if "lora_B" in key and f".{name}." in key:
                    parameter.data.copy_(SPREAD * torch.randn(parameter.shape, generator=generator))
            write_adapter_folder(self.model, name, folder / name, dtype=torch.bfloat16)

    @staticmethod
    def names() -> list[str]:
        return [f"{c}_{v}" for c in CAPABILITIES for v in range(1, VERSIONS + 1)]

    @torch.inference_mode()
    def logprobs(self, sequences: list[list[int]], name: str) -> list[list[float]]:
        """Of every token after the first; rows are padded on the right, which a causal model does not see."""
        activate(self.model, name)
        width = max(map(len, sequences))
        ids = torch.tensor([s + [0] * (width - len(s)) for s in sequences])
        rows = torch.log_softmax(self.model(input_ids=ids).logits[:, :-1].float(), dim=-1)
        chosen = rows.gather(2, ids[:, 1:, None])[..., 0]
        return [chosen[k, : len(s) - 1].tolist() for k, s in enumerate(sequences)]


def served(url: str) -> set[str]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        return {m["id"] for m in json.load(answer)["data"]}


async def other_work(engine: VllmEngine, prompt: list[int], stop: asyncio.Event) -> int:
    """Turns of the base model without a pause: the server is never idle, as it is with several capabilities."""
    turns = 0
    while not stop.is_set():
        await asyncio.gather(*(engine.sample(prompt, SamplingParams(3, 1.0, seed=turns + k)) for k in range(2)))
        turns += 2
    return turns


async def one_capability(
    delivery: AdapterDelivery, engine: VllmEngine, codec: ChatCodec, reference: Reference, name: str, canary: list[int]
) -> list[Turn]:
    """Deliver, sample, cancel some turns in flight, deliver the next version."""
    rng, done = random.Random(name), list[Turn]()
    old = tuple(reference.logprobs([canary], f"{name}_{VERSIONS}")[0])  # any weights that are not the first version's
    for version in range(1, VERSIONS + 1):
        new = tuple(reference.logprobs([canary], f"{name}_{version}")[0])
        report = await delivery.deliver(
            name, version, str(reference.folder / f"{name}_{version}"), Canary(tuple(canary), new, old)
        )
        assert report.canary is not None and report.canary.resolved and not report.canary.wrong
        old = new

        async def turn(k: int, version: int = version) -> None:
            prompt = codec.prompt_ids([{"role": "user", "content": f"Tell me about {name} number {k}."}])
            params = SamplingParams(TOKENS, 1.0, seed=rng.randrange(2**31))
            sample = await engine.sample(prompt, params, adapter_name(name, version))
            done.append(Turn(name, version, prompt, list(sample.token_ids), list(sample.logprobs)))

        running = [asyncio.create_task(turn(k)) for k in range(TURNS)]
        await asyncio.sleep(0.1)
        running[0].cancel()  # as a deadline does; the next version is delivered while the server still works on it
        results = await asyncio.gather(*running, return_exceptions=True)
        assert not [r for r in results if isinstance(r, Exception)]
    return done


async def test_adapters_come_and_go_while_others_sample(vllm_server: str, smollm2: Path, tmp_path: Path) -> None:
    codec = ChatCodec.from_model(str(smollm2))
    reference = await asyncio.to_thread(Reference, smollm2, tmp_path)
    text = "You are a clerk. Order 481 is pending, order 7 is shipped, ticket 92 is closed. Which may be changed?"
    canary = codec.prompt_ids([{"role": "user", "content": text}])
    before = served(vllm_server)
    engine = VllmEngine(vllm_server, str(smollm2), codec.stop_token_ids)
    delivery = AdapterDelivery(engine)
    events: list[dict[str, Any]] = []
    engine.pool.on_event = events.append
    try:
        stop = asyncio.Event()
        others = asyncio.create_task(other_work(engine, canary[:8], stop))
        jobs = (one_capability(delivery, engine, codec, reference, name, canary) for name in CAPABILITIES)
        turns = [t for part in await asyncio.gather(*jobs) for t in part]
        stop.set()
        assert await others > 10
    finally:
        await delivery.close()
        await engine.close()
    assert engine.pool.n_deaths == 0 and not [e for e in events if e["event"] == "server lost"]
    assert served(vllm_server) == before, "versions are left on the server"
    assert len(turns) >= len(CAPABILITIES) * VERSIONS * (TURNS - 1)
    for name in CAPABILITIES:
        mine = [t for t in turns if t.capability == name]
        gaps = {v: gaps_to(reference, mine, f"{name}_{v}") for v in range(1, VERSIONS + 1)}
        for k, turn in enumerate(mine):
            own, others = gaps[turn.version][k], [gaps[v][k] for v in gaps if v != turn.version]
            assert own < 0.15 and own < 0.5 * min(others), (turn.capability, turn.version, own, others)


def gaps_to(reference: Reference, turns: list[Turn], name: str) -> list[float]:
    """Mean |server - reference| of each turn's sampled tokens under the adapter ``name``."""
    known = reference.logprobs([t.prompt + t.token_ids for t in turns], name)
    own = [row[len(t.prompt) - 1 :] for row, t in zip(known, turns, strict=True)]
    return [
        sum(abs(a - b) for a, b in zip(row, t.logprobs, strict=True)) / len(row)
        for row, t in zip(own, turns, strict=True)
    ]
