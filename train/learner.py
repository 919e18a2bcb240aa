"""One adapter with its optimiser, version, seeds and curriculum. Knows nothing of other capabilities."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import PeftModel

from game_registry import GameMix
from train.config import FIRST_TRAIN_SEED
from train.forward import action_logprobs, make_packs
from train.groups import Group
from train.lora import activate, adapter_parameters, adapter_state, restore_adapter
from train.losses import (
    LossConfig,
    Totals,
    group_advantages,
    importance_weights,
    mismatch_of_sums,
    mismatch_sums,
    policy_loss,
)
from train.packing import Pack, TokenSequence, build_pack


@dataclasses.dataclass(frozen=True)
class TrainItem:
    """One scored rollout. ``sampler_logprobs``: of its action tokens; NaN = unknown (a swapped prompt)."""

    sequence: TokenSequence
    advantage: float
    sampler_logprobs: tuple[float, ...]
    group: int


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """What an update needs to know beside the rollouts."""

    loss: LossConfig
    temperature: float
    epochs: int = 1
    groups_per_step: int = 0
    max_grad_norm: float = 1.0
    pack_tokens: int = 1024
    logit_chunk: int = 1024


Reduce = Callable[[torch.Tensor], torch.Tensor]  # sum over ranks, in place


def items_of_groups(groups: Sequence[Group], normalise: bool) -> list[TrainItem]:
    """Advantages per group over scored rollouts; hinted rollouts get the group's own prompt back."""
    items = []
    for index, group in enumerate(groups):
        scored = group.scored
        advantages = group_advantages(group.rewards(), normalise=normalise).tolist()
        plain = next((e for e in scored if not e.hinted), None)
        for episode, advantage in zip(scored, advantages, strict=True):
            ids, mask, logprobs = episode.token_ids, episode.action_mask, episode.logprobs
            sampler = [x for x, m in zip(logprobs, mask, strict=True) if m]
            if episode.hinted:
                if plain is None:
                    continue  # no rollout of this group knows the prompt without the hint
                ids = plain.token_ids[: plain.prompt_len] + ids[episode.prompt_len :]
                mask = plain.action_mask[: plain.prompt_len] + mask[episode.prompt_len :]
                sampler = [math.nan] * len(sampler)
            if sampler:
                end = len(mask) - mask[::-1].index(True)  # what an environment said last is context of nothing
                sequence = TokenSequence(ids[:end], mask[:end])
                items.append(TrainItem(sequence, advantage, tuple(sampler), index))
    return items


class Learner:
    """One capability's adapter on the shared base.

    Args:
        model: the peft model that holds the adapter ``name``.
        reduce: sums a tensor over ranks (identity on one rank).
        sharded: the base lies on all ranks (``train.sharding``), so all of them run the same number of passes.
        tasks: the seeds to train on; without them every group is a new one from ``FIRST_TRAIN_SEED`` on.
    """

    sharded = False
    _tasks: Sequence[int] = ()  # none: every group is a new one
    solved = False  # nothing left to learn
    empty_iterations = 0  # in a row, up to now: no group carried a signal
    nonfinite_iterations = 0  # in a row, up to now: the update was skipped

    def __init__(
        self, model: PeftModel, name: str, mix: GameMix, *, lr: float, weight_decay: float, seed: int,
        reduce: Reduce = lambda x: x, rank: int = 0, world: int = 1, sharded: bool = False, tasks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.model, self.name, self.mix = model, name, mix
        self.reduce, self.rank, self.world, self.sharded = reduce, rank, world, sharded
        self.parameters = adapter_parameters(model, name)
        # fused: one pass over the state; with clipping 5 to 9 ms instead of 14 on an H200 (Qwen3-4B, rank 32)
        fused = self.device.type == "cuda" or None
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=lr, weight_decay=weight_decay, betas=(0.9, 0.999), fused=fused
        )
        self.version = 0  # of the weights; the sampler's name is <name>@v<version>
        self.iteration = 0
        # One fixed order: as long as no iteration needs more groups than there are tasks, it has none twice.
        self._tasks = random.Random(seed).sample(tasks, len(tasks))
        first = 0 if tasks else FIRST_TRAIN_SEED + seed * 10_000_000
        self.next_seed = dict.fromkeys(mix.weights, first)
        self.best_reward: float | None = None  # of the held-out evaluations so far

    @property
    def device(self) -> torch.device:
        """Where the adapter lies."""
        return next(iter(self.parameters.values())).device

    def next_jobs(self, n: int) -> list[tuple[str, int]]:
        """(game, seed) of the next ``n`` groups: no seed is ever dealt twice, or the given tasks go round."""
        jobs = []
        for game in self.mix.deal(n):
            at = self.next_seed[game]
            jobs.append((game, self._tasks[at % len(self._tasks)] if self._tasks else at))
            self.next_seed[game] += 1
        return jobs

    def finish_iteration(self, *, trained: bool, nonfinite: bool = False) -> None:
        """Count an iteration, and in how many in a row nothing could be learned."""
        self.iteration += 1
        self.empty_iterations = 0 if trained else self.empty_iterations + 1
        self.nonfinite_iterations = self.nonfinite_iterations + 1 if nonfinite else 0

    # ------------------------------------------------------------------ update

    def update(self, items: Sequence[TrainItem], config: UpdateConfig) -> dict[str, float]:
        """Optimiser steps on ``items`` (the same on every rank; each rank computes its share of the packs).

        With one step the policy that is updated is the one that sampled: the ratio is 1 and the sampler's rounding
        enters as a truncated importance weight. With several steps the sampler's log-probs are the old policy's and the
        clip acts.
        """
        self._activate()
        n_groups = len({item.group for item in items})
        per_step = config.groups_per_step or n_groups
        order = sorted({item.group for item in items})
        batches = [order[i : i + per_step] for i in range(0, len(order), per_step)]
        single = len(batches) * config.epochs == 1
        if not single:
            items = self._with_old_logprobs(items, config)
        totals: dict[str, float] = {}
        for _ in range(config.epochs):
            for batch in batches:
                chosen = set(batch)
                step = self._step([i for i in items if i.group in chosen], config, single)
                for key, value in step.items():
                    totals[key] = totals.get(key, 0.0) + value
        n_steps = max(1, len(batches) * config.epochs)
        self.version += 1
        if self.device.type == "cuda":  # whoever reads the weights need not know of our stream
            torch.cuda.current_stream(self.device).synchronize()
        return {key: value / n_steps for key, value in totals.items()} | {"optimizer_steps": float(n_steps)}

    def _activate(self) -> None:
        """Make the model the policy that is updated."""
        activate(self.model, self.name)

    @torch.no_grad()
    def _with_old_logprobs(self, items: Sequence[TrainItem], config: UpdateConfig) -> list[TrainItem]:
        """Items with unknown sampler log-probs get the present policy's, so that later steps have an old policy."""
        done = list(items)
        for index, item in enumerate(items):
            if any(map(math.isnan, item.sampler_logprobs)):
                pack = make_packs(self.model, [item.sequence], config.pack_tokens)[0]
                own, _ = action_logprobs(self.model, pack, config.temperature, config.logit_chunk)
                done[index] = dataclasses.replace(item, sampler_logprobs=tuple(own.tolist()))
        return done

    def _step(self, items: list[TrainItem], config: UpdateConfig, single: bool) -> dict[str, float]:
        sequences = [item.sequence for item in items]
        packs = make_packs(self.model, sequences, config.pack_tokens, self.world)
        totals = Totals(len(items), sum(len(item.sampler_logprobs) for item in items))
        self.optimizer.zero_grad(set_to_none=True)
        stats, unheard = _Stats(self.device), _Stats(self.device)
        shares = shares_of_ranks(packs, self.world)
        for pack in shares[self.rank]:
            loss = self._pack_loss(pack, items, totals, config, single, stats)
            loss.backward()
            stats.add_loss(loss)
        for pack in idle_passes(packs, [len(share) for share in shares], self.rank) if self.sharded else []:
            (0.0 * self._pack_loss(pack, items, totals, config, single, unheard)).backward()
        norm = self._reduce_and_clip(config.max_grad_norm)
        metrics = stats.finish(self.reduce, self.rank, self.world)
        metrics["grad_norm"] = norm
        metrics["packs"] = float(len(packs))
        metrics["packed_tokens"] = float(sum(p.n_tokens for p in packs))
        metrics["plain_tokens"] = float(sum(len(s.token_ids) for s in sequences))
        if not (math.isfinite(norm) and math.isfinite(metrics["loss"])):
            metrics["nonfinite"] = 1.0  # the weights stay as they are
            return metrics
        self.optimizer.step()
        return metrics | {"nonfinite": 0.0}

    def _pack_loss(
        self, pack: Pack, items: list[TrainItem], totals: Totals, config: UpdateConfig, single: bool, stats: _Stats
    ) -> torch.Tensor:
        logprobs, entropy = action_logprobs(self.model, pack, config.temperature, config.logit_chunk)
        device = logprobs.device
        sampler = torch.tensor([x for e in pack.episodes for x in items[e].sampler_logprobs], device=device)
        lengths = torch.tensor([len(items[e].sampler_logprobs) for e in pack.episodes], device=device)
        episode = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        advantages = torch.tensor([items[e].advantage for e in pack.episodes], device=device)[episode]
        detached = logprobs.detach()
        known = ~torch.isnan(sampler)
        sampler = torch.where(known, sampler, detached)
        importance = None
        if single and config.loss.is_cap is not None:
            importance = importance_weights(logprobs, sampler, config.loss.is_cap)
        reference = None
        if config.loss.kl_coef > 0:
            with torch.no_grad(), self.model.disable_adapter():
                reference, _ = action_logprobs(self.model, pack, config.temperature, config.logit_chunk)
        stats.add(detached[known], sampler[known], entropy)
        return policy_loss(
            logprobs, detached if single else sampler, advantages, episode, lengths, totals, config.loss,
            importance_N=importance, reference_logprobs_N=reference,
        )  # fmt: skip

    def _reduce_and_clip(self, max_norm: float) -> float:
        """Sum gradients over ranks in one buffer, then clip by the global norm. Returns the norm before clipping."""
        parameters = list(self.parameters.values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.world > 1:
            gradients = [p.grad for p in parameters if p.grad is not None]  # all of them
            flat = self.reduce(torch.cat([g.reshape(-1) for g in gradients]))
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))

    @torch.no_grad()
    def logprobs_of(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probs (temperature 1) of ``token_ids[1:]`` under the present weights. A sharded base meets here too."""
        self._activate()
        sequence = TokenSequence(token_ids, [False] + [True] * (len(token_ids) - 1))
        logprobs, _ = action_logprobs(self.model, build_pack([sequence], [0]), 1.0)
        return tuple(logprobs.tolist())

    # ------------------------------------------------------------------ state

    def weights(self) -> dict[str, torch.Tensor]:
        """What is trained, for a checkpoint."""
        return adapter_state(self.model, self.name)

    def restore_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        restore_adapter(self.model, self.name, tensors)

    def counters(self) -> dict[str, Any]:
        """JSON part of a checkpoint."""
        return {
            "version": self.version,
            "iteration": self.iteration,
            "next_seed": self.next_seed,
            "mix": self.mix.state,
            "best_reward": self.best_reward,
            "solved": self.solved,
            "empty_iterations": self.empty_iterations,
            "nonfinite_iterations": self.nonfinite_iterations,
        }

    def restore_counters(self, state: dict[str, Any]) -> None:
        self.version, self.iteration = int(state["version"]), int(state["iteration"])
        self.next_seed = {str(k): int(v) for k, v in state["next_seed"].items()}
        self.mix.state = {str(k): float(v) for k, v in state["mix"].items()}
        best = state.get("best_reward")
        self.best_reward = None if best is None else float(best)
        self.solved = bool(state.get("solved"))
        self.empty_iterations = int(state.get("empty_iterations") or 0)
        self.nonfinite_iterations = int(state.get("nonfinite_iterations") or 0)


class _Stats:
    """Sums over the packs of a step. They stay on the device until the end, so no pack waits for the one before."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._sums = torch.zeros(10, dtype=torch.float64, device=device)  # loss, entropy, tokens, seven of the mismatch
        self._largest = torch.zeros((), dtype=torch.float64, device=device)

    def add_loss(self, loss: torch.Tensor) -> None:
        self._sums[0] += loss.detach()

    def add(self, new: torch.Tensor, sampler: torch.Tensor, entropy: torch.Tensor) -> None:
        sums, largest = mismatch_sums(new, sampler)
        self._sums[1] += entropy.detach().double().sum()
        self._sums[2] += len(entropy)
        self._sums[3:] += sums
        self._largest = torch.maximum(self._largest, largest)

    def finish(self, reduce: Reduce, rank: int = 0, world: int = 1) -> dict[str, float]:
        """Loss, entropy and sampler mismatch over all ranks. A sum carries the maximum too: every rank has a slot."""
        slots = torch.zeros(world, dtype=torch.float64, device=self._sums.device)
        slots[rank] = self._largest
        everything = reduce(torch.cat([self._sums, slots])).cpu()
        loss, entropy, tokens = everything[:3].tolist()
        mismatch = mismatch_of_sums(everything[3:10], float(everything[10:].max()))
        result = {"loss": loss, "entropy": entropy / max(1.0, tokens), "action_tokens": tokens}
        return result | {f"mismatch_{k}": v for k, v in mismatch.items()}


def shares_of_ranks(packs: Sequence[Pack], world: int) -> list[list[Pack]]:
    """Longest-processing-time assignment of packs to ranks; every rank computes the same assignment."""
    load = [0] * world
    shares: list[list[int]] = [[] for _ in range(world)]
    for index in sorted(range(len(packs)), key=lambda i: (-packs[i].n_tokens, i)):
        target = min(range(world), key=lambda r: (load[r], r))
        load[target] += packs[index].n_tokens
        shares[target].append(index)
    return [[packs[i] for i in sorted(share)] for share in shares]


def idle_passes(packs: Sequence[Pack], counts: Sequence[int], rank: int) -> list[Pack]:
    """Packs that ``rank`` has to run with weight zero beside its share, so that all ranks meet equally often.

    Args:
        counts: packs in the share of every rank.
    """
    if not packs:
        return []
    shortest = min(packs, key=lambda pack: pack.n_tokens)
    return [shortest] * (max(counts) - counts[rank])
