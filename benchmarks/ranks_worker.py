"""One rank of the data-parallel and the sharded measurement; started by ``bench_ranks.py`` through torchrun.

Every rank holds the same model and the same groups. Alone: each rank computes everything by itself. Together: the
learner of ``python -m train`` over all ranks. Sharded: the same with the frozen layers sharded over the ranks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.grpo_step_variants import PRESETS, TARGETS, build_model, group_items, timed  # noqa: E402
from game_registry import GameMix  # noqa: E402
from pipeline.files import write_json  # noqa: E402
from train.distributed import Ranks, join_ranks  # noqa: E402
from train.kernels import use_deterministic_kernels  # noqa: E402
from train.learner import Learner, TrainItem, UpdateConfig  # noqa: E402
from train.lora import attach_adapter, lora_config  # noqa: E402
from train.losses import LossConfig  # noqa: E402
from train.sharding import shard_base  # noqa: E402


def batch(preset: Any, groups: int) -> list[TrainItem]:
    """``groups`` groups of the preset, one pack each at its token budget."""
    items = []
    for g in range(groups):
        items += [TrainItem(i.sequence, i.advantage, i.sampler_logprobs, g) for i in group_items(preset, seed=g)]
    return items


def new_learner(model: Any, ranks: Ranks, sharded: bool) -> Learner:
    return Learner(
        model, "bench", GameMix.parse("bench"), lr=0.0, weight_decay=0.0, seed=0,
        reduce=ranks.sum, rank=ranks.rank, world=ranks.world, sharded=sharded,
    )  # fmt: skip


def gradient(learner: Learner) -> torch.Tensor:
    """[all] of the last update, as the optimiser saw it."""
    return torch.cat([p.grad.reshape(-1).double() for p in learner.parameters.values()])  # type: ignore[union-attr]


def memory_gib(device: str, peak: bool) -> float | None:
    if not device.startswith("cuda"):
        return None
    used = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    return round(used / 2**30, 3)


def measure(
    learner: Learner, items: list[TrainItem], config: UpdateConfig, device: str, repeats: int
) -> dict[str, Any]:
    kind = device.partition(":")[0]
    held = memory_gib(device, peak=False)
    first = timed(lambda: learner.update(items, config), 1, kind)
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = timed(lambda: learner.update(items, config), repeats, kind)
    metrics = learner.update(items, config)
    return {
        "step_s": sorted(times)[len(times) // 2], "first_s": first[0], "loss": metrics["loss"],
        "grad_norm": metrics["grad_norm"], "packs": metrics["packs"], "held_gib": held,
        "peak_gib": memory_gib(device, peak=True),
    }  # fmt: skip


def run(preset: Any, ranks: Ranks, device: str, groups: int, repeats: int, shard: bool) -> dict[str, Any]:
    """Results of this rank."""
    items = batch(preset, groups)
    tokens = preset.prompt + preset.group * preset.suffix
    config = UpdateConfig(LossConfig(), 1.0, pack_tokens=max(tokens, 64))
    model = build_model(preset, device)  # random numbers differ between devices
    model = model.to("cpu") if shard else model
    model.requires_grad_(False)
    lora = lora_config(preset.rank, preset.rank, tuple(TARGETS))
    model = attach_adapter(model, "bench", lora, seed=0)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # B = 0 would leave the gradient of A out of the comparison
            parameter.data.copy_(0.01 * torch.randn(parameter.shape, generator=generator))
    result: dict[str, Any] = {}
    if shard:
        # no list of them: it would keep the whole weights on the device
        named = model.named_parameters()
        result["base_bytes"] = sum(p.numel() * p.element_size() for n, p in named if "lora_" not in n)
        result["base_bytes_held"] = shard_base(model, device.partition(":")[0])
        learner = new_learner(model, ranks, sharded=True)
        result["sharded"] = measure(learner, items, config, device, repeats)
        result["gradient"] = gradient(learner).cpu()
        return result
    alone = new_learner(model, Ranks(), sharded=False)
    result["alone"] = measure(alone, items, config, device, repeats)
    one = gradient(alone)
    mean = ranks.sum(one.clone()) / ranks.world  # the same computation on every device: what its kernels differ by
    result["relative_difference_alone"] = float((one - mean).norm() / mean.norm())
    together = new_learner(model, ranks, sharded=False)
    result["together"] = measure(together, items, config, device, repeats)
    two = gradient(together)
    result["relative_gradient_error"] = float((two - one).norm() / one.norm())
    result["gradient"] = one.cpu()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=sorted(PRESETS), required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="folder: one JSON per rank, gradients of rank 0")
    args = parser.parse_args()
    if args.deterministic:
        use_deterministic_kernels()
    ranks, device = join_ranks()
    try:
        result = run(PRESETS[args.preset], ranks, device, args.groups, args.repeats, args.shard)
        name = "sharded" if args.shard else "whole"
        found = result.pop("gradient")
        if ranks.driver:
            torch.save(found, args.out / f"{name}.pt")
        write_json(args.out / f"{name}_rank{ranks.rank}.json", result)
    finally:
        ranks.close()


if __name__ == "__main__":
    main()
