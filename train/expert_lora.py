"""LoRA on the fused experts of a mixture-of-experts layer (Qwen3-MoE in transformers >= 5).

transformers holds gate and up of all experts in one tensor; the published adapters, vLLM and peft's files know three
projections per expert, each of rank r. This module trains exactly those: 3 r (d + f) parameters per expert (1.7 B
with attention at
rank 32 on Qwen3-30B-A3B), and saves them under the names ``experts.<i>.{gate,up,down}_proj.lora_{A,B}.weight``. The
router stays frozen; gradients flow through its weights into the hidden states.
"""

from __future__ import annotations

import math
import re
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer

from train.kernels import swiglu, swiglu_backward

EXPERT_TARGETS = ("gate_proj", "up_proj", "down_proj")


def grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows of x [N, k] times their expert's weight [E, out, k] transposed: [N, out].

    Args:
        ends: [E] int32, end of each expert's rows.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    out = x.new_empty(len(x), weight.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert].T, out=out[start:end])
        start = end
    return out


def grouped_outer(y: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Sum over each expert's rows of y [N, out] outer x [N, k]: [E, out, k]; zero for an expert without rows."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        product = torch._grouped_mm(y.T, x, offs=ends)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return product.masked_fill_((counts == 0)[:, None, None], 0.0)
    out = x.new_zeros(len(ends), y.shape[1], x.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(y[start:end].T, x[start:end], out=out[expert])
        start = end
    return out


class _Experts(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)) of sorted rows, all with LoRA. Keeps the hidden states, gate and up, and the low-
    rank products."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, top_k: int, gate_up: torch.Tensor,
        down: torch.Tensor, in_a: torch.Tensor, in_b: torch.Tensor, out_a: torch.Tensor, out_b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:  # fmt: skip
        x = hidden[order // top_k]
        rank = out_a.shape[1]
        factors = [f.to(x.dtype) for f in (in_a, in_b, out_a, out_b)]
        low_in = grouped_product(x, factors[0], ends)
        both = grouped_product(x, gate_up, ends)
        gate, up = both.chunk(2, dim=1)
        gate.add_(grouped_product(low_in[:, :rank], factors[1][:, 0], ends), alpha=scale)
        up.add_(grouped_product(low_in[:, rank:], factors[1][:, 1], ends), alpha=scale)
        inner = swiglu(gate, up)
        low_out = grouped_product(inner, factors[2], ends)
        y = grouped_product(inner, down, ends)
        y.add_(grouped_product(low_out, factors[3], ends), alpha=scale)
        ctx.save_for_backward(hidden, order, ends, both, low_in, low_out, gate_up, down, in_a, in_b, out_a, out_b)
        ctx.scale, ctx.top_k = scale, top_k
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, order, ends, both, low_in, low_out, gate_up, down, *masters = ctx.saved_tensors
        in_a, in_b, out_a, out_b = (f.to(grad.dtype) for f in masters)
        scale, rank = ctx.scale, out_a.shape[1]
        grad = grad.contiguous()
        grad_low_out = grouped_product(grad, out_b.transpose(1, 2), ends).mul_(scale)
        grad_inner = grouped_product(grad, down.transpose(1, 2), ends)
        grad_inner.add_(grouped_product(grad_low_out, out_a.transpose(1, 2), ends))
        gate, up = both.chunk(2, dim=1)
        grad_gate, grad_up, inner = swiglu_backward(grad_inner, gate, up)
        grad_both = torch.cat((grad_gate, grad_up), dim=1)
        low_grads = [
            grouped_product(part, in_b[:, i].transpose(1, 2), ends) for i, part in enumerate((grad_gate, grad_up))
        ]
        grad_low_in = torch.cat(low_grads, dim=1).mul_(scale)
        grad_x = grouped_product(grad_both, gate_up.transpose(1, 2), ends)
        grad_x.add_(grouped_product(grad_low_in, in_a.transpose(1, 2), ends))
        x = hidden[order // ctx.top_k]
        grad_in_b = torch.stack(
            [
                grouped_outer(part.contiguous(), low_in[:, i * rank : (i + 1) * rank].contiguous(), ends)
                for i, part in enumerate((grad_gate, grad_up))
            ],
            dim=1,
        )
        return (
            _gather_rows(grad_x, order, ctx.top_k), None, None, None, None, None,
            grouped_outer(grad_low_in, x, ends).float(), grad_in_b.float().mul_(scale),
            grouped_outer(grad_low_out, inner, ends).float(), grouped_outer(grad, low_out, ends).float().mul_(scale),
            None,
        )  # fmt: skip


def _gather_rows(rows: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
    """Sum of the ``top_k`` sorted rows of every token: [T, d], in a fixed order (no atomics)."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return rows[back].view(-1, top_k, rows.shape[1]).sum(1)


class ExpertsLora(torch.nn.Module, BaseTunerLayer):
    """Wraps an experts module; adapters are switched, disabled and frozen by peft as those of linear layers are.

    Per adapter: lora_in_A [E, 2 r, d] (gate's rows, then up's), lora_in_B [E, 2, f, r], lora_out_A [E, r, f],
    lora_out_B [E, d, r].
    """

    adapter_layer_names = ("lora_in_A", "lora_in_B", "lora_out_A", "lora_out_B")
    lora_in_A: torch.nn.ParameterDict
    lora_in_B: torch.nn.ParameterDict
    lora_out_A: torch.nn.ParameterDict
    lora_out_B: torch.nn.ParameterDict
    base_layer: Any  # an experts module: gate_up_proj [E, 2 f, d], down_proj [E, d, f]

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        for name in self.adapter_layer_names:
            setattr(self, name, torch.nn.ParameterDict())
        self.scaling: dict[str, float] = {}
        self._active_adapter: list[str] = []

    def add(self, name: str, rank: int, alpha: int) -> None:
        """A fresh adapter: A uniform in +-1/sqrt(in) as in a linear layer, B zero, fp32."""
        n_experts, double, hidden = self.base_layer.gate_up_proj.shape
        inner, device = double // 2, self.base_layer.gate_up_proj.device

        def uniform(*shape: int) -> torch.nn.Parameter:
            bound = 1 / math.sqrt(shape[-1])
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=torch.float32).uniform_(-bound, bound))

        def zero(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, device=device, dtype=torch.float32))

        self.lora_in_A[name] = uniform(n_experts, 2 * rank, hidden)
        self.lora_in_B[name] = zero(n_experts, 2, inner, rank)
        self.lora_out_A[name] = uniform(n_experts, rank, inner)
        self.lora_out_B[name] = zero(n_experts, hidden, rank)
        self.scaling[name] = alpha / rank

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As the base module: hidden_states [T, d], top_k_index and top_k_weights [T, k]; returns [T, d]."""
        names = [n for n in cast(list[str], self.active_adapters) if n in self.lora_in_A]
        if self.disable_adapters or not names:
            result: torch.Tensor = self.base_layer(hidden_states, top_k_index, top_k_weights)
            return result
        (name,) = names
        top_k = top_k_index.shape[1]
        order = torch.argsort(top_k_index.flatten(), stable=True)
        counts = torch.bincount(top_k_index.flatten(), minlength=len(self.lora_in_A[name]))
        rows = _Experts.apply(
            hidden_states, order, counts.cumsum(0).int(), top_k, self.base_layer.gate_up_proj,
            self.base_layer.down_proj, *(getattr(self, layer)[name] for layer in self.adapter_layer_names),
            self.scaling[name],
        )  # fmt: skip
        weights = top_k_weights.flatten()[order, None].to(rows.dtype)
        return _Sum.apply(rows * weights, order, top_k)


LoraLayer.register(ExpertsLora)  # so that peft's set_adapter, which asks for LoraLayer, switches it too


class _Sum(torch.autograd.Function):
    """``_gather_rows`` under autograd."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return _gather_rows(rows, order, top_k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grad[order // ctx.top_k], None, None


# ---------------------------------------------------------------------- in a model


def fused_experts(model: Any) -> dict[str, torch.nn.Module]:
    """Experts modules of ``model`` that hold all experts in two tensors, by name; wrapped ones as their wrapper."""
    found = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            base = module.base_layer if isinstance(module, ExpertsLora) else module
            if getattr(base, "gate_up_proj", None) is not None and getattr(base, "down_proj", None) is not None:
                found[name] = module
    return found


def add_expert_adapters(model: Any, name: str, rank: int, alpha: int) -> int:
    """Give every experts module of ``model`` an adapter ``name``. Returns how many there are."""
    experts = fused_experts(model)
    for path, module in experts.items():
        if not isinstance(module, ExpertsLora):
            wrapped = ExpertsLora(module)
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, wrapped)
            module = wrapped
        module.add(name, rank, alpha)
    return len(experts)


def on_cpu(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A copy without history on the CPU, cast to ``dtype`` before it travels."""
    return tensor.detach().to(dtype or tensor.dtype).to("cpu").contiguous()


def expert_state(model: Any, name: str, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The expert adapters' tensors under the published names, on the CPU, in ``dtype`` if one is given."""
    state: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, ExpertsLora) and name in module.lora_in_A:
            in_a, in_b, out_a, out_b = (
                on_cpu(getattr(module, layer)[name], dtype) for layer in ExpertsLora.adapter_layer_names
            )
            rank = out_a.shape[1]
            for i in range(len(in_a)):
                pairs = {
                    "gate_proj": (in_a[i, :rank], in_b[i, 0]),
                    "up_proj": (in_a[i, rank:], in_b[i, 1]),
                    "down_proj": (out_a[i], out_b[i]),
                }
                for target, (a, b) in pairs.items():
                    state[f"{path}.{i}.{target}.lora_A.weight"] = a.contiguous()
                    state[f"{path}.{i}.{target}.lora_B.weight"] = b.contiguous()
    return state


_EXPERT_KEY = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.lora_[AB]\.weight$")


def is_expert_parameter(key: str) -> bool:
    """Is this the name, in the model, of a parameter of ``ExpertsLora``?"""
    return ".mlp.experts.lora_" in key


def is_expert_key(key: str) -> bool:
    """Is this one of the names that ``expert_state`` gives?"""
    return _EXPERT_KEY.search(key) is not None


@torch.no_grad()
def restore_experts(model: Any, name: str, state: dict[str, torch.Tensor]) -> None:
    """Put tensors named as by ``expert_state`` (all of them) back into the adapter ``name``."""
    for path, module in model.named_modules():
        if isinstance(module, ExpertsLora) and name in module.lora_in_A:
            n_experts = len(module.lora_in_A[name])

            def stacked(target: str, factor: str, path: str = path, n: int = n_experts) -> torch.Tensor:
                return torch.stack([state[f"{path}.{i}.{target}.lora_{factor}.weight"] for i in range(n)])

            module.lora_in_A[name].copy_(torch.cat([stacked("gate_proj", "A"), stacked("up_proj", "A")], dim=1))
            module.lora_in_B[name].copy_(torch.stack([stacked("gate_proj", "B"), stacked("up_proj", "B")], dim=1))
            module.lora_out_A[name].copy_(stacked("down_proj", "A"))
            module.lora_out_B[name].copy_(stacked("down_proj", "B"))
