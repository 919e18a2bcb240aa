"""A pack through the decoder of a transformers model, with the fast pieces in place of its own forward.

Every layer is still called as the module it is, so that hooks on it (a sharded base, offloading) act; only what
happens inside is replaced: ``train.fast_lora`` for norms, projections and gates, ``train.tree_attention`` for
attention. Which models
this is true for is decided by ``refusal``; tests compare hidden states and gradients with the model's own forward.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from train.fast_lora import (
    AdaptedLinear,
    UnsupportedLayer,
    normed_projections,
    projection,
    rotated_heads,
    swiglu_projection,
)
from train.kernels import rms_norm, rms_norm_backward
from train.tree_attention import TreeMask, tree_attention

_DENSE = {"LlamaDecoderLayer": "LlamaMLP", "Qwen2DecoderLayer": "Qwen2MLP", "Qwen3DecoderLayer": "Qwen3MLP"}
_SPARSE = {"Qwen3MoeDecoderLayer"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def refusal(base: Any) -> str | None:
    """Why this causal LM with its active adapter cannot take the fast path; None when it can."""
    reason = structure_refusal(base)
    if reason is not None:
        return reason
    try:
        for layer in base.get_decoder().layers:
            for name in _ATTENTION:
                AdaptedLinear.of(getattr(layer.self_attn, name))
            if _is_dense(layer):
                for name in ("gate_proj", "up_proj", "down_proj"):
                    AdaptedLinear.of(getattr(layer.mlp, name))
    except UnsupportedLayer as error:
        return str(error)
    return None


def structure_refusal(base: Any) -> str | None:
    """``refusal`` without a look at the adapters, which ``decode`` takes itself."""
    config = base.config.get_text_config()
    if hasattr(base, "capability_routing"):
        return "routed layers: their route travels with the model's own forward"
    decoder = base.get_decoder()
    kinds = {_kind(layer) for layer in decoder.layers}
    if not kinds <= set(_DENSE) | _SPARSE:
        return f"layers of type {', '.join(sorted(kinds))}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        return "layers without full attention"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    return None


def _kind(layer: Any) -> str:
    """The class of a decoder layer; sharding gives it a subclass of its own at run time."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who shards has imported it; nobody else waits a second for that
    added = fsdp.FSDPModule if fsdp is not None else ()
    return next(c.__name__ for c in type(layer).__mro__ if not issubclass(c, added))


def _is_dense(layer: Any) -> bool:
    return hasattr(layer.mlp, "gate_proj")


@dataclasses.dataclass(frozen=True)
class _Step:
    """Beside a layer's input: cos, sin: [T, dim]; rows: the only ones whose result is asked for, or all."""

    cos: torch.Tensor
    sin: torch.Tensor
    mask: TreeMask
    rows: torch.Tensor | None


def decode(
    base: Any,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    mask: TreeMask,
    rows: torch.Tensor,
    checkpoint_layers: int = 0,
) -> torch.Tensor:
    """Final hidden states [R, d], after the last norm, of the rows ``rows`` [R] of a pack.

    Args:
        base: a model that ``structure_refusal`` accepts. input_ids, position_ids: [T].
        checkpoint_layers: the first so many layers keep nothing but their input and run again in backward.

    Raises:
        UnsupportedLayer: a layer holds more than linears with one plain LoRA.
    """
    decoder = base.get_decoder()
    hidden = decoder.embed_tokens(input_ids)
    cos, sin = decoder.rotary_emb(hidden[None], position_ids[None])
    last = len(decoder.layers) - 1
    for index, layer in enumerate(decoder.layers):
        step = _Step(cos[0], sin[0], mask, rows if index == last else None)
        if index < checkpoint_layers and torch.is_grad_enabled():
            hidden = checkpoint(_run_layer, layer, hidden, step, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden = _run_layer(layer, hidden, step)
    return _norm(decoder.norm, hidden)


def _run_layer(layer: Any, hidden: torch.Tensor, step: _Step) -> torch.Tensor:
    own = layer.__dict__.get("forward")  # set by tools that wrap a module's forward
    layer.forward = lambda x: _layer(layer, x, step)
    try:
        result: torch.Tensor = layer(hidden)
    finally:
        if own is None:
            del layer.forward
        else:
            layer.forward = own
    return result


def _layer(layer: Any, hidden: torch.Tensor, step: _Step) -> torch.Tensor:
    attention = layer.self_attn
    linears = [AdaptedLinear.of(getattr(attention, name)) for name in _ATTENTION]
    norm = layer.input_layernorm
    query, key, value = (
        y.unflatten(-1, (-1, attention.head_dim))
        for y in normed_projections(hidden, norm.weight, norm.variance_epsilon, linears[:3])
    )
    query, key = (
        rotated_heads(x, *_head_norm(attention, name), step.cos, step.sin)
        for x, name in ((query, "q_norm"), (key, "k_norm"))
    )
    mixed = tree_attention(query, key, value, step.mask, attention.scaling).flatten(1)
    if step.rows is not None:
        mixed, hidden = mixed.index_select(0, step.rows), hidden.index_select(0, step.rows)
    hidden = projection(mixed, linears[3], hidden)
    norm = layer.post_attention_layernorm
    if not _is_dense(layer):
        routed: torch.Tensor = layer.mlp(_norm(norm, hidden)[None])[0]
        return hidden + routed
    gate, up, down = (AdaptedLinear.of(getattr(layer.mlp, name)) for name in ("gate_proj", "up_proj", "down_proj"))
    gated, open_up = normed_projections(hidden, norm.weight, norm.variance_epsilon, [gate, up])
    return swiglu_projection(gated, open_up, down, hidden)


def _head_norm(attention: Any, name: str) -> tuple[torch.Tensor | None, float]:
    norm = getattr(attention, name, None)
    return (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)


def _norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Norm.apply(hidden, norm.weight, norm.variance_epsilon)
    return result


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return rms_norm_backward(grad, x, weight, ctx.eps), None, None
