"""Policy-gradient losses over action tokens. Pure functions: tensors in, tensors out.

Layout: the N action tokens of a batch of E episodes in one flat vector; ``episode`` [N] says whose token it is. A
suffix tells a tensor's shape: ``_N`` per token, ``_E`` per episode.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

LossKind = Literal["grpo", "dr_grpo", "dapo", "gspo"]
LOSSES: tuple[LossKind, ...] = ("grpo", "dr_grpo", "dapo", "gspo")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Which loss.

    Args:
        kind: ``grpo`` mean over episodes of the mean over tokens (Shao et al. 2024); ``dr_grpo`` sum over tokens by a
            constant length (Liu et al. 2025); ``dapo`` mean over all tokens (Yu et al. 2025); ``gspo`` sequence-level
            ratio (Zheng et al. 2025).
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        clipping: False = no clipping.
        kl_coef: weight of the k3 estimate of KL(policy || reference).
        kl_correction: multiply k3 by the ratio; the gradient of the KL term is unbiased only so (DeepSeek-V3.2, 2025).
        is_cap: truncation of the sampler-to-trainer importance weight; None = no correction (Yao et al. 2025).
        max_length: the constant of ``dr_grpo``, in tokens.
    """

    kind: LossKind = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    clipping: bool = True
    kl_coef: float = 0.0
    kl_correction: bool = True
    is_cap: float | None = 2.0
    max_length: int = 1024


def group_advantages(rewards_G: torch.Tensor, eps: float = 1e-4, normalise: bool = True) -> torch.Tensor:
    """A_k = (r_k - mean r) / (std r + eps) over the scored rollouts of one group; std with Bessel's correction.

    Args:
        rewards_G: [G], G >= 2. ``normalise=False`` leaves the division out (Dr. GRPO).
    """
    centred = rewards_G - rewards_G.mean()
    return centred / (rewards_G.std() + eps) if normalise else centred


def is_constant(rewards_G: torch.Tensor, tolerance: float = 1e-6) -> bool:
    """A group without a learning signal: the spread of its rewards is rounding noise."""
    return bool((rewards_G.max() - rewards_G.min()) <= tolerance)


def token_weights(episode_N: torch.Tensor, lengths_E: torch.Tensor, config: LossConfig, totals: Totals) -> torch.Tensor:
    """Weight of each token in the loss, so that summing weighted terms over all ranks and passes gives the loss.

    ``grpo``, ``gspo``: 1 / (|B| T_k); ``dapo``: 1 / sum_k T_k; ``dr_grpo``: 1 / (|B| max_length); sums are global.
    """
    if config.kind in ("grpo", "gspo"):
        return 1.0 / (totals.episodes * lengths_E[episode_N].float())
    if config.kind == "dapo":
        return torch.full_like(episode_N, 1, dtype=torch.float32) / totals.tokens
    return torch.full_like(episode_N, 1, dtype=torch.float32) / (totals.episodes * config.max_length)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Counts over the whole optimiser step, all passes and ranks: the only divisors of the loss."""

    episodes: int
    tokens: int


def policy_loss(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    episode_N: torch.Tensor,
    lengths_E: torch.Tensor,
    totals: Totals,
    config: LossConfig,
    *,
    importance_N: torch.Tensor | None = None,
    reference_logprobs_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss of these tokens, a scalar. Summed over all packs and ranks of a step it is

        L = - 1/|B| sum_k 1/T_k sum_t w_t min(rho_t A_k, clip(rho_t, 1 - eps_low, 1 + eps_high) A_k) + kl_coef * KL

    with rho_t = exp(logprob - old_logprob) per token (``gspo``: its geometric mean over the episode).

    Args:
        logprobs_N, old_logprobs_N: fp32 log-probs of the sampled tokens under the new and the old policy.
        advantages_N: A_k of each token's episode.
        importance_N: w_t, a constant weight per token (``importance_weights``); None = 1.
        reference_logprobs_N: needed when ``config.kl_coef > 0``.
    """
    log_ratio_N = logprobs_N - old_logprobs_N
    if config.kind == "gspo":
        log_ratio_N = sequence_log_ratio(log_ratio_N, episode_N, lengths_E, logprobs_N)
    ratio_N = torch.exp(log_ratio_N)
    objective_N = ratio_N * advantages_N
    if config.clipping:
        clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_N
        objective_N = torch.minimum(objective_N, clipped_N)
    if importance_N is not None:
        objective_N = objective_N * importance_N
    if config.kl_coef > 0:
        if reference_logprobs_N is None:
            raise ValueError("kl_coef > 0 needs reference_logprobs_N")
        kl_N = k3(logprobs_N, reference_logprobs_N)
        objective_N = objective_N - config.kl_coef * (kl_N * ratio_N if config.kl_correction else kl_N)
    return -(objective_N * token_weights(episode_N, lengths_E, config, totals)).sum()


def sequence_log_ratio(
    log_ratio_N: torch.Tensor, episode_N: torch.Tensor, lengths_E: torch.Tensor, logprobs_N: torch.Tensor
) -> torch.Tensor:
    """GSPO: s_k = mean_t log rho_t as value; the gradient of each token flows through its own log-prob."""
    mean_E = torch.zeros(len(lengths_E), dtype=log_ratio_N.dtype, device=log_ratio_N.device)
    mean_E = mean_E.index_add(0, episode_N, log_ratio_N.detach()) / lengths_E.clamp_min(1)
    return logprobs_N - logprobs_N.detach() + mean_E[episode_N]


def k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(policy || reference) per token, unbiased and >= 0: exp(d) - d - 1, d = reference - policy (Schulman 2020)."""
    difference = reference_logprobs - logprobs
    return torch.exp(difference) - difference - 1


def importance_weights(logprobs_N: torch.Tensor, sampler_logprobs_N: torch.Tensor, cap: float) -> torch.Tensor:
    """Truncated importance weights min(pi_trainer / pi_sampler, cap), without gradient."""
    return torch.exp(logprobs_N.detach() - sampler_logprobs_N).clamp_max(cap)


def mismatch_metrics(logprobs_N: torch.Tensor, sampler_logprobs_N: torch.Tensor) -> dict[str, float]:
    """How far the sampler's log-probs are from the trainer's on the tokens that were sampled.

    k1 = mean(sampler - trainer) and k3 estimate KL(sampler || trainer); ``max_abs`` is the largest gap of one token;
    ``outside`` the share of ratios outside [0.5, 2]; ``ess`` the effective sample size (sum w)^2 / (N sum w^2) <= 1.
    """
    sums, largest = mismatch_sums(logprobs_N, sampler_logprobs_N)
    return mismatch_of_sums(sums, float(largest))


def mismatch_sums(logprobs_N: torch.Tensor, sampler_logprobs_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``mismatch_metrics`` is made of and what adds up over packs and ranks, with w = exp(d), d = trainer -
    sampler: (N, sum -d, sum (w - 1 - d), sum |d|, number of w outside [0.5, 2], sum w, sum w^2) [7] in fp64, and
    max |d|, a scalar (0 without tokens)."""
    gap = (logprobs_N - sampler_logprobs_N).double()
    ratio = gap.exp()
    outside = ((ratio < 0.5) | (ratio > 2)).double()
    rows = torch.stack([torch.ones_like(gap), -gap, ratio - 1 - gap, gap.abs(), outside, ratio, ratio**2])
    return rows.sum(1), gap.abs().max() if len(gap) else gap.new_zeros(())


def mismatch_of_sums(sums_7: torch.Tensor, largest: float) -> dict[str, float]:
    """``mismatch_metrics`` from the sums and the maximum of ``mismatch_sums``."""
    n, k1, k3, absolute, outside, weights, squares = sums_7.tolist()
    if n == 0:
        return {"k1": 0.0, "k3": 0.0, "mean_abs": 0.0, "max_abs": 0.0, "outside": 0.0, "ess": 1.0}
    return {
        "k1": k1 / n, "k3": k3 / n, "mean_abs": absolute / n, "max_abs": largest, "outside": outside / n,
        "ess": weights**2 / (n * squares),
    }  # fmt: skip
