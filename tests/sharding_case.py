"""One training pass over fixed episodes, alone or as one of several ranks.

``python sharding_case.py OUT`` runs all cases as a rank.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from tiny_models import tiny_model

from train.distributed import Ranks, join_ranks
from train.forward import action_logprobs, make_packs
from train.lora import adapter_parameters, adapter_state, attach_adapter, lora_config
from train.packing import TokenSequence
from train.sharding import is_sharded, shard_base

CASES = [("qwen3", "none"), ("qwen3_moe", "all")]


def run_case(family: str, checkpoint: str, ranks: Ranks, shard: bool) -> dict[str, Any]:
    """Gradients and log-probs summed over ranks, bytes of the base held and in all, the adapter's tensors."""
    model = attach_adapter(tiny_model(family), "skill", lora_config(4, 8), seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in adapter_parameters(model, "skill").values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    whole = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "lora_" not in n)
    held = shard_base(model, "cpu") if shard else whole
    assert is_sharded(model) == shard
    mask = [False] * 6 + [True] * 2
    episodes = [TokenSequence([5, 6, 7, 8, 9, g, 20 + k, 30 + k], mask) for g in range(2) for k in range(3)]
    packs = make_packs(model, episodes, 12)
    assert len(packs) == 2
    total = 0.0
    for _ in range(2):  # twice: the second time the layers are gathered again
        for pack in packs[ranks.rank :: ranks.world]:
            logprobs, _ = action_logprobs(model, pack, 1.0, checkpoint=checkpoint)
            total += float(logprobs.detach().double().sum())
            (logprobs * torch.arange(1, len(logprobs) + 1)).sum().backward()
    grads = {n: ranks.sum(p.grad.clone()) for n, p in adapter_parameters(model, "skill").items()}
    sums = ranks.sum(torch.tensor([total], dtype=torch.float64))
    return {"grads": grads, "sum": sums, "held": held, "whole": whole, "state": adapter_state(model, "skill")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    joined, _ = join_ranks("cpu")
    results = [run_case(*case, joined, shard=True) for case in CASES]
    if joined.driver:
        torch.save(results, sys.argv[1])
    joined.close()
