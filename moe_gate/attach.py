"""Attach routing to a loaded model: routed linears and experts, gates, and the hooks that carry the route.

The one place that changes a model. It needs the shapes and scales of the adapters (real or empty factors), nothing
else, so that an exported folder can rebuild the same modules without the rest of this package.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_gate.experts import FUSED_PARAMETERS, route_experts
from moe_gate.factors import LoraFactors
from moe_gate.linear import MultiLoRAGatedLinear, row_layout
from moe_gate.routing import (
    LayerCapabilityGater,
    LayerRoute,
    RoutingContext,
    RoutingState,
    RowLayout,
    TrajectoryGlobalRouter,
    kept_rows,
)
from pipeline.files import InputError

CONTEXT_KEY = "capability_routing_context"
IN_LAYER = re.compile(r"^(?P<layers>(?:.+\.)?layers)\.(?P<index>\d+)\.(?P<inner>.+)$")
FactorTable = dict[str, list[LoraFactors | None]]  # path of the adapted weight -> one entry per adapter


def attach_routing(
    model: nn.Module, table: FactorTable, state: RoutingState, base_bias: float = 5.0, global_layer: int = 0
) -> None:
    """Freeze ``model`` and make it a routed one, in place.

    Args:
        table: for every adapted weight one pair of factors per adapter, None where an adapter leaves it alone.
        state: slots and modes; kept as ``model.capability_routing``.
        base_bias: starting logit of the base slot.
        global_layer: the layer whose gate decides for all layers from there on (scope global, token granularity).

    Raises:
        InputError: a path or shape that the model does not have.
    """
    model.requires_grad_(False)
    layers = _group_by_layer(table)
    decoder = _decoder(model, layers)
    first_slot, per_token = int(state.has_base_slot), state.granularity == "token"
    bias = base_bias if state.has_base_slot else 0.0
    config: Any = model.config
    hidden_size = int(config.get_text_config().hidden_size)
    if state.scope == "global" and per_token and global_layer not in {i for _, i in layers}:
        choices = sorted(i for _, i in layers)
        raise InputError(f"global_layer {global_layer}: not an adapted layer; choose one of {choices}")
    for (path, index), inner in sorted(layers.items(), key=lambda item: item[0][1]):
        layer = _layer(model, path, index)
        has_gate = state.scope == "per_layer" or (per_token and index == global_layer)
        gate = LayerCapabilityGater(hidden_size, state.num_slots, bias, _device_of(layer)) if has_gate else None
        _route_layer(layer, f"{path}.{index}", index, inner, state, gate, first_slot)
    if state.scope == "global" and not per_token:
        decoder.capability_router = TrajectoryGlobalRouter(hidden_size, state.num_slots, bias, _device_of(decoder))
    decoder.register_forward_pre_hook(_DecoderHook(state), with_kwargs=True)
    object.__setattr__(model, "capability_routing", state)
    object.__setattr__(model, "capability_decoder", decoder)


def _group_by_layer(table: FactorTable) -> dict[tuple[str, int], dict[str, list[LoraFactors | None]]]:
    layers: dict[tuple[str, int], dict[str, list[LoraFactors | None]]] = defaultdict(dict)
    for path, pairs in table.items():
        match = IN_LAYER.match(path)
        assert match is not None
        layers[match["layers"], int(match["index"])][match["inner"]] = pairs
    return dict(layers)


def _decoder(model: nn.Module, layers: Iterable[tuple[str, int]]) -> Any:
    paths = {path for path, _ in layers}
    if len(paths) > 1:
        raise InputError(
            f"adapters touch several stacks of layers ({', '.join(sorted(paths))}); only one can be routed"
        )
    path = paths.pop()
    try:
        model.get_submodule(path)
    except AttributeError:
        raise InputError(f"{path}: not in the base model; the adapter belongs to another base") from None
    return model.get_submodule(path.rpartition(".")[0])


def _layer(model: nn.Module, path: str, index: int) -> nn.Module:
    try:
        return model.get_submodule(f"{path}.{index}")
    except AttributeError:
        raise InputError(f"{path}.{index}: not in the base model; the adapter belongs to another base") from None


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _route_layer(
    layer: nn.Module,
    path: str,
    index: int,
    inner: Mapping[str, list[LoraFactors | None]],
    state: RoutingState,
    gater: LayerCapabilityGater | None,
    first_slot: int,
) -> None:
    layout_of = {name: row_layout(pairs, first_slot) for name, pairs in inner.items()}
    layouts: list[RowLayout] = list(dict.fromkeys(layout_of.values()))
    route = LayerRoute(index, state, layouts, gater)
    experts: dict[str, dict[str, list[LoraFactors | None]]] = defaultdict(dict)
    for name, pairs in inner.items():
        parent_name, _, last = name.rpartition(".")
        if last in FUSED_PARAMETERS and parent_name.endswith("experts"):
            experts[parent_name][last] = pairs
            continue
        try:
            parent: nn.Module = layer.get_submodule(parent_name)
            linear: Any = layer.get_submodule(name)
        except AttributeError:
            raise InputError(f"{path}.{name}: not in the base model; the adapter belongs to another base") from None
        routed = MultiLoRAGatedLinear(linear, pairs, route, layouts.index(layout_of[name]), f"{path}.{name}")
        setattr(parent, last, routed)
    for parent_name, parameters in experts.items():
        indices = {last: layouts.index(layout_of[f"{parent_name}.{last}"]) for last in parameters}
        route_experts(layer.get_submodule(parent_name), parameters, route, indices)
    layer.capability_route = route
    layer.register_forward_pre_hook(_LayerHook(route), with_kwargs=True)
    layer.register_forward_hook(_leave, always_call=True)


class _LayerHook:
    """Before a decoder layer: take the context out of its keyword arguments and decide the route of its input."""

    def __init__(self, route: LayerRoute) -> None:
        self.route = route

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        context = kwargs.pop(CONTEXT_KEY, None)
        if context is None:
            raise RuntimeError(
                f"decoder layer {self.route.index} was called without routing context: call the decoder or the whole "
                "model; a decoder that does not pass keyword arguments to its layers is not supported"
            )
        self.route.enter(args[0] if args else kwargs["hidden_states"], context)
        return args, kwargs


def _leave(layer: nn.Module, args: Any, output: Any) -> None:
    layer.capability_route.leave()  # type: ignore[operator, union-attr]


class _DecoderHook:
    """Before the decoder: make the context of this forward and send it to every layer."""

    def __init__(self, state: RoutingState) -> None:
        self.state = state

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if CONTEXT_KEY in kwargs:  # the base pass of the trajectory router
            return args, kwargs
        state = self.state
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        cache = kwargs.get("past_key_values", args[3] if len(args) > 3 else None)
        context = RoutingContext(forced=state.forced, prompt_lengths=state.prompt_lengths)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            context.input_mask = mask.bool()
        if state.granularity == "trajectory" or state.recorder is not None:
            context.starts_sequence = cache is None or int(cache.get_seq_length()) == 0
        if state.granularity == "trajectory" and state.scope == "global" and state.forced is None:
            self._decide_trajectory(decoder, args, kwargs, context)
        if state.recorder is not None:
            context.call = state.recorder.new_call(context.input_mask, not context.starts_sequence)
        return args, kwargs | {CONTEXT_KEY: context}

    def _decide_trajectory(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], context: RoutingContext
    ) -> None:
        """On a new sequence: one pass of the base over the prompt, its pooled last hidden state decides for all
        layers."""
        if context.starts_sequence:
            probe = {**kwargs, "past_key_values": None, "use_cache": False, CONTEXT_KEY: RoutingContext(forced=0)}
            if not self.state.has_base_slot:
                raise RuntimeError("routing_scope global with trajectory granularity needs the base slot")
            with torch.no_grad():  # the base is frozen: no gradient reaches a gate through it
                hidden = decoder(*args[:3], **probe).last_hidden_state
            mask = context.prompt_mask(hidden.shape[0], hidden.shape[1], hidden.device)
            router: Any = decoder.capability_router
            differentiable = decoder.training and torch.is_grad_enabled() and router.weight.requires_grad
            self.state.kept_weights = self.state.slot_weights(router.pooled(hidden, mask), differentiable).unsqueeze(1)
            context.shared_weights = self.state.kept_weights
        else:
            tokens = kwargs.get("input_ids", args[0] if args else None)
            rows = (tokens if tokens is not None else kwargs["inputs_embeds"]).shape[0]
            context.shared_weights = kept_rows(self.state.kept_weights, rows)
