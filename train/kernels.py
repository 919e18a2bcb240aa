"""Elementwise pieces of a decoder layer and their derivatives, as functions of plain tensors.

On a GPU each is compiled into one kernel (``torch.compile``); on the CPU they run as written. The norm's weight is
frozen, so no derivative with respect to it exists here. Inner arithmetic is fp32, results have the dtype of the
input.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch._inductor.config as inductor

F = TypeVar("F", bound=Callable[..., Any])


def use_deterministic_kernels() -> None:
    """Let every update of this process give the same bits each time, on every GPU of one kind.

    Kernels are then chosen without timing them, and none adds up in an order that chance decides: a chain too goes
    through FlexAttention, since the backward of ordinary causal attention does. Not covered is the own attention of
    models that train one episode per row (``can_pack``). PyTorch warns where an operation has no such form. To be
    called before the first computation on a GPU.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    inductor.deterministic = True


def fused_on_gpu(function: F) -> F:
    """``function``, compiled when its first argument is on a GPU."""
    compiled = torch.compile(function)

    def call(*args: Any) -> Any:
        return (compiled if args[0].is_cuda else function)(*args)

    return call  # type: ignore[return-value]


@fused_on_gpu
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last axis."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rms_norm_grad(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit = wide * inverse
    inner = grad.float() * weight.float()
    return (inverse * (inner - unit * (inner * unit).mean(-1, keepdim=True))).to(x.dtype)


rms_norm_backward = fused_on_gpu(_rms_norm_grad)
"""Derivative of ``rms_norm`` in x, applied to ``grad``."""


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@fused_on_gpu
def rotate_heads(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Rotary embedding of x [T, heads, dim] by cos, sin [T, dim], with a norm per head if ``weight`` [dim] is given."""
    wide = x.float()
    if weight is not None:
        wide = weight.float() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))
    return (wide * cos[:, None].float() + _rotate_half(wide) * sin[:, None].float()).to(x.dtype)


@fused_on_gpu
def rotate_heads_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Derivative of ``rotate_heads`` in x, applied to ``grad``."""
    wide = grad.float()
    # the transpose of rotate_half is -it
    inner = wide * cos[:, None].float() - _rotate_half(wide * sin[:, None].float())
    return inner.to(x.dtype) if weight is None else _rms_norm_grad(inner, x, weight, eps)


@fused_on_gpu
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return torch.nn.functional.silu(gate) * up


@fused_on_gpu
def swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Derivatives of ``swiglu`` in gate and up, applied to ``grad``, and its value again."""
    active = torch.nn.functional.silu(gate)
    return torch.ops.aten.silu_backward(grad * up, gate), grad * active, active * up
