"""Pieces of the fast pass against slow twins: block masks, tiled attention, kernels, LoRA linears, experts,
checkpointing."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from pipeline.files import InputError
from train import kernels
from train import tree_attention as tree_attention_module
from train.checkpointing import (
    PACK_TOKENS_LEAST,
    PACK_TOKENS_MOST,
    RESERVE,
    bytes_per_token,
    layers_to_checkpoint,
    pack_budget,
)
from train.config import ALL_LINEARS
from train.expert_lora import ExpertsLora, grouped_outer, grouped_product
from train.fast_lora import AdaptedLinear, UnsupportedLayer, normed_projections, projection, swiglu_projection
from train.forward import action_logprobs, head_weight, make_packs
from train.lora import adapter_parameters, adapter_state, attach_adapter, lora_config
from train.packing import Pack, TokenSequence, build_pack
from train.tree_attention import (
    KEPT_WEIGHTS,
    TreeMask,
    block_mask,
    tree_attention,
    tree_mask,
)


def random_pack(seed: int, longest: int = 300, n: int = 6) -> Pack:
    rng = random.Random(seed)
    trunk = [rng.randrange(9) for _ in range(longest)]
    episodes = [
        TokenSequence(
            trunk[: rng.randrange(1, longest)] + [rng.randrange(9) for _ in range(rng.randrange(1, longest // 2))], []
        )
        for _ in range(n)
    ]
    return build_pack([TokenSequence(e.token_ids, [False] * len(e.token_ids)) for e in episodes], range(n))


# ---------------------------------------------------------------------- masks


@pytest.mark.parametrize("seed", range(6))
def test_block_masks_cover_the_tree_and_fill_nothing_else(seed: int) -> None:
    pack = random_pack(seed)
    n, block = pack.n_tokens, 32
    mask = block_mask(pack.subtree_end, torch.device("cpu"), block)
    allowed = pack.attention_mask()[0, 0]
    index = torch.arange(n)
    assert torch.equal(mask.mask_mod(torch.tensor(0), torch.tensor(0), index[:, None], index), allowed)
    state = torch.zeros(-(-n // block), -(-n // block), dtype=torch.long)
    for value, counts, indices in (
        (1, mask.kv_num_blocks, mask.kv_indices),
        (2, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for row in range(len(state)):
            chosen = indices[0, 0, row, : counts[0, 0, row]].long()
            assert (state[row, chosen] == 0).all()
            state[row, chosen] = value
    for row in range(len(state)):
        for column in range(len(state)):
            square = allowed[row * block : (row + 1) * block, column * block : (column + 1) * block]
            if state[row, column] == 0:
                assert not square.any()
            elif state[row, column] == 2:
                assert square.all()
            elif row != column:
                assert square.any() and not square.all()


def test_the_block_mask_of_a_group_is_mostly_full_or_empty() -> None:
    """A prompt of 8 blocks and 8 suffixes of one block: no [T, T] work is left in mixed blocks but the diagonal."""
    prompt = list(range(100, 356))
    group = [TokenSequence([*prompt, *([k] * 32)], [False] * 288) for k in range(8)]
    mask = block_mask(build_pack(group, range(8)).subtree_end, torch.device("cpu"), 32)
    assert int(mask.kv_num_blocks.sum()) == 16, "the diagonal"
    assert int(mask.full_kv_num_blocks.sum()) == 8 * 7 // 2 + 8 * 8, "below the prompt's diagonal, suffixes x prompt"


def test_flex_attention_with_the_block_mask_equals_dense_attention() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    pack = random_pack(3, 60, 4)
    q, k, v = (torch.randn(1, h, pack.n_tokens, 16) for h in (4, 2, 2))
    mask = block_mask(pack.subtree_end, torch.device("cpu"))
    found = flex_attention(q, k, v, block_mask=mask, scale=0.3, enable_gqa=True)
    assert torch.allclose(found, dense(q, k, v, pack, 0.3), atol=1e-5)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pack: Pack, scale: float) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~pack.attention_mask(), float("-inf"))
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("tile", [1, 7, 64, 10_000])
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "recomputed"])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)], ids=str)
def test_tiled_attention_equals_dense_attention(
    tile: int, keep: bool, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.tree_attention.KEPT_WEIGHTS", KEPT_WEIGHTS if keep else 0)
    pack = random_pack(1, 60, 4)
    n, (n_heads, kv_heads) = pack.n_tokens, heads
    tensors = [torch.randn(n, h, 8, requires_grad=True) for h in (n_heads, kv_heads, kv_heads)]
    upstream = torch.randn(n, n_heads, 8)
    mask = tree_mask(pack.subtree_end, torch.device("cpu"), n_heads // kv_heads, tile)
    assert mask.tiles and mask.block_mask is None
    found = tree_attention(*tensors, mask, 0.4)
    expected = dense(*(x.transpose(0, 1)[None] for x in tensors), pack, 0.4)[0].transpose(0, 1)
    assert torch.allclose(found, expected, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(o, tensors, upstream) for o in (found, expected)), strict=True):
        assert torch.allclose(a, b, atol=2e-5)


def test_a_tile_meets_only_keys_that_one_of_its_rows_sees() -> None:
    groups = [[g * 50 + i for i in range(40)] for g in range(5)]
    episodes = [TokenSequence([*g, 900 + k], [False] * 41) for g in groups for k in range(3)]
    pack = build_pack(episodes, range(len(episodes)))
    tiles = tree_mask(pack.subtree_end, torch.device("cpu"), 1, 43).tiles
    assert pack.n_tokens == 5 * 43 and [len(t.keys) for t in tiles] == [43] * 5


def test_a_chain_is_causal_attention() -> None:
    pack = build_pack([TokenSequence(list(range(20)), [False] * 20)], [0])
    mask = tree_mask(pack.subtree_end, torch.device("cpu"), 2)
    assert mask == TreeMask()
    q, k, v = (torch.randn(20, h, 8) for h in (4, 2, 2))
    expected = dense(*(x.transpose(0, 1)[None] for x in (q, k, v)), pack, 0.2)[0].transpose(0, 1)
    assert torch.allclose(tree_attention(q, k, v, mask, 0.2), expected, atol=1e-5)


# ---------------------------------------------------------------------- kernels


def numeric(function: Any, backward: Any, *inputs: torch.Tensor) -> None:
    """Autograd through ``function`` against the hand-written ``backward(grad, *inputs)``."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    value = function(*leaves)
    upstream = torch.randn_like(value)
    expected = torch.autograd.grad(value, leaves, upstream)
    found = backward(upstream, *inputs)
    for a, b in zip(found if isinstance(found, tuple) else (found,), expected, strict=False):
        assert torch.allclose(a, b, atol=1e-5), (a - b).abs().max()


def test_derivatives_of_the_kernels() -> None:
    weight, cos, sin = torch.rand(8) + 0.5, torch.randn(5, 8), torch.randn(5, 8)
    x, heads = torch.randn(5, 8), torch.randn(5, 3, 8)
    numeric(lambda y: kernels.rms_norm(y, weight, 1e-6), lambda g, y: kernels.rms_norm_backward(g, y, weight, 1e-6), x)
    for norm in (None, weight):
        numeric(
            lambda y, norm=norm: kernels.rotate_heads(y, norm, 1e-6, cos, sin),
            lambda g, y, norm=norm: kernels.rotate_heads_backward(g, y, norm, 1e-6, cos, sin),
            heads,
        )
    numeric(kernels.swiglu, kernels.swiglu_backward, torch.randn(5, 8), torch.randn(5, 8))
    gate, up = torch.randn(2, 5, 8)
    assert torch.equal(kernels.swiglu_backward(torch.ones(5, 8), gate, up)[2], kernels.swiglu(gate, up))


def test_rotation_equals_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x, angle = torch.randn(1, 3, 5, 8), torch.randn(1, 5, 4)
    angle = torch.cat((angle, angle), -1)
    expected, _ = apply_rotary_pos_emb(x, x, angle.cos(), angle.sin())
    found = kernels.rotate_heads(x[0].transpose(0, 1), None, 0.0, angle[0].cos(), angle[0].sin())
    assert torch.allclose(found, expected[0].transpose(0, 1), atol=1e-6)


# ---------------------------------------------------------------------- linears


def linear(n_in: int, n_out: int, rank: int | None, bias: bool = False) -> AdaptedLinear:
    return AdaptedLinear(
        torch.randn(n_out, n_in),
        torch.randn(n_out) if bias else None,
        torch.randn(rank, n_in, requires_grad=True) if rank else None,
        torch.randn(n_out, rank, requires_grad=True) if rank else None,
        0.5,
    )


def slow_linear(x: torch.Tensor, layer: AdaptedLinear) -> torch.Tensor:
    y = torch.nn.functional.linear(x, layer.weight, layer.bias)
    return y if layer.a is None else y + layer.scale * (x @ layer.a.T) @ layer.b.T  # type: ignore[union-attr]


def same_gradients(found: Any, expected: Any, leaves: list[torch.Tensor]) -> None:
    upstream = [torch.randn_like(f) for f in found]
    for f, e in zip(found, expected, strict=True):
        assert torch.allclose(f, e, atol=1e-4)
    grads = [torch.autograd.grad(values, leaves, upstream) for values in (found, expected)]
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm() and a.dtype == b.dtype


@pytest.mark.parametrize("ranks", [(2, 3, 1), (None, 4, None), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_projections_that_share_a_normed_input(ranks: tuple[int | None, ...], bias: bool) -> None:
    x, norm = torch.randn(6, 10, requires_grad=True), torch.rand(10) + 0.5
    layers = [linear(10, n, rank, bias) for n, rank in zip((7, 5, 9), ranks, strict=True)]
    found = normed_projections(x, norm, 1e-6, layers)
    expected = [slow_linear(kernels.rms_norm(x, norm, 1e-6), layer) for layer in layers]
    same_gradients(found, expected, [x, *(f for layer in layers for f in (layer.a, layer.b) if f is not None)])


def test_the_first_layer_needs_no_gradient_of_its_input() -> None:
    x, norm, layer = torch.randn(6, 10), torch.rand(10), linear(10, 7, 2)
    (y,) = normed_projections(x, norm, 1e-6, [layer])
    y.sum().backward()
    assert x.grad is None and layer.a is not None and layer.a.grad is not None


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_projection_and_gated_projection_with_residual(rank: int | None, bias: bool) -> None:
    layer = linear(10, 7, rank, bias)
    x, gate, up = (torch.randn(6, 10, requires_grad=True) for _ in range(3))
    residual = torch.randn(6, 7, requires_grad=True)
    factors = [f for f in (layer.a, layer.b) if f is not None]
    same_gradients([projection(x, layer, residual)], [residual + slow_linear(x, layer)], [x, residual, *factors])
    found = swiglu_projection(gate, up, layer, residual)
    expected = residual + slow_linear(torch.nn.functional.silu(gate) * up, layer)
    same_gradients([found], [expected], [gate, up, residual, *factors])


def test_masters_are_fp32_and_products_bf16() -> None:
    layer = AdaptedLinear(
        torch.randn(7, 10).bfloat16(),
        None,
        torch.randn(3, 10, requires_grad=True),
        torch.randn(7, 3, requires_grad=True),
    )
    x = torch.randn(6, 10).bfloat16()
    y = projection(x, layer, torch.zeros(6, 7).bfloat16())
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer.a is not None and layer.a.grad is not None and layer.a.grad.dtype == torch.float32


def test_unknown_layers_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedLayer, match="Embedding"):
        AdaptedLinear.of(torch.nn.Embedding(3, 3))


# ---------------------------------------------------------------------- experts


def test_grouped_products_with_empty_experts() -> None:
    x, y, weight = torch.randn(7, 5), torch.randn(7, 4), torch.randn(4, 3, 5)
    ends = torch.tensor([2, 2, 7, 7], dtype=torch.int32)
    expected = torch.cat([x[:2] @ weight[0].T, x[2:] @ weight[2].T])
    assert torch.allclose(grouped_product(x, weight, ends), expected, atol=1e-6)
    outer = grouped_outer(y, x, ends)
    assert torch.allclose(outer[0], y[:2].T @ x[:2], atol=1e-6) and torch.allclose(outer[2], y[2:].T @ x[2:], atol=1e-6)
    assert not outer[1].any() and not outer[3].any()


def test_expert_adapters_equal_merged_experts() -> None:
    """Slow twin: the experts' own forward on W + s B A, gradients through the merged weights."""
    model = attach_adapter(tiny_model("qwen3_moe"), "skill", lora_config(3, 6), seed=0)
    module = next(m for m in model.modules() if isinstance(m, ExpertsLora))
    factors = [getattr(module, n)["skill"] for n in module.adapter_layer_names]
    for factor in factors:
        torch.nn.init.normal_(factor, std=0.3)
    hidden = torch.randn(9, 32, requires_grad=True)
    index = torch.tensor([[0, 1], [1, 0], [3, 1], [1, 3], [0, 3], [3, 0], [1, 0], [0, 1], [3, 1]])  # expert 2 is idle
    weights = torch.rand(9, 2, requires_grad=True)
    in_a, in_b, out_a, out_b = factors
    low = in_a.view(4, 2, 3, 32)
    merged_in = module.base_layer.gate_up_proj + 2.0 * torch.einsum("ecfr,ecrd->ecfd", in_b, low).flatten(1, 2)
    merged_out = module.base_layer.down_proj + 2.0 * out_b @ out_a
    expected = torch.zeros(9, 32)
    for token in range(9):
        for slot in range(2):
            gate, up = (merged_in[index[token, slot]] @ hidden[token]).chunk(2)
            value = merged_out[index[token, slot]] @ (torch.nn.functional.silu(gate) * up)
            expected = (
                expected + torch.nn.functional.one_hot(torch.tensor(token), 9)[:, None] * value * weights[token, slot]
            )
    same_gradients([module(hidden, index, weights)], [expected], [hidden, weights, *factors])


def test_the_published_size_of_a_mixture_of_experts_adapter() -> None:
    """Rank 32 on all linears of Qwen3-30B-A3B, experts included: 1.69e9 parameters, router and head frozen."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
        n_base = sum(p.numel() for p in base.parameters())
        model = attach_adapter(base, "skill", lora_config(32, 32), seed=0)
    parameters = adapter_parameters(model, "skill")
    n_adapter = sum(p.numel() for p in parameters.values())
    per_layer = 128 * 3 * 32 * (2048 + 768) + 32 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    assert n_adapter == 48 * per_layer == 1_687_683_072
    assert 0.05 < n_adapter / (n_base + n_adapter) < 0.055
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(parameters)
    assert not any(".gate.weight" in n and "lora" in n for n in parameters)


def test_names_in_the_file_are_the_published_ones() -> None:
    model = attach_adapter(tiny_model("qwen3_moe"), "skill", lora_config(3, 6), seed=0)
    state = adapter_state(model, "skill")
    prefix = "base_model.model.model.layers.1.mlp.experts.3"
    shapes = {k.removeprefix(prefix + "."): tuple(v.shape) for k, v in state.items() if k.startswith(prefix)}
    assert shapes == {
        "gate_proj.lora_A.weight": (3, 32), "gate_proj.lora_B.weight": (16, 3), "up_proj.lora_A.weight": (3, 32),
        "up_proj.lora_B.weight": (16, 3), "down_proj.lora_A.weight": (3, 16), "down_proj.lora_B.weight": (32, 3),
    }  # fmt: skip
    assert len(state) == 2 * (8 + 4 * 6)
    assert not model.peft_config["skill"].target_parameters


@pytest.mark.parametrize("targets", [("q_proj", "gate_proj"), ("up_proj", "down_proj")], ids=str)
def test_a_part_of_an_expert_is_refused(targets: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="experts take all of"):
        attach_adapter(tiny_model("qwen3_moe"), "skill", lora_config(3, 6, targets), seed=0)


def test_dense_layers_beside_experts_are_refused() -> None:
    with pytest.raises(InputError, match="both dense and expert layers"):
        attach_adapter(tiny_model("qwen3_moe", mlp_only_layers=[0]), "skill", lora_config(3, 6), seed=0)


def test_attaching_leaves_the_config_alone() -> None:
    config = lora_config(3, 6)
    attach_adapter(tiny_model("qwen3_moe"), "skill", config, seed=0)
    assert config.target_modules == set(ALL_LINEARS) and config.target_parameters is None


# ---------------------------------------------------------------------- the pass


def test_checkpointing_takes_as_many_layers_as_memory_asks_for() -> None:
    model = tiny_model("qwen3")
    config = model.config
    kept, bare = bytes_per_token(config, 4)
    assert kept == 4 * (2 * 32 + 3 * 32 + 3 * 16 + 2 * 48) and bare == 4 * 32
    tokens = 1000
    enough = round((2 * kept * tokens + 1) / (1 - RESERVE)) + 1
    assert layers_to_checkpoint(model, tokens, "auto", free_bytes=enough) == 0
    assert layers_to_checkpoint(model, tokens, "auto", free_bytes=enough // 2) == 2
    assert layers_to_checkpoint(model, tokens, "auto") == 0, "a CPU keeps everything"
    assert layers_to_checkpoint(model, tokens, "all") == 2 and layers_to_checkpoint(model, tokens, "none") == 0
    with pytest.raises(ValueError, match="expected none, all or auto"):
        layers_to_checkpoint(model, tokens, "some")


def test_a_pack_takes_half_of_the_free_memory() -> None:
    model = tiny_model("qwen3")
    kept, _ = bytes_per_token(model.config, 4)
    assert pack_budget(model, free_bytes=2 * 2 * kept * 32_768 + 1) == 32_768
    assert pack_budget(model, free_bytes=2 * 2 * kept * 65_000) == 32_768, "not a new number every time"
    assert pack_budget(model, free_bytes=0) == PACK_TOKENS_LEAST, "checkpointing makes it fit"
    assert pack_budget(model, free_bytes=2**50) == PACK_TOKENS_MOST
    assert pack_budget(model) == 1024, "a CPU"
    torch.use_deterministic_algorithms(True)
    try:
        assert pack_budget(model, free_bytes=2**50) == PACK_TOKENS_LEAST
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_checkpointed_layer_keeps_less() -> None:
    model = attach_adapter(tiny_model("qwen3", num_hidden_layers=4), "skill", lora_config(4, 8), seed=0)
    episode = TokenSequence(list(range(3, 203)), [False, *[True] * 199])
    sizes = {}
    for policy in ("none", "all"):
        kept: dict[int, int] = {}

        def pack_hook(x: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda x: x):
            action_logprobs(model, build_pack([episode], [0]), 1.0, checkpoint=policy)
        parameters = {p.data_ptr() for p in model.parameters()}
        sizes[policy] = sum(n for pointer, n in kept.items() if pointer not in parameters)
    assert sizes["all"] < 0.5 * sizes["none"]


def test_hooks_on_layers_still_act() -> None:
    model = attach_adapter(tiny_model("llama"), "skill", lora_config(4, 8), seed=0)
    layers = model.get_base_model().get_decoder().layers
    seen = []
    handle = layers[0].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    (pack,) = make_packs(model, [TokenSequence([5, 6, 7], [False, True, True])], 100)
    action_logprobs(model, pack, 1.0)
    handle.remove()
    assert seen == [(3, 32)] and "forward" not in vars(layers[0])


def test_only_rows_that_predict_reach_the_head() -> None:
    model = tiny_model("llama")
    episode = TokenSequence(list(range(3, 103)), [False] * 98 + [True] * 2)
    calls = []
    import train.forward as forward

    original = forward.pair_logprobs
    try:
        forward.pair_logprobs = lambda hidden, *a, **k: (calls.append(hidden.shape), original(hidden, *a, **k))[1]
        action_logprobs(model, build_pack([episode], [0]), 1.0)
    finally:
        forward.pair_logprobs = original
    assert calls == [(2, 32)]


def test_heads_that_the_chunked_logprobs_do_not_know_are_refused() -> None:
    model = tiny_model("llama")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(InputError, match="logit cap"):
        head_weight(model)
    model = attach_adapter(tiny_model("llama"), "skill", lora_config(4, 8, ("q_proj", "lm_head")), seed=0)
    with pytest.raises(InputError, match="lm_head"):
        head_weight(model)


def test_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch, what it leaves out on a GPU, and that the training command turns it."""
    from train import run as run_module
    from train.config import TrainConfig
    from train.kernels import use_deterministic_kernels

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # whatever it was comes back at the end
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    gpu = torch.device("cuda")
    before = torch._inductor.config.deterministic
    try:
        use_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled() and torch._inductor.config.deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        chain = torch.full((7,), 7)
        assert tree_mask(chain, torch.device("cpu"), 1) == TreeMask()
        monkeypatch.setattr(tree_attention_module, "block_mask", lambda ends, device: (ends, device))
        mask = tree_mask(chain, gpu, 1)
        assert mask.block_mask == (chain, gpu)  # type: ignore[comparison-overlap]
    finally:
        torch.use_deterministic_algorithms(False)
        torch._inductor.config.deterministic = before

    turned: list[bool] = []

    def stop(device: str) -> None:
        raise InterruptedError

    monkeypatch.setattr(run_module, "use_deterministic_kernels", lambda: turned.append(True))
    monkeypatch.setattr(run_module, "join_ranks", stop)
    for deterministic in (False, True):
        config = TrainConfig(model="m", capabilities=("a",), deterministic=deterministic)
        with pytest.raises(InterruptedError):
            run_module.run(config, {}, {}, range(0), {})
        assert turned == [True] * deterministic
