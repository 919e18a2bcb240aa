"""Model types whose cache is unlike Llama's: sampled log-probs are those of one plain pass over the sequence."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import tiny_tokenizer

from train.chat import ChatCodec
from train.engine import SamplingParams
from train.kv_cache import can_share_prefix
from train.local_engine import LocalEngine, load_model

SHAPE: dict[str, Any] = dict(
    vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.2,
)  # fmt: skip


def jamba() -> Any:
    config = transformers.JambaConfig(
        **SHAPE, num_experts=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False
    )
    return transformers.JambaForCausalLM(config)


def diffllama() -> Any:
    return transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**SHAPE))


def deepseek() -> Any:
    """Multi-head latent attention: the cache holds no keys and values."""
    config = transformers.DeepseekV3Config(
        **SHAPE, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


@pytest.mark.parametrize(("make", "shares"), [(jamba, False), (deepseek, False), (diffllama, False)])
def test_logprobs_of_rows_with_a_common_prefix(make: Any, shares: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make().save_pretrained(tmp_path)
    model = load_model(str(tmp_path), "float32", "cpu")
    assert can_share_prefix(model) == shares
    plain = type(model).from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    rng = random.Random(0)
    common = [rng.randrange(3, 259) for _ in range(20)]
    prompts = [[*common, *(rng.randrange(3, 259) for _ in range(3))] for _ in range(3)]
    requests = [(p, SamplingParams(6, 1.0, seed=i)) for i, p in enumerate([*prompts, *prompts])]
    samples = LocalEngine(model, ChatCodec(tiny_tokenizer(), [2])).generate(requests)
    for (prompt, _), sample in zip(requests, samples, strict=True):
        with torch.inference_mode():
            rows = plain(input_ids=torch.tensor([[*prompt, *sample.token_ids]])).logits[0].log_softmax(-1)
        found = [float(rows[len(prompt) - 1 + i, token]) for i, token in enumerate(sample.token_ids)]
        assert sample.logprobs == pytest.approx(found, abs=2e-4)


def test_threads_load_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loads at once can leave transformers' weight tying off: a later model would have no head."""
    config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    load, inside, most = transformers.AutoModelForCausalLM.from_pretrained, threading.Semaphore(1), []

    def slow(*args: Any, **options: Any) -> Any:
        most.append(inside.acquire(blocking=False))
        time.sleep(0.02)
        model = load(*args, **options)
        inside.release()
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", slow)
    with ThreadPoolExecutor(3) as pool:
        models = list(pool.map(lambda _: load_model(str(tmp_path), "float32", "cpu"), range(3)))
    assert most == [True] * 3
    assert all(m.lm_head.weight is m.model.embed_tokens.weight for m in models)
