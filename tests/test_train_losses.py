"""Loss and gradient against TRL's own GRPO code on the same tokens, masks, rewards and old log-probs.

TRL's sampler is replaced by canned rollouts; everything after it (padding, masks, rewards, advantages, old and
reference log-probs, importance weights, loss, gradient) is TRL's. Ours goes through groups, packs, chunked log-probs
and ``_pack_loss``.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer
from train_helpers import random_group, slow_logprobs_with_grad, tiny_learners, update_config, with_logprobs

from train.forward import make_packs
from train.groups import Group
from train.learner import Learner, TrainItem, _Stats, items_of_groups
from train.losses import (
    LossConfig,
    Totals,
    group_advantages,
    importance_weights,
    is_constant,
    k3,
    mismatch_metrics,
    policy_loss,
    token_weights,
)

REWARDS: list[list[float | None]] = [[0.0, 1.0, 0.25, 0.5], [1.0, 0.0, 0.0, 0.0]]
MAX_LENGTH = 64


# ------------------------------------------------------------------------ our side


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    return [random_group(rewards, seed) for seed, rewards in enumerate(REWARDS)]


def our_gradient(
    learner: Learner, items: list[TrainItem], loss: dict[str, Any], *, single: bool, pack_tokens: int = 64
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of one optimiser step, as ``Learner._step`` sums them over packs."""
    config = update_config(loss={"max_length": MAX_LENGTH} | loss, pack_tokens=pack_tokens)
    totals = Totals(len(items), sum(len(i.sampler_logprobs) for i in items))
    learner.optimizer.zero_grad(set_to_none=True)
    value = 0.0
    for pack in make_packs(learner.model, [i.sequence for i in items], config.pack_tokens):
        part = learner._pack_loss(pack, items, totals, config, single, _Stats())
        part.backward()
        value += float(part.detach())
    return value, {k: p.grad.clone() for k, p in learner.parameters.items()}


# ------------------------------------------------------------------------ TRL's side


def trl_trainer(model: Any, groups: list[Group], folder: Path, **options: Any) -> Any:
    """A GRPOTrainer on a copy of ``model`` whose sampler hands out the episodes of ``groups``."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    episodes = [e for g in groups for e in g.episodes]
    defaults = {"epsilon": 0.2, "epsilon_high": 0.28, "loss_type": "grpo", "max_completion_length": MAX_LENGTH}
    config = trl.GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=len(episodes), num_generations=len(groups[0].episodes),
        use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False, **defaults | options,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=copy.deepcopy(model),
        reward_funcs=lambda completions, **_: [e.reward for e in episodes],
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "x"}] * len(episodes)),
        processing_class=tiny_tokenizer(),
    )
    prompts = [e.token_ids[: e.prompt_len] for e in episodes]
    completions = [e.token_ids[e.prompt_len :] for e in episodes]
    masks = [[int(m) for m in e.action_mask[e.prompt_len :]] for e in episodes]
    logprobs = [e.logprobs[e.prompt_len :] for e in episodes]
    trainer._generate = lambda _: (prompts, completions, masks, [""] * len(episodes), logprobs, {}, None, None)
    trainer.model.eval()  # no dropout anywhere; in this mode TRL's divisors are those of one optimiser step
    return trainer


def trl_gradient(trainer: Any, old: list[torch.Tensor] | None = None) -> tuple[float, dict[str, torch.Tensor], Any]:
    """Loss, gradient and the scored batch. ``old``: log-probs of the old policy per episode, for action tokens."""
    batch = trainer._generate_and_score_completions([{"prompt": "x"}] * trainer.args.per_device_train_batch_size)
    if old is not None:
        padded = torch.zeros_like(batch["completion_ids"], dtype=torch.float32)
        for row, values in enumerate(old):
            padded[row, (batch["completion_mask"] * batch["tool_mask"])[row].bool()] = values
        batch["old_per_token_logps"] = padded
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradient = {k: p.grad for k, p in trainer.model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradient, batch


def assert_same(ours: tuple[float, dict[str, torch.Tensor]], theirs: tuple[Any, ...], relative: float = 1e-4) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5, abs=1e-6)
    assert set(ours[1]) == set(theirs[1])
    scale = max(float(g.abs().max()) for g in theirs[1].values())
    assert scale > 1e-4, "the oracle has no gradient: nothing is compared"
    for name, gradient in ours[1].items():
        assert float((gradient - theirs[1][name]).abs().max()) <= relative * scale, name


LOSS_PAIRS = [
    ("grpo", {"loss_type": "grpo"}),
    ("dr_grpo", {"loss_type": "dr_grpo"}),
    ("dapo", {"loss_type": "dapo"}),
    ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
]


@pytest.mark.parametrize(("kind", "options"), LOSS_PAIRS)
def test_loss_and_gradient_equal_trl_when_clipping_acts(
    kind: str, options: dict[str, Any], groups: list[Group], tmp_path: Path
) -> None:
    """Old log-probs far from the new ones: ratios on both sides of [0.8, 1.28], as on later optimiser steps."""
    model, learner = tiny_learners("first", family="qwen3", spread=0.05)
    noise = 0.4 if kind != "gspo" else 1.5  # a mean over an episode moves less
    items = with_logprobs(model, items_of_groups(groups, normalise=True), noise=noise)
    old = [torch.tensor(i.sampler_logprobs) for i in items]
    theirs = trl_gradient(trl_trainer(model, groups, tmp_path, **options), old)
    ours = our_gradient(learner, items, {"kind": kind}, single=False)
    unclipped = our_gradient(learner, items, {"kind": kind, "clipping": False}, single=False)
    assert unclipped[0] != pytest.approx(ours[0], rel=1e-3), "no ratio was clipped: the case is too easy"
    assert_same(ours, theirs)


@pytest.mark.parametrize("correction", [True, False])
def test_kl_and_importance_weights_equal_trl(correction: bool, groups: list[Group], tmp_path: Path) -> None:
    """One step on-policy: k3 against the base without adapter, weights truncated at 2 as TRL's ``token_truncate``."""
    model, learner = tiny_learners("first", spread=0.1)
    items = with_logprobs(model, items_of_groups(groups, normalise=True), noise=0.8)
    sampled = []
    for group in groups:
        for episode in group.episodes:
            values = iter(items[len(sampled)].sampler_logprobs)
            sampled.append([next(values) if m else 0.0 for m in episode.action_mask])
    fed = [Group(g.game, g.seed, [dataclasses.replace(e, logprobs=sampled.pop(0)) for e in g.episodes]) for g in groups]
    trainer = trl_trainer(model, fed, tmp_path, use_bias_correction_kl=correction)
    trainer.beta = 0.3  # set here: given to the constructor, TRL would take a copy of the adapter as its reference
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    trainer.vllm_importance_sampling_mode = "token_truncate"
    trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max = None, 2.0
    theirs = trl_gradient(trainer)
    weights = theirs[2]["importance_sampling_ratio"]
    assert bool((weights == 2.0).any()) and bool((weights < 1.0).any())
    kl = {"kl_coef": 0.3, "kl_correction": correction}
    ours = our_gradient(learner, items, kl | {"is_cap": 2.0}, single=True)
    assert_same(ours, theirs)
    without = our_gradient(learner, items, {"kl_coef": 0.0, "is_cap": 2.0}, single=True)
    assert max(float((without[1][k] - g).abs().max()) for k, g in ours[1].items()) > 1e-3, "KL has no gradient"


def test_advantages_and_masks_equal_trl(groups: list[Group], tmp_path: Path) -> None:
    model, _ = tiny_learners("first")
    batch = trl_gradient(trl_trainer(model, groups, tmp_path))[2]
    ours = torch.cat([group_advantages(g.rewards()) for g in groups])
    assert torch.allclose(ours, batch["advantages"], atol=1e-6)
    plain = trl_gradient(trl_trainer(model, groups, tmp_path, scale_rewards="none"))[2]
    centred = torch.cat([group_advantages(g.rewards(), normalise=False) for g in groups])
    assert torch.allclose(centred, plain["advantages"])
    n_trained = int((batch["completion_mask"] * batch["tool_mask"]).sum())
    assert n_trained == sum(e.n_action_tokens for g in groups for e in g.episodes)


# ------------------------------------------------------------------------ slow twins of the fast path


def slow_loss(model: Any, items: list[TrainItem], config: LossConfig, single: bool) -> torch.Tensor:
    """The GRPO formula, one episode at a time from full logits."""
    total: Any = 0.0
    for item in items:
        new = slow_logprobs_with_grad(model, item.sequence)
        sampler = torch.tensor(item.sampler_logprobs)
        ratio = torch.exp(new - (new.detach() if single else sampler))
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        term = torch.minimum(ratio * item.advantage, clipped * item.advantage)
        if single and config.is_cap is not None:
            term = term * torch.exp(new.detach() - sampler).clamp_max(config.is_cap)
        total = total - term.mean() / len(items)
    return total


@pytest.mark.parametrize("pack_tokens", [16, 64, 4096])  # one episode a pack, some, all in one tree
@pytest.mark.parametrize("single", [True, False])
def test_packed_step_equals_one_row_at_a_time(groups: list[Group], pack_tokens: int, single: bool) -> None:
    model, learner = tiny_learners("first", family="qwen3", spread=0.05)
    items = with_logprobs(model, items_of_groups(groups, normalise=True), noise=0.3)
    ours = our_gradient(learner, items, {"is_cap": 2.0}, single=single, pack_tokens=pack_tokens)
    learner.optimizer.zero_grad()
    loss = slow_loss(model, items, LossConfig(is_cap=2.0), single)
    loss.backward()
    assert_same(ours, (float(loss.detach()), {k: p.grad for k, p in learner.parameters.items()}), relative=1e-5)


def sampled_tokens(item: TrainItem) -> list[int]:
    return [t for t, m in zip(item.sequence.token_ids, item.sequence.action_mask, strict=True) if m]


def test_every_sampled_token_is_trained_and_no_other(groups: list[Group]) -> None:
    """All turns count, the end-of-turn token too; what the environment said is context."""
    model, _ = tiny_learners("first", spread=0.05)
    items = items_of_groups(groups, normalise=True)
    for item, episode in zip(items, (e for g in groups for e in g.episodes), strict=True):
        assert list(item.sequence.token_ids) == episode.token_ids
        trained = sampled_tokens(item)
        assert trained.count(2) == episode.result.turns and len(trained) == len(item.sampler_logprobs)
    pack = make_packs(model, [i.sequence for i in items], 4096)[0]
    targets = pack.pair_target[torch.cat(pack.pair_of_action)].tolist()
    assert targets == [token for e in pack.episodes for token in sampled_tokens(items[e])]


# ------------------------------------------------------------------------ formulas


def flat(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths_E = torch.tensor(lengths)
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths_E), lengths_E


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "slope"),
    [
        (math.log(1.27), 1.0, 1.27),  # inside the upper bound 1.28
        (math.log(1.29), 1.0, 0.0),
        (math.log(0.81), -1.0, -0.81),  # inside the lower bound 0.8
        (math.log(0.79), -1.0, 0.0),
        (math.log(1.5), -1.0, -1.5),  # the pessimistic side is never clipped
        (math.log(0.5), 1.0, 0.5),
    ],
)
def test_clip_is_asymmetric(log_ratio: float, advantage: float, slope: float) -> None:
    new = torch.tensor([log_ratio], requires_grad=True)
    episode, lengths = flat([1])
    loss = policy_loss(new, torch.zeros(1), torch.tensor([advantage]), episode, lengths, Totals(1, 1), LossConfig())
    loss.backward()
    assert float(-new.grad) == pytest.approx(slope, rel=1e-5)  # type: ignore[arg-type,operator]


def test_k3_has_a_gradient_and_k1_has_none_in_expectation() -> None:
    """k3 at p != q pulls towards the reference on average; it is zero with zero gradient at p == q."""
    logits = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0]), 0)
    policy = torch.log_softmax(logits, 0)
    p = policy.exp().detach()
    expected_k3 = (p * k3(policy, reference)).sum()
    kl = float((p * (policy - reference)).sum())
    assert float(expected_k3) == pytest.approx(kl, rel=1e-5)  # unbiased: E k3 = KL
    (gradient,) = torch.autograd.grad(expected_k3, logits, retain_graph=True)
    assert float(gradient.abs().max()) > 0.1
    (of_k1,) = torch.autograd.grad((p * (policy - reference)).sum(), logits)
    assert float(of_k1.abs().max()) < 1e-6  # the estimator that must not be used
    assert bool((k3(policy, policy) == 0).all())


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20), st.floats(-3, 3))
@settings(max_examples=50, deadline=None)
def test_k3_is_never_negative(values: list[float], shift: float) -> None:
    a = torch.tensor(values)
    assert bool((k3(a, a + shift) >= -1e-6).all())


def test_importance_weights_are_truncated_and_carry_no_gradient() -> None:
    new = torch.tensor([0.0, 1.0, -1.0], requires_grad=True)
    weights = importance_weights(new, torch.zeros(3), 2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-1)]) and not weights.requires_grad


@pytest.mark.parametrize("kind", ["grpo", "gspo", "dapo", "dr_grpo"])
def test_weights_of_parts_add_up_to_those_of_the_whole(kind: Any) -> None:
    """Split in two passes with the counts of the whole, the loss is the same: no part has a divisor of its own."""
    torch.manual_seed(0)
    lengths = [3, 1, 7, 2]
    new, old, advantages = torch.randn(13), torch.randn(13), torch.randn(4)
    totals, config = Totals(4, 13), LossConfig(kind=kind, max_length=16)
    episode, lengths_E = flat(lengths)
    whole = policy_loss(new, old, advantages[episode], episode, lengths_E, totals, config)
    parts = 0.0
    for first, last, tokens in ((0, 2, slice(0, 4)), (2, 4, slice(4, 13))):
        own_episode, own_lengths = flat(lengths[first:last])
        own_advantages = advantages[first:last][own_episode]
        parts += float(policy_loss(new[tokens], old[tokens], own_advantages, own_episode, own_lengths, totals, config))
    assert parts == pytest.approx(float(whole), rel=1e-5)
    total_weight = float(token_weights(episode, lengths_E, config, totals).sum())
    assert total_weight == pytest.approx(13 / (4 * 16) if kind == "dr_grpo" else 1.0)


@pytest.mark.parametrize(
    ("rewards", "constant"),
    [
        ([0.3] * 4, True),
        ([0.1 + 0.2, 0.3, 0.3, 0.3], True),  # equal up to rounding
        ([0.3, 0.3, 0.3, 0.3001], False),
        ([0.0, 1.0, 0.0, 0.0], False),
        ([1.0, 0.0, 0.5, 0.5], False),  # the mean alone would not tell
    ],
)
def test_constant_groups_are_told_by_their_spread(rewards: list[float], constant: bool) -> None:
    assert is_constant(torch.tensor(rewards)) is constant
    advantages = group_advantages(torch.tensor(rewards))
    assert bool(torch.isfinite(advantages).all())
    if constant:
        assert float(advantages.abs().max()) < 1e-3  # would not move anything even unfiltered


def test_mismatch_metrics() -> None:
    sampler = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    assert mismatch_metrics(sampler, sampler) == {
        "k1": 0.0, "k3": 0.0, "mean_abs": 0.0, "max_abs": 0.0, "outside": 0.0, "ess": 1.0,
    }  # fmt: skip
    off = mismatch_metrics(sampler + torch.tensor([0.0, 1.0, -1.0, 0.0]), sampler)
    ratio = torch.tensor([1.0, math.e, 1 / math.e, 1.0])
    assert off["outside"] == 0.5 and off["max_abs"] == pytest.approx(1.0) and off["mean_abs"] == pytest.approx(0.5)
    assert off["k1"] == pytest.approx(0.0) and off["k3"] == pytest.approx(float(ratio.mean()) - 1.0)
    assert off["ess"] == pytest.approx(float(ratio.sum() ** 2 / (4 * (ratio**2).sum())))
    assert mismatch_metrics(torch.empty(0), torch.empty(0))["ess"] == 1.0


def test_kl_needs_a_reference() -> None:
    episode, lengths = flat([1])
    zero, config = torch.zeros(1), LossConfig(kl_coef=0.1)
    with pytest.raises(ValueError, match="reference_logprobs_N"):
        policy_loss(zero, zero, torch.ones(1), episode, lengths, Totals(1, 1), config)
