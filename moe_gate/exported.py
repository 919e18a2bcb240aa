"""The exported folder: what is in its ``config.json``, and the class that loads it.

``config.json`` is the base's own, with ``architectures`` of ours and one more key, ``trace_gate``: slots, modes, and
for every adapted weight the rank and scaling of each adapter. The weights are the base's files and one file of ours.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from moe_gate.attach import FactorTable, attach_routing
from moe_gate.checkpoint import AdapterRecord
from moe_gate.experts import MultiLoRAGatedExperts
from moe_gate.factors import LoraFactors
from moe_gate.linear import MultiLoRAGatedLinear
from moe_gate.routing import LayerRoute, RoutingGranularity, RoutingMode, RoutingScope, RoutingState
from pipeline.files import InputError, check, read_json

CONFIG_KEY = "trace_gate"
FP32_MODULES = {"capability_route", "capability_router"}
VLLM_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5ForCausalLM")
SlotRanks = list[tuple[int, float] | None]  # (rank, scaling) of each adapter, None where it leaves the weight alone


class ExportSpec(BaseModel):
    """The ``trace_gate`` key of an exported ``config.json``."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    slot_names: list[str]
    routing_scope: RoutingScope
    routing_granularity: RoutingGranularity
    routing_mode: RoutingMode
    global_layer: int
    base_architecture: str
    base_model: str
    base_revision: str | None = None
    base_included: bool
    adapters: list[AdapterRecord]
    table: dict[str, SlotRanks]


def vllm_refusal(spec: ExportSpec) -> str | None:
    """Why vLLM cannot serve this folder, in one line; None when it can."""
    if spec.base_architecture not in VLLM_ARCHITECTURES:
        known = ", ".join(VLLM_ARCHITECTURES)
        return f"vLLM cannot serve a routed {spec.base_architecture}, only {known}; use transformers"
    if spec.routing_granularity != "token":
        return "vLLM serves token granularity only; a trajectory decision needs the whole prompt at once"
    experts = [path for path in spec.table if path.split(".")[-2] == "experts"]
    if experts:
        return f"vLLM serves adapters of dense linears only, found {experts[0]}; use transformers for experts"
    return None


def rank_table(model: nn.Module) -> dict[str, SlotRanks]:
    """Rank and scaling of every adapter on every adapted weight of a routed model."""
    table: dict[str, SlotRanks] = {}
    for name, module in model.named_modules():
        if isinstance(module, MultiLoRAGatedLinear):
            table[name] = _slot_ranks(module.route, module.layout_index)
        elif isinstance(module, MultiLoRAGatedExperts):
            for parameter, index in module.capability_layouts.items():
                table[f"{name}.{parameter}"] = _slot_ranks(module.capability_route, index)
    return table


def _slot_ranks(route: LayerRoute, layout_index: int) -> SlotRanks:
    slots, scales = route.layouts[layout_index].slots, route.layouts[layout_index].scales
    first = int(route.state.has_base_slot)
    ranks: SlotRanks = []
    for slot in range(first, route.state.num_slots):
        ranks.append((slots.count(slot), scales[slots.index(slot)]) if slot in slots else None)
    return ranks


def empty_factors(model: nn.Module, table: dict[str, SlotRanks]) -> FactorTable:
    """Factors of the right shapes and scales without values, to be filled from a state dict."""
    factors: FactorTable = {}
    for path, ranks in table.items():
        parent, _, last = path.rpartition(".")
        owner = model.get_submodule(parent)
        weight = getattr(owner, last)
        shape = weight.weight.shape if isinstance(weight, nn.Linear) else weight.shape
        lead, (out_features, in_features) = tuple(shape[:-2]), shape[-2:]
        factors[path] = [
            None
            if entry is None
            else LoraFactors(
                torch.empty(*lead, entry[0], in_features), torch.empty(*lead, out_features, entry[0]), entry[1]
            )
            for entry in ranks
        ]
    return factors


def attach_from_spec(model: Any, spec: dict[str, Any]) -> None:
    """Make ``model`` the routed model that ``spec`` (the ``trace_gate`` dict) describes; weights follow by state
    dict."""
    state = RoutingState(
        tuple(spec["slot_names"]), spec["routing_scope"], spec["routing_granularity"], spec["routing_mode"]
    )
    table = {
        path: [None if e is None else (int(e[0]), float(e[1])) for e in ranks] for path, ranks in spec["table"].items()
    }
    attach_routing(model, empty_factors(model, table), state, global_layer=spec["global_layer"])


def read_spec(folder: str | os.PathLike[str]) -> ExportSpec:
    """The checked ``trace_gate`` key of an exported folder.

    Raises:
        InputError: not an exported folder, or a broken one.
    """
    config = read_json(Path(folder) / "config.json", "model configuration")
    if not isinstance(config, dict) or CONFIG_KEY not in config:
        raise InputError(
            f"{folder}: config.json has no {CONFIG_KEY}; write the folder with `python -m moe_gate.export`"
        )
    return check(ExportSpec, config[CONFIG_KEY], f"{folder}/config.json {CONFIG_KEY}")


def load_exported(folder: str | os.PathLike[str], *, dtype: torch.dtype | str = "auto", **options: Any) -> Any:
    """The routed model of an exported folder, in eval mode, by the code of this package (no remote code).

    Raises:
        InputError: not an exported folder, or one without the base's weights (load those with ``load_routed``).
    """
    import transformers

    spec = read_spec(folder)
    if not spec.base_included:
        raise InputError(f"{folder}: refers to base {spec.base_model} and does not hold it; export with --base include")
    base: Any = getattr(transformers, spec.base_architecture, None)
    if base is None:
        raise InputError(f"{folder}: transformers has no {spec.base_architecture}; install a newer transformers")
    return routed_class(base).from_pretrained(str(folder), dtype=dtype, **options).eval()


def routed_class(base: Any) -> Any:
    """A subclass of a transformers model class that attaches the routing of its ``config.trace_gate``."""

    class Routed(base):  # type: ignore[misc]
        _keep_in_fp32_modules_strict = FP32_MODULES

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            attach_from_spec(self, getattr(config, CONFIG_KEY))

    Routed.__name__ = Routed.__qualname__ = base.__name__
    return Routed
