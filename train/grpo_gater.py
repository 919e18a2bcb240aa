"""GRPO of the gates over synthetic environments: backbone and adapters frozen, routing is what is learned.

    python -m train.grpo_gater --config configs/moe_gate.yaml --games capability_a:1,capability_b:1

The policy is the routed model: it samples with hard top-1 routes, in this process. The update is that of
``python -m train`` (groups, dynamic refill, per-token clipped loss, packed episodes), on all action tokens of all
turns. A route is a discrete choice; its gradient is straight-through: the forward takes the one-hot of the argmax, the
backward that of the softmax, so a gate is pushed towards slots that would have made good tokens likelier. Hinted
rollouts are not used: every rollout of a group has the same prompt, so no hint is in a baseline.

Starts from the gates of ``train.train_router_sft``; writes ``gate.safetensors``, ``metrics.jsonl`` and checkpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from game_registry import GameMix, GameSpec
from moe_gate import find_adapter, load_gate, named_gater_parameters, save_gate
from moe_gate.builder import build_capability_model
from moe_gate.checkpoint import GATE_FILE
from moe_gate.config import GateConfig, GrpoSection, load_gate_config
from pipeline.files import InputError, ServerError, check, write_json
from pipeline.remote_game import resolve_game
from train.chat import ChatCodec
from train.checkpoint import load_checkpoint, save_checkpoint
from train.config import FIRST_TRAIN_SEED
from train.distributed import Ranks, held_folder, join_ranks, run_ranks
from train.episode import EpisodeParams
from train.groups import Collected, Group, Sampler, collect_informative
from train.grpo import Worker
from train.heap import standing_heap
from train.learner import Learner, Reduce, UpdateConfig, items_of_groups
from train.local_engine import LocalEngine, load_model
from train.losses import LossConfig
from train.rollout import EnvironmentPool
from train.run_log import RunLog, list_checkpoints

NAME = "gate"
EMPTY_LIMIT = 5  # iterations in a row without one informative group before the run stops


class GateLearner(Learner):
    """The gates of a routed model as a learner: same update, other parameters."""

    def __init__(
        self,
        model: Any,
        mix: GameMix,
        *,
        lr: float,
        seed: int,
        reduce: Reduce = lambda x: x,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.model, self.name, self.mix = model, NAME, mix
        self.reduce, self.rank, self.world = reduce, rank, world
        self.parameters = dict(named_gater_parameters(model))
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=lr, weight_decay=0.0, betas=(0.9, 0.999))
        self.version = self.iteration = 0
        self.next_seed = dict.fromkeys(mix.weights, FIRST_TRAIN_SEED + seed * 10_000_000)
        self.best_reward = None

    def update(self, items: Sequence[Any], config: UpdateConfig) -> dict[str, float]:
        """As ``Learner.update``; the gates pass gradients in training mode only."""
        self.model.train()
        try:
            return super().update(items, config)
        finally:
            self.model.eval()

    def _activate(self) -> None:
        """The gates are always active."""

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().cpu().clone() for name, parameter in self.parameters.items()}

    def restore_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Raises ``InputError`` when the tensors are those of other gates."""
        if tensors.keys() != self.parameters.keys():
            raise InputError(f"checkpoint: gates {sorted(tensors)[:1]}..., expected {sorted(self.parameters)[:1]}...")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])


@dataclasses.dataclass
class GateTrainer:
    """Rank 0 of a run: sample, update, record, save."""

    config: GateConfig
    worker: Worker
    sampler: Sampler
    log: RunLog
    folder: Path
    settings: dict[str, Any]

    async def run(self) -> None:
        """All iterations.

        Raises:
            ServerError: no rollout can be scored, or too long no group carries a signal; the last checkpoint is kept.
        """
        learner, grpo = self.worker.learners[NAME], self.config.grpo
        while learner.iteration < grpo.max_iters:
            begin = time.perf_counter()
            collected = await self._collect(learner)
            sampled = time.perf_counter()
            if not any(e.scored for g in collected.groups for e in g.episodes):
                raise ServerError(f"no rollout could be scored ({collected.error_kinds()}); fix this, then --resume")
            items = items_of_groups(collected.informative, True)
            metrics = collected.metrics() | {"sample_s": sampled - begin, "deliver_s": 0.0}
            if items:
                metrics |= self.worker.update(learner, items)
            metrics["update_s"] = time.perf_counter() - sampled
            learner.finish_iteration(trained=bool(items), nonfinite=bool(metrics.get("nonfinite")))
            self.log.iteration(NAME, learner.iteration, grpo.max_iters, metrics, collected.error_kinds())
            empty = learner.empty_iterations
            if metrics.get("nonfinite"):
                raise ServerError("the loss is not finite; lower grpo.lr, then --resume")
            if learner.iteration % grpo.save_every == 0 or learner.iteration == grpo.max_iters:
                self.save(learner)
            if empty >= EMPTY_LIMIT:
                raise ServerError(f"{empty} iterations without an informative group; choose other games, then --resume")

    def save(self, learner: Learner) -> None:
        save_checkpoint(self.folder / "checkpoints", learner, learner.counters(), self.settings, keep=2)
        training = {"grpo": self.config.grpo.model_dump(), "iteration": learner.iteration}
        save_gate(learner.model, self.folder, self.config.base_model, training)

    async def _collect(self, learner: Learner) -> Collected:
        grpo = self.config.grpo
        params = EpisodeParams(
            grpo.max_new_tokens, grpo.max_seq_length, grpo.temperature, grpo.episode_deadline_s,
            seed=self.config.seed * 1_000_003 + learner.iteration,
        )  # fmt: skip

        def sample(n: int) -> asyncio.Task[list[Group]]:
            return asyncio.create_task(self.sampler.groups(learner.next_jobs(n), grpo.group_size, params, None))

        enough = max(2, grpo.group_size // 2)
        wanted, batches = grpo.groups_per_batch, grpo.dynamic_sampling_max_batches
        return await collect_informative(sample, wanted, wanted, batches, enough, False)


def load_policy(config: GateConfig, device: str) -> Any:
    """The routed model with its starting gates, on the attention that the local engine samples fast with.

    Raises:
        InputError: no gates to start from, or they do not fit the adapters.
    """
    start = Path(config.grpo.init_gate or config.output_dir)
    if not (start / GATE_FILE).exists() and start.suffix != ".safetensors":
        raise InputError(f"gate {start / GATE_FILE}: not found; run train.train_router_sft or set grpo.init_gate")
    model = build_capability_model(
        load_model(config.base_model, config.dtype, device),
        {name: str(find_adapter(config.adapter_dir, name)) for name in config.adapter_names},
        routing_scope=config.routing_scope,
        routing_granularity=config.routing_granularity,
        routing_mode=config.routing_mode,
        include_base_slot=config.include_base_slot,
        global_layer=config.global_layer,
        target_modules=config.target_modules,
    )
    load_gate(model, start)
    return model.eval()


def resume_point(folder: Path, resume: bool) -> Path | None:
    """The newest checkpoint of a run that goes on.

    Raises:
        InputError: there is a run in ``folder`` and ``--resume`` was not given.
    """
    found = list_checkpoints(folder / "checkpoints")
    if (found or (folder / "metrics.jsonl").exists()) and not resume:
        raise InputError(f"{folder}: holds a run; add --resume, or choose another --output-dir")
    return found[-1] if found else None


def build_worker(config: GateConfig, model: Any, ranks: Ranks, point: Path | None, settings: dict[str, Any]) -> Worker:
    """The learner and how it is updated, on every rank."""
    grpo = config.grpo
    learner = GateLearner(
        model,
        GameMix.parse(grpo.games),
        lr=grpo.lr,
        seed=config.seed,
        reduce=ranks.sum,
        rank=ranks.rank,
        world=ranks.world,
    )
    if point is not None:
        load_checkpoint(point, learner, settings)
    loss = LossConfig(clip_low=grpo.clip_low, clip_high=grpo.clip_high)
    update = UpdateConfig(loss, grpo.temperature, max_grad_norm=grpo.max_grad_norm, pack_tokens=grpo.pack_tokens)
    return Worker({NAME: learner}, update, ranks)


async def drive(
    config: GateConfig, worker: Worker, specs: dict[str, GameSpec], folder: Path, settings: dict[str, Any]
) -> None:
    """Rank 0: the engine around the routed model, and the run."""
    learner = worker.learners[NAME]
    codec = ChatCodec.from_model(config.base_model)
    engine = LocalEngine(learner.model, codec)
    pools = {name: EnvironmentPool(spec) for name, spec in specs.items()}
    sampler = Sampler(engine, codec, specs, pools, asyncio.Semaphore(config.grpo.concurrency))
    log = RunLog(folder, {NAME: learner.iteration})
    try:
        with standing_heap():
            await GateTrainer(config, worker, sampler, log, folder, settings).run()
    finally:
        log.close()
        await engine.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="configs/moe_gate.yaml")
    for name, kind in {"games": str, "init_gate": str, "output_dir": str, "max_iters": int, "group_size": int,
                       "groups_per_batch": int, "lr": float, "save_every": int}.items():  # fmt: skip
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, help=f"instead of the configuration's grpo.{name}"
        )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    args = vars(parser.parse_args(arguments))
    config = load_gate_config(args["config"])
    changes = {key: value for key, value in args.items() if key in GrpoSection.model_fields and value is not None}
    grpo = check(GrpoSection, config.grpo.model_dump() | changes, "grpo settings")
    config = config.model_copy(update={"grpo": grpo})
    if not grpo.games:
        raise InputError("grpo.games is empty: name environments in the configuration or with --games a:1,b:1")
    specs = {name: resolve_game(name) for name in GameMix.parse(grpo.games).weights}
    folder = Path(grpo.output_dir or f"{config.output_dir}_grpo")
    with held_folder(folder):
        return train_gate(config, grpo, specs, folder, args["resume"])


def train_gate(config: GateConfig, grpo: GrpoSection, specs: dict[str, GameSpec], folder: Path, resume: bool) -> int:
    """The whole run on this rank; its exit code."""
    settings = config.model_dump(mode="json", exclude={"output_dir", "run_name", "vllm"})
    settings["grpo"] = {k: v for k, v in settings["grpo"].items() if k not in ("max_iters", "save_every", "output_dir")}
    point = resume_point(folder, resume)
    ranks, device = join_ranks()
    try:
        worker = build_worker(config, load_policy(config, device), ranks, point, settings)
        if not ranks.driver:
            return 0 if worker.serve() else 2
        write_json(folder / "config.json", config.model_dump(mode="json"))
        done = False
        try:
            asyncio.run(drive(config, worker, specs, folder, settings))
            done = True
        finally:
            worker.stop(done)
        sys.stdout.write(f"{folder / GATE_FILE}: {worker.learners[NAME].iteration} iterations\n")
        return 0
    finally:
        ranks.close()


if __name__ == "__main__":
    run_ranks(main)
