"""Answers that no healthy server gives: typed as nonsense, never a traceback and never a number that is believed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from train.engine import SamplingParams
from train.systems import System
from train.vllm_engine import VllmEngine
from train.vllm_protocol import (
    NonsenseAnswer,
    ServedModels,
    read_models,
    read_sample,
)

GOOD: dict[str, Any] = {
    "choices": [
        {
            "finish_reason": "stop",
            "prompt_token_ids": [5],
            "token_ids": [2],
            "logprobs": {"token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -3}]},
        }
    ]
}


def edited(**changes: Any) -> dict[str, Any]:
    payload = copy.deepcopy(GOOD)
    payload["choices"][0] |= changes
    return payload


def test_the_good_answer_is_read() -> None:
    assert read_sample(GOOD, [5], SamplingParams(4), [2]).logprobs == (-0.5,)


@pytest.mark.parametrize(
    "logprobs",
    [[1], "x", 3, {"token_logprobs": [-(10**400)]}, {"token_logprobs": [-1e308]}, {"token_logprobs": [float("nan")]}],
)
def test_logprobs_of_a_wrong_kind(logprobs: Any) -> None:
    with pytest.raises(NonsenseAnswer, match="logprobs"):
        read_sample(edited(logprobs=logprobs), [5], SamplingParams(4), [2])


@pytest.mark.parametrize("length", [0, -5, True, "4096", 2.5])
def test_a_context_length_that_cannot_be(length: Any) -> None:
    """Believed, every turn would end as a context that is used up."""
    with pytest.raises(NonsenseAnswer, match="max_model_len"):
        read_models({"data": [{"id": "m", "max_model_len": length}]})


async def test_a_root_that_is_no_path(tmp_path: Any) -> None:
    engine = VllmEngine("http://127.0.0.1:1", str(tmp_path), [2])
    try:
        known = ServedModels(("served",), (f"{tmp_path}/.",), (), 10)
        assert engine._base_name(known) == "served"
        with pytest.raises(ValueError, match="is not served"):
            engine._base_name(ServedModels(("served",), ("a\0b",), (), 10))
    finally:
        await engine.close()


def test_results_of_one_routed_server_are_not_those_of_another() -> None:
    first = System("routed", "routed", base_url="http://a:1", served_model="gate")
    assert first.fingerprint() == System("routed", "routed", base_url="http://a:1", served_model="gate").fingerprint()
    for other in ({"base_url": "http://b:1"}, {"served_model": "gate2"}):
        changed = System("routed", "routed", **{"base_url": "http://a:1", "served_model": "gate", **other})
        assert changed.fingerprint() != first.fingerprint()
