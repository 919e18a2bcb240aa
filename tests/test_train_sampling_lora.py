"""Sampling through cast copies of an adapter equals peft's own forward."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from train.sampling_lora import cast_adapter, plain_lora


def adapted(dtype: torch.dtype = torch.float32, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "down_proj"], **options)  # type: ignore[arg-type]
    model = get_peft_model(model, lora, adapter_name="cap")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


IDS = torch.tensor([[3, 7, 9, 4], [1, 2, 8, 6]])


@torch.no_grad()
def test_equal_to_peft_in_fp32_and_nothing_stays() -> None:
    model = adapted()
    before = model(IDS).logits
    with cast_adapter(model, "cap"):
        inside = model(IDS).logits
    torch.testing.assert_close(inside, before, rtol=1e-5, atol=1e-5)
    assert torch.equal(model(IDS).logits, before)
    with model.disable_adapter():
        assert (model(IDS).logits - before).abs().max() > 1e-2  # the adapter does something


@torch.no_grad()
def test_copies_follow_the_weights_of_the_next_batch() -> None:
    model = adapted()
    with cast_adapter(model, "cap"):
        first = model(IDS).logits
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.mul_(2)
    with cast_adapter(model, "cap"):
        second = model(IDS).logits
    torch.testing.assert_close(second, model(IDS).logits, rtol=1e-5, atol=1e-5)
    assert (second - first).abs().max() > 1e-2


@torch.no_grad()
def test_bf16_is_near_peft() -> None:
    model = adapted(torch.bfloat16)
    before = model(IDS).logits.float()
    with cast_adapter(model, "cap"):
        inside = model(IDS).logits.float()
    assert (inside - before).abs().max() < 0.05 * before.abs().max()


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
@torch.no_grad()
def test_other_kinds_of_lora_keep_their_own_forward(options: dict[str, object]) -> None:
    model = adapted(**options)
    assert not any(plain_lora(module, "cap") for module in model.modules())
    before = model(IDS).logits
    with cast_adapter(model, "cap"):
        assert torch.equal(model(IDS).logits, before)


def test_restored_after_an_error() -> None:
    model = adapted()
    with pytest.raises(RuntimeError, match="stop"), cast_adapter(model, "cap"):
        raise RuntimeError("stop")
    assert not any("forward" in vars(module) for module in model.modules())
