"""One training pass over fixed episodes, alone or as one of several ranks.

``python sharding_case.py OUT FOLDER`` runs all cases as a rank, and loads the model in FOLDER sharded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_model

from train.distributed import Ranks, join_ranks
from train.forward import action_logprobs, make_packs
from train.local_engine import load_model
from train.lora import adapter_parameters, adapter_state, attach_adapter, lora_config
from train.packing import TokenSequence
from train.sharding import is_sharded, shard_base, skeleton
from train.tree_decoder import structure_refusal

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
    assert structure_refusal(model.get_base_model()) is None, "a sharded layer too takes the fast path"
    mask = [False] * 6 + [True] * 2
    episodes = [TokenSequence([5, 6, 7, 8, 9, g, 20 + k, 30 + k], mask) for g in range(2) for k in range(3)]
    packs = make_packs(model, episodes, 4)
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


def memory_kib(key: str) -> int:
    """A figure of this process from /proc: VmRSS now, VmHWM at most."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(key))


def load_sharded(folder: str, ranks: Ranks) -> dict[str, Any]:
    """What ``python -m train --shard-base`` does: rank 0 reads, the others get their parts.

    ``peak_bytes``: how much more than before this rank needed at most, as each rank found it.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak (VmHWM) starts anew
    before = memory_kib("VmRSS")
    base = load_model(folder, "float32", "cpu") if ranks.driver else skeleton(folder)
    whole = sum(p.numel() * p.element_size() for p in base.parameters())
    model = attach_adapter(base, "skill", lora_config(4, 8), seed=1)
    shard_base(model, "cpu")
    peak = (memory_kib("VmHWM") - before) * 1024
    peaks: list[Any] = [None] * ranks.world
    torch.distributed.all_gather_object(peaks, peak)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    full = {n: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for n, p in model.named_parameters()}
    sign = 1.0 if ranks.driver else -1.0  # of two ranks: their sum is the difference
    differences = [float(ranks.sum(sign * tensor.double()).abs().max()) for tensor in full.values()]
    ids = torch.arange(2, 9)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    return {"peak_bytes": peaks, "whole": whole, "tied": tied, "differences": differences, "logits": logits,
            "buffers_meta": any(b.is_meta for b in model.buffers())}  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    joined, _ = join_ranks("cpu")
    results = [run_case(*case, joined, shard=True) for case in CASES]
    results.append(load_sharded(sys.argv[2], joined))  # last: by now all code is in memory
    if joined.driver:
        torch.save(results, sys.argv[1])
    joined.close()
