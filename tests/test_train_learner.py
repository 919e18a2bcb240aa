"""One learner: what an update changes and what it must never change, on one rank and on two."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model, tiny_tokenizer
from train_helpers import (
    TARGETS,
    adapter_copy,
    largest_change,
    random_group,
    slow_logprobs_with_grad,
    tiny_learners,
    update_config,
    with_logprobs,
)

from game_registry import GameMix
from pipeline.files import InputError
from train.chat import ChatCodec
from train.config import FIRST_TRAIN_SEED
from train.engine import SamplingParams
from train.learner import Learner, TrainItem, items_of_groups, shares_of_ranks
from train.local_engine import LocalEngine
from train.lora import adapter_parameters, attach_adapter, lora_config
from train.losses import group_advantages
from train.packing import TokenSequence

REWARDS: list[list[float | None]] = [[0.0, 1.0, 0.25, 0.5], [1.0, 0.0, 0.0], [0.5, 0.75]]  # unequal groups


def items_for(model: Any, noise: float = 0.0) -> list[TrainItem]:
    groups = [random_group(rewards, seed) for seed, rewards in enumerate(REWARDS)]
    return with_logprobs(model, items_of_groups(groups, normalise=True), noise=noise)


def weights_of(model: Any, without: str = "lora_") -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items() if without not in k}


# ------------------------------------------------------------------------ step 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_agree_at_step_0(family: str, temperature: float) -> None:
    """fp32 on both sides: the ratio is 1 per token, at the sampling temperature, for shared and for single prompts."""
    model, learner = tiny_learners("first", family=family, spread=0.05)
    engine = LocalEngine(model, ChatCodec(tiny_tokenizer(), [2]))
    engine.bind("first@v0", "first")
    prompts = [[5, 6, 7, 8, 9] * 5, [5, 6, 7, 8, 9] * 5, [5, 6, 7, 8, 9] * 4 + [11, 12, 13], [40, 41]]
    samples = engine.generate([(p, SamplingParams(9, temperature, seed=i)) for i, p in enumerate(prompts)], "first@v0")
    items = []
    for index, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        mask = [False] * len(prompt) + [True] * len(sample.token_ids)
        sequence = TokenSequence([*prompt, *sample.token_ids], mask)
        items.append(TrainItem(sequence, (-1.0) ** index, sample.logprobs, index // 2))
    metrics = learner.update(items, update_config(temperature=temperature, loss={"is_cap": 2.0}))
    assert metrics["mismatch_max_abs"] < 1e-5 and metrics["mismatch_ess"] > 1 - 1e-9
    assert metrics["loss"] == pytest.approx(-sum(i.advantage for i in items) / len(items), abs=1e-5)  # ratio 1
    assert metrics["grad_norm"] > 1e-3 and metrics["action_tokens"] == sum(len(s.token_ids) for s in samples)


def test_kl_is_zero_at_step_0_and_not_after() -> None:
    """B = 0: the adapter is the base, so the KL term changes neither loss nor gradient until the first step is done."""
    model, learner = tiny_learners("first", lr=5e-2)
    items, config = items_for(model), update_config(loss={"kl_coef": 0.5})
    twin, other = tiny_learners("first", lr=5e-2)
    without = other.update(items_for(twin), update_config())
    with_kl = learner.update(items, config)
    assert with_kl["loss"] == pytest.approx(without["loss"], abs=1e-6)
    assert with_kl["grad_norm"] == pytest.approx(without["grad_norm"], rel=1e-5)
    later = learner.update(items_for(model), config)
    assert later["loss"] > other.update(items_for(twin), update_config())["loss"] + 1e-4


# ------------------------------------------------------------------------ what changes


def test_learning_rate_zero_changes_nothing() -> None:
    model, learner = tiny_learners("first", lr=0.0, spread=0.05)
    before, base = adapter_copy(learner), weights_of(model)
    metrics = learner.update(items_for(model), update_config(epochs=2))
    assert metrics["grad_norm"] > 1e-3
    assert largest_change(before, adapter_copy(learner)) == 0.0
    assert all(torch.equal(v, base[k]) for k, v in weights_of(model).items())


def test_only_the_adapter_that_is_trained_changes() -> None:
    """Base and other adapters stay as they are, bit for bit; every part of the trained one moves."""
    model, first, second = tiny_learners("first", "second", spread=0.05)
    base, other = weights_of(model), adapter_copy(second)
    before = adapter_copy(first)
    first.update(items_for(model), update_config())
    assert all(torch.equal(v, base[k]) for k, v in weights_of(model).items())
    assert largest_change(other, adapter_copy(second)) == 0.0
    after = adapter_copy(first)
    assert all(not torch.equal(after[k], before[k]) for k in before)
    frozen = adapter_copy(first)
    second.update(items_for(model), update_config())
    assert largest_change(frozen, adapter_copy(first)) == 0.0
    assert largest_change(other, adapter_copy(second)) > 0.0


def test_updates_raise_the_probability_of_what_was_rewarded() -> None:
    model, learner = tiny_learners("first", lr=2e-2)
    items = items_for(model)

    def gain() -> float:
        with torch.no_grad():
            return sum(i.advantage * float(slow_logprobs_with_grad(model, i.sequence).mean()) for i in items)

    before = gain()
    for _ in range(5):
        learner.update(with_logprobs(model, items), update_config())
    assert gain() > before + 0.5 and learner.version == 5


@pytest.mark.parametrize("name", ["model", "layers", "q_proj", "first_b"])
def test_an_adapter_may_be_named_like_a_module(name: str) -> None:
    model: Any = tiny_model()
    model.requires_grad_(False)
    model = attach_adapter(model, "first", lora_config(2, 2, TARGETS), 0)
    model = attach_adapter(model, name, lora_config(4, 4, TARGETS), 1)
    mine, other = adapter_parameters(model, name), adapter_parameters(model, "first")
    assert len(mine) == len(other) == 2 * 3 * 2 and not set(mine) & set(other)


def test_adapters_are_fp32_on_a_bf16_base_and_start_as_the_base() -> None:
    model: Any = tiny_model().to(torch.bfloat16)
    model.requires_grad_(False)
    ids = torch.arange(3, 20)[None]
    plain = model(input_ids=ids).logits
    model = attach_adapter(model, "first", lora_config(4, 8), 0)
    assert {p.dtype for p in adapter_parameters(model, "first").values()} == {torch.float32}
    assert torch.equal(model(input_ids=ids).logits, plain)
    with pytest.raises(InputError, match="--target-modules"):
        attach_adapter(tiny_model(), "second", lora_config(4, 8, ("nothing",)), 0)


def test_adapter_initialisation_depends_on_the_seed_only() -> None:
    torch.manual_seed(1)
    first = adapter_copy(tiny_learners("first")[1])
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    assert largest_change(first, adapter_copy(tiny_learners("first")[1])) == 0.0
    assert torch.equal(torch.random.get_rng_state(), state)


# ------------------------------------------------------------------------ groups to items


def test_failed_rollouts_have_no_say() -> None:
    """k of n: advantages over scored rollouts only; a failure is neither an item nor a reward of 0."""
    whole, part = random_group([0.0, 1.0, 0.5], 3), random_group([0.0, None, 1.0, None, 0.5], 3)
    items = items_of_groups([part], normalise=True)
    assert [i.advantage for i in items] == pytest.approx(group_advantages(whole.rewards()).tolist())
    assert [list(i.sequence.token_ids) for i in items] == [e.token_ids for e in part.episodes if e.scored]


def test_hinted_rollouts_get_the_plain_prompt_back() -> None:
    group = random_group([0.0, 1.0, 0.5], 1)
    hinted = group.episodes[2]
    hint = [33, 34, 35]
    changed = dataclasses.replace(
        hinted, hinted=True, prompt_len=hinted.prompt_len + 3, token_ids=hint + hinted.token_ids,
        action_mask=[False] * 3 + hinted.action_mask, logprobs=[0.0] * 3 + hinted.logprobs,
    )  # fmt: skip
    group.episodes[2] = changed
    items = items_of_groups([group], normalise=True)
    assert list(items[2].sequence.token_ids) == hinted.token_ids
    assert list(items[2].sequence.action_mask) == hinted.action_mask
    assert all(math.isnan(x) for x in items[2].sampler_logprobs)
    assert len(items[2].sampler_logprobs) == hinted.n_action_tokens
    # The sampler saw another prompt: its log-probs are no part of the mismatch, and its weight is 1.
    model, learner = tiny_learners("first")
    known = with_logprobs(model, items[:2])
    metrics = learner.update([*known, items[2]], update_config(loss={"is_cap": 2.0}))
    assert metrics["mismatch_max_abs"] < 1e-5 and metrics["nonfinite"] == 0.0
    assert metrics["action_tokens"] == sum(len(i.sampler_logprobs) for i in items)


def test_a_group_of_hinted_survivors_is_left_out() -> None:
    group = random_group([None, 1.0, 0.5], 1)
    group.episodes[1].hinted = group.episodes[2].hinted = True
    assert items_of_groups([group], normalise=True) == []


def test_context_behind_the_last_action_is_not_computed() -> None:
    """An episode that ran out of context ends with what the environment said: nothing is predicted from it."""
    group = random_group([0.0, 1.0], 1)
    episode = group.episodes[0]
    plain = list(episode.token_ids)
    episode.token_ids, episode.action_mask = [*plain, 7, 8], [*episode.action_mask, False, False]
    episode.logprobs = [*episode.logprobs, 0.0, 0.0]
    items = items_of_groups([group], normalise=True)
    assert list(items[0].sequence.token_ids) == plain and items[0].sequence.action_mask[-1]


# ------------------------------------------------------------------------ several steps


def slow_update(model: Any, learner: Learner, items: list[TrainItem], epochs: int, per_step: int, clip: bool) -> None:
    """Epochs over mini batches of groups, one episode at a time, against the sampler's log-probs."""
    groups = sorted({i.group for i in items})
    for _ in range(epochs):
        for first in range(0, len(groups), per_step):
            batch = [i for i in items if i.group in groups[first : first + per_step]]
            learner.optimizer.zero_grad()
            for item in batch:
                ratio = torch.exp(slow_logprobs_with_grad(model, item.sequence) - torch.tensor(item.sampler_logprobs))
                clipped = ratio.clamp(0.8, 1.28) if clip else ratio
                term = torch.minimum(ratio * item.advantage, clipped * item.advantage).mean()
                (-term / len(batch)).backward()
            torch.nn.utils.clip_grad_norm_(learner.parameters.values(), 1.0)
            learner.optimizer.step()


def test_epochs_and_mini_batches_clip_against_the_sampler() -> None:
    results = {}
    for clip in (True, False):
        model, fast = tiny_learners("first", spread=0.05)
        items = items_for(model)
        twin_model, slow = tiny_learners("first", spread=0.05)
        for learner in (fast, slow):  # Adam would blow rounding up where a gradient is zero
            learner.optimizer = torch.optim.SGD(learner.parameters.values(), lr=3.0)
        config = update_config(epochs=2, groups_per_step=2, loss={"clipping": clip})
        metrics = fast.update(items, config)
        slow_update(twin_model, slow, items, 2, 2, clip)
        assert metrics["optimizer_steps"] == 4.0 and fast.version == 1
        assert largest_change(adapter_copy(slow), adapter_copy(fast)) < 1e-4
        results[clip] = adapter_copy(fast)
    assert largest_change(results[True], results[False]) > 1e-3, "nothing was clipped: the case is too easy"


def test_unknown_log_probs_get_an_old_policy_when_there_are_several_steps() -> None:
    """Rollouts with a swapped prompt are clipped too: their old policy is the one before the first step."""
    results = []
    for swap in (False, True):
        model, learner = tiny_learners("first", lr=3e-2)
        items = items_for(model)
        if swap:
            nan = tuple(math.nan for _ in items[1].sampler_logprobs)
            items[1] = dataclasses.replace(items[1], sampler_logprobs=nan)
        learner.update(items, update_config(epochs=3))
        results.append(adapter_copy(learner))
    assert largest_change(*results) < 1e-5


def test_gradients_are_clipped_by_their_global_norm() -> None:
    model, learner = tiny_learners("first", spread=0.1)
    items = items_for(model)
    seen = []
    learner.optimizer.register_step_pre_hook(
        lambda *_: seen.append(float(torch.cat([p.grad.reshape(-1) for p in learner.parameters.values()]).norm()))
    )
    metrics = learner.update(items, update_config(max_grad_norm=1e-2))
    assert metrics["grad_norm"] > 0.05 and seen == [pytest.approx(1e-2, rel=1e-3)]


# ------------------------------------------------------------------------ faults


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_skips_the_update(bad: float) -> None:
    model, learner = tiny_learners("first", spread=0.05)
    items = items_for(model)
    learner.update(items, update_config())
    before, state = adapter_copy(learner), copy.deepcopy(learner.optimizer.state_dict())
    poisoned = [dataclasses.replace(items[0], advantage=bad), *items[1:]]
    metrics = learner.update(poisoned, update_config())
    assert metrics["nonfinite"] == 1.0
    assert largest_change(before, adapter_copy(learner)) == 0.0
    for key, entry in learner.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][key][name]) for name, value in entry.items())
    assert learner.update(items, update_config())["nonfinite"] == 0.0
    assert 0 < largest_change(before, adapter_copy(learner)) < 0.1


# ------------------------------------------------------------------------ seeds and ranks


def test_no_seed_is_dealt_twice_and_mixes_are_fair() -> None:
    model, _ = tiny_learners("first")
    learner = Learner(model, "first", GameMix.parse("a:2,b:1"), lr=0.1, weight_decay=0.0, seed=3)
    jobs = [job for n in (3, 1, 5, 6) for job in learner.next_jobs(n)]
    assert len(set(jobs)) == 15 and min(seed for _, seed in jobs) == FIRST_TRAIN_SEED + 30_000_000
    assert sum(game == "a" for game, _ in jobs) == 10
    twin = Learner(model, "first", GameMix.parse("a:2,b:1"), lr=0.1, weight_decay=0.0, seed=3)
    twin.restore_counters(learner.counters())
    assert twin.next_jobs(4) == learner.next_jobs(4)


def test_given_tasks_go_round_in_one_shuffled_order() -> None:
    """A window as long as the set has every task once, over the end of a round and an interruption too."""
    model, _ = tiny_learners("first")
    tasks = range(40, 50)

    def learner() -> Learner:
        return Learner(model, "first", GameMix.parse("a:1"), lr=0.1, weight_decay=0.0, seed=3, tasks=tasks)

    first, second = learner(), learner()
    seeds = [seed for n in (4, 4, 4, 9) for _, seed in first.next_jobs(n)]
    assert all(set(seeds[i : i + 10]) == set(tasks) for i in range(len(seeds) - 9)) and seeds[:10] != list(tasks)
    second.restore_counters(first.counters())
    assert second.next_jobs(5) == first.next_jobs(5)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(1, 5))
def test_every_pack_has_one_rank_and_the_load_is_even(sizes: list[int], world: int) -> None:
    class Sized:
        def __init__(self, index: int, n_tokens: int) -> None:
            self.index, self.n_tokens = index, n_tokens

    packs: Any = [Sized(i, n) for i, n in enumerate(sizes)]
    shares: list[Any] = shares_of_ranks(packs, world)
    assert sorted(p.index for share in shares for p in share) == list(range(len(sizes)))
    loads = [sum(p.n_tokens for p in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes)


CASES: list[dict[str, Any]] = [
    {"pack_tokens": 24, "loss": {"kind": "grpo", "kl_coef": 0.1}},
    {"pack_tokens": 4096, "loss": {"kind": "dapo"}},  # one pack on one rank, as many as ranks on several
    {"pack_tokens": 4096, "loss": {"kind": "dr_grpo"}, "of_group": 1},  # one or two episodes a step: a rank is idle
]
REDUCED = (
    "loss", "entropy", "action_tokens", "grad_norm", "plain_tokens", "mismatch_k1", "mismatch_k3", "mismatch_mean_abs",
    "mismatch_max_abs", "mismatch_outside", "mismatch_ess",
)  # fmt: skip
WORKER = """
import sys, torch
from test_train_learner import CASES, learner_of_case, steps_of_case
from train.distributed import join_ranks
torch.set_num_threads(1)
ranks, _ = join_ranks("cpu")
mine = [learner_of_case(reduce=ranks.sum, rank=ranks.rank, world=ranks.world) for _ in CASES]
results = [steps_of_case(case, *learner) for case, learner in zip(CASES, mine)]
for weights, _ in results:
    ranks.agree(float(sum(p.double().sum() for p in weights.values())), "weights")
if ranks.driver:
    torch.save(results, sys.argv[1])
ranks.close()
"""


def learner_of_case(**ranks: Any) -> Any:
    return tiny_learners("first", spread=0.05, lr=1e-3, **ranks)


def steps_of_case(
    case: dict[str, Any], model: Any, learner: Learner
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Two iterations of four optimiser steps each. Returns weights and the last metrics."""
    config = update_config(epochs=2, groups_per_step=2, **{k: v for k, v in case.items() if k != "of_group"})
    items = items_for(model, noise=0.5)
    if keep := case.get("of_group"):
        items = [item for group in range(len(REWARDS)) for item in [i for i in items if i.group == group][:keep]]
    metrics = [learner.update(items, config) for _ in range(2)][-1]
    return adapter_copy(learner), metrics


class ThreadedSum:
    """Sums over ranks that are threads of this process."""

    def __init__(self, world: int) -> None:
        self.slots: list[Any] = [None] * world
        self.barrier = threading.Barrier(world, timeout=60)

    def of_rank(self, rank: int) -> Any:
        def reduce(tensor: torch.Tensor) -> torch.Tensor:
            self.slots[rank] = tensor.clone()
            self.barrier.wait()
            total = sum(self.slots)
            self.barrier.wait()
            return tensor.copy_(total)

        return reduce


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=["several packs", "a pack each", "fewer episodes"])
def test_many_ranks_equal_one(case: dict[str, Any], world: int) -> None:
    """Global token counts: unequal shares, or a rank without any pack, make the steps of one rank."""
    one, metrics_one = steps_of_case(case, *learner_of_case())
    assert 0 < metrics_one["mismatch_outside"] < 1 and metrics_one["mismatch_max_abs"] > 0.7, "the case is too easy"
    peers = ThreadedSum(world)
    ranks = [learner_of_case(reduce=peers.of_rank(rank), rank=rank, world=world) for rank in range(world)]
    with ThreadPoolExecutor(world) as pool:
        running = [pool.submit(steps_of_case, case, *rank) for rank in ranks]
        results = [r.result() for r in running]
    for weights, metrics in results:
        assert largest_change(one, weights) < 1e-6
        assert metrics["packs"] >= (world + 2) / 2 or "of_group" in case, "every rank has a pack of seven episodes"
        for key in REDUCED:
            assert metrics[key] == pytest.approx(metrics_one[key], rel=1e-5, abs=1e-6), key


@pytest.mark.slow
def test_two_gloo_processes_equal_one(tmp_path: Path) -> None:
    """Global counts: two gloo processes with unequal shares make the steps of one."""
    script, out = tmp_path / "worker.py", tmp_path / "two.pt"
    script.write_text(WORKER)
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--standalone",
        str(script),
        str(out),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for case, (two, metrics_two) in zip(CASES, torch.load(out), strict=True):
        one, metrics_one = steps_of_case(case, *learner_of_case())
        assert largest_change(one, two) < 1e-6
        for key in REDUCED:
            assert metrics_two[key] == pytest.approx(metrics_one[key], rel=1e-5, abs=1e-6), key
