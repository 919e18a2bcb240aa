"""Linear merge of adapters, the baseline that routing must beat: W' = W + sum_i w_i s_i B_i A_i, exactly.

The sum of low-rank products is one product of stacked factors, ``[w_1 s_1 B_1, ...] @ [A_1; ...]``, of rank sum r_i:
what peft's ``add_weighted_adapter(combination_type="cat")`` builds, here from files alone. A server's rank limit is
met by the best approximation of lower rank (truncated SVD).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_gate.adapters import LoraAdapter, load_adapter
from moe_gate.factors import LoraFactors
from pipeline.files import InputError
from train.lora import write_peft_folder


def merge_adapters(
    folders: Mapping[str, str], target: Path, weights: Sequence[float] | None = None, max_rank: int | None = None
) -> int:
    """Write the merged adapter as the PEFT folder ``target``.

    Args:
        folders: name -> PEFT folder (or one-file form).
        weights: w_i; default 1/N each.
        max_rank: truncate above this rank.

    Returns:
        The rank of the merged adapter.

    Raises:
        InputError: fewer than two adapters, a wrong number of weights, or fused expert weights.
    """
    if len(folders) < 2:
        raise InputError(f"merge: expected two adapters or more, found {len(folders)}")
    adapters = [load_adapter(folder, name) for name, folder in folders.items()]
    shares = list(weights) if weights is not None else [1.0 / len(adapters)] * len(adapters)
    if len(shares) != len(adapters):
        raise InputError(f"merge: expected {len(adapters)} weights, found {len(shares)}")
    modules = sorted({module for adapter in adapters for module in adapter.factors})
    if fused := [m for m in modules if "experts" in m.rsplit(".", 1)[-1] or ".experts.base_layer" in m]:
        raise InputError(
            f"merge: {fused[0]} is a fused expert weight, which cannot be merged as a linear; drop --merge"
        )
    merged = {m: _merge_module(adapters, shares, m, max_rank) for m in modules}
    rank = max(a.shape[0] for a, _ in merged.values())
    state = {}
    for module, (a, b) in merged.items():
        state[f"base_model.model.{module}.lora_A.weight"] = _pad(a, rank, 0).contiguous()
        state[f"base_model.model.{module}.lora_B.weight"] = _pad(b, rank, 1).contiguous()
    write_peft_folder(target, state, _config(adapters, modules, rank))
    return rank


def _merge_module(
    adapters: Sequence[LoraAdapter], shares: Sequence[float], module: str, max_rank: int | None
) -> tuple[Tensor, Tensor]:
    """A [r, in], B [out, r] of one module; an adapter that leaves it alone adds nothing."""
    parts: list[tuple[LoraFactors, float]] = [
        (adapter.factors[module], share)
        for adapter, share in zip(adapters, shares, strict=True)
        if module in adapter.factors
    ]
    a = torch.cat([f.A.float() for f, _ in parts], dim=0)
    b = torch.cat([f.B.float() * (share * f.scaling) for f, share in parts], dim=1)
    return (a, b) if max_rank is None or a.shape[0] <= max_rank else truncate(a, b, max_rank)


def truncate(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of ``b @ a`` of rank ``rank``, as A [rank, in] and B [out, rank]; only small SVDs."""
    q_b, r_b = torch.linalg.qr(b)
    q_a, r_a = torch.linalg.qr(a.T)
    u, s, vh = torch.linalg.svd(r_b @ r_a.T)
    root = s[:rank].sqrt()
    return (root[:, None] * vh[:rank]) @ q_a.T, (q_b @ u[:, :rank]) * root


def _pad(tensor: Tensor, rank: int, dim: int) -> Tensor:
    missing = rank - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)


def _config(adapters: Sequence[LoraAdapter], modules: Sequence[str], rank: int) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapters[0].settings.base_model_name_or_path,
        "r": rank,
        "lora_alpha": rank,  # scale 1: the scales are in B
        "target_modules": sorted({module.rsplit(".", 1)[-1] for module in modules}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
