"""The routed model against its two references, the base and peft, in every supported family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gate_models as gm
import pytest
import torch
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_gate import (
    LoraAdapter,
    RoutingRecorder,
    assert_frozen,
    build_capability_model,
    force_route,
    gater_parameters,
    trace_routes,
)
from moe_gate.adapters import PeftSettings
from moe_gate.factors import LoraFactors
from pipeline.files import InputError

EXPERTS = {
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
CASES = {
    "llama": (gm.llama, {}),
    "qwen3": (gm.qwen3, {}),
    "qwen3_moe_attention": (gm.qwen3_moe, {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
    "qwen3_moe_experts": (gm.qwen3_moe, EXPERTS),
    "qwen3_5": (gm.qwen3_5, {}),
}


def routed(tmp_path: Path, case: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    make, settings = CASES[case]
    base = make().to(dtype)
    model = build_capability_model(copy.deepcopy(base), gm.two_adapters(base, tmp_path, **settings), **options).eval()
    gm.random_gates(model)
    return base, model


def routes_of(model: Any, **inputs: Any) -> torch.Tensor:
    with RoutingRecorder(model) as recorder, torch.no_grad():
        model(**inputs)
    return recorder.calls[0].routes_LBT()


def test_gate_parameters_of_qwen3_30b_a3b() -> None:
    """48 layers x (2048 x 5 + 5) = 491,760, with four adapters on the meta device."""
    config = Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    )  # fmt: skip
    with torch.device("meta"):
        base = Qwen3MoeForCausalLM(config)
        widths = {"q_proj": (2048, 4096), "k_proj": (2048, 512), "v_proj": (2048, 512), "o_proj": (4096, 2048)}
        adapters = [
            LoraAdapter(
                name,
                {
                    f"model.layers.{layer}.self_attn.{linear}": LoraFactors(torch.empty(32, i), torch.empty(o, 32), 1.0)
                    for layer in range(48)
                    for linear, (i, o) in widths.items()
                },
                PeftSettings(peft_type="LORA", r=32, lora_alpha=32),
            )
            for name in ("a", "b", "c", "d")
        ]
    model = build_capability_model(base, adapters)
    assert sum(parameter.numel() for parameter in gater_parameters(model)) == 491_760
    assert_frozen(model)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_slot_0_is_the_base_bit_for_bit(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    make, settings = CASES[case]
    base = make().to(dtype)
    model = build_capability_model(copy.deepcopy(base), gm.two_adapters(base, tmp_path, **settings)).eval()
    ids = gm.tokens()
    with torch.no_grad():
        expected = base(input_ids=ids).logits
        untrained = model(input_ids=ids).logits  # the base bias decides
        torch.testing.assert_close(untrained, expected, rtol=0, atol=0)
        with force_route(model, "base"):
            torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=0, atol=0)
        with force_route(model, torch.zeros_like(ids)):
            torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_one_hot_routes_are_the_peft_adapters(tmp_path: Path, case: str) -> None:
    make, settings = CASES[case]
    base = make()
    references = [
        gm.write_adapter(base, tmp_path / "alpha", seed=1, **settings),
        gm.write_adapter(base, tmp_path / "beta", seed=2, **{"r": 6, "lora_alpha": 9} | settings),
    ]
    model = build_capability_model(copy.deepcopy(base), {n: str(tmp_path / n) for n in ("alpha", "beta")}).eval()
    ids = gm.tokens()
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        for slot, reference in enumerate(references, 1):
            expected = reference(input_ids=ids).logits
            assert (expected - plain).abs().max() > 0.01
            with force_route(model, slot):
                torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=2e-6)
            with force_route(model, torch.full_like(ids, slot)):
                torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=2e-6)


def test_each_row_of_a_batch_has_its_own_route(tmp_path: Path) -> None:
    _, model = routed(tmp_path, "llama")
    ids = gm.tokens(3)
    with torch.no_grad(), force_route(model, torch.tensor([[0], [1], [2]])):
        together = model(input_ids=ids).logits
    for row in range(3):
        with torch.no_grad(), force_route(model, row):
            torch.testing.assert_close(
                model(input_ids=ids[row : row + 1]).logits[0], together[row], rtol=1e-5, atol=2e-6
            )


@pytest.mark.parametrize("case", CASES)
def test_cached_steps_equal_one_whole_forward(tmp_path: Path, case: str) -> None:
    _, model = routed(tmp_path, case)
    ids = gm.tokens(2, 12)
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        cache = DynamicCache(config=model.config)
        pieces = [ids[:, :5], ids[:, 5:8], *ids[:, 8:].split(1, dim=1)] if case != "qwen3_5" else ids.split(1, dim=1)
        steps = torch.cat([model(input_ids=p, past_key_values=cache, use_cache=True).logits for p in pieces], dim=1)
    assert len(set(routes_of(model, input_ids=ids).flatten().tolist())) == 3, "the gates must use every slot here"
    torch.testing.assert_close(steps, whole, rtol=1e-4, atol=1e-5)


def test_generate_with_cache_equals_without(tmp_path: Path) -> None:
    _, model = routed(tmp_path, "qwen3")
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = gm.tokens(2, 6)
    cached = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **options)
    assert cached.tolist() == plain.tolist() and cached.shape[1] == 18


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(tmp_path: Path, case: str, side: str) -> None:
    _, model = routed(tmp_path, case)
    short, long = gm.tokens(1, 5, seed=1), gm.tokens(1, 9, seed=2)
    filler = torch.zeros(1, 4, dtype=torch.long)
    parts = [filler, short] if side == "left" else [short, filler]
    ids = torch.cat([torch.cat(parts, 1), long])
    mask = torch.ones_like(ids)
    real = slice(4, 9) if side == "left" else slice(0, 5)
    mask[0] = 0
    mask[0, real] = 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(padded[0, real], model(input_ids=short).logits[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(padded[1], model(input_ids=long).logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_the_future_reaches_a_route(tmp_path: Path, case: str) -> None:
    _, model = routed(tmp_path, case)
    ids = gm.tokens(1, 10)
    other = ids.clone()
    other[:, 6:] = gm.tokens(1, 4, seed=9)
    before, after = routes_of(model, input_ids=ids), routes_of(model, input_ids=other)
    assert torch.equal(before[..., :6], after[..., :6])
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits[:, :6], model(input_ids=other).logits[:, :6])


def test_four_dimensional_masks_and_embeddings_pass_through(tmp_path: Path) -> None:
    """The form that packed groups use: a boolean [B, 1, T, T] mask with explicit positions, embeddings as input."""
    _, model = routed(tmp_path, "llama")
    ids = gm.tokens(1, 7)
    causal = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    positions = torch.arange(7)[None]
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        embedded = model.model.embed_tokens(ids)
        masked = model(inputs_embeds=embedded, attention_mask=causal, position_ids=positions, use_cache=False).logits
        inner = model.lm_head(model.model(input_ids=ids).last_hidden_state)
    torch.testing.assert_close(masked, plain)
    torch.testing.assert_close(inner, plain, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["top1", "soft"])
def test_only_gates_have_gradients(tmp_path: Path, case: str, mode: str) -> None:
    _, model = routed(tmp_path, case, routing_mode=mode)
    model.train()
    assert_frozen(model)
    model(input_ids=gm.tokens()).logits.square().mean().backward()
    gates = {id(parameter) for parameter in gater_parameters(model)}
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (id(parameter) in gates), name
    assert all(float(parameter.grad.abs().sum()) > 0 for parameter in gater_parameters(model))


def test_assert_frozen_names_what_is_wrong(tmp_path: Path) -> None:
    _, model = routed(tmp_path, "llama")
    model.model.layers[1].self_attn.q_proj.lora_A.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"layers\.1\.self_attn\.q_proj\.lora_A is trainable"):
        assert_frozen(model)


def test_straight_through_value_is_exactly_the_hard_route(tmp_path: Path) -> None:
    _, model = routed(tmp_path, "llama")
    ids = gm.tokens()
    with torch.no_grad():
        hard = model(input_ids=ids).logits
    model.train()
    torch.testing.assert_close(model(input_ids=ids).logits.detach(), hard, rtol=0, atol=0)


def test_soft_mixture_is_the_weighted_sum(tmp_path: Path) -> None:
    """One linear by hand: W x + sum_i p_i scale_i B_i (A_i x); the base's share adds nothing."""
    base, model = routed(tmp_path, "llama", routing_mode="soft")
    ids = gm.tokens(1, 4)
    seen: dict[str, torch.Tensor] = {}
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda _m, args: seen.update(hidden=args[0]))
    layer.self_attn.o_proj.register_forward_hook(lambda _m, args, out: seen.update(x=args[0], y=out))
    with torch.no_grad():
        model(input_ids=ids)
        probs = layer.capability_route.gater(seen["hidden"]).softmax(-1)
        x, linear = seen["x"], base.model.layers[0].self_attn.o_proj
        expected = linear(x)
        stacked = layer.self_attn.o_proj
        for slot, rows, scale in [(1, slice(0, 4), 8 / 4), (2, slice(4, 10), 9 / 6)]:
            delta = (x @ stacked.lora_A[rows].T) @ stacked.lora_B[:, rows].T
            expected = expected + probs[..., slot : slot + 1] * scale * delta
    torch.testing.assert_close(seen["y"], expected, rtol=1e-5, atol=1e-6)


def test_no_gate_on_a_block_without_adapted_linears(tmp_path: Path) -> None:
    base = gm.llama()
    adapters = gm.two_adapters(base, tmp_path, target_modules=["q_proj"], layers_to_transform=[0, 2])
    model = build_capability_model(base, adapters).eval()
    gated = [i for i, layer in enumerate(model.model.layers) if hasattr(layer, "capability_route")]
    assert gated == [0, 2]
    assert sum(p.numel() for p in gater_parameters(model)) == 2 * (32 * 3 + 3)
    model(input_ids=gm.tokens())


def test_adapters_on_different_linears(tmp_path: Path) -> None:
    """One adapter on the attention, one on the MLP: each row of a stack belongs to its own slot."""
    base = gm.llama()
    first = gm.write_adapter(base, tmp_path / "alpha", seed=1, target_modules=["q_proj", "v_proj"])
    second = gm.write_adapter(base, tmp_path / "beta", seed=2, target_modules=["v_proj", "down_proj"], r=3)
    model = build_capability_model(copy.deepcopy(base), {n: str(tmp_path / n) for n in ("alpha", "beta")}).eval()
    ids = gm.tokens()
    with torch.no_grad():
        for slot, reference in [(1, first), (2, second)]:
            with force_route(model, slot):
                torch.testing.assert_close(
                    model(input_ids=ids).logits, reference(input_ids=ids).logits, rtol=1e-5, atol=2e-6
                )


def test_without_base_slot(tmp_path: Path) -> None:
    base = gm.llama()
    reference = gm.write_adapter(base, tmp_path / "alpha", seed=1)
    gm.write_adapter(base, tmp_path / "beta", seed=2)
    model = build_capability_model(
        base, {n: str(tmp_path / n) for n in ("alpha", "beta")}, include_base_slot=False
    ).eval()
    ids = gm.tokens()
    with torch.no_grad(), force_route(model, 0):
        torch.testing.assert_close(model(input_ids=ids).logits, reference(input_ids=ids).logits, rtol=1e-5, atol=2e-6)


def test_routed_linear_outside_its_layer_is_an_error(tmp_path: Path) -> None:
    _, model = routed(tmp_path, "llama")
    with pytest.raises(RuntimeError, match="outside its decoder layer"):
        model.model.layers[0].self_attn.q_proj(torch.zeros(1, 1, 32))
    with pytest.raises(RuntimeError, match="without routing context"):
        model.model.layers[0](torch.zeros(1, 1, 32))


def test_trace_gives_the_routes_that_generation_had(tmp_path: Path) -> None:
    _, model = routed(tmp_path, "llama")
    ids = gm.tokens(1, 6)
    with RoutingRecorder(model) as recorder:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=None
        )
    live = torch.cat([call.routes_LBT()[:, 0] for call in recorder.calls], dim=1)
    assert torch.equal(live, trace_routes(model, out[0].tolist())[:, : live.shape[1]])


def test_builder_refuses_what_does_not_fit(tmp_path: Path) -> None:
    base = gm.llama()
    adapters = gm.two_adapters(base, tmp_path)
    with pytest.raises(InputError, match="belongs to another base"):
        build_capability_model(gm.llama(hidden_size=64, num_attention_heads=8), adapters)
    with pytest.raises(InputError, match=r"layers\.2.*not in the base model"):
        build_capability_model(gm.llama(num_hidden_layers=2), adapters)
    with pytest.raises(InputError, match="target_modules"):
        build_capability_model(gm.llama(), adapters, target_modules=["q_proj"])
    with pytest.raises(InputError, match="distinct names"):
        build_capability_model(gm.llama(), [adapters["alpha"], adapters["alpha"]])
    model = build_capability_model(gm.llama(), adapters)
    with pytest.raises(InputError, match="routed model already"):
        build_capability_model(model, adapters)
    with pytest.raises(ValueError, match="there is: base, alpha, beta"), force_route(model, "gamma"):
        pass
