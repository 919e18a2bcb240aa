"""All gates of a model trained together on kept features: softmax regression in every layer at once.

    logits[l, n] = V_l (x[l, n] / s_l) + b_l          s_l [H]: root mean square of each feature in layer l
    loss = mean over layers of  sum_n w_n CE(logits[l, n], label_n) / sum_n w_n  +  c * S * sum_s f_s P_s

``w_n`` is how many episodes share the token; ``f_s`` the share of tokens whose argmax is s and ``P_s`` the mean
probability (the load balance of the Switch transformer). The scale is folded into the weights afterwards (``W = V /
s``), so the gate stays ``W h + b``. A residual stream has a few features hundreds of times larger than the rest;
without ``s`` they decide alone.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from train.gate_features import FeatureSet


@dataclasses.dataclass(frozen=True)
class FitSettings:
    """Optimiser settings of one round; see ``moe_gate.config.GateConfig``."""

    steps: int
    batch_episodes: int
    lr: float
    bias_lr: float
    weight_decay: float
    warmup_steps: int
    load_balance_coef: float
    eval_every: int
    patience: int
    seed: int


@dataclasses.dataclass(frozen=True)
class GateScore:
    """Token-level quality over all gated layers. ``confusion[label][choice]`` sums weights; shares are of each label's
    row."""

    loss: float
    accuracy: float
    accuracy_of_layer: list[float]
    confusion: list[list[float]]


def global_sum(tensor: Tensor) -> Tensor:
    """The sum over all ranks (the tensor itself in a single process)."""
    if dist.is_available() and dist.is_initialized():
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def feature_scale(features: FeatureSet) -> Tensor:
    """Root mean square of every feature over all ranks' tokens: ``[L, 1, H]`` fp32."""
    squares = torch.stack([_weighted_squares(layer, features.weight) for layer in features.hidden])
    total = global_sum(features.weight.sum())
    return (global_sum(squares) / total).sqrt().clamp_min(1e-6).unsqueeze(1)


def _weighted_squares(hidden_NH: Tensor, weight_N: Tensor) -> Tensor:
    total = torch.zeros(hidden_NH.shape[1])
    for chunk, weight in zip(torch.split(hidden_NH, 8192), torch.split(weight_N, 8192), strict=True):
        total += (chunk.float().square() * weight[:, None]).sum(0)
    return total


def balance(features: FeatureSet, n_slots: int) -> FeatureSet:
    """``features`` with weights such that every label that occurs has the same total over all ranks.

    A prefix that all episodes share would otherwise outweigh the tokens that tell capabilities apart.
    """
    per_label = torch.zeros(n_slots).index_add_(0, features.label, features.weight)
    per_label = global_sum(per_label)
    present = per_label > 0
    factor = torch.where(present, per_label.sum() / (present.sum() * per_label.clamp_min(1e-9)), torch.zeros(()))
    return dataclasses.replace(features, weight=features.weight * factor[features.label])


class GateFit:
    """Weights of all gates, their optimiser, and the best state seen so far.

    Args:
        weight: ``[L, S, H]`` and ``bias`` ``[L, S]``: where to start (fp32).
        scale: ``[L, 1, H]`` from ``feature_scale``.
        has_base: slot 0 is the base.
    """

    def __init__(self, weight: Tensor, bias: Tensor, scale: Tensor, settings: FitSettings) -> None:
        self.settings, self.scale = settings, scale
        self.scaled_weight = (weight * scale).clone().requires_grad_(True)
        self.bias = bias.clone().requires_grad_(True)
        groups = [
            {"params": [self.scaled_weight], "lr": settings.lr, "weight_decay": settings.weight_decay},
            {"params": [self.bias], "lr": settings.bias_lr, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups)
        self.base_lrs = [settings.lr, settings.bias_lr]
        self.step = 0
        self.best_loss = float("inf")
        self.best = self.weights()
        self.evals_without_gain = 0

    def weights(self) -> tuple[Tensor, Tensor]:
        """The gates as the model uses them: ``W [L, S, H]``, ``b [L, S]``."""
        return (self.scaled_weight.detach() / self.scale).clone(), self.bias.detach().clone()

    @property
    def finished(self) -> bool:
        return self.step >= self.settings.steps or self.evals_without_gain >= self.settings.patience

    def train_step(
        self, features: FeatureSet, rows_of_episode: Sequence[Tensor], episodes: Sequence[int], share: float
    ) -> float:
        """One optimiser step; returns the loss over all ranks.

        Args:
            episodes: those of the step that this rank holds, as indices into ``rows_of_episode``.
            share: episodes of the step (on all ranks) divided by all training episodes.
        """
        warmup = min(1.0, (self.step + 1) / max(1, self.settings.warmup_steps))
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr * warmup
        shared = (features.episode < 0).nonzero().squeeze(1)  # in every step, for its share of the episodes
        rows = torch.cat([shared, *(rows_of_episode[e] for e in episodes)])
        weight = features.weight[rows]
        weight[: len(shared)] *= share
        self.optimizer.zero_grad()
        loss = self._loss(features, rows, weight)
        torch.autograd.backward(loss)
        for parameter in (self.scaled_weight, self.bias):
            assert parameter.grad is not None
            parameter.grad = global_sum(parameter.grad)
        self.optimizer.step()
        self.step += 1
        return float(global_sum(loss.detach()))

    def _loss(self, features: FeatureSet, rows: Tensor, weight: Tensor) -> Tensor:
        """This rank's part of the loss: parts of all ranks add up to the loss over the whole batch."""
        logits = self._logits(features.hidden[:, rows])
        label = features.label[rows]
        n_layers, _, n_slots = logits.shape
        total = global_sum(weight.sum()).clamp_min(1e-9)
        soft = features.target
        wanted = label.repeat(n_layers) if soft is None else soft[rows].repeat(n_layers, 1)
        entropy = F.cross_entropy(logits.flatten(0, 1), wanted, reduction="none").view(n_layers, -1)
        loss = (entropy * weight).sum() / total / n_layers
        if self.settings.load_balance_coef:
            share = F.one_hot(logits.argmax(-1), n_slots).float() * weight[:, None]
            share_LS = global_sum(share.sum(1)) / total
            mean_prob_LS = (logits.softmax(-1) * weight[:, None]).sum(1) / total
            loss = loss + self.settings.load_balance_coef * n_slots * (share_LS * mean_prob_LS).sum() / n_layers
        return loss

    def _logits(self, hidden_LNH: Tensor) -> Tensor:
        weight = self.scaled_weight / self.scale  # [L, S, H], a thousandth of the features
        return torch.baddbmm(self.bias.unsqueeze(1), hidden_LNH.float(), weight.transpose(1, 2))

    def keep_best(self, score: GateScore) -> bool:
        """Note a validation score; True when it is the best so far."""
        if score.loss < self.best_loss - 1e-6:
            self.best_loss, self.best, self.evals_without_gain = score.loss, self.weights(), 0
            return True
        self.evals_without_gain += 1
        return False


@torch.no_grad()
def score_gates(weight_LSH: Tensor, bias_LS: Tensor, features: FeatureSet) -> GateScore:
    """Loss, accuracy and confusion of given gates on kept features, over all ranks."""
    n_layers, n_slots, _ = weight_LSH.shape
    loss, right = torch.zeros(()), torch.zeros(n_layers)
    confusion = torch.zeros(n_slots, n_slots)
    for chunk in torch.split(torch.arange(features.label.numel()), 4096):
        label, weight = features.label[chunk], features.weight[chunk]
        for layer in range(n_layers):
            logits = F.linear(features.hidden[layer, chunk].float(), weight_LSH[layer], bias_LS[layer])
            choice = logits.argmax(-1)
            loss += (F.cross_entropy(logits, label, reduction="none") * weight).sum()
            right[layer] += (weight * (choice == label)).sum()
            confusion.index_put_((label, choice), weight, accumulate=True)
    total = float(global_sum(features.weight.sum()))
    loss, right, confusion = global_sum(loss), global_sum(right), global_sum(confusion)
    if total == 0:
        raise ValueError("no labelled token to score")
    per_layer = (right / total).tolist()
    return GateScore(float(loss) / total / n_layers, sum(per_layer) / n_layers, per_layer, confusion.tolist())


def batch_of(step: int, n_episodes: int, size: int, seed: int) -> list[int]:
    """Episodes of optimiser step ``step``: whole shuffled passes one after the other, the same on every rank and after
    a resume."""
    chosen: list[int] = []
    position = step * size
    while len(chosen) < min(size, n_episodes):
        turn, offset = divmod(position, n_episodes)
        order = list(range(n_episodes))
        random.Random(f"{seed}/{turn}").shuffle(order)
        chosen.append(order[offset])
        position += 1
    return chosen


def rows_by_episode(features: FeatureSet, n_episodes: int) -> list[Tensor]:
    """Row numbers of every episode's own tokens (a shared prefix belongs to none)."""
    order = torch.argsort(features.episode, stable=True)
    order = order[int((features.episode < 0).sum()) :]
    counts = torch.bincount(features.episode[features.episode >= 0], minlength=n_episodes)
    return list(torch.split(order, counts.tolist()))
