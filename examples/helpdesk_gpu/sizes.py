"""How much the evidence run does: one object per size, chosen with ``--size``."""

from __future__ import annotations

import dataclasses
import math

from pipeline.files import InputError

LEAST_BUDGET = 2  # iterations


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is run.

    Args:
        budgets: iterations per adapter after which everything is measured; the last is the result.
        draws: how many random choices of ``count`` candidates stand against the filter's choice.
        parallel: stages at once.
        lora_rank: with ``alpha = 2 * rank``.
        plugin_flags: of the server that runs the exported routed model.

    Raises:
        InputError: a budget below 2. The gate learns from rollouts of the adapters, and the first iteration samples
            from the base.
    """

    mine_seeds: int
    mine_samples: int
    calibrate_seeds: int
    calibrate_samples: int
    group_size: int
    groups: int
    budgets: tuple[int, ...]
    lr: float
    lora_rank: int
    gate_steps: int
    gate_iters: int
    gate_min_reward: float
    score_seeds: str
    trials: int
    transfer_trials: int
    draws: int
    max_rows: int
    bootstrap: int
    parallel: int
    plugin_flags: str
    merges: tuple[str, ...] = ("linear", "ties")  # the sparse ones take a full SVD of every linear: minutes on a CPU
    count: int = 4

    def __post_init__(self) -> None:
        if not self.budgets or min(self.budgets) < LEAST_BUDGET or list(self.budgets) != sorted(set(self.budgets)):
            raise InputError(
                f"budgets {self.budgets}: expected rising numbers of at least {LEAST_BUDGET} iterations each, because "
                "the first samples from the base and leaves the gate no rollout of an adapter; raise them"
            )

    @property
    def save_every(self) -> int:
        """Iterations between checkpoints: every budget must be one of them."""
        return math.gcd(*self.budgets)


GPU_PLUGIN = (
    "--attention-backend FLASH_ATTN --dtype bfloat16 --max-model-len 2048 --gpu-memory-utilization 0.2 "
    # a fixed cache: the share of the memory that is free would be measured while other stages use the GPU
    "--kv-cache-memory-bytes 8589934592 --enable-prefix-caching"
)
CPU_PLUGIN = "--enforce-eager --dtype bfloat16 --max-model-len 1024 --block-size 32 --enable-prefix-caching"

SIZES = {
    "gpu": Size(
        mine_seeds=200, mine_samples=4, calibrate_seeds=50, calibrate_samples=16, group_size=16, groups=16,
        budgets=(6, 12, 24), lr=4e-4, lora_rank=16, gate_steps=300, gate_iters=12, gate_min_reward=1.0,
        score_seeds="10000:10256", trials=5, transfer_trials=2, draws=3, max_rows=1024, bootstrap=10_000, parallel=8,
        plugin_flags=GPU_PLUGIN, merges=("linear", "ties", "dare_ties"),
    ),
    "cpu": Size(
        mine_seeds=96, mine_samples=2, calibrate_seeds=24, calibrate_samples=8, group_size=8, groups=12,
        budgets=(7, 14), lr=4e-4, lora_rank=16, gate_steps=200, gate_iters=4, gate_min_reward=1.0,
        score_seeds="10000:10064", trials=2, transfer_trials=1, draws=2, max_rows=128, bootstrap=10_000, parallel=1,
        plugin_flags=CPU_PLUGIN,
    ),
    "tiny": Size(
        mine_seeds=8, mine_samples=1, calibrate_seeds=2, calibrate_samples=4, group_size=4, groups=2,
        budgets=(2, 3), lr=4e-4, lora_rank=2, gate_steps=10, gate_iters=1, gate_min_reward=0.0,
        score_seeds="10000:10002", trials=1, transfer_trials=1, draws=1, max_rows=64, bootstrap=200, parallel=2,
        plugin_flags=CPU_PLUGIN,
    ),
}  # fmt: skip
