"""Gates on disk: ``gate.safetensors`` with everything needed to rebuild the routed model in its JSON metadata.

model = load_routed("runs/demo/gate")            # a gate run's folder
model = load_routed("configs/moe_gate.yaml")     # the gate that this configuration trains
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from moe_gate.adapters import load_adapter
from moe_gate.builder import build_capability_model, named_gater_parameters
from moe_gate.routing import RoutingGranularity, RoutingMode, RoutingScope, routing_state
from pipeline.files import InputError, atomic_path, check, parse_json

GATE_FILE = "gate.safetensors"
METADATA_KEY = "trace_gate"


class AdapterRecord(BaseModel):
    """One slot's adapter: where it was, what it was (digest of its weights file), rank and scaling by its
    configuration."""

    model_config = ConfigDict(extra="forbid")

    name: str
    path: str
    sha256: str
    r: int
    lora_alpha: float
    use_rslora: bool


class GateMetadata(BaseModel):
    """The ``trace_gate`` metadata of a gate file."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    slot_names: list[str]
    adapters: list[AdapterRecord]
    base_model: str
    base_revision: str | None = None
    dtype: str
    routing_scope: RoutingScope
    routing_granularity: RoutingGranularity
    routing_mode: RoutingMode
    global_layer: int = 0
    target_modules: list[str]
    training: dict[str, Any] = {}


def describe(model: Any, base_model: str, training: dict[str, Any] | None = None) -> GateMetadata:
    """The metadata of a routed model; ``training`` is free for whoever trained the gates (JSON only)."""
    state = routing_state(model)
    gates = [name for name, _ in named_gater_parameters(model)]
    targets = {name.rsplit(".", 2)[-2] for name, _ in model.named_parameters() if name.endswith(".lora_A")}
    targets |= {name.rsplit("lora_A_", 1)[1] for name, _ in model.named_parameters() if ".lora_A_" in name}
    layer = 0
    if state.scope == "global" and state.granularity == "token":
        layer = int(gates[0].split(".layers.")[1].split(".")[0])
    return GateMetadata(
        slot_names=list(state.slot_names),
        adapters=[
            AdapterRecord(
                name=a.name, path=a.path, sha256=a.sha256, r=a.settings.r, lora_alpha=a.settings.lora_alpha,
                use_rslora=a.settings.use_rslora,
            )
            for a in model.capability_adapters
        ],
        base_model=base_model,
        base_revision=getattr(model.config, "_commit_hash", None),
        dtype=str(model.dtype).removeprefix("torch."),
        routing_scope=state.scope,
        routing_granularity=state.granularity,
        routing_mode=state.mode,
        global_layer=layer,
        target_modules=sorted(targets),
        training=training or {},
    )  # fmt: skip


def save_gate(
    model: Any, path: str | os.PathLike[str], base_model: str, training: dict[str, Any] | None = None
) -> Path:
    """Write the gates of ``model`` to ``path`` (a folder, or a ``.safetensors`` file), atomically; returns the file."""
    target = Path(path)
    if target.suffix != ".safetensors":
        target = target / GATE_FILE
    tensors = {name: parameter.detach().float().cpu().contiguous() for name, parameter in named_gater_parameters(model)}
    metadata = describe(model, base_model, training).model_dump_json()
    with atomic_path(target) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", METADATA_KEY: metadata})
    return target


def read_gate(path: str | os.PathLike[str]) -> tuple[GateMetadata, dict[str, torch.Tensor]]:
    """Metadata and tensors of a gate file.

    Raises:
        InputError: missing, damaged, not a gate, wrong schema, or values that are not finite.
    """
    file_path = Path(path) / GATE_FILE if Path(path).is_dir() else Path(path)
    if not file_path.is_file():
        raise InputError(f"gate {file_path}: not found; train one with `python -m train.train_router_sft`")
    try:
        with safe_open(file_path, framework="pt") as file:
            raw = dict(file.metadata() or {})
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"gate {file_path}: not a whole safetensors file ({error}); train it again") from None
    if METADATA_KEY not in raw:
        raise InputError(f"gate {file_path}: no {METADATA_KEY} metadata; expected a file written by moe_gate.save_gate")
    metadata = check(GateMetadata, parse_json(raw[METADATA_KEY], f"gate {file_path}"), f"gate {file_path}")
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"gate {file_path}: {name} holds NaN or infinity; train it again")
    return metadata, tensors


def load_gate(model: nn.Module, path: str | os.PathLike[str]) -> GateMetadata:
    """Load gate weights into a routed model of the same shape.

    Raises:
        InputError: slots, tensor names or shapes differ (each named).
    """
    metadata, tensors = read_gate(path)
    names = list(routing_state(model).slot_names)
    if metadata.slot_names != names:
        raise InputError(
            f"gate {path}: slots {metadata.slot_names}, the model has {names}; build it with the same adapters"
        )
    gates = dict(named_gater_parameters(model))
    if wrong := sorted(set(gates) ^ set(tensors)):
        raise InputError(f"gate {path}: {wrong[0]} is on one side only; it belongs to another model or routing scope")
    for name, parameter in gates.items():
        if parameter.shape != tensors[name].shape:
            raise InputError(f"gate {path}: {name} is {tuple(tensors[name].shape)}, expected {tuple(parameter.shape)}")
        with torch.no_grad():
            parameter.copy_(tensors[name])
    return metadata


def load_routed(
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | nn.Module | None = None,
    adapter_dir: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    **build_options: Any,
) -> Any:
    """The trained routed model: base, adapters and gates, in eval mode, ready wherever the base model is used.

    Args:
        path: a gate run's folder, its ``gate.safetensors``, or a ``moe_gate.yaml`` (its ``output_dir`` is used).
        base: another place of the same base, or the loaded base model (changed in place).
        adapter_dir: where the adapters are now, when they moved.
        dtype: as trained when None.

    Raises:
        InputError: something is missing or the adapters are not the ones that the gate was trained with.
    """
    from moe_gate.adapters import find_adapter

    source = Path(path)
    if source.suffix in (".yaml", ".yml"):
        from moe_gate.config import load_gate_config

        source = Path(load_gate_config(source).output_dir)
    metadata, _ = read_gate(source)
    adapters = {}
    for record in metadata.adapters:
        place = find_adapter(adapter_dir, record.name) if adapter_dir is not None else Path(record.path)
        adapter = load_adapter(place, record.name)
        if record.sha256 and adapter.sha256 != record.sha256:
            raise InputError(
                f"adapter {place}: not the weights that gate {source} was trained with; train the gate again"
            )
        adapters[record.name] = adapter
    model = build_capability_model(
        metadata.base_model if base is None else base,
        adapters,
        routing_scope=metadata.routing_scope,
        routing_granularity=metadata.routing_granularity,
        routing_mode=metadata.routing_mode,
        include_base_slot=len(metadata.slot_names) > len(metadata.adapters),
        global_layer=metadata.global_layer,
        dtype=metadata.dtype if dtype is None else dtype,
        revision=metadata.base_revision,
        **build_options,
    )
    load_gate(model, source)
    return model.eval()


def gate_training_record(path: str | os.PathLike[str]) -> str:
    """The metadata of a gate file as indented JSON, for people."""
    return json.dumps(read_gate(path)[0].model_dump(), indent=2)
