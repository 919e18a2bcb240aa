"""Linear layers with a plain LoRA on a frozen base, with gradients written by hand.

``y = x W^T + s (x A^T) B^T``. The base is frozen, so nothing has to be kept for a gradient of W; the products with A
and B run in the base's dtype on weights cast from their fp32 masters; projections that share an input share one
product with A; norms and gates are recomputed in backward instead of being kept. All functions take [T, features].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from train.kernels import rms_norm, rms_norm_backward, rotate_heads, rotate_heads_backward, swiglu, swiglu_backward


class UnsupportedLayer(Exception):
    """A layer that these functions do not know; the message says what it is."""


@dataclasses.dataclass(frozen=True)
class AdaptedLinear:
    """weight [out, in], bias [out], a [r, in], b [out, r] (fp32 masters), scale of b a; without a and b: no LoRA."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, module: torch.nn.Module) -> AdaptedLinear:
        """The weights of a linear layer with its active adapter.

        Raises:
            UnsupportedLayer: more than a linear layer with at most one plain LoRA.
        """
        if type(module) is torch.nn.Linear:
            return cls(module.weight, module.bias)
        if not isinstance(module, LoraLayer) or type(module.get_base_layer()) is not torch.nn.Linear:
            raise UnsupportedLayer(f"{type(module).__name__} in place of a linear layer")
        base = module.get_base_layer()
        names = [n for n in module.active_adapters if n in module.lora_A]
        if module.merged:
            raise UnsupportedLayer("a merged adapter")
        if module.disable_adapters or not names:
            return cls(base.weight, base.bias)
        if len(names) > 1:
            raise UnsupportedLayer(f"{len(names)} active adapters at once")
        name = names[0]
        dropout = module.lora_dropout[name]
        if name in module.lora_variant or module.lora_bias[name] or not isinstance(dropout, torch.nn.Identity):
            raise UnsupportedLayer(f"adapter {name} is more than a plain LoRA (variant, bias or dropout)")
        return cls(base.weight, base.bias, module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])


def _stack(factors: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor | None:
    """The A factors of projections with one input as one [sum of ranks, in] matrix."""
    present = [f for f in factors if f is not None]
    return torch.cat(present).to(dtype) if present else None


def _split(stacked: torch.Tensor | None, factors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Columns of ``stacked`` [T, sum of ranks] that belong to each projection."""
    result: list[torch.Tensor | None] = []
    at = 0
    for factor in factors:
        if factor is None or stacked is None:
            result.append(None)
        else:
            result.append(stacked[:, at : at + len(factor)])
            at += len(factor)
    return result


def _apply(
    x: torch.Tensor, linear: AdaptedLinear, low: torch.Tensor | None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + bias + s low B^T + residual, where low = x A^T."""
    if residual is not None and linear.bias is None:
        y = torch.addmm(residual, x, linear.weight.T)
    else:
        y = torch.nn.functional.linear(x, linear.weight, linear.bias)
        if residual is not None:
            y += residual
    if low is not None and linear.b is not None:
        y.addmm_(low, linear.b.to(x.dtype).T, alpha=linear.scale)
    return y


def _backward(
    grads: Sequence[torch.Tensor],
    x: torch.Tensor | None,
    linears: Sequence[AdaptedLinear],
    low: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor | None]]:
    """Gradient of the common input, gradient of low = x A^T, and the gradients of every B."""
    parts = _split(low, [linear.a for linear in linears])
    grad_x: torch.Tensor | None = None
    low_grads, b_grads = [], []  # type: list[torch.Tensor], list[torch.Tensor | None]
    for grad, linear, part in zip(grads, linears, parts, strict=True):
        grad_x = grad @ linear.weight if grad_x is None else grad_x.addmm_(grad, linear.weight)
        if part is None or linear.b is None:
            b_grads.append(None)
            continue
        low_grads.append((grad @ linear.b.to(grad.dtype)).mul_(linear.scale))
        b_grads.append((grad.T @ part).float().mul_(linear.scale))
    assert grad_x is not None
    grad_low = torch.cat(low_grads, dim=1) if low_grads else None
    if grad_low is not None:
        grad_x.addmm_(grad_low, _stack([linear.a for linear in linears], grad_x.dtype))  # type: ignore[arg-type]
    return grad_x, grad_low, b_grads


def _a_grads(
    grad_low: torch.Tensor | None, x: torch.Tensor, linears: Sequence[AdaptedLinear]
) -> list[torch.Tensor | None]:
    stacked = None if grad_low is None else (grad_low.T @ x).float()
    return [None if p is None else p.T for p in _split(None if stacked is None else stacked.T, [i.a for i in linears])]


def _factors(linears: Sequence[AdaptedLinear]) -> list[torch.Tensor | None]:
    """What autograd must know about: every A, then every B."""
    return [linear.a for linear in linears] + [linear.b for linear in linears]


class _NormedProjections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, norm: torch.Tensor, eps: float, linears: Sequence[AdaptedLinear], *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        normed = rms_norm(x, norm, eps)
        stacked = _stack([linear.a for linear in linears], x.dtype)
        low = None if stacked is None else normed @ stacked.T
        parts = _split(low, [linear.a for linear in linears])
        ctx.save_for_backward(x, norm, low)
        ctx.eps, ctx.linears = eps, linears
        return tuple(_apply(normed, linear, part) for linear, part in zip(linears, parts, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, norm, low = ctx.saved_tensors
        grad_normed, grad_low, b_grads = _backward(grads, None, ctx.linears, low)
        a_grads = (
            _a_grads(grad_low, rms_norm(x, norm, ctx.eps), ctx.linears)
            if grad_low is not None
            else [None] * len(b_grads)
        )
        grad_x = rms_norm_backward(grad_normed, x, norm, ctx.eps) if ctx.needs_input_grad[0] else None
        return (grad_x, None, None, None, *a_grads, *b_grads)


def normed_projections(
    x: torch.Tensor, norm: torch.Tensor, eps: float, linears: Sequence[AdaptedLinear]
) -> tuple[torch.Tensor, ...]:
    """linear(rms_norm(x)) for each of ``linears``. Keeps x and the low-rank products only."""
    result: tuple[torch.Tensor, ...] = _NormedProjections.apply(x, norm, eps, linears, *_factors(linears))
    return result


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, linear: AdaptedLinear, *_: torch.Tensor
    ) -> torch.Tensor:
        low = None if linear.a is None else x @ linear.a.to(x.dtype).T
        ctx.save_for_backward(x if linear.a is not None else None, low)
        ctx.linear = linear
        return _apply(x, linear, low, residual)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, low = ctx.saved_tensors
        grad_x, grad_low, b_grads = _backward([grad], x, [ctx.linear], low)
        a_grads = [None] if x is None else _a_grads(grad_low, x, [ctx.linear])
        return (grad_x, grad, None, *a_grads, *b_grads)


def projection(x: torch.Tensor, linear: AdaptedLinear, residual: torch.Tensor) -> torch.Tensor:
    """residual + linear(x)."""
    result: torch.Tensor = _Projection.apply(x, residual, linear, *_factors([linear]))
    return result


class _SwigluProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, residual: torch.Tensor, linear: AdaptedLinear, *_: torch.Tensor
    ) -> torch.Tensor:
        x = swiglu(gate, up)
        low = None if linear.a is None else x @ linear.a.to(x.dtype).T
        ctx.save_for_backward(gate, up, low)
        ctx.linear = linear
        return _apply(x, linear, low, residual)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up, low = ctx.saved_tensors
        grad_x, grad_low, b_grads = _backward([grad], None, [ctx.linear], low)
        grad_gate, grad_up, x = swiglu_backward(grad_x, gate, up)
        return (grad_gate, grad_up, grad, None, *_a_grads(grad_low, x, [ctx.linear]), *b_grads)


def swiglu_projection(
    gate: torch.Tensor, up: torch.Tensor, linear: AdaptedLinear, residual: torch.Tensor
) -> torch.Tensor:
    """residual + linear(silu(gate) * up). Keeps gate and up only."""
    result: torch.Tensor = _SwigluProjection.apply(gate, up, residual, linear, *_factors([linear]))
    return result


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        return rotate_heads(x, weight, eps, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        return rotate_heads_backward(grad, x, weight, ctx.eps, cos, sin), None, None, None, None


def rotated_heads(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """``kernels.rotate_heads`` under autograd. x: [T, heads, dim]."""
    result: torch.Tensor = _RotatedHeads.apply(x, weight, eps, cos, sin)
    return result
