"""Packed weights at decode time: the same numbers, never a stale weight, nothing left behind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_model, tiny_tokenizer

from train import packed_linear
from train.chat import ChatCodec
from train.engine import SamplingParams
from train.kv_cache import ATTENTION
from train.local_engine import LocalEngine
from train.packed_linear import MAX_ROWS, can_pack, packed_linears, packed_weight, product

needs_onednn = pytest.mark.skipif(
    not can_pack(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="torch without oneDNN's packed product"
)


def frozen(rows: int, columns: int, bias: bool = False) -> torch.nn.Linear:
    torch.manual_seed(rows + columns)
    return torch.nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (5, 1), (64, 1), (2, 40), (3, 7, 2)])
def test_equal_bit_for_bit(shape: tuple[int, ...], bias: bool) -> None:
    for rows, columns in ((576, 576), (192, 576), (96, 1536), (259, 64)):
        layer = frozen(rows, columns, bias)
        x = torch.randn(*shape, columns).to(torch.bfloat16)
        with torch.inference_mode():
            assert torch.equal(product(layer)(x), F.linear(x, layer.weight, layer.bias))


@needs_onednn
def test_a_changed_weight_is_converted_anew() -> None:
    layer = frozen(64, 32)
    x = torch.randn(4, 32).to(torch.bfloat16)
    first = packed_weight(layer)
    assert packed_weight(layer) is first
    with torch.no_grad():
        layer.weight.mul_(2)
    assert packed_weight(layer) is not first
    assert torch.equal(product(layer)(x), F.linear(x, layer.weight))
    layer.weight = torch.nn.Parameter(torch.randn(64, 32).to(torch.bfloat16), requires_grad=False)
    assert torch.equal(product(layer)(x), F.linear(x, layer.weight))


def test_what_trains_or_is_not_bf16_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: torch.nn.Linear) -> torch.Tensor:
        raise AssertionError("this weight must not be packed")

    monkeypatch.setattr(packed_linear, "packed_weight", refuse)
    for layer in (frozen(8, 8).float(), frozen(8, 8).requires_grad_(True)):
        x = torch.randn(2, 8, dtype=layer.weight.dtype)
        assert torch.equal(product(layer)(x), F.linear(x, layer.weight))


@needs_onednn
def test_layers_are_given_back_even_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(frozen(8, 8), torch.nn.ReLU(), frozen(4, 8))
    with pytest.raises(ZeroDivisionError), packed_linears(model):
        assert all("forward" in vars(model[i]) for i in (0, 2))
        raise ZeroDivisionError
    assert not any("forward" in vars(layer) for layer in model)
    monkeypatch.setattr(packed_linear, "MAX_BYTES", 100)  # too large to be worth a second copy
    with packed_linears(model):
        assert not any("forward" in vars(layer) for layer in model)


@needs_onednn
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_engine_samples_the_same_with_and_without(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family).to(torch.bfloat16).requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    engine = LocalEngine(model, ChatCodec(tiny_tokenizer(), [2]))
    requests = [([5, 9, 40 + i % 3, 7], SamplingParams(16, 1.0, seed=i)) for i in range(8)]
    packed = engine.generate(requests)
    monkeypatch.setattr("train.packed_linear.packable", lambda _: [])
    assert engine.generate(requests) == packed
    assert len(requests) <= MAX_ROWS
