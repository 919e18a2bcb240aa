"""Groups: independent episodes with deadlines, k of n, constant ones dropped and replaced, errors apart from rates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import tiny_game
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine, right_answer
from tiny_models import tiny_tokenizer
from train_helpers import random_group

from game_registry import AgentError, GameMix, Scored
from train.chat import ChatCodec
from train.engine import Sample, SamplingParams
from train.episode import EpisodeParams
from train.groups import Collected, Group, Sampler, collect_informative
from train.rollout import EnvironmentPool

GAME = tiny_game.SPEC.name
PARAMS = EpisodeParams(max_new_tokens=60, max_seq_length=1024, deadline_s=20.0, seed=1)


def sampler_of(engine: Any, slots: int = 64) -> Sampler:
    pools = {GAME: EnvironmentPool(tiny_game.SPEC)}
    return Sampler(engine, engine.codec, {GAME: tiny_game.SPEC}, pools, asyncio.Semaphore(slots))


@pytest.fixture(scope="module")
def codec() -> ChatCodec:
    return ChatCodec(tiny_tokenizer(), [2])


# ------------------------------------------------------------------------ sampling


async def test_a_group_is_one_task_sampled_n_times(codec: ChatCodec) -> None:
    engine = ScriptedEngine(codec, right_answer)
    group = await sampler_of(engine).group(GAME, 5, 4, PARAMS, "a@v3")
    assert [e.sample_idx for e in group.episodes] == [0, 1, 2, 3] and group.rewards().tolist() == [1.0] * 4
    assert len({tuple(e.token_ids[: e.prompt_len]) for e in group.episodes}) == 1  # identical task
    assert {name for name, _ in engine.asked} == {"a@v3"}
    assert len({params.seed for _, params in engine.asked}) == 4  # but not identical samples
    assert engine.max_in_flight == 4


async def test_hints_go_to_a_part_of_a_group_never_to_all(codec: ChatCodec) -> None:
    sampler = sampler_of(ScriptedEngine(codec, right_answer))
    for size, ratio, n_hinted in ((4, 0.5, 2), (4, 0.99, 3), (4, 0.0, 0), (5, 0.3, 1)):
        group = await sampler.group(GAME, 1, size, PARAMS, None, ratio)
        assert sum(e.hinted for e in group.episodes) == n_hinted
        plain = [e for e in group.episodes if not e.hinted]
        assert all(e.prompt_len > plain[0].prompt_len for e in group.episodes if e.hinted)


async def test_no_more_than_the_slots_are_in_flight(codec: ChatCodec) -> None:
    engine = ScriptedEngine(codec, right_answer, delay_s=0.01)
    groups = await sampler_of(engine, slots=3).groups([(GAME, s) for s in range(4)], 4, PARAMS, None)
    assert engine.max_in_flight == 3 and [g.seed for g in groups] == [0, 1, 2, 3]


class UnevenEngine(ScriptedEngine):
    """The first request never answers; the others do at once."""

    async def sample(self, prompt_ids: list[int], params: SamplingParams, adapter: str | None = None) -> Sample:
        if not self.asked:
            self.asked.append((adapter, params))
            await asyncio.sleep(3600)
        return await super().sample(prompt_ids, params, adapter)


async def test_a_straggler_ends_at_its_deadline_and_the_group_closes_with_k_of_n(codec: ChatCodec) -> None:
    engine = UnevenEngine(codec, right_answer)
    begin = time.monotonic()
    params = EpisodeParams(max_new_tokens=60, deadline_s=0.5)
    groups = await sampler_of(engine).groups([(GAME, 1), (GAME, 2)], 4, params, None)
    assert time.monotonic() - begin < 5
    assert [len(g.scored) for g in groups] == [3, 4]
    assert Collected(groups, [], 1).error_kinds() == {"timeout": 1}
    metrics = Collected(groups, [], 1).metrics()
    assert metrics["errors"] == 1 / 8 and metrics["reward"] == 1.0  # not 7/8


class LostServer(ScriptedEngine):
    async def sample(self, prompt_ids: list[int], params: SamplingParams, adapter: str | None = None) -> Sample:
        raise AgentError("server", "no server is alive")


async def test_a_dead_server_is_no_reward(codec: ChatCodec) -> None:
    group = await sampler_of(LostServer(codec, right_answer)).group(GAME, 1, 3, PARAMS, None)
    assert group.scored == [] and not group.informative(1)
    metrics = Collected([group], [], 1).metrics()
    assert metrics["errors"] == 1.0 and metrics["episodes"] == 3.0


@pytest.mark.parametrize("seed", [tiny_game.RAISES, tiny_game.NAN_REWARD])
async def test_an_instance_that_failed_is_not_used_again(codec: ChatCodec, seed: int) -> None:
    sampler = sampler_of(ScriptedEngine(codec, right_answer))
    await sampler.group(GAME, seed, 2, PARAMS, None)
    assert sampler.pools[GAME]._free == []
    await sampler.group(GAME, 1, 2, PARAMS, None)
    assert len(sampler.pools[GAME]._free) == 2


# ------------------------------------------------------------------------ signal


@pytest.mark.parametrize(
    ("rewards", "min_scored", "informative"),
    [
        ([0.0, 1.0, 0.0, 0.0], 2, True),
        ([0.3, 0.3, 0.3, 0.3], 2, False),
        ([0.1 + 0.2, 0.3, 0.3, 0.3], 2, False),  # rounding is no signal
        ([0.0, 1.0, None, None], 2, True),
        ([0.0, 1.0, None, None], 3, False),  # too few of n
        ([0.0, None, None, None], 1, False),  # one rollout has no baseline
        ([None, None, None, None], 1, False),
    ],
)
def test_informative_groups(rewards: list[float | None], min_scored: int, informative: bool) -> None:
    assert random_group(rewards).informative(min_scored) is informative


def test_rewards_that_cancel_in_the_mean_still_count() -> None:
    """A range on the mean would call these alike."""
    assert random_group([0.0, 1.0, 0.5, 0.5]).informative(2) and not random_group([0.5] * 4).informative(2)


def test_metrics_count_everything_that_was_sampled() -> None:
    groups = [random_group([1.0] * 4), random_group([0.0] * 4, 1), random_group([0.0, 1.0, None, 0.5], 2)]
    metrics = Collected(groups, groups[2:], 2).metrics()
    assert metrics["reward"] == pytest.approx((4 + 1.5) / 11) and metrics["success"] == pytest.approx(5 / 11)
    assert metrics["constant_high"] == metrics["constant_low"] == metrics["informative"] == pytest.approx(1 / 3)
    assert metrics["errors"] == 1 / 12 and metrics["groups"] == 3.0 and metrics["batches"] == 2.0
    assert metrics["sampled_tokens"] == sum(e.n_action_tokens for g in groups for e in g.episodes)


def test_truncation_and_invalid_calls_are_rates_of_scored_episodes() -> None:
    group = random_group([0.0, 1.0, 0.5, None])
    group.episodes[0].result.truncated_turns = 1
    group.episodes[1].result.finish_reason = "context"
    group.episodes[2].result.invalid_calls = 2
    metrics = Collected([group], [], 1).metrics()
    turns = sum(e.result.turns for e in group.scored)
    assert metrics["truncated"] == pytest.approx(2 / 3) and metrics["invalid_calls"] == pytest.approx(2 / turns)


# ------------------------------------------------------------------------ refill


def source(pattern: Callable[[int], list[float | None]]) -> tuple[Any, list[int]]:
    """A sampler of groups whose rewards follow ``pattern``, and the sizes that it was asked for."""
    sizes: list[int] = []

    async def sample(n: int) -> list[Group]:
        first = sum(sizes)
        sizes.append(n)
        return [random_group(pattern(first + i), first + i) for i in range(n)]

    return sample, sizes


SIGNAL: list[float | None] = [0.0, 1.0]
CONSTANT: list[float | None] = [1.0, 1.0]


async def test_constant_groups_are_replaced_by_new_seeds() -> None:
    sample, sizes = source(lambda i: SIGNAL if i % 2 else CONSTANT)
    collected = await collect_informative(sample, 8, 8, 3, 2, False)
    assert sizes == [8, 8] and len(collected.informative) == 8 and collected.batches == 2  # 4 missing, half are good
    assert len({g.seed for g in collected.groups}) == 16


async def test_refilling_ends_after_three_batches() -> None:
    sample, sizes = source(lambda i: CONSTANT)
    collected = await collect_informative(sample, 8, 8, 3, 2, False)
    assert sizes == [8, 8, 8] and collected.informative == [] and collected.batches == 3


async def test_no_refill_when_enough_carry_a_signal() -> None:
    sample, sizes = source(lambda i: SIGNAL if i else CONSTANT)
    assert len((await collect_informative(sample, 8, 7, 3, 2, False)).informative) == 7
    assert sizes == [8]
    await collect_informative(sample, 8, 8, 3, 2, False)
    assert sizes == [8, 8]  # seven of eight are not enough now, but every later one has a signal


async def test_without_the_filter_one_batch_is_taken_as_it_is() -> None:
    sample, sizes = source(lambda i: [CONSTANT, SIGNAL, [0.0, None]][i % 3])
    collected = await collect_informative(sample, 6, 6, 3, 2, True)
    assert sizes == [6] and len(collected.informative) == 4  # those without a second scored rollout have no baseline


# ------------------------------------------------------------------------ mixes


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 100), min_size=1, max_size=6),
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
)
@settings(max_examples=80, deadline=None)
def test_a_mix_starves_no_game(weights: dict[str, float], deals: list[int]) -> None:
    """After any number of deals every game is within one group per game of its exact share."""
    mix = GameMix(weights)
    dealt = [name for n in deals for name in mix.deal(n)]
    assert len(dealt) == sum(deals)
    for name, weight in mix.weights.items():
        assert abs(dealt.count(name) - weight * len(dealt)) <= len(weights)


def test_the_smallest_weight_gets_its_turn() -> None:
    mix = GameMix.parse("a:49,b:49,c:2")
    assert [name for _ in range(50) for name in mix.deal(4)].count("c") in (3, 4, 5)


def test_random_groups_are_what_they_seem() -> None:
    group = random_group([0.25, None])
    assert isinstance(group.episodes[0].result.outcome, Scored) and group.rewards().tolist() == [0.25]
