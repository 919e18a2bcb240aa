"""The vLLM engine against a real server of a real model, beside the local engine and plain transformers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from game_registry import AgentError
from pipeline.files import InputError
from train.chat import ChatCodec
from train.engine import SamplingParams
from train.vllm_engine import VllmEngine

pytestmark = pytest.mark.server

NEAR_TIE = 0.35  # the largest |log-prob difference| measured between bf16 vLLM and bf16 transformers was 0.33
QUESTIONS = ["Say hello.", "What is 2 + 3?", "Name a colour.", "Who wrote Hamlet?", "Is water wet?", "Count to five."]


@pytest.fixture(scope="module")
def codec(smollm2: Path) -> ChatCodec:
    return ChatCodec.from_model(str(smollm2))


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    from train.local_engine import load_model

    return load_model(str(smollm2), "bfloat16")


@contextlib.asynccontextmanager
async def engine_on(url: str, codec: ChatCodec, smollm2: Path) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(url, str(smollm2), codec.stop_token_ids)
    try:
        yield engine
    finally:
        await engine.close()


def prompts(codec: ChatCodec) -> list[list[int]]:
    return [codec.prompt_ids([{"role": "user", "content": q}]) for q in QUESTIONS]


def teacher_forced(model: Any, token_ids: list[int]) -> Any:
    """Log-softmax rows [len - 1, vocab] of plain transformers."""
    import torch

    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0, :-1].float(), dim=-1)


def make_adapter(smollm2: Path, folder: Path, scale: float, seed: int) -> Any:
    """A PEFT folder with random A and B; returns the peft model that holds it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    peft_model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, scale)
    peft_model.eval().save_pretrained(folder)
    return peft_model


async def test_sampled_logprobs_are_those_of_the_model(
    vllm_server: str, codec: ChatCodec, smollm2: Path, model: Any
) -> None:
    async with engine_on(vllm_server, codec, smollm2) as engine:
        params = SamplingParams(24, 1.0, seed=3)
        samples = await asyncio.gather(*(engine.sample(p, params) for p in prompts(codec)))
    gaps = []
    for prompt, sample in zip(prompts(codec), samples, strict=True):
        rows = teacher_forced(model, [*prompt, *sample.token_ids])[len(prompt) - 1 :]
        gaps += [
            abs(rows[i, t].item() - p) for i, (t, p) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True))
        ]
    assert len(gaps) > 60 and sum(gaps) / len(gaps) < 0.1 and max(gaps) < 1.0


async def test_same_greedy_episode_through_both_engines(
    vllm_server: str, codec: ChatCodec, smollm2: Path, model: Any
) -> None:
    """Multi-turn episodes of the same seeds: equal token for token, or different only from a near tie on."""
    import tiny_game

    from train.episode import EpisodeParams, run_episode
    from train.local_engine import LocalEngine

    params = EpisodeParams(max_new_tokens=16, max_seq_length=512, temperature=0.0)
    local = LocalEngine(model, codec)
    equal = 0
    async with engine_on(vllm_server, codec, smollm2) as remote:
        for seed in range(6):
            streams = []
            for engine in (local, remote):
                episode = await run_episode(tiny_game.SPEC, tiny_game.TinyGame(), engine, codec, seed, params)
                assert episode.scored and len(episode.token_ids) == len(episode.action_mask)
                streams.append(episode)
            here, there = streams
            assert here.token_ids[: here.prompt_len] == there.token_ids[: there.prompt_len]
            if here.token_ids == there.token_ids:
                assert here.action_mask == there.action_mask and here.reward == there.reward
                equal += 1
                continue
            pairs = zip(here.token_ids, there.token_ids, strict=False)
            at = next(i for i, (a, b) in enumerate(pairs) if a != b)
            row = teacher_forced(model, here.token_ids[: at + 1])[at - 1]
            assert row.max().item() - row[there.token_ids[at]].item() < NEAR_TIE
    assert equal >= 3
    await local.close()


async def test_stop_string_ends_a_turn_and_stays_in_it(vllm_server: str, codec: ChatCodec, smollm2: Path) -> None:
    async with engine_on(vllm_server, codec, smollm2) as engine:
        free = await engine.sample(prompts(codec)[1], SamplingParams(24, 0.0))
        stop = codec.decode(free.token_ids).split()[1]
        cut = await engine.sample(prompts(codec)[1], SamplingParams(24, 0.0, (stop,)))
    assert cut.finish_reason == "stop" and stop in codec.decode(cut.token_ids)
    assert len(cut.token_ids) < len(free.token_ids) and cut.token_ids == free.token_ids[: len(cut.token_ids)]


async def test_adapter_loads_under_its_versioned_name_and_unloads(
    vllm_server: str, codec: ChatCodec, smollm2: Path, tmp_path: Path
) -> None:
    make_adapter(smollm2, tmp_path / "a", 0.05, 0)
    async with engine_on(vllm_server, codec, smollm2) as engine:
        base = await engine.sample(prompts(codec)[0], SamplingParams(16, 0.0))
        await engine.load_adapter("tiny@v1", str(tmp_path / "a"))
        adapted = await engine.sample(prompts(codec)[0], SamplingParams(16, 0.0), "tiny@v1")
        assert adapted.token_ids != base.token_ids or adapted.logprobs != base.logprobs
        listed = await engine.pool.request(engine.pool.servers[0], "GET", "/v1/models")
        assert "tiny@v1" in [m["id"] for m in listed["data"]]
        await engine.unload_adapter("tiny@v1")
        listed = await engine.pool.request(engine.pool.servers[0], "GET", "/v1/models")
        assert "tiny@v1" not in [m["id"] for m in listed["data"]]
        again = await engine.sample(prompts(codec)[0], SamplingParams(16, 0.0))
        assert again.token_ids == base.token_ids


async def test_rank_above_the_servers_limit_is_explained(
    vllm_server: str, codec: ChatCodec, smollm2: Path, tmp_path: Path
) -> None:
    make_adapter(smollm2, tmp_path / "a", 0.05, 0)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**config, "r": 256}))
    async with engine_on(vllm_server, codec, smollm2) as engine:
        with pytest.raises(InputError, match="--max-lora-rank"):
            await engine.load_adapter("tiny@v9", str(tmp_path / "a"))
        with pytest.raises(InputError, match=r"adapter_config\.json"):
            await engine.load_adapter("tiny@v9", str(tmp_path))


async def test_canary_passes_for_the_right_weights_and_stops_on_stale_ones(
    vllm_server: str, codec: ChatCodec, smollm2: Path, model: Any, tmp_path: Path
) -> None:
    from train.delivery import AdapterDelivery, Canary, DeliveryError

    text = (
        "The quick brown fox jumps over the lazy dog, and then it rests beside the river until the evening comes. " * 2
    )
    ids = codec._encode(text)
    versions = [make_adapter(smollm2, tmp_path / f"v{k}", 0.08, k) for k in (1, 2)]

    def logprobs(weights: Any) -> tuple[float, ...]:
        rows = teacher_forced(weights, ids)
        return tuple(rows[i, t].item() for i, t in enumerate(ids[1:]))

    base, first, second = (logprobs(w) for w in (model, *versions))
    async with engine_on(vllm_server, codec, smollm2) as engine:
        delivery = AdapterDelivery(engine)
        report = await delivery.deliver("tiny", 1, str(tmp_path / "v1"), Canary(tuple(ids), first, base))
        assert report.canary is not None and report.canary.resolved
        assert report.canary.error_new < 0.2 < report.canary.error_old
        with pytest.raises(DeliveryError, match=r"does not run tiny@v2.*new weights by \d.*old ones by \d"):
            await delivery.deliver("tiny", 2, str(tmp_path / "v1"), Canary(tuple(ids), second, first))
        report = await delivery.deliver("tiny", 3, str(tmp_path / "v2"), Canary(tuple(ids), second, first))
        assert report.canary is not None and report.canary.error_new < report.canary.error_old
        await delivery.close()


def test_evaluation_on_a_server(
    vllm_server: str, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base, two adapters, merges and the adapter that the base picks through one server with several adapters."""
    import tiny_game  # noqa: F401 - registers capability_tiny

    from pipeline.files import read_json, write_json
    from train import evaluate

    for seed, name in enumerate(("first", "second")):
        make_adapter(smollm2, tmp_path / name, 0.05, seed)
    flags = (
        f"--model {smollm2} --base-url {vllm_server}/v1 --envs capability_tiny --seeds 10000:10002 --trials 1 "
        f"--merge linear,ties --merge-max-rank 8 --choose {tmp_path}/descriptions.json"
    )
    described = [{"skill": name, "description": f"the {name} one"} for name in ("first", "second")]
    write_json(tmp_path / "descriptions.json", described)
    flags += f" --adapters {tmp_path}/first,{tmp_path}/second --out-dir {tmp_path}/out --bootstrap 200"
    monkeypatch.setattr(sys, "argv", ["evaluate", *flags.split(), "--max-new-tokens", "6", "--modes", "sampled"])
    assert evaluate.main() == 0
    result = read_json(tmp_path / "out" / "evaluation.json")
    rows = result["results"]["capability_tiny"]["sampled"]
    assert list(rows) == ["base", "first", "second", "merge", "ties", "chosen", "union"]
    assert result["info"]["engine"] == "vllm"
    assert all(row["n_episodes"] == 2 and row["error_share"] == 0 for row in rows.values())
    assert sum(result["choice"]["capability_tiny"]["picks"].values()) == 2


async def test_raw_logprobs_at_another_temperature_are_noticed(
    vllm_server: str, codec: ChatCodec, smollm2: Path
) -> None:
    async with engine_on(vllm_server, codec, smollm2) as engine:
        with pytest.raises(InputError, match="processed_logprobs"):
            await engine.sample(prompts(codec)[0], SamplingParams(4, 0.7))


async def test_prompt_longer_than_the_context_is_a_context_failure(
    vllm_server: str, codec: ChatCodec, smollm2: Path
) -> None:
    async with engine_on(vllm_server, codec, smollm2) as engine:
        with pytest.raises(AgentError) as caught:
            await engine.sample([10] * 3000, SamplingParams(4))
    assert caught.value.kind == "context"
