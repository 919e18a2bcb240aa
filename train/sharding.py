"""A frozen base that does not fit into one device: its decoder layers sharded over the ranks (PyTorch FSDP2).

Each layer's frozen weights are gathered for its forward and again for its backward; adapters, embeddings, head and
norms outside the layers stay whole on every rank, so the optimiser and the files know nothing of it. Every gather is
a meeting of all ranks: all must run the same number of passes (``train.learner`` fills up with passes of weight zero).

Only rank 0 reads the base. The others build it without storage (``skeleton``) and get one layer at a time from rank 0,
of which they keep their part: the base is in host memory once, not once per rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from pipeline.files import InputError
from train.distributed import with_peers


def skeleton(folder: str) -> Any:
    """The model of ``folder`` on the meta device: shapes, no storage; ``shard_base`` fills it, with the dtypes
    of rank 0.

    Raises:
        InputError: the folder has no usable configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from train.local_engine import frozen

    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(folder)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"model {folder}: cannot be loaded ({str(error).splitlines()[0]}); check --model") from None
    return frozen(model)


def shard_base(model: Any, device_type: str, mesh: DeviceMesh | None = None) -> int:
    """Shard the frozen weights of every decoder layer of ``model`` (with its adapters attached) over all ranks.

    Args:
        model: on the CPU or on ``device_type``; layers move to the device one by one, so the whole base need never
        fit there. mesh: one-dimensional; None = all ranks of the default process group.

    Returns:
        Bytes of the base that this rank still holds.

    Raises:
        InputError: the model has no list of decoder layers, or the ranks have different models.
    """
    mesh = mesh or init_device_mesh(device_type, (torch.distributed.get_world_size(),))
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = getattr(base.get_decoder(), "layers", None)
    if not layers:
        raise InputError(f"--shard-base: model type {base.config.model_type} has no decoder layers to shard; drop it")
    device = torch.device(device_type, torch.cuda.current_device()) if device_type != "cpu" else torch.device("cpu")
    with with_peers():
        filled = _any_skeleton(model)
        for layer in layers:
            if filled:
                _fill(layer.modules(), device)
            trained = {p for n, p in layer.named_parameters() if "lora_" in n}
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=trained)
        if filled:
            _fill(_outside(model, layers), device)
    if device_type != "cpu":
        _move_the_rest(model, device)
    return sum(
        (p.to_local() if hasattr(p, "to_local") else p).numel() * p.element_size()
        for n, p in base.named_parameters()
        if "lora_" not in n
    )


def _any_skeleton(model: Any) -> bool:
    """Has any rank a model without storage? Raises ``InputError`` on all ranks where their tensors differ."""
    named = [*model.named_parameters(), *model.named_buffers()]
    mine = ([(name, tuple(tensor.shape)) for name, tensor in named], any(tensor.is_meta for _, tensor in named))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if odd := sorted(set().union(*(set(names) ^ set(found[0][0]) for names, _ in found))):
        raise InputError(f"--shard-base: ranks have different models (first at {odd[0][0]}); give all the same --model")
    return any(without for _, without in found)


def _outside(model: Any, layers: Iterable[Any]) -> list[Any]:
    """The modules of ``model`` that belong to none of ``layers``."""
    inside = {module for layer in layers for module in layer.modules()}
    return [module for module in model.modules() if module not in inside]


def _fill(modules: Iterable[Any], device: torch.device) -> None:
    """Give the parameters and buffers of ``modules`` rank 0's dtypes and values, on ``device``. Tied parameters stay
    tied."""
    slots = [(own, key) for module in modules for own in (module._parameters, module._buffers) for key in own]
    slots = [(own, key) for own, key in slots if own[key] is not None]
    box: list[Any] = [[own[key].dtype for own, key in slots]]
    dist.broadcast_object_list(box, src=0, device=device)
    made: dict[int, Tensor] = {}
    kept = []  # no id is used again while its tensor is here
    for (own, key), dtype in zip(slots, box[0], strict=True):
        old = own[key]
        kept.append(old)
        if id(old) not in made:
            new = torch.empty_like(old, device=device, dtype=dtype) if old.is_meta else old.detach().to(device)
            dist.broadcast(new, src=0)
            is_parameter = isinstance(old, torch.nn.Parameter)
            made[id(old)] = torch.nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new
        own[key] = made[id(old)]


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
