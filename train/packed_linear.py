"""Products with frozen weights at decode time on a CPU, without rearranging the weight at every step.

oneDNN multiplies in a blocked layout. ``F.linear`` converts a plain weight on every call, which for a decode step of a
few rows costs as much as the product. Here each frozen bf16 weight is converted once and kept; the numbers are the same
bit for bit (tests). ``benchmarks/bench_decode.py`` measures it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

MAX_ROWS = 64  # above, the conversion is a small part of the product
ROWS_HINT = 16
MAX_BYTES = 2 * 2**30  # weights of one model: the converted copies take as much again

Product = Callable[[torch.Tensor], torch.Tensor]
_Packed = tuple[int, int, torch.Tensor]  # address and version of the weight that was converted, and the copy
_cache: weakref.WeakKeyDictionary[torch.nn.Linear, _Packed] = weakref.WeakKeyDictionary()


def can_pack(weight: torch.Tensor) -> bool:
    """Frozen bf16 on a CPU whose torch has oneDNN's packed product."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and not weight.requires_grad
        and not weight.is_inference()  # no version counter, so a change would go unseen
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def packed_weight(module: torch.nn.Linear) -> torch.Tensor:
    """The converted weight of ``module``, made anew when the weight has changed."""
    weight = module.weight
    key = (weight.data_ptr(), weight._version)
    found = _cache.get(module)
    if found is None or found[:2] != key:
        found = (*key, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT))
        _cache[module] = found
    return found[2]


def product(module: torch.nn.Linear) -> Product:
    """``x -> x W^T + b`` of ``module``, for inference; through the packed weight where that is the faster way."""
    weight, bias = module.weight, module.bias
    if not can_pack(weight):
        return lambda x: F.linear(x, weight, bias)
    packed, columns = packed_weight(module), weight.shape[1]

    def multiply(x: torch.Tensor) -> torch.Tensor:
        if x.numel() > MAX_ROWS * columns:
            return F.linear(x, weight, bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out

    return multiply


def packable(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """The layers of ``model`` whose weights can be packed; none when a second copy of them all is not affordable."""
    layers = [m for m in model.modules() if type(m) is torch.nn.Linear and can_pack(m.weight)]
    size = sum(m.weight.numel() * m.weight.element_size() for m in layers)
    return layers if size <= MAX_BYTES else []


@contextlib.contextmanager
def packed_linears(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the frozen ``nn.Linear`` layers of ``model`` multiply through packed weights; for inference only."""
    changed: list[Any] = list(packable(model))
    try:
        for module in changed:
            module.forward = product(module)
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)
