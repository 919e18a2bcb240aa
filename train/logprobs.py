"""Log-probs of action tokens without ever holding [tokens, vocab] logits.

The LM head runs on the rows that predict an action token only, in chunks, and again in backward. A row that predicts
several tokens (rollouts that branch there) is computed once.
"""

from __future__ import annotations

from typing import Any

import torch


class _PairLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        row: torch.Tensor,
        target: torch.Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = hidden.new_empty(len(row), dtype=torch.float32)
        normaliser = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(normaliser)
        bounds = _chunk_bounds(row, len(hidden), chunk)
        row, target = row.to(hidden.device), target.to(hidden.device)
        for start, end, first, last in bounds:
            logits = _logits(hidden[start:end], weight, temperature)
            normaliser[start:end] = torch.logsumexp(logits, dim=-1)
            pairs = slice(first, last)
            logprobs[pairs] = logits[row[pairs] - start, target[pairs]] - normaliser[row[pairs]]
            logits -= normaliser[start:end, None]
            entropy[start:end] = -(logits.exp() * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, row, target, normaliser)
        ctx.temperature, ctx.bounds = temperature, bounds
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, row, target, normaliser = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        for start, end, first, last in ctx.bounds:
            logits = _logits(hidden[start:end], weight, ctx.temperature)
            pairs = slice(first, last)
            local = row[pairs] - start
            per_row = torch.zeros(end - start, device=logits.device).index_add_(0, local, grad_logprobs[pairs])
            grad = (logits - normaliser[start:end, None]).exp_().mul_(-per_row[:, None])  # -g softmax
            grad.index_put_((local, target[pairs]), grad_logprobs[pairs], accumulate=True)  # + g one_hot
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            grad_hidden[start:end] = (grad.to(weight.dtype) @ weight).to(hidden.dtype)
        return grad_hidden, None, None, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = (hidden @ weight.T).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunk_bounds(row: torch.Tensor, n_rows: int, chunk: int) -> list[tuple[int, int, int, int]]:
    """(first row, end row, first pair, end pair) of each chunk."""
    edges = [*range(0, n_rows, chunk), n_rows]
    pairs = torch.searchsorted(row, torch.tensor(edges, device=row.device)).tolist()
    return [(edges[i], edges[i + 1], pairs[i], pairs[i + 1]) for i in range(len(edges) - 1)]


def pair_logprobs(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    pair_row: torch.Tensor,
    pair_target: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(hidden[row] W^T / temperature)[target] for every pair, and the entropy behind it.

    Args:
        hidden: [R, d] last hidden states of the rows that predict. head_weight: [vocab, d], frozen.
        pair_row: [K] indices into ``hidden``, ascending; pair_target: [K]. Both best on the CPU (no wait for the
            device).
        temperature: of sampling (1.0 for greedy evaluation).
        chunk: rows of logits held at a time; memory is chunk * vocab * 4 bytes, twice.

    Returns:
        fp32 log-probs [K], differentiable in ``hidden``, and entropies [K] in nats, without gradient.
    """
    logprobs, entropy = _PairLogprobs.apply(hidden, head_weight, pair_row, pair_target, temperature, chunk)
    return logprobs, entropy[pair_row.to(entropy.device)]
