"""Fused mixture-of-experts weights (transformers v5) with N stacked LoRA adapters, routed by capability.

The experts hold ``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]``. For a token t that the model's own router
sends to expert e with weight p:

    u = W_gu[e] x_t + B_gu[e] (mask_t * (A_gu[e] x_t))        h = act(u_gate) * u_up
    y_t += p (W_d[e] h + B_d[e] (mask_t * (A_d[e] h)))        A[e]: [R, in], B[e]: [out, R]

The two routers are unrelated: the model's picks experts, ours picks the adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_gate.factors import LoraFactors
from moe_gate.linear import stack
from moe_gate.routing import LayerRoute

FUSED_PARAMETERS = ("gate_up_proj", "down_proj")


class MultiLoRAGatedExperts:
    """Mixed into an experts module's class by ``route_experts``: same parameters, a forward that adds the routed
    LoRA."""

    capability_route: LayerRoute
    capability_layouts: dict[str, int]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``hidden_states [T, H]``, ``top_k_index [T, K]``, ``top_k_weights [T, K]`` -> ``[T, H]``."""
        masks = {name: self.capability_route.mask(index) for name, index in self.capability_layouts.items()}
        if all(mask is None for mask in masks.values()):
            base: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)  # type: ignore[misc]
            return base
        tokens, top_k = top_k_index.shape
        expert_of_pair, order = top_k_index.reshape(-1).sort()
        token_of_pair = order // top_k
        experts: Any = self
        offsets = torch.histc(expert_of_pair.float(), experts.num_experts, 0, experts.num_experts - 1).cumsum(0).int()
        x = hidden_states[token_of_pair]
        up = self._projected("gate_up_proj", x, offsets, token_of_pair, masks)
        h = experts._apply_gate(up)
        down = self._projected("down_proj", h, offsets, token_of_pair, masks)
        weighted = down * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        unsorted = torch.empty_like(weighted).index_copy(0, order, weighted)  # sum in a fixed order: deterministic
        return unsorted.view(tokens, top_k, -1).sum(1).to(hidden_states.dtype)

    def _projected(
        self, name: str, x: Tensor, offsets: Tensor, token_of_pair: Tensor, masks: Mapping[str, Tensor | None]
    ) -> Tensor:
        experts: Any = self
        output = grouped_linear(x, getattr(experts, name), offsets)
        mask = masks.get(name)
        if mask is None:
            return output
        low = grouped_linear(x, getattr(experts, f"lora_A_{name}"), offsets) * mask[token_of_pair]
        return output + grouped_linear(low, getattr(experts, f"lora_B_{name}"), offsets)


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows of ``x [P, in]``, sorted by expert, times their expert's ``weight [E, out, in]``; ``offsets [E]`` = end
    rows.

    One kernel where torch's fits (rows of whole 16 bytes; transformers uses it too, so that sums agree to the bit),
    else one matmul per expert in use.
    """
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if aligned and hasattr(F, "grouped_mm"):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)
    pieces, start = [], 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            pieces.append(F.linear(x[start:end], weight[expert]))
            start = end
    return torch.cat(pieces) if pieces else x.new_zeros(0, weight.shape[1])


def route_experts(
    experts: nn.Module,
    factors: Mapping[str, Sequence[LoraFactors | None]],
    route: LayerRoute,
    layouts: Mapping[str, int],
) -> None:
    """Turn an experts module into its routed form in place (its parameters keep their names and storage)."""
    for name, pairs in factors.items():
        weight: Tensor = getattr(experts, name)
        a, b = stack(pairs, weight.dtype, weight.device)
        experts.register_parameter(f"lora_A_{name}", nn.Parameter(a, requires_grad=False))
        experts.register_parameter(f"lora_B_{name}", nn.Parameter(b, requires_grad=False))
    object.__setattr__(experts, "capability_route", route)
    object.__setattr__(experts, "capability_layouts", dict(layouts))
    kind = type(experts)
    experts.__class__ = type(kind.__name__, (MultiLoRAGatedExperts, kind), {"__module__": __name__})
