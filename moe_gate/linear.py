"""A linear with N stacked LoRA adapters, of which each token uses the one on its route.

    y_t = W x_t + B (mask_t * (A x_t))       A: [R, in], B: [out, R], R = sum of the adapters' ranks, mask_t: [R]

The cost is that of one adapter of rank R: two dense matmuls, no sort, no loop over adapters. Unequal ranks need no
padding, an adapter that does not touch this linear has no rows. Exact for one-hot routes and for soft mixtures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_gate.factors import LoraFactors
from moe_gate.routing import LayerRoute, RowLayout
from pipeline.files import InputError


def row_layout(factors: Sequence[LoraFactors | None], first_slot: int) -> RowLayout:
    """The layout of the rows of ``stack(factors)``; adapter i has slot ``first_slot + i``."""
    slots: list[int] = []
    scales: list[float] = []
    for i, pair in enumerate(factors):
        if pair is not None:
            slots += [first_slot + i] * pair.rank
            scales += [pair.scaling] * pair.rank
    return RowLayout(tuple(slots), tuple(scales))


def stack(factors: Sequence[LoraFactors | None], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A ``[(E,) R, in]`` and B ``[(E,) out, R]`` of all adapters, one below (beside) the other."""
    present = [pair for pair in factors if pair is not None]
    a = torch.cat([pair.A.to(device=device, dtype=dtype) for pair in present], dim=-2)
    b = torch.cat([pair.B.to(device=device, dtype=dtype) for pair in present], dim=-1)
    return a.contiguous(), b.contiguous()


class MultiLoRAGatedLinear(nn.Linear):
    """``nn.Linear`` that keeps the base's own parameters (and their names) and adds ``lora_A``, ``lora_B``.

    Args:
        base: the linear to adapt; its weight and bias are taken over, not copied.
        factors: one entry per adapter in slot order, None where an adapter leaves this linear alone.
        route: the route of the decoder layer that this linear belongs to.
        layout_index: which of ``route``'s row layouts the stacked rows have.
        module: the path of the linear, for messages.

    Raises:
        InputError: a factor does not fit the linear, or the linear is quantised or of another foreign kind.
    """

    route: LayerRoute

    def __init__(
        self, base: nn.Linear, factors: Sequence[LoraFactors | None], route: LayerRoute, layout_index: int, module: str
    ) -> None:
        nn.Module.__init__(self)
        if type(base) is not nn.Linear:
            raise InputError(
                f"{module}: expected a plain linear, found {type(base).__name__}; load the base without quantisation"
            )
        for pair in factors:
            if pair is not None and (pair.A.shape[-1] != base.in_features or pair.B.shape[0] != base.out_features):
                raise InputError(
                    f"{module}: adapter of shape [{pair.B.shape[0]}, {pair.A.shape[-1]}] on a linear of shape "
                    f"[{base.out_features}, {base.in_features}]; the adapter belongs to another base model"
                )
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        a, b = stack(factors, base.weight.dtype, base.weight.device)
        self.lora_A = nn.Parameter(a, requires_grad=False)
        self.lora_B = nn.Parameter(b, requires_grad=False)
        self.layout_index = layout_index
        object.__setattr__(self, "route", route)  # a reference, not a submodule: the layer owns it

    def forward(self, input: Tensor) -> Tensor:
        """``input [..., in]`` -> ``[..., out]``, tokens in the order of the layer's input."""
        output = F.linear(input, self.weight, self.bias)
        mask = self.route.mask(self.layout_index)
        if mask is None:
            return output
        low = F.linear(input.flatten(0, -2), self.lora_A) * mask
        # In place: out of place addmm first copies ``output``, one more pass over the largest tensor. No backward needs
        # the output of a linear.
        output.flatten(0, -2).addmm_(low, self.lora_B.t())
        return output

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, stacked_rank={self.lora_A.shape[0]}"
