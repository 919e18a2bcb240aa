"""Modes other than token-level per-layer routing, and what surrounds a forward: checkpointing, compiling, masks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gate_models as gm
import pytest
import torch
from transformers import DynamicCache

from moe_gate import RoutingRecorder, build_capability_model, force_route, gater_parameters, prompt_lengths
from pipeline.files import InputError


def routed(folder: Path, family: str = "llama", **options: Any) -> Any:
    base = gm.FAMILIES[family](**options.pop("shape", {}))
    settings = {"target_modules": ["q_proj", "o_proj", "v_proj"]} if family == "qwen3_moe" else {}
    model = build_capability_model(copy.deepcopy(base), gm.two_adapters(base, folder, **settings), **options).eval()
    gm.random_gates(model)
    return model


def routes_of(model: Any, **inputs: Any) -> torch.Tensor:
    with RoutingRecorder(model) as recorder, torch.no_grad():
        model(**inputs)
    return recorder.calls[0].routes_LBT()


def test_global_scope_is_one_decision_per_token(tmp_path: Path) -> None:
    model = routed(tmp_path, routing_scope="global", global_layer=1)
    assert sum(p.numel() for p in gater_parameters(model)) == 3 * 32 + 3
    routes = routes_of(model, input_ids=gm.tokens(2, 12))
    assert (routes[0] == 0).all() and torch.equal(routes[1], routes[2]) and len(routes[1].unique()) > 1
    with pytest.raises(InputError, match="global_layer 9"):
        routed(tmp_path, routing_scope="global", global_layer=9)


def test_global_scope_at_layer_0_reaches_a_whole_adapter(tmp_path: Path) -> None:
    model = routed(tmp_path, routing_scope="global", global_layer=0)
    ids = gm.tokens(1, 1)
    route = int(routes_of(model, input_ids=ids)[0, 0, 0])
    with torch.no_grad():
        own = model(input_ids=ids).logits
        with force_route(model, route):
            torch.testing.assert_close(own, model(input_ids=ids).logits)


TRAJECTORY = [{"routing_scope": "per_layer"}, {"routing_scope": "global"}]


@pytest.mark.parametrize("options", TRAJECTORY, ids=["per_layer", "global"])
def test_a_trajectory_keeps_the_decision_of_its_prompt(tmp_path: Path, options: dict[str, str]) -> None:
    model = routed(tmp_path, routing_granularity="trajectory", **options)
    turns = [
        gm.tokens(3, 6),
        gm.tokens(3, 1, seed=5),
        gm.tokens(3, 4, seed=6),
    ]  # prompt, a sampled token, the next turn
    cache = DynamicCache(config=model.config)
    with RoutingRecorder(model) as recorder, torch.no_grad():
        stepwise = torch.cat([model(input_ids=t, past_key_values=cache, use_cache=True).logits for t in turns], dim=1)
    routes = torch.cat([call.routes_LBT() for call in recorder.calls], dim=2)
    assert (routes == routes[:, :, :1]).all(), "one decision per layer and sequence"
    assert len(routes[:, :, 0].unique()) > 1, "the test needs different decisions"
    if options["routing_scope"] == "global":
        assert (routes == routes[:1]).all()
    whole = torch.cat(turns, dim=1)
    with torch.no_grad(), prompt_lengths(model, torch.tensor([6, 6, 6])):
        torch.testing.assert_close(model(input_ids=whole).logits, stepwise, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", TRAJECTORY, ids=["per_layer", "global"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_reach_a_trajectory_decision(tmp_path: Path, options: dict[str, str], side: str) -> None:
    model = routed(tmp_path, routing_granularity="trajectory", **options)
    short, filler, long = gm.tokens(1, 5, seed=1), torch.full((1, 4), 3), gm.tokens(1, 9, seed=2)
    parts = [filler, short] if side == "left" else [short, filler]
    ids, mask = torch.cat([torch.cat(parts, 1), long]), torch.ones(2, 9, dtype=torch.long)
    real = slice(4, 9) if side == "left" else slice(0, 5)
    mask[0] = 0
    mask[0, real] = 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        alone = model(input_ids=short).logits[0]
        padded = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[0, real]
    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-5)


def test_a_repeated_cache_repeats_its_decisions_and_foreign_rows_are_refused(tmp_path: Path) -> None:
    model = routed(tmp_path, routing_granularity="trajectory")
    cache = DynamicCache(config=model.config)
    prompt, step = gm.tokens(2, 6), gm.tokens(2, 1, seed=3)
    with torch.no_grad():
        model(input_ids=prompt, past_key_values=cache, use_cache=True)
        repeated = copy.deepcopy(cache)
        repeated.batch_repeat_interleave(3)
        once = model(input_ids=step, past_key_values=copy.deepcopy(cache), use_cache=True).logits
        thrice = model(input_ids=step.repeat_interleave(3, 0), past_key_values=repeated, use_cache=True).logits
        torch.testing.assert_close(thrice, once.repeat_interleave(3, 0), rtol=1e-4, atol=1e-5)
        with pytest.raises(RuntimeError, match=r"decided for 2 rows, asked for 3"):
            cache.batch_select_indices(torch.tensor([0, 1, 1]))
            model(input_ids=step[[0, 1, 1]], past_key_values=cache, use_cache=True)


def grads(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(input_ids=ids, use_cache=False).logits.square().mean()
    loss.backward()
    return [p.grad.clone() for p in gater_parameters(model)]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("scope", ["per_layer", "global"])
def test_gradient_checkpointing_changes_nothing(tmp_path: Path, family: str, scope: str) -> None:
    model = routed(tmp_path, family, routing_scope=scope).train()
    plain = grads(model, gm.tokens())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for checkpointed, expected in zip(grads(model, gm.tokens()), plain, strict=True):
        torch.testing.assert_close(checkpointed, expected, rtol=1e-4, atol=1e-7)
    assert any(float(g.abs().sum()) > 0 for g in plain)


def test_a_layer_recomputed_later_sees_the_forced_route_of_its_forward(tmp_path: Path) -> None:
    """The backward runs after ``force_route`` has ended; the recomputation must not fall back to the gates."""
    model = routed(tmp_path).train()

    def embedding_grad() -> torch.Tensor:
        embedded = model.model.embed_tokens(gm.tokens()).detach().requires_grad_(True)
        with force_route(model, 2):
            loss = model(inputs_embeds=embedded, use_cache=False).logits.square().mean()
        loss.backward()
        assert embedded.grad is not None
        return embedded.grad

    plain = embedding_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.testing.assert_close(embedding_grad(), plain, rtol=1e-4, atol=1e-8)


def test_recomputed_layers_are_recorded_once(tmp_path: Path) -> None:
    model = routed(tmp_path).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with RoutingRecorder(model, keep_logits=True) as recorder:
        model(input_ids=gm.tokens(), use_cache=False).logits.sum().backward()
    assert len(recorder.calls) == 1 and recorder.calls[0].routes_LBT().shape == (3, 2, 9)
    assert recorder.calls[0].logits[1].shape == (2, 9, 3)


def test_torch_compile_in_one_graph(tmp_path: Path) -> None:
    model = routed(tmp_path)
    ids = gm.tokens()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)


def test_eager_and_sdpa_attention_agree(tmp_path: Path) -> None:
    model = routed(tmp_path)
    ids = gm.tokens()
    with torch.no_grad():
        sdpa = model(input_ids=ids).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(input_ids=ids).logits, sdpa, rtol=1e-4, atol=1e-5)


def test_flex_attention(tmp_path: Path) -> None:
    model = routed(tmp_path, shape={"hidden_size": 64, "num_attention_heads": 4})
    ids = gm.tokens(1, 16)
    with torch.no_grad():
        sdpa = model(input_ids=ids).logits
        model.set_attn_implementation("flex_attention")
        torch.testing.assert_close(model(input_ids=ids).logits, sdpa, rtol=1e-3, atol=1e-4)


def test_a_mixture_costs_one_adapter_of_the_summed_rank(tmp_path: Path) -> None:
    """Memory overhead = the adapters, and two matmuls per linear whatever the number of adapters."""
    base = gm.llama()
    plain = sum(p.numel() for p in base.parameters())
    model = routed(tmp_path)
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    per_rank = 3 * ((32 + 32) * 2 + (32 + 16) * 2 + (32 + 48) * 3)
    assert adapters == (4 + 6) * per_rank
    assert sum(p.numel() for p in model.parameters()) == plain + adapters + 3 * (3 * 32 + 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
        model(input_ids=gm.tokens(1, 4))
    matmuls = sum(e.count for e in profile.key_averages() if e.key in ("aten::mm", "aten::addmm"))
    assert matmuls <= 3 * (7 * 3 + 1) + 1  # W, A, B of seven linears and a gate per layer, and the LM head
