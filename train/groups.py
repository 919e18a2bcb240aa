"""Groups of rollouts: collect them, drop the ones without a signal, refill."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from game_registry import Failed, GameSpec
from train.chat import ChatCodec
from train.engine import Engine
from train.episode import Episode, EpisodeParams, run_episode
from train.losses import is_constant
from train.rollout import EnvironmentPool


@dataclasses.dataclass
class Group:
    """The rollouts of one seed. Only scored ones have a say."""

    game: str
    seed: int
    episodes: list[Episode]

    @property
    def scored(self) -> list[Episode]:
        return [e for e in self.episodes if e.scored]

    def rewards(self) -> torch.Tensor:
        """[G'] rewards of the scored rollouts, fp32."""
        return torch.tensor([e.reward for e in self.scored], dtype=torch.float32)

    def informative(self, min_scored: int) -> bool:
        """At least ``min_scored`` scored rollouts, sampled tokens to train, and rewards that differ."""
        scored = self.scored
        enough = len(scored) >= max(2, min_scored) and any(e.n_action_tokens for e in scored)
        return enough and not is_constant(self.rewards())


@dataclasses.dataclass
class Sampler:
    """What it takes to run episodes of some games with one engine."""

    engine: Engine
    codec: ChatCodec
    specs: dict[str, GameSpec]
    pools: dict[str, EnvironmentPool]
    slots: asyncio.Semaphore

    async def episode(
        self, game: str, seed: int, sample_idx: int, params: EpisodeParams, adapter: str | None, hinted: bool = False
    ) -> Episode:
        async with self.slots:
            pool, env = self.pools[game], self.pools[game].take()
            episode = await run_episode(
                self.specs[game], env, self.engine, self.codec, seed, params,
                adapter=adapter, sample_idx=sample_idx, hinted=hinted,
            )  # fmt: skip
            if not isinstance(episode.result.outcome, Failed):
                pool.give_back(env)  # one whose episode failed is not used again
            return episode

    async def group(
        self, game: str, seed: int, size: int, params: EpisodeParams, adapter: str | None, hint_ratio: float = 0.0
    ) -> Group:
        """``size`` rollouts of one seed, the last ``hint_ratio`` of them with the hint (never all of them)."""
        n_hinted = min(math.floor(size * hint_ratio), size - 1) if self.specs[game].hint_prompt else 0
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self.episode(game, seed, k, params, adapter, k >= size - n_hinted))
                for k in range(size)
            ]
        return Group(game, seed, [t.result() for t in running])

    async def groups(
        self,
        jobs: Sequence[tuple[str, int]],
        size: int,
        params: EpisodeParams,
        adapter: str | None,
        hint_ratio: float = 0.0,
    ) -> list[Group]:
        """One group per (game, seed), all in flight together, in the order of ``jobs``."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self.group(g, s, size, params, adapter, hint_ratio)) for g, s in jobs]
        return [t.result() for t in running]


@dataclasses.dataclass
class Collected:
    """The result of an iteration's sampling: ``informative`` groups to train on, ``groups`` = all that were sampled."""

    groups: list[Group]
    informative: list[Group]
    batches: int

    def metrics(self) -> dict[str, float]:
        """Rates over everything that was sampled (not over what survived the filter), errors apart."""
        episodes = [e for g in self.groups for e in g.episodes]
        scored = [e for e in episodes if e.scored]
        rewards = [e.reward for e in scored]
        n_scored, n = max(1, len(scored)), max(1, len(episodes))
        turns = max(1, sum(e.result.turns for e in scored))
        live = [g for g in self.groups if len(g.scored) >= 2]
        return {
            "reward": sum(rewards) / n_scored,
            "success": sum(r >= 1.0 - 1e-9 for r in rewards) / n_scored,
            "episodes": float(len(episodes)),
            "errors": (len(episodes) - len(scored)) / n,
            "truncated": sum(e.result.truncated_turns > 0 or e.result.finish_reason == "context" for e in scored)
            / n_scored,
            "invalid_calls": sum(e.result.invalid_calls for e in scored) / turns,
            "groups": float(len(self.groups)),
            "informative": len(self.informative) / max(1, len(self.groups)),
            "constant_high": sum(is_constant(g.rewards()) and float(g.rewards()[0]) >= 0.5 for g in live)
            / max(1, len(live)),
            "constant_low": sum(is_constant(g.rewards()) and float(g.rewards()[0]) < 0.5 for g in live)
            / max(1, len(live)),
            "batches": float(self.batches),
            "sampled_tokens": float(sum(e.n_action_tokens for e in episodes)),
        }

    def error_kinds(self) -> dict[str, int]:
        outcomes = (e.result.outcome for g in self.groups for e in g.episodes)
        return dict(Counter(o.kind for o in outcomes if isinstance(o, Failed)))


async def collect_informative(
    sample: Callable[[int], asyncio.Future[list[Group]] | asyncio.Task[list[Group]]],
    batch: int,
    wanted: int,
    max_batches: int,
    min_scored: int,
    keep_constant: bool,
) -> Collected:
    """Dynamic sampling (DAPO): collect until ``wanted`` groups carry a signal or ``max_batches`` were asked for.

    Args:
        sample: collects n new groups on seeds not used before.
        keep_constant: do not filter; one batch then is enough.
    """
    groups: list[Group] = []
    informative: list[Group] = []
    n_batches = 0
    while n_batches < max_batches:
        n_batches += 1
        missing = wanted - len(informative)
        share = max(len(informative) / len(groups), 0.25) if groups else 1.0
        size = batch if not groups else min(batch, math.ceil(missing / share))
        new = await sample(size)
        groups += new
        enough = [g for g in new if len(g.scored) >= max(2, min_scored)]
        informative += enough if keep_constant else [g for g in enough if g.informative(min_scored)]
        if len(informative) >= wanted or keep_constant:
            break
    return Collected(groups, informative, n_batches)
