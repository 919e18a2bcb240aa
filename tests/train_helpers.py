"""Learners, episodes and groups on tiny models, for the tests of the trainer."""

from __future__ import annotations

import random
from typing import Any

import torch
from tiny_models import tiny_model

from game_registry import EpisodeResult, Failed, GameMix, Scored
from train.config import ALL_LINEARS
from train.episode import Episode
from train.groups import Group
from train.kv_cache import ATTENTION
from train.learner import Learner, TrainItem, UpdateConfig
from train.lora import attach_adapter, lora_config
from train.losses import LossConfig
from train.packing import TokenSequence

TARGETS = ("q_proj", "v_proj", "down_proj")


def tiny_learners(*names: str, family: str = "llama", lr: float = 1e-2, spread: float = 0.0, **options: Any) -> Any:
    """(peft model, learner of each name). ``spread`` > 0 makes B random, so that the adapter differs from the base."""
    model: Any = tiny_model(family)
    model.requires_grad_(False)
    model.set_attn_implementation(ATTENTION)  # as train.local_engine.load_model does
    targets = ALL_LINEARS if family == "qwen3_moe" else TARGETS  # fused experts are adapted as a whole
    for index, name in enumerate(names):
        model = attach_adapter(model, name, lora_config(4, 8, targets), seed=index)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    mix = {name: GameMix({f"capability_{name}": 1.0}) for name in names}
    learners = [Learner(model, n, mix[n], lr=lr, weight_decay=0.0, seed=0, **options) for n in names]
    return model, *learners


def update_config(**options: Any) -> UpdateConfig:
    """One step, no truncation of importance weights unless asked for."""
    loss = LossConfig(**{"is_cap": None} | options.pop("loss", {}))
    return UpdateConfig(**{"loss": loss, "temperature": 1.0, "pack_tokens": 64} | options)


def random_episode(
    prompt: list[int], rng: random.Random, reward: float | None, *, turns: int = 2, hinted: bool = False, seed: int = 0
) -> Episode:
    """A multi-turn episode of random tokens; its log-probs are placeholders (-5). ``reward=None``: it failed."""
    ids, mask = list(prompt), [False] * len(prompt)
    for turn in range(turns):
        if turn:  # what the environment says
            context = [rng.randrange(3, 259) for _ in range(rng.randint(1, 3))]
            ids, mask = ids + context, mask + [False] * len(context)
        sampled = [rng.randrange(3, 259) for _ in range(rng.randint(1, 5))] + [2]
        ids, mask = ids + sampled, mask + [True] * len(sampled)
    outcome = Failed("timeout", "slow") if reward is None else Scored(reward)
    result = EpisodeResult(seed, outcome, [], [], "done", turns=turns)
    logprobs = [-5.0 if m else 0.0 for m in mask]
    return Episode("capability_a", seed, 0, None, hinted, 1.0, ids, mask, logprobs, len(prompt), result)


def random_group(rewards: list[float | None], seed: int = 0, prompt_len: int = 7) -> Group:
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 259) for _ in range(prompt_len)]
    episodes = [random_episode(prompt, rng, r, turns=1 + k % 3, seed=seed) for k, r in enumerate(rewards)]
    return Group("capability_a", seed, episodes)


@torch.no_grad()
def slow_logprobs(model: Any, sequence: TokenSequence, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of the action tokens of one sequence from full logits: the slow twin of packs and chunked heads."""
    return slow_logprobs_with_grad(model, sequence, temperature)


def slow_logprobs_with_grad(model: Any, sequence: TokenSequence, temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor([list(sequence.token_ids)])
    rows = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float() / temperature, dim=-1)
    chosen = rows.gather(1, ids[0, 1:, None])[:, 0]
    return chosen[torch.tensor(list(sequence.action_mask))[1:]]


def with_logprobs(model: Any, items: list[TrainItem], noise: float = 0.0, seed: int = 0) -> list[TrainItem]:
    """Items whose sampler log-probs are the model's own, plus noise."""
    generator = torch.Generator().manual_seed(seed)
    done = []
    for item in items:
        own = slow_logprobs(model, item.sequence)
        own = own + noise * torch.randn(own.shape, generator=generator)
        done.append(TrainItem(item.sequence, item.advantage, tuple(own.tolist()), item.group))
    return done


def adapter_copy(learner: Learner) -> dict[str, torch.Tensor]:
    return {k: p.detach().clone() for k, p in learner.parameters.items()}


def largest_change(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    return max(float((after[k] - before[k]).abs().max()) for k in before)
