"""Merges of adapters into one, the baselines that routing must beat. From files alone, without the base model.

    linear        W' = W + sum_i w_i D_i           D_i = s_i B_i A_i; exact: [w_1 s_1 B_1, ...] @ [A_1; ...]
    ties          trim each D_i to its largest entries, elect a sign per entry, mean of those that agree (Yadav 2023)
    dare_linear   drop entries of D_i at random, divide the rest by the density, then the sum (Yu 2023)
    dare_ties     drop at random, then elect signs as above

The last three are peft's functions on whole deltas, which is what ``add_weighted_adapter`` does for
``combination_type="ties_svd"`` and its like: ranks may differ, and the result is cut to a rank by SVD. (peft's forms
without ``_svd`` work on A and B apart and need equal ranks.)
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_gate.adapters import LoraAdapter, load_adapter
from moe_gate.factors import LoraFactors
from pipeline.files import InputError
from train.lora import write_peft_folder
from train.merge_methods import DENSITY, MergeMethod

_MEANS = ("ties", "dare_ties")  # they divide by the number of agreeing adapters themselves


@dataclasses.dataclass(frozen=True)
class MergePlan:
    """How adapters are merged.

    Args:
        weights: w_i; default 1/N each, or 1 where the method takes the mean itself.
        max_rank: cut above this rank (default: the sum of the ranks).
        density: share of entries kept by TIES and DARE.
        seed: of DARE's random choice.
    """

    method: MergeMethod = "linear"
    weights: tuple[float, ...] | None = None
    max_rank: int | None = None
    density: float = DENSITY
    seed: int = 0

    def shares(self, count: int) -> list[float]:
        """One weight per adapter.

        Raises:
            InputError: a wrong number of weights.
        """
        if self.weights is None:
            return [1.0 if self.method in _MEANS else 1.0 / count] * count
        if len(self.weights) != count:
            raise InputError(f"merge: expected {count} weights, found {len(self.weights)}")
        return list(self.weights)


def merge_adapters(
    folders: Mapping[str, str],
    target: Path,
    weights: Sequence[float] | None = None,
    max_rank: int | None = None,
    *,
    method: MergeMethod = "linear",
    density: float = DENSITY,
    seed: int = 0,
) -> int:
    """Write the merged adapter as the PEFT folder ``target``; arguments as in ``MergePlan``.

    Args:
        folders: name -> PEFT folder (or one-file form).

    Returns:
        The rank of the merged adapter.

    Raises:
        InputError: fewer than two adapters, a wrong number of weights, a density out of range, or fused expert weights.
    """
    plan = MergePlan(method, tuple(weights) if weights is not None else None, max_rank, density, seed)
    if len(folders) < 2:
        raise InputError(f"merge: expected two adapters or more, found {len(folders)}")
    if method != "linear" and not 0 < density <= 1:
        raise InputError(f"merge: expected a density in (0, 1], found {density}")
    adapters = [load_adapter(folder, name) for name, folder in folders.items()]
    shares = plan.shares(len(adapters))
    modules = sorted({module for adapter in adapters for module in adapter.factors})
    if fused := [m for m in modules if "experts" in m.rsplit(".", 1)[-1] or ".experts.base_layer" in m]:
        raise InputError(
            f"merge: {fused[0]} is a fused expert weight, which cannot be merged as a linear; drop --merge"
        )
    merged = dict(_merged(adapters, shares, modules, plan))
    rank = max(a.shape[0] for a, _ in merged.values())
    state = {}
    for module, (a, b) in merged.items():
        state[f"base_model.model.{module}.lora_A.weight"] = _pad(a, rank, 0).contiguous()
        state[f"base_model.model.{module}.lora_B.weight"] = _pad(b, rank, 1).contiguous()
    write_peft_folder(target, state, _config(adapters, modules, rank))
    return rank


def _merged(
    adapters: Sequence[LoraAdapter], shares: Sequence[float], modules: Sequence[str], plan: MergePlan
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Module by module A [r, in] and B [out, r]; an adapter that leaves a module alone adds nothing there."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        for module in modules:
            present = [(a.factors[module], w) for a, w in zip(adapters, shares, strict=True) if module in a.factors]
            yield module, _concatenated(present, plan) if plan.method == "linear" else _sparse(present, plan)


def _concatenated(parts: Sequence[tuple[LoraFactors, float]], plan: MergePlan) -> tuple[Tensor, Tensor]:
    a = torch.cat([f.A.float() for f, _ in parts], dim=0)
    b = torch.cat([f.B.float() * (share * f.scaling) for f, share in parts], dim=1)
    return (a, b) if plan.max_rank is None or a.shape[0] <= plan.max_rank else truncate(a, b, plan.max_rank)


def _sparse(parts: Sequence[tuple[LoraFactors, float]], plan: MergePlan) -> tuple[Tensor, Tensor]:
    from peft.utils.merge_utils import dare_linear, dare_ties, ties

    function = {"ties": ties, "dare_linear": dare_linear, "dare_ties": dare_ties}[plan.method]
    deltas = [(f.B.float() @ f.A.float()) * f.scaling for f, _ in parts]
    weights = torch.tensor([share for _, share in parts])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The density .* no pruning")  # density 1 was asked for
        merged = function(deltas, weights, plan.density)
    rank = min(sum(f.rank for f, _ in parts), *merged.shape)
    return split(merged, rank if plan.max_rank is None else min(rank, plan.max_rank))


def split(delta: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best A [rank, in] and B [out, rank] of ``delta [out, in]``; on a GPU where there is one (a full SVD)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    u, s, vh = torch.linalg.svd(delta.to(device), full_matrices=False)
    root = s[:rank].sqrt()
    return (root[:, None] * vh[:rank]).cpu(), (u[:, :rank] * root).cpu()


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
