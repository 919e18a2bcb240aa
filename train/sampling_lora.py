"""Sampling through a peft adapter without peft's casts.

peft keeps the adapter in fp32 and converts every layer's input to it and back; at query length 1 that costs as much
as the products. For the time of a batch the projections use copies of A and s B in the base's dtype, as the trainer's
forward does, so sampler and trainer also round alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear


def plain_lora(module: torch.nn.Module, name: str) -> bool:
    """A linear layer whose adapter ``name`` is y + s B A x and nothing else."""
    return (
        isinstance(module, LoraLinear)
        and name in module.lora_A
        and type(module.get_base_layer()) is torch.nn.Linear
        and not module.merged
        and not module.lora_variant.get(name)
        and not module.lora_bias.get(name, False)
    )


def _projection(module: Any, name: str) -> Callable[..., torch.Tensor]:
    base = module.get_base_layer()
    weight, multiply = base.weight, base.forward  # the forward that ``packed_linears`` may have put there
    a = module.lora_A[name].weight.detach().to(weight.dtype)
    b = (module.lora_B[name].weight.detach() * module.scaling[name]).to(weight.dtype).t()

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = torch.addmm(multiply(flat), F.linear(flat, a), b)
        return out.view(*x.shape[:-1], out.shape[-1])

    return forward


@contextlib.contextmanager
def cast_adapter(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Inside, plain LoRA layers of adapter ``name`` run on cast copies; for inference only."""
    changed = [module for module in model.modules() if plain_lora(module, name)]
    try:
        for module in changed:
            module.forward = _projection(module, name)
        yield
    finally:
        for module in changed:
            del module.forward
