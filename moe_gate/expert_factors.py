"""LoRA factors on mixture-of-experts weights, in the one form that the routed experts use.

Fused parameters: ``gate_up_proj [E, 2I, H]``, ``down_proj [E, H, I]``; factors ``A [E, r, in]``, ``B [E, out, r]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moe_gate.experts import FUSED_PARAMETERS
from moe_gate.factors import LoraFactors
from pipeline.files import InputError

_SINGLE_EXPERT = re.compile(r"^(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj)$")
_PEFT_WRAPPER = re.compile(r"^(?P<experts>.+\.experts)(?:\.base_layer)*$")


def fuse_expert_factors(factors: Mapping[str, LoraFactors], model: nn.Module, adapter: str) -> dict[str, LoraFactors]:
    """Factors on experts as ``<experts>.<parameter>`` with ``A [E, r, in]``, ``B [E, out, r]``; others unchanged.

    Two source forms: peft's wrapper of a fused parameter (A ``[E r, in]``, B ``[out, r E]``), and one pair per expert
    and projection (transformers v4, vLLM), where gate and up become one pair of rank 2r with a block-diagonal B.

    Raises:
        InputError: an expert of a layer is missing, or the shapes fit neither fused parameter.
    """
    fused: dict[str, LoraFactors] = {}
    singles: dict[str, dict[tuple[int, str], LoraFactors]] = {}
    for module, pair in factors.items():
        single, wrapper = _SINGLE_EXPERT.match(module), _PEFT_WRAPPER.match(module)
        if single and not _has_module(model, module):
            singles.setdefault(single["experts"], {})[int(single["number"]), single["part"]] = pair
        elif wrapper:
            parameter, unfolded = _unfold(pair, _experts(model, wrapper["experts"], adapter), f"{adapter}: {module}")
            fused[f"{wrapper['experts']}.{parameter}"] = unfolded
        else:
            fused[module] = pair
    for path, parts in singles.items():
        fused |= _fuse_singles(path, parts, _experts(model, path, adapter), adapter)
    return fused


def _has_module(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _experts(model: nn.Module, path: str, adapter: str) -> Any:
    if not _has_module(model, path):
        raise InputError(f"adapter {adapter}: {path} is not in the base model; the adapter belongs to another base")
    experts = model.get_submodule(path)
    plain = all(isinstance(getattr(experts, name, None), nn.Parameter) for name in FUSED_PARAMETERS)
    if not plain or getattr(experts, "is_transposed", False) or getattr(experts, "has_bias", False):
        raise InputError(
            f"{path}: experts of kind {type(experts).__name__} are not supported; adapt the attention only"
        )
    return experts


def _unfold(pair: LoraFactors, experts: Any, where: str) -> tuple[str, LoraFactors]:
    for name in FUSED_PARAMETERS:
        count, out_features, in_features = getattr(experts, name).shape
        if pair.A.shape[1] == in_features and pair.B.shape[0] == out_features and pair.A.shape[0] % count == 0:
            a = pair.A.reshape(count, -1, in_features)
            b = pair.B.reshape(out_features, -1, count).permute(2, 0, 1)
            return name, LoraFactors(a, b, pair.scaling)
    raise InputError(f"{where}: A {tuple(pair.A.shape)}, B {tuple(pair.B.shape)} fit no fused parameter of the experts")


def _fuse_singles(
    path: str, parts: Mapping[tuple[int, str], LoraFactors], experts: Any, adapter: str
) -> dict[str, LoraFactors]:
    count = experts.gate_up_proj.shape[0]
    names = {part for _, part in parts}
    for number in range(count):
        for part in names:
            if (number, part) not in parts:
                raise InputError(f"adapter {adapter}: {path}.{number}.{part} is missing; every expert must be adapted")
    if len(parts) != count * len(names):
        raise InputError(f"adapter {adapter}: {path} has experts beyond the base's {count}; it belongs to another base")
    fused: dict[str, LoraFactors] = {}
    if "down_proj" in names:
        down = [parts[e, "down_proj"] for e in range(count)]
        fused[f"{path}.down_proj"] = LoraFactors(
            torch.stack([p.A for p in down]), torch.stack([p.B for p in down]), _one_scaling(down, path)
        )
    if names & {"gate_proj", "up_proj"}:
        fused[f"{path}.gate_up_proj"] = _gate_up(path, parts, names, count, experts.gate_up_proj.shape[1] // 2)
    return fused


def _gate_up(
    path: str, parts: Mapping[tuple[int, str], LoraFactors], names: Iterable[str], count: int, width: int
) -> LoraFactors:
    sides = [name for name in ("gate_proj", "up_proj") if name in names]
    a, b = [], []
    for e in range(count):
        pairs = [parts[e, side] for side in sides]
        a.append(torch.cat([p.A for p in pairs]))
        whole = torch.zeros(2 * width, a[-1].shape[0], dtype=pairs[0].B.dtype, device=pairs[0].B.device)
        row = 0
        for side, p in zip(sides, pairs, strict=True):
            top = 0 if side == "gate_proj" else width
            whole[top : top + width, row : row + p.rank] = p.B
            row += p.rank
        b.append(whole)
    return LoraFactors(
        torch.stack(a), torch.stack(b), _one_scaling([parts[e, s] for e in range(count) for s in sides], path)
    )


def _one_scaling(pairs: Sequence[LoraFactors], path: str) -> float:
    scalings = {pair.scaling for pair in pairs}
    if len(scalings) > 1 or len({pair.rank for pair in pairs}) > 1:
        raise InputError(f"{path}: experts of one adapter with different ranks or scalings are not supported")
    return scalings.pop()
