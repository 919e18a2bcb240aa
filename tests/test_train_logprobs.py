"""Chunked log-probs against full logits: values, entropies, gradients, memory."""

from __future__ import annotations

import pytest
import torch

from train.logprobs import pair_logprobs


def problem(n_rows: int = 23, vocab: int = 61, dim: int = 12, n_pairs: int = 40) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n_rows, dim, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, dim, generator=generator)
    row = torch.sort(torch.randint(0, n_rows, (n_pairs,), generator=generator)).values
    target = torch.randint(0, vocab, (n_pairs,), generator=generator)
    return hidden, weight, row, target, torch.randn(n_pairs, generator=generator)


def slow(
    hidden: torch.Tensor, weight: torch.Tensor, row: torch.Tensor, target: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return table[row, target], -(table.exp() * table).sum(-1)[row]


@pytest.mark.parametrize("chunk", [1, 5, 23, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_entropies_and_gradients_equal_full_logits(chunk: int, temperature: float) -> None:
    hidden, weight, row, target, upstream = problem()
    expected, entropy = slow(hidden, weight, row, target, temperature)
    found, found_entropy = pair_logprobs(hidden, weight, row, target, temperature=temperature, chunk=chunk)
    assert torch.allclose(found, expected, atol=1e-5) and torch.allclose(found_entropy, entropy, atol=1e-5)
    (expected_grad,) = torch.autograd.grad((expected * upstream).sum(), hidden)
    (grad,) = torch.autograd.grad((found * upstream).sum(), hidden)
    assert torch.allclose(grad, expected_grad, atol=1e-5)
    assert not found_entropy.requires_grad


def test_the_derivative_by_finite_differences() -> None:
    hidden, weight, row, target, _ = problem(5, 7, 3, 6)
    double = hidden.detach().double().requires_grad_()
    slow_grad = torch.autograd.grad(slow(double, weight.double(), row, target, 0.8)[0].sum(), double)[0]
    fast_grad = torch.autograd.grad(
        pair_logprobs(hidden, weight, row, target, temperature=0.8, chunk=2)[0].sum(), hidden
    )[0]
    assert torch.allclose(slow_grad.float(), fast_grad, atol=1e-5)


def test_repeated_pairs_add_up() -> None:
    hidden, weight, _, _, _ = problem()
    row, target = torch.tensor([3, 3, 3]), torch.tensor([5, 5, 9])
    found, _ = pair_logprobs(hidden, weight, row, target, chunk=2)
    expected, _ = slow(hidden, weight, row, target, 1.0)
    grads = [torch.autograd.grad(v.sum(), hidden)[0] for v in (found, expected)]
    assert torch.allclose(*grads, atol=1e-6)


def test_no_pairs_is_no_problem() -> None:
    hidden, weight, *_ = problem()
    empty = torch.empty(0, dtype=torch.long)
    found, entropy = pair_logprobs(hidden[:0], weight, empty, empty)
    assert len(found) == len(entropy) == 0
    found.sum().backward()


def test_results_are_fp32_for_a_bf16_model() -> None:
    hidden, weight, row, target, _ = problem()
    expected, _ = slow(hidden, weight, row, target, 1.0)
    found, entropy = pair_logprobs(hidden.bfloat16(), weight.bfloat16(), row, target)
    assert found.dtype == entropy.dtype == torch.float32
    assert (found - expected).abs().max() < 0.2


def test_extreme_logits_stay_finite() -> None:
    weight = torch.eye(4)
    hidden = torch.tensor([[1e4, 0.0, 0.0, 0.0]], requires_grad=True)
    found, entropy = pair_logprobs(hidden, weight, torch.tensor([0, 0]), torch.tensor([0, 1]))
    assert found.tolist() == [0.0, -1e4] and entropy.tolist() == [0.0, 0.0]
    found.sum().backward()
    assert torch.isfinite(hidden.grad).all()


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_never_all_logits_at_once() -> None:
    """Full [rows, vocab] logits were 19 GB elsewhere; here no tensor may exceed chunk * vocab."""
    hidden, weight, row, target, _ = problem(n_rows=64, vocab=500, n_pairs=64)
    with _Largest() as seen:
        pair_logprobs(hidden, weight, row, target, chunk=4)[0].sum().backward()
    assert 4 * 500 <= seen.numel < 64 * 500
    assert seen.numel == max(4 * 500, weight.numel())
