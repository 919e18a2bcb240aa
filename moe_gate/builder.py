"""Build the routed model: a frozen base, frozen stacked adapters, trainable gates.

    from moe_gate import build_capability_model
    model = build_capability_model("models/smollm2", {"lookup": "adapters/lookup", "exact": "adapters/exact"})

The result is the base's own model object (``LlamaForCausalLM``, ``Qwen3MoeForCausalLM``, ...), changed in place:
``.model``, ``.lm_head``, ``generate``, caches, 4-D masks and ``inputs_embeds`` work as before, so whatever samples from
or trains through the base does so with the routed model.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_gate.adapters import LoraAdapter, LoraFactors, load_adapter
from moe_gate.experts import FUSED_PARAMETERS, fuse_expert_factors, route_experts
from moe_gate.linear import MultiLoRAGatedLinear, row_layout
from moe_gate.routing import (
    BASE_SLOT,
    LayerCapabilityGater,
    LayerRoute,
    RoutingContext,
    RoutingGranularity,
    RoutingMode,
    RoutingScope,
    RoutingState,
    RowLayout,
    TrajectoryGlobalRouter,
    kept_rows,
)
from pipeline.files import InputError

CONTEXT_KEY = "capability_routing_context"
_IN_LAYER = re.compile(r"^(?P<layers>(?:.+\.)?layers)\.(?P<index>\d+)\.(?P<inner>.+)$")
AdapterSource = LoraAdapter | str | os.PathLike[str]
FactorTable = dict[str, list[LoraFactors | None]]  # path of the adapted weight -> one entry per adapter


def build_capability_model(
    base: str | os.PathLike[str] | nn.Module,
    adapters: Mapping[str, AdapterSource] | Sequence[AdapterSource],
    *,
    routing_scope: RoutingScope = "per_layer",
    routing_granularity: RoutingGranularity = "token",
    routing_mode: RoutingMode = "top1",
    include_base_slot: bool = True,
    base_bias: float = 5.0,
    global_layer: int = 0,
    target_modules: Iterable[str] | None = None,
    dtype: torch.dtype | str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    **load_options: Any,
) -> Any:
    """The routed model over ``base`` with ``adapters`` in slots 1..N (0..N-1 without the base slot).

    Args:
        base: a model folder or hub name (loaded in ``dtype``; ``load_options`` go to ``from_pretrained``), or a loaded
            model, which is changed in place.
        adapters: name -> PEFT folder, single file or loaded ``LoraAdapter``; a sequence takes the adapters' own names.
        routing_scope: ``per_layer``: a gate in every adapted layer. ``global``: one decision for all layers; at token
            granularity the gate reads the input of layer ``global_layer`` and the layers below it run the base.
        routing_granularity: ``token``, or ``trajectory``: decided on the prompt (what enters with an empty cache) and
        kept. routing_mode: ``top1`` or ``soft`` (softmax over slots; the base slot's share adds no LoRA).
        base_bias: starting logit of the base slot.
        target_modules: when given, the adapters must touch exactly linears with these last names.

    Raises:
        InputError: an adapter does not fit the base, or touches something that cannot be routed.
    """
    model = (
        _load_base(base, dtype, revision, trust_remote_code, load_options)
        if isinstance(base, str | os.PathLike)
        else base
    )
    if hasattr(model, "capability_routing"):
        raise InputError("the base is a routed model already; load a fresh base")
    loaded = _load_adapters(adapters)
    first_slot = 1 if include_base_slot else 0
    names = ((BASE_SLOT,) if include_base_slot else ()) + tuple(adapter.name for adapter in loaded)
    state = RoutingState(names, routing_scope, routing_granularity, routing_mode)
    table = _factor_table(model, loaded)
    _check_targets(table, target_modules)
    model.requires_grad_(False)
    layers = _group_by_layer(table)
    decoder = _decoder(model, layers)
    bias = base_bias if include_base_slot else 0.0
    config: Any = model.config
    hidden_size = int(config.get_text_config().hidden_size)
    if routing_scope == "global" and routing_granularity == "token" and global_layer not in {i for _, i in layers}:
        raise InputError(
            f"global_layer {global_layer}: not an adapted layer; choose one of {sorted(i for _, i in layers)}"
        )
    for (path, index), inner in sorted(layers.items(), key=lambda item: item[0][1]):
        layer = _layer(model, path, index)
        device = _device_of(layer)
        has_gate = routing_scope == "per_layer" or (routing_granularity == "token" and index == global_layer)
        gater = LayerCapabilityGater(hidden_size, len(names), bias, device) if has_gate else None
        _route_layer(layer, f"{path}.{index}", index, inner, state, gater, first_slot, device)
    if routing_scope == "global" and routing_granularity == "trajectory":
        decoder.capability_router = TrajectoryGlobalRouter(hidden_size, len(names), bias, _device_of(decoder))
    decoder.register_forward_pre_hook(_DecoderHook(state), with_kwargs=True)
    object.__setattr__(model, "capability_routing", state)
    object.__setattr__(model, "capability_decoder", decoder)
    object.__setattr__(model, "capability_adapters", tuple(_without_tensors(adapter) for adapter in loaded))
    return model


def _load_base(
    base: str | os.PathLike[str], dtype: torch.dtype | str, revision: str | None, remote: bool, options: dict[str, Any]
) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            str(base), dtype=dtype, revision=revision, trust_remote_code=remote, **options
        )
    except OSError as error:
        raise InputError(f"base model {base}: cannot be loaded ({str(error).splitlines()[0]:.200})") from error


def _load_adapters(adapters: Mapping[str, AdapterSource] | Sequence[AdapterSource]) -> list[LoraAdapter]:
    pairs = list(adapters.items()) if isinstance(adapters, Mapping) else [(None, source) for source in adapters]
    loaded: list[LoraAdapter] = []
    for name, source in pairs:
        adapter = source if isinstance(source, LoraAdapter) else load_adapter(source, name)
        if name is not None and adapter.name != name:
            adapter = LoraAdapter(name, adapter.factors, adapter.settings, adapter.sha256, adapter.path)
        loaded.append(adapter)
    names = [adapter.name for adapter in loaded]
    if not loaded:
        raise InputError("no adapters given: expected at least one")
    if len(set(names)) < len(names) or BASE_SLOT in names:
        raise InputError(f"adapter names {names}: expected distinct names other than '{BASE_SLOT}'")
    return loaded


def _without_tensors(adapter: LoraAdapter) -> LoraAdapter:
    return LoraAdapter(adapter.name, {}, adapter.settings, adapter.sha256, adapter.path)


def _factor_table(model: nn.Module, adapters: Sequence[LoraAdapter]) -> FactorTable:
    table: FactorTable = defaultdict(lambda: [None] * len(adapters))
    for i, adapter in enumerate(adapters):
        for path, pair in fuse_expert_factors(adapter.factors, model, adapter.name).items():
            if _IN_LAYER.match(path) is None:
                raise InputError(
                    f"adapter {adapter.name}: {path} is outside the decoder layers and has no route; retrain without it"
                )
            table[path][i] = pair
    return dict(table)


def _check_targets(table: FactorTable, target_modules: Iterable[str] | None) -> None:
    if target_modules is None:
        return
    wanted, found = set(target_modules), {path.rsplit(".", 1)[1] for path in table}
    experts_names = {"gate_up_proj": {"gate_proj", "up_proj"}}
    covered = found | {name for one in found for name in experts_names.get(one, ())}
    if not (found <= wanted or covered <= wanted) or not wanted <= covered:
        raise InputError(f"target_modules {sorted(wanted)}: the adapters touch {sorted(found)}; make them agree")


def _group_by_layer(table: FactorTable) -> dict[tuple[str, int], dict[str, list[LoraFactors | None]]]:
    layers: dict[tuple[str, int], dict[str, list[LoraFactors | None]]] = defaultdict(dict)
    for path, pairs in table.items():
        match = _IN_LAYER.match(path)
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
    device: torch.device,
) -> None:
    layout_of = {name: row_layout(pairs, first_slot) for name, pairs in inner.items()}
    layouts: list[RowLayout] = list(dict.fromkeys(layout_of.values()))
    route = LayerRoute(index, state, layouts, gater, device)
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


def named_gater_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of all gates, in model order."""
    for name, module in model.named_modules():
        if isinstance(module, LayerCapabilityGater):
            yield from ((f"{name}.{key}", parameter) for key, parameter in module.named_parameters(recurse=False))


def gater_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters: weights and biases of all gates."""
    return [parameter for _, parameter in named_gater_parameters(model)]


def assert_frozen(model: nn.Module) -> None:
    """Check that the gates and nothing else can be trained.

    Raises:
        RuntimeError: naming the first parameter that is wrong.
    """
    gates = dict(named_gater_parameters(model))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad != (name in gates):
            wrong = "is trainable" if parameter.requires_grad else "is frozen"
            raise RuntimeError(f"{name} {wrong}; expected gates trainable and everything else frozen")
