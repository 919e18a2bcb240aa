"""The engine in this process against ``transformers.generate`` and against itself, one row at a time."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model, tiny_model_folder, tiny_tokenizer
from train_helpers import TARGETS

from game_registry import AgentError
from pipeline.files import InputError
from train.chat import ChatCodec
from train.engine import Sample, SamplingParams
from train.kv_cache import ATTENTION, RowMap, SharedKeys, branching_attention, has_only_full_attention
from train.local_engine import LocalEngine, _draw, load_model
from train.lora import attach_adapter, lora_config, save_adapter

FAMILIES = ["llama", "qwen3", "qwen3_moe", "qwen3_5"]


def engine_of(family: str, **options: Any) -> LocalEngine:
    model = tiny_model(family)
    model.set_attn_implementation(ATTENTION)
    return LocalEngine(model, ChatCodec(tiny_tokenizer(), [2]), **options)


def prompts_of(lengths: list[int], common: int = 0, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    prefix = [rng.randrange(3, 259) for _ in range(common)]
    return [prefix + [rng.randrange(3, 259) for _ in range(n)] for n in lengths]


def teacher_forced(model: Any, prompt: list[int], sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *sample.token_ids]])
        rows = torch.log_softmax(model(input_ids=ids).logits[0].float() / temperature, dim=-1)
    chosen = rows[len(prompt) - 1 : -1].gather(1, torch.tensor(sample.token_ids)[:, None])
    return chosen[:, 0]


def assert_rows_alone(engine: LocalEngine, rows: list[tuple[list[int], SamplingParams]]) -> list[Sample]:
    """A batch gives what its rows give one by one."""
    together = engine.generate(rows)
    for row, sample in zip(rows, together, strict=True):
        (alone,) = engine.generate([row])
        assert sample.token_ids == alone.token_ids and sample.finish_reason == alone.finish_reason
        assert sample.logprobs == pytest.approx(alone.logprobs, abs=2e-5)
    return together


# ------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("lengths", "common"), [([5, 9, 1, 9], 0), ([3, 7, 1, 3], 20)])
def test_greedy_equals_transformers_generate(family: str, lengths: list[int], common: int) -> None:
    engine, plain = engine_of(family), tiny_model(family)
    prompts = prompts_of(lengths, common)
    samples = engine.generate([(p, SamplingParams(12, 0.0)) for p in prompts])
    for prompt, sample in zip(prompts, samples, strict=True):
        ids = torch.tensor([prompt])
        expected = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert list(sample.token_ids) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_a_teacher_forced_pass(family: str, temperature: float) -> None:
    engine, plain = engine_of(family), tiny_model(family)
    prompts = prompts_of([4, 11, 4], 18) * 2
    rows = [(p, SamplingParams(10, temperature, seed=i)) for i, p in enumerate(prompts)]
    for (prompt, _), sample in zip(rows, engine.generate(rows), strict=True):
        expected = teacher_forced(plain, prompt, sample, temperature)
        assert list(sample.logprobs) == pytest.approx(expected.tolist(), abs=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_padding_and_dropped_rows_change_nothing(family: str) -> None:
    """Repeated prompts, a common prefix, unequal lengths, rows that leave early and late, greedy ones among them."""
    engine = engine_of(family)
    a, b, c = prompts_of([2, 9, 5], 17)
    (d,) = prompts_of([1], seed=5)
    rows = [(p, SamplingParams(n, t, seed=i)) for i, (p, n, t) in enumerate(
        [(a, 3, 1.0), (a, 14, 1.0), (b, 1, 1.0), (a, 2, 0.0), (c, 14, 0.0), (d, 5, 1.0), (b, 9, 0.5), (a, 1, 1.0)]
    )]  # fmt: skip
    samples = assert_rows_alone(engine, rows)
    assert [len(s.token_ids) for s in samples if s.finish_reason == "length"] == [
        r[1].max_new_tokens for r, s in zip(rows, samples, strict=True) if s.finish_reason == "length"
    ]


def test_hybrids_run_without_padding() -> None:
    """A recurrent state has no mask: prompts of other lengths go into other batches."""
    engine = engine_of("qwen3_5")
    assert not has_only_full_attention(engine.model) and has_only_full_attention(tiny_model("qwen3"))
    assert engine._split([[1], [1, 2], [3], [4, 5]]) == [[0, 2], [1, 3]]
    widths = []
    original = engine._prefill
    engine._prefill = lambda prompts: widths.append({len(p) for p in prompts}) or original(prompts)  # type: ignore[method-assign]
    engine.generate([(p, SamplingParams(2, 0.0)) for p in prompts_of([3, 5, 3, 7])])
    assert widths == [{3}, {5}, {7}]


def test_a_long_decode_equals_generate() -> None:
    """Far beyond the first tokens the cache is still right."""
    engine, plain = engine_of("qwen3", max_rows=4), tiny_model("qwen3")
    (prompt,) = prompts_of([30])
    (sample,) = engine.generate([(prompt, SamplingParams(200, 0.0))])
    ids = torch.tensor([prompt])
    expected = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=200)
    assert list(sample.token_ids) == expected[0, len(prompt) :].tolist()


# ------------------------------------------------------------------------ sampling


def test_seeds_repeat_and_differ() -> None:
    engine = engine_of("llama")
    (prompt,) = prompts_of([6])
    first, second = (engine.generate([(prompt, SamplingParams(8, 1.0, seed=s)) for s in (1, 2, 1)]) for _ in range(2))
    assert first == second and first[0] == first[2] != first[1]
    free = engine.generate([(prompt, SamplingParams(8, 1.0)) for _ in range(4)])
    assert len({s.token_ids for s in free}) == 4


def test_sampled_frequencies_are_the_probabilities() -> None:
    """First tokens of 4,000 rows against softmax(logits / T), chi-square over the ten most probable."""
    engine, plain = engine_of("llama"), tiny_model("llama")
    (prompt,) = prompts_of([6])
    with torch.inference_mode():
        expected = torch.softmax(plain(input_ids=torch.tensor([prompt])).logits[0, -1] / 0.5, dim=-1)
    n = 4000
    counts = torch.zeros(259)
    for sample in engine.generate([(prompt, SamplingParams(1, 0.5, seed=i)) for i in range(n)]):
        counts[sample.token_ids[0]] += 1
    top = expected.topk(10).indices
    chi_square = float(((counts[top] - n * expected[top]) ** 2 / (n * expected[top])).sum())
    assert chi_square < 30  # 10 degrees of freedom: 0.1 % lie above 29.6


@given(st.lists(st.floats(0, 1), min_size=1, max_size=600), st.floats(0, 1, exclude_max=True))
@settings(max_examples=60, deadline=None)
def test_inverse_transform_never_picks_an_impossible_token(weights: list[float], uniform: float) -> None:
    weights[len(weights) // 2] += 0.5
    probabilities = torch.tensor([weights], dtype=torch.float32)
    probabilities = torch.where(probabilities < 1e-3, 0.0, probabilities)
    probabilities /= probabilities.sum()
    token = int(_draw(probabilities, torch.tensor([uniform]), torch.tensor([0]))[0])
    assert float(probabilities[0, token]) > 0
    below = float(probabilities[0, :token].double().sum())
    assert below - 1e-5 <= uniform <= below + float(probabilities[0, token]) + 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_rows_that_are_equal_so_far_run_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each distinct (prompt, tokens so far) is one row of the forward; each row samples what it samples alone."""
    engine = engine_of(kind)
    prompts = prompts_of([9, 9, 7])
    requests = [(p, SamplingParams(12, 0.12, seed=i)) for p in prompts for i in range(6)]
    requests += [(prompts[0], SamplingParams(12, 0.0)) for _ in range(4)]
    alone = [engine.generate([request])[0] for request in requests]
    widths: list[int] = []
    original = engine._forward

    def forward(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if ids.shape[1] == 1:
            widths.append(len(ids))
        return original(ids, *rest)

    monkeypatch.setattr(engine, "_forward", forward)
    together = engine.generate(requests)
    assert [s.token_ids for s in together] == [s.token_ids for s in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    pairs = list(zip(requests, together, strict=True))
    distinct = {(tuple(p), s.token_ids[:k]) for (p, _), s in pairs for k in range(1, len(s.token_ids))}
    rows = sum(len(s.token_ids) - 1 for s in together)
    assert len(distinct) < 0.8 * rows, "nothing to share: the test needs a sharper distribution"
    assert len(distinct) <= sum(widths) <= len(distinct) / 0.75 + 3


def test_end_of_turn_and_length() -> None:
    engine = engine_of("llama")
    (prompt,) = prompts_of([6])
    (greedy,) = engine.generate([(prompt, SamplingParams(6, 0.0))])
    assert greedy.finish_reason == "length" and len(greedy.token_ids) == len(greedy.logprobs) == 6
    stops = LocalEngine(engine.model, ChatCodec(tiny_tokenizer(), [2]))
    stops.codec.stop_token_ids = (2, greedy.token_ids[3])
    (cut,) = stops.generate([(prompt, SamplingParams(6, 0.0))])
    first = greedy.token_ids.index(greedy.token_ids[3])
    assert cut.finish_reason == "stop" and cut.token_ids == greedy.token_ids[: first + 1]  # the stop token is kept


def test_stop_strings_are_kept_and_end_the_turn() -> None:
    engine = engine_of("llama")
    (prompt,) = prompts_of([6])
    (free,) = engine.generate([(prompt, SamplingParams(30, 1.0, seed=4))])
    text = engine.codec.tokenizer.decode(free.token_ids)
    printable = [i for i in range(5, 25) if text[i].isascii() and text[i] not in text[:i]]
    stop = text[printable[0]]
    (cut,) = engine.generate([(prompt, SamplingParams(30, 1.0, (stop, "never there"), seed=4))])
    assert cut.finish_reason == "stop" and engine.codec.tokenizer.decode(cut.token_ids).endswith(stop)
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]


# ------------------------------------------------------------------------ attention over shared prompts


@pytest.mark.parametrize("padded", [False, True])
def test_branching_attention_equals_plain_softmax(padded: bool) -> None:
    torch.manual_seed(0)
    prompt_of_row = torch.tensor([1, 0, 1, 1, 2])
    n, n_prompts, heads, kv_heads, dim, length, own = 5, 3, 4, 2, 8, 6, 3
    keep = torch.ones(n_prompts, length, dtype=torch.bool)
    if padded:
        keep[0, :2] = keep[2, :4] = False
    rows = RowMap.build(prompt_of_row, n_prompts, keep if padded else None)
    query = torch.randn(n, heads, 1, dim)
    keys, values = (
        SharedKeys(torch.randn(n_prompts, kv_heads, length, dim), torch.randn(n, kv_heads, own, dim), rows)
        for _ in range(2)
    )
    assert tuple(keys.shape) == (n, kv_heads, length + own, dim)
    fast = branching_attention(query, keys, values, None)
    for i in range(n):
        k, v = (torch.cat([x.prompt[prompt_of_row[i]], x.own[i]], dim=1) for x in (keys, values))
        k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k, v))
        seen = torch.cat([keep[prompt_of_row[i]], torch.ones(own, dtype=torch.bool)])
        scores = (query[i] @ k.transpose(-1, -2) * dim**-0.5).masked_fill(~seen, float("-inf"))
        assert torch.allclose(fast[i, 0], (torch.softmax(scores, -1) @ v)[:, 0], atol=1e-6)


# ------------------------------------------------------------------------ requests


async def test_requests_that_wait_together_run_together() -> None:
    engine = engine_of("llama", max_rows=3)
    batches: list[int] = []
    original = engine.generate
    engine.generate = lambda rows, adapter=None: batches.append(len(rows)) or original(rows, adapter)  # type: ignore[method-assign]
    prompts = prompts_of([4, 4, 5, 6, 7])
    samples = await asyncio.gather(*(engine.sample(p, SamplingParams(4, 1.0, seed=i)) for i, p in enumerate(prompts)))
    assert batches == [3, 2] and engine.n_sampled_tokens == sum(len(s.token_ids) for s in samples)
    alone = [await engine.sample(p, SamplingParams(4, 1.0, seed=i)) for i, p in enumerate(prompts)]
    assert [s.token_ids for s in alone] == [s.token_ids for s in samples]
    await engine.close()


async def test_a_cancelled_request_costs_nothing_and_blocks_nobody() -> None:
    engine = engine_of("llama")
    seen: list[int] = []
    original = engine.generate
    engine.generate = lambda rows, adapter=None: seen.append(len(rows)) or original(rows, adapter)  # type: ignore[method-assign]
    (prompt,) = prompts_of([4])
    lost = asyncio.ensure_future(engine.sample(prompt, SamplingParams(4)))
    await asyncio.sleep(0)
    lost.cancel()
    sample = await engine.sample(prompt, SamplingParams(4))
    assert seen == [1] and len(sample.token_ids) >= 1
    await engine.close()


@pytest.mark.parametrize("fault", [RuntimeError("out of memory"), IndexError("index out of range"), TypeError("odd")])
async def test_a_model_that_fails_is_typed_and_leaves_nobody_waiting(fault: Exception) -> None:
    engine = engine_of("llama")
    original = engine.generate

    def broken(*_: Any) -> Any:
        raise fault

    engine.generate = broken  # type: ignore[method-assign]
    (prompt,) = prompts_of([4])
    async with asyncio.timeout(10):
        results = await asyncio.gather(
            *(engine.sample(prompt, SamplingParams(4)) for _ in range(3)), return_exceptions=True
        )
    assert all(isinstance(r, AgentError) and r.kind == "server" and str(fault) in r.detail for r in results)
    engine.generate = original  # type: ignore[method-assign]
    assert (await engine.sample(prompt, SamplingParams(2))).token_ids
    await engine.close()


async def test_bad_requests() -> None:
    engine = engine_of("llama")
    with pytest.raises(AgentError, match="no tokens"):
        await engine.sample([], SamplingParams(4))
    with pytest.raises(AgentError, match="adapter 'a@v1' is not loaded; loaded: none"):
        await engine.sample([5], SamplingParams(4), "a@v1")
    await engine.close()


# ------------------------------------------------------------------------ adapters


async def test_adapters_by_name_beside_the_base(tmp_path: Path) -> None:
    """Loaded folders and the base in one process: each request gets the weights it names."""
    folders = {}
    for index, name in enumerate(("alpha", "beta")):
        model: Any = attach_adapter(tiny_model(), name, lora_config(4, 8, TARGETS), index)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_B" in key:
                    parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(index))
        save_adapter(model, name, tmp_path / name)
        folders[name] = model.eval()
    engine = engine_of("llama")
    await engine.load_adapter("alpha@v1.5", str(tmp_path / "alpha"))
    await engine.load_adapter("beta@v1", str(tmp_path / "beta"))
    (prompt,) = prompts_of([6])
    names: list[str | None] = ["alpha@v1.5", "beta@v1", None, "alpha@v1.5"]
    samples = await asyncio.gather(
        *(engine.sample(prompt, SamplingParams(6, 1.0, seed=i), name) for i, name in enumerate(names))
    )
    models = [folders["alpha"], folders["beta"], tiny_model(), folders["alpha"]]
    for model, sample in zip(models, samples, strict=True):
        assert list(sample.logprobs) == pytest.approx(teacher_forced(model, prompt, sample).tolist(), abs=2e-5)
    with pytest.raises(InputError, match="already loaded"):
        await engine.load_adapter("beta@v1", str(tmp_path / "alpha"))
    await engine.unload_adapter("beta@v1")
    with pytest.raises(AgentError, match="not loaded"):
        await engine.sample(prompt, SamplingParams(1), "beta@v1")
    with pytest.raises(InputError, match="cannot be loaded"):
        await engine.load_adapter("gamma@v1", str(tmp_path / "nothing"))
    await engine.close()


def test_sampling_leaves_modes_and_gradients_of_the_trainer_alone() -> None:
    model: Any = attach_adapter(tiny_model(), "first", lora_config(4, 8, TARGETS), 0)
    engine = LocalEngine(model, ChatCodec(tiny_tokenizer(), [2]))
    model.set_attn_implementation(ATTENTION)
    model.train()
    engine.generate([([5, 6, 7], SamplingParams(3))])
    assert model.training
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_B" in n)


# ------------------------------------------------------------------------ loading


def test_load_model_is_frozen_and_faults_are_typed(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "tiny")
    model: Any = load_model(str(folder), "bfloat16", "cpu")
    assert model.dtype == torch.bfloat16 and not model.training
    assert not any(p.requires_grad for p in model.parameters())
    engine = LocalEngine.from_folder(str(folder), "float32", "cpu")
    assert engine.codec.end_of_turn == 2 and engine.generate([([5, 6], SamplingParams(2, 0.0))])[0].token_ids
    for bad, says in ((tmp_path / "none", "cannot be loaded"), (tmp_path, "cannot be loaded")):
        with pytest.raises(InputError, match=says):
            load_model(str(bad), "float32", "cpu")
    with pytest.raises(InputError, match="--dtype int7"):
        load_model(str(folder), "int7", "cpu")
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(str(folder), "float32", "cpu")
