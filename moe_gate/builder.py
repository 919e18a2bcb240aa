"""Build the routed model: a frozen base, frozen stacked adapters, trainable gates.

    from moe_gate import build_capability_model
    model = build_capability_model("models/smollm2", {"lookup": "adapters/lookup", "exact": "adapters/exact"})

The result is the base's own model object (``LlamaForCausalLM``, ``Qwen3MoeForCausalLM``, ...), changed in place:
``.model``, ``.lm_head``, ``generate``, caches, 4-D masks and ``inputs_embeds`` work as before, so whatever samples from
or trains through the base does so with the routed model.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moe_gate.adapters import LoraAdapter, load_adapter
from moe_gate.attach import IN_LAYER, FactorTable, attach_routing
from moe_gate.expert_factors import fuse_expert_factors
from moe_gate.routing import (
    BASE_SLOT,
    LayerCapabilityGater,
    RoutingGranularity,
    RoutingMode,
    RoutingScope,
    RoutingState,
)
from pipeline.files import InputError

AdapterSource = LoraAdapter | str | os.PathLike[str]


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
        routing_granularity: ``token``, or ``trajectory``: decided on the prompt (what enters with an empty cache)
            and kept.
        routing_mode: ``top1`` or ``soft`` (softmax over slots; the base slot's share adds no LoRA).
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
    names = ((BASE_SLOT,) if include_base_slot else ()) + tuple(adapter.name for adapter in loaded)
    state = RoutingState(names, routing_scope, routing_granularity, routing_mode)
    table = _factor_table(model, loaded)
    _check_targets(table, target_modules)
    attach_routing(model, table, state, base_bias, global_layer)
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
            if IN_LAYER.match(path) is None:
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
