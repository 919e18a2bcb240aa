"""The comparison of the canary: when it is decided, and that it errs neither way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from test_sampling_delivery import ROUNDING, logprobs

from train.delivery import SCORED_TOKENS, CanaryResult, compare_canary


def healthy(runs: int, move: float) -> list[CanaryResult]:
    """Verdicts on servers that run the new weights, whose log-probs lie ``move`` nats (rms) off the old ones."""
    verdicts = []
    for seed in range(runs):
        old = logprobs(seed)
        new = logprobs(seed + 1000, old, move)
        verdicts.append(compare_canary(logprobs(seed + 2000, new, ROUNDING), new, old))
    return verdicts


def test_right_weights_pass_and_stale_ones_are_found() -> None:
    old = logprobs(0)
    new = logprobs(1, old, 0.3)
    fresh = compare_canary(logprobs(2, new, ROUNDING), new, old)
    stale = compare_canary(logprobs(3, old, ROUNDING), new, old)
    assert fresh.resolved and not fresh.wrong and fresh.error_new < 0.1 < fresh.error_old
    assert stale.resolved and stale.wrong and stale.error_old < 0.1 < stale.error_new


def test_a_step_smaller_than_the_rounding_decides_nothing() -> None:
    """Half of such comparisons come out the wrong way round by chance; none may stop a healthy run."""
    verdicts = healthy(200, 0.002)
    assert not any(v.wrong or v.resolved for v in verdicts)
    assert 0.2 < sum(v.error_new > v.error_old for v in verdicts) / 200 < 0.8


def test_no_false_alarm_where_the_comparison_is_decided() -> None:
    verdicts = healthy(300, 0.2)
    assert sum(v.resolved for v in verdicts) > 200 and not any(v.wrong for v in verdicts)


@pytest.mark.parametrize("sure", [0.0, 0.001])
@pytest.mark.parametrize("unsure", [1, 2, 4, 8, 12, SCORED_TOKENS])
def test_rounding_of_the_few_unsure_tokens_decides_nothing(unsure: int, sure: float) -> None:
    """A sure policy: all tokens but a few are exact, and those differ by rounding only, some more than others."""
    rng = np.random.default_rng(unsure)
    verdicts = []
    for _ in range(500):
        scale = np.full(SCORED_TOKENS, sure)
        scale[:unsure] = 0.1 * np.exp(0.5 * rng.normal(size=unsure))
        server, new, old = (-0.5 + scale * rng.normal(size=SCORED_TOKENS) for _ in range(3))
        verdicts.append(compare_canary(server, new, old))
    assert sum(v.resolved for v in verdicts) <= 2 and sum(v.wrong for v in verdicts) <= 1


def test_a_move_of_many_tokens_is_told_although_their_rounding_differs() -> None:
    rng, found = np.random.default_rng(0), []
    for _ in range(200):
        scale = 0.04 * np.exp(0.5 * rng.normal(size=SCORED_TOKENS))
        old = rng.normal(size=SCORED_TOKENS) * 0.5 - 3
        new = old + 0.4 * rng.normal(size=SCORED_TOKENS)
        verdict = compare_canary(old + scale * rng.normal(size=SCORED_TOKENS), new, old)
        assert verdict.wrong == verdict.resolved
        found.append(verdict.wrong)
    assert np.mean(found) > 0.75


@pytest.mark.parametrize("moving", [12, 16, 20])
def test_tokens_that_stay_certain_do_not_hide_the_others(moving: int) -> None:
    """Log-probs of exactly 0 under new and old weights, on most tokens: what the others say is found all the same."""
    rng, found = np.random.default_rng(moving), []
    for _ in range(200):
        unsure = np.arange(SCORED_TOKENS) < moving
        old = np.where(unsure, -2.0 + 0.3 * rng.normal(size=SCORED_TOKENS), 0.0)
        new = old + unsure * 0.4 * rng.normal(size=SCORED_TOKENS)
        stale, fresh = (x + unsure * 0.05 * rng.normal(size=SCORED_TOKENS) for x in (old, new))
        found.append(compare_canary(stale, new, old).wrong)
        assert not compare_canary(fresh, new, old).wrong
    assert np.mean(found) > 0.6


def test_another_model_altogether_is_found_even_when_nothing_moved() -> None:
    old = logprobs(0)
    result = compare_canary(logprobs(1, old, 1.5), old, old)
    assert result.wrong and not result.resolved and result.moved == 0.0


def test_what_is_no_number_is_no_proof() -> None:
    old = logprobs(0)
    assert compare_canary([math.nan, *old[1:]], old, old).wrong


def test_first_version_equal_to_the_base_is_no_alarm() -> None:
    """LoRA starts with B = 0: new and old log-probs are the same numbers."""
    old = logprobs(0)
    result = compare_canary(logprobs(1, old, ROUNDING), old, old)
    assert not result.wrong and not result.resolved and result.error_new == result.error_old
