"""The GRPO loop: K capabilities on one frozen base and one sampler, each strictly on-policy.

Every capability runs its own cycle: collect groups with its newest adapter, update, deliver. While one is updated the
others sample, so neither the trainer nor the server waits; no cycle ever sees rollouts of an older version.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from game_registry import GameError
from pipeline.files import InputError, JsonlLog, ServerError
from train.busy import BusyClock, IdleMeter
from train.checkpoint import save_checkpoint
from train.config import TrainConfig, seed_range
from train.delivery import AdapterDelivery, Canary, adapter_name
from train.distributed import PeerLost, Ranks
from train.episode import EpisodeParams, to_simulation
from train.groups import Collected, Group, Sampler, collect_informative
from train.heap import standing_heap
from train.learner import Learner, UpdateConfig, items_of_groups
from train.local_engine import LocalEngine
from train.lora import copy_adapter, save_adapter, write_adapter_folder
from train.run_log import RunLog

CANARY_TOKENS = 512  # of one real rollout; enough to tell two adapters apart, cheap to score
# iterations in a row without one informative group before a learner stops: done from solved_reward on; below it the
# environment gives no signal, which is a fault
EMPTY_LIMIT = 5
NONFINITE_LIMIT = 3
T = TypeVar("T")


class TrainingStopped(ServerError):
    """The run cannot go on; checkpoints are kept."""


@dataclasses.dataclass
class Worker:
    """What every rank has: the learners and how to update them."""

    learners: dict[str, Learner]
    update_config: UpdateConfig
    ranks: Ranks

    def serve(self) -> bool:
        """Ranks other than 0: compute what rank 0 says until it says stop. Returns whether rank 0 was done by then."""
        while True:
            command, payload = self.ranks.broadcast()
            if command == "stop":
                return bool(payload)
            name, given = payload
            if command == "score":
                self.learners[name].logprobs_of(given)
            else:
                self.learners[name].update(given, self.update_config)

    def stop(self, done: bool) -> None:
        """Rank 0: end ``serve`` on all other ranks."""
        with contextlib.suppress(PeerLost):  # what happened to the peer is the fault that is reported
            self.ranks.broadcast(("stop", done))

    def update(self, learner: Learner, items: list[Any]) -> dict[str, float]:
        """Rank 0: update ``learner`` on all ranks."""
        self.ranks.broadcast(("update", (learner.name, items)))
        return learner.update(items, self.update_config)

    def logprobs_of(self, learner: Learner, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Rank 0: ``Learner.logprobs_of``; all ranks take part when the base is sharded over them."""
        if learner.sharded:
            self.ranks.broadcast(("score", (learner.name, token_ids)))
        return learner.logprobs_of(token_ids)


@dataclasses.dataclass(frozen=True)
class _Scores:
    """A learner's canary: log-probs of a fixed sequence with the weights of its last update, and with those before."""

    token_ids: tuple[int, ...]
    new: tuple[float, ...]
    old: tuple[float, ...]


class Trainer:
    """Rank 0 of a training run.

    Args:
        sampler: engine, environments and concurrency.
        model_name: as written into rollouts.
        max_seq_length: tokens per episode, at most the model's context.
    """

    def __init__(
        self, config: TrainConfig, worker: Worker, sampler: Sampler, log: RunLog, model_name: str, max_seq_length: int
    ) -> None:
        self.config, self.worker, self.sampler, self.log = config, worker, sampler, log
        self.model_name, self.max_seq_length = model_name, max_seq_length
        self.folder = Path(config.output_dir)
        self.delivery = AdapterDelivery(sampler.engine)
        self.settings = checkpoint_settings(config)
        self._updating = asyncio.Lock()
        self._local = isinstance(sampler.engine, LocalEngine)
        self._names: dict[str, str | None] = {}
        self._resume_points: dict[str, dict[str, Any]] = {}
        self._canaries: dict[str, _Scores] = {}
        self._torn: set[str] = set()  # learners in the middle of an update: nothing to save
        self._sampling, self._training = BusyClock(), BusyClock()
        # episodes of one capability never wait for a slot that another one holds
        self._samplers = {
            name: dataclasses.replace(sampler, slots=asyncio.Semaphore(config.concurrency)) for name in worker.learners
        }

    async def run(self) -> None:
        """Train every learner to ``max_iters``.

        Raises:
            TrainingStopped, ServerError: the sampler is gone, a sync failed, the loss is not finite.
            InputError, GameError: a file cannot be written, an adapter is refused, an environment cannot be made.
        """
        learners = self.worker.learners.values()
        try:
            if not self._local:
                async with asyncio.TaskGroup() as tasks:  # of all capabilities, before any of them samples
                    for learner in learners:
                        if learner.version == 0 and self._unfinished(learner):
                            tasks.create_task(self._rehearse(learner))
            with standing_heap():
                async with asyncio.TaskGroup() as tasks:
                    for learner in learners:
                        tasks.create_task(self._train(learner))
        except BaseExceptionGroup as group:  # not except*: that would wrap what is raised here in a group again
            raise _first(group) from None
        finally:
            await self.delivery.close()

    async def _train(self, learner: Learner) -> None:
        self._checkpoint_point(learner)
        idle = IdleMeter(self._sampling, self._training)
        try:
            if learner.version > 0 and self._unfinished(learner):
                await self._deliver(learner)
            while self._unfinished(learner):
                await self._iteration(learner, idle)
        except (InputError, ServerError, GameError, BaseExceptionGroup, asyncio.CancelledError):
            try:  # also when cancelled: another learner failed or the user stopped the run
                self._save(learner)
            except InputError as error:  # the fault that ended the run is the one to raise
                self.log.say(f"[{learner.name}] warning: {error}")
            raise
        if learner.version == 0 and learner.iteration > 0:
            self.log.say(f"[{learner.name}] warning: no group had a signal: the adapter that is written is untrained")
        await self._aside(lambda: self._save(learner))
        await self._aside(lambda: self._export(learner))

    async def _iteration(self, learner: Learner, idle: IdleMeter) -> None:
        begin = time.perf_counter()
        collected = await self._collect(learner)
        metrics = collected.metrics() | {"update_s": 0.0, "deliver_s": 0.0}
        metrics["sample_s"] = time.perf_counter() - begin
        self._check_alive(learner, collected)
        items = await self._aside(lambda: items_of_groups(collected.informative, self.config.normalize_advantages))
        if items:
            metrics |= await self._update(learner, collected, items)
        else:
            self._finish(learner, metrics)
        try:
            if items:
                metrics |= await self._deliver(learner)
        finally:  # an update that is done is on record, even when its delivery fails
            metrics |= idle.shares()
            self.log.iteration(learner.name, learner.iteration, self.config.max_iters, metrics, collected.error_kinds())
        self._check_progress(learner, metrics)
        if self.config.eval_every and learner.iteration % self.config.eval_every == 0:
            await self._evaluate(learner)
            self._checkpoint_point(learner)
        if learner.iteration % self.config.save_every == 0:
            await self._aside(lambda: self._save(learner))

    async def _aside(self, work: Callable[[], T]) -> T:
        """``work()`` beside the event loop, so that no episode waits for it. A sampler in this process would not gain
        from that, and lose the fixed order of its batches."""
        return work() if self._local else await _in_thread(work)

    # ------------------------------------------------------------------ sampling

    async def _collect(self, learner: Learner) -> Collected:
        config = self.config
        params = EpisodeParams(
            max_new_tokens=config.max_new_tokens or None,
            max_seq_length=self.max_seq_length,
            temperature=config.temperature,
            deadline_s=config.episode_deadline_s,
            seed=_stream_seed(config.seed, learner.name, learner.iteration),
        )

        def sample(n: int) -> asyncio.Task[list[Group]]:
            jobs = learner.next_jobs(n)
            name = self._names.get(learner.name)
            sampler = self._samplers[learner.name]
            return asyncio.create_task(sampler.groups(jobs, config.group_size, params, name, config.hint_ratio))

        with self._sampling:
            collected = await collect_informative(
                sample,
                config.groups_per_batch,
                config.dynamic_sampling_min_groups or config.groups_per_batch,
                config.dynamic_sampling_max_batches,
                round(config.group_size * config.min_group_share),
                not config.filter_constant_groups,
            )
        if config.rollout_log:
            await self._aside(lambda: self._dump(learner, collected))
        return collected

    def _check_alive(self, learner: Learner, collected: Collected) -> None:
        """A run whose rollouts all fail outside the policy stops, typed, instead of spinning."""
        if any(e.scored for g in collected.groups for e in g.episodes):
            return
        kinds = collected.error_kinds()
        detail = next((e.result.outcome.detail for g in collected.groups for e in g.episodes if not e.scored), "")  # type: ignore[union-attr]
        raise TrainingStopped(
            f"{learner.name}: no rollout could be scored ({kinds}; {detail}); fix this, then --resume"
        )

    def _dump(self, learner: Learner, collected: Collected) -> None:
        path = self.folder / "rollouts" / f"{learner.name}_{learner.iteration + 1:06d}.jsonl"
        path.unlink(missing_ok=True)
        with JsonlLog(path) as log:
            for group in collected.groups:
                for episode in group.episodes:
                    log.append(to_simulation(episode, self.model_name, tokens=True))

    async def _evaluate(self, learner: Learner) -> None:
        """Held-out greedy reward; the best adapter so far is kept."""
        seeds = seed_range(self.config.eval_seeds, "--eval-seeds")
        params = EpisodeParams(
            self.config.max_new_tokens or None, self.max_seq_length, 0.0, self.config.episode_deadline_s
        )
        jobs = [(game, seed) for game in learner.mix.weights for seed in seeds]
        with self._sampling:
            groups = await self._samplers[learner.name].groups(jobs, 1, params, self._names.get(learner.name))
        scored = [e for g in groups for e in g.scored]
        if not scored:
            kinds = Collected(groups, [], 1).error_kinds()
            self.log.say(f"[{learner.name} {learner.iteration}] warning: no held-out episode could be scored ({kinds})")
            return
        reward = sum(e.reward for e in scored) / len(scored)
        success = sum(e.reward >= 1.0 - 1e-9 for e in scored) / len(scored)
        self.log.evaluation(
            learner.name, learner.iteration, {"reward": reward, "success": success, "n": float(len(scored))}
        )
        if learner.best_reward is None or reward > learner.best_reward:
            learner.best_reward = reward
            best = self.folder / "best" / learner.name
            await self._aside(lambda: save_adapter(learner.model, learner.name, best))

    # ------------------------------------------------------------------ update and delivery

    async def _update(self, learner: Learner, collected: Collected, items: list[Any]) -> dict[str, float]:
        """One update. With it the iteration is over: what is saved from here on goes on after it."""

        def work() -> dict[str, float]:
            self._remember_canary(learner, collected)
            self._torn.add(learner.name)
            metrics = self.worker.update(learner, items)
            self._finish(learner, collected_metrics | metrics, trained=True)
            self._torn.discard(learner.name)
            self._score_canary(learner)  # here, so that the delivery does not wait for another learner's update
            return metrics

        collected_metrics = collected.metrics()
        async with self._updating:
            begin = time.perf_counter()
            with self._training:  # a local sampler shares the model with the trainer: one at a time
                metrics = await self._aside(work)
        return metrics | {"update_s": time.perf_counter() - begin}

    def _finish(self, learner: Learner, metrics: dict[str, float], trained: bool = False) -> None:
        learner.finish_iteration(trained=trained, nonfinite=bool(metrics.get("nonfinite")))
        learner.solved = learner.empty_iterations >= EMPTY_LIMIT and metrics["reward"] >= self.config.solved_reward
        self._checkpoint_point(learner)

    def _check_progress(self, learner: Learner, metrics: dict[str, float]) -> None:
        """A learner that has nothing left to learn is done; one that learns nothing stops the run, typed."""
        name, why = learner.name, ""
        if learner.solved:
            reward = metrics["reward"]
            self.log.say(f"[{name}] solved: reward {reward:.3f}, every group alike in {EMPTY_LIMIT} iterations")
        elif learner.empty_iterations >= EMPTY_LIMIT:
            why = (
                f"no informative group in {EMPTY_LIMIT} iterations (reward {metrics['reward']:.2f}); "
                "the environment gives this model no signal: calibrate it, then --resume"
            )
        elif learner.nonfinite_iterations >= NONFINITE_LIMIT:
            why = f"loss not finite in {NONFINITE_LIMIT} iterations in a row; lower --lr, then --resume"
        if why:
            learner.empty_iterations = learner.nonfinite_iterations = 0  # whoever resumes has done something about it
            self._checkpoint_point(learner)
            raise TrainingStopped(f"{name}: {why}")

    def _unfinished(self, learner: Learner) -> bool:
        return learner.iteration < self.config.max_iters and not learner.solved

    def _delivered(self, learner: Learner, version: int) -> Path:
        """The folder that servers read a version from."""
        return self.folder.resolve() / "adapters" / adapter_name(learner.name, version)

    async def _write(self, learner: Learner) -> Path:
        """Its newest weights where servers read them."""
        folder, dtype = self._delivered(learner, learner.version), _model_dtype(learner.model)
        await _in_thread(lambda: write_adapter_folder(learner.model, learner.name, folder, dtype=dtype))
        return folder

    async def _rehearse(self, learner: Learner) -> None:
        """Deliver the untrained adapter, so that a server that cannot take it stops the run now and not after an
        iteration."""
        try:
            folder = await self._write(learner)
            await self.delivery.rehearse(learner.name, learner.version, str(folder))
        finally:
            await self._forget(learner, learner.version)

    async def _deliver(self, learner: Learner) -> dict[str, float]:
        """Make the newest weights what the sampler uses for this learner from now on. Returns the seconds it took and
        what the canary found."""
        found: dict[str, float] = {}
        begin = time.perf_counter()
        name = adapter_name(learner.name, learner.version)
        if isinstance(self.sampler.engine, LocalEngine):
            previous = self._names.get(learner.name)
            self.sampler.engine.bind(name, learner.name)
            if previous is not None:
                await self.sampler.engine.unload_adapter(previous)
        else:
            folder = await self._write(learner)
            scores = self._canaries.get(learner.name)
            canary = None if scores is None else Canary(scores.token_ids, scores.new, scores.old)
            judged = (await self.delivery.deliver(learner.name, learner.version, str(folder), canary)).canary
            if judged is not None:
                found = {
                    "canary_error_new": judged.error_new, "canary_error_old": judged.error_old,
                    "canary_resolved": float(judged.resolved),
                }  # fmt: skip
            # nobody samples from it; the ones after it stay, because a server reads an evicted one from disk again
            await self._forget(learner, learner.version - 3)
        self._names[learner.name] = name
        return found | {"deliver_s": time.perf_counter() - begin}

    async def _forget(self, learner: Learner, version: int) -> None:
        await _in_thread(lambda: shutil.rmtree(self._delivered(learner, version), ignore_errors=True))

    def _remember_canary(self, learner: Learner, collected: Collected) -> None:
        """Fix the canary sequence at the first update: one real rollout, scored before the weights change."""
        if self._local or learner.name in self._canaries:
            return
        episode = max((e for g in collected.informative for e in g.scored), key=lambda e: e.n_action_tokens)
        tokens = tuple(episode.token_ids[-CANARY_TOKENS:])
        now = self.worker.logprobs_of(learner, tokens)
        self._canaries[learner.name] = _Scores(tokens, now, now)

    def _score_canary(self, learner: Learner) -> None:
        if learner.name in self._canaries:
            scores = self._canaries[learner.name]
            now = self.worker.logprobs_of(learner, scores.token_ids)
            self._canaries[learner.name] = _Scores(scores.token_ids, now, scores.new)

    # ------------------------------------------------------------------ files

    def _checkpoint_point(self, learner: Learner) -> None:
        """Remember where an interrupted iteration has to start again."""
        counters = learner.counters()
        self._resume_points[learner.name] = {
            **counters, "next_seed": dict(counters["next_seed"]), "mix": dict(counters["mix"]),
        }  # fmt: skip

    def _save(self, learner: Learner) -> None:
        if learner.name in self._torn:
            return
        save_checkpoint(
            self.folder / "checkpoints" / learner.name,
            learner,
            self._resume_points[learner.name],
            self.settings,
            self.config.keep_checkpoints,
        )

    def _export(self, learner: Learner) -> None:
        """The finished adapter, best by held-out reward when it was evaluated, in both published forms."""
        target = Path(self.config.adapter_dir) / learner.name
        best = self.folder / "best" / learner.name
        if learner.best_reward is not None and best.is_dir():
            copy_adapter(best, target)
        else:
            save_adapter(learner.model, learner.name, target)
        self.log.say(f"[{learner.name}] adapter written to {target}/ and {target}.safetensors")


def checkpoint_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that must not change between a checkpoint and its continuation."""
    return {
        "model": config.model,
        "games": config.adapter_games(),
        "group_size": config.group_size,
        "lora_rank": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted(config.target_modules),
        "seed": config.seed,
        "train_seeds": config.train_seeds or None,  # what checkpoints of earlier versions say
    }


async def _in_thread(work: Callable[[], T]) -> T:
    """``work()`` in a thread. A caller that is cancelled still waits for its end: nobody meets half an update."""
    future = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


def _stream_seed(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=7).digest(), "big")


def _model_dtype(model: Any) -> torch.dtype:
    return next(p.dtype for n, p in model.named_parameters() if "lora_" not in n)


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first cause in a group of failures."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
