"""A frozen base that does not fit into one device: its decoder layers sharded over the ranks (PyTorch FSDP2).

Each layer's frozen weights are gathered for its forward and again for its backward; adapters, embeddings, head and
norms outside the layers stay whole on every rank, so the optimiser and the files know nothing of it. Every gather is
a meeting of all ranks: all must run the same number of passes (``train.learner`` fills up with passes of weight zero).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from pipeline.files import InputError


def shard_base(model: Any, device_type: str, mesh: DeviceMesh | None = None) -> int:
    """Shard the frozen weights of every decoder layer of ``model`` (with its adapters attached) over all ranks.

    Args:
        model: on the CPU or on ``device_type``; layers move to the device one by one, so the whole base need never
        fit there. mesh: one-dimensional; None = all ranks of the default process group.

    Returns:
        Bytes of the base that this rank still holds.

    Raises:
        InputError: the model has no list of decoder layers.
    """
    mesh = mesh or init_device_mesh(device_type, (torch.distributed.get_world_size(),))
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = getattr(base.get_decoder(), "layers", None)
    if not layers:
        raise InputError(f"--shard-base: model type {base.config.model_type} has no decoder layers to shard; drop it")
    for layer in layers:
        trained = {p for n, p in layer.named_parameters() if "lora_" in n}
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=trained)
    if device_type != "cpu":
        _move_the_rest(model, torch.device(device_type, torch.cuda.current_device()))
    return sum(
        (p.to_local() if hasattr(p, "to_local") else p).numel() * p.element_size()
        for n, p in base.named_parameters()
        if "lora_" not in n
    )


def _move_the_rest(model: Any, device: torch.device) -> None:
    """What is not sharded: adapters, embeddings, head, norms, buffers."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not hasattr(parameter, "to_local") and parameter.device != device:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def is_sharded(model: Any) -> bool:
    """Must all ranks run their passes together?"""
    return any(isinstance(module, FSDPModule) for module in model.modules())
