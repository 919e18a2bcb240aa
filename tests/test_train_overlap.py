"""While one adapter is updated the others sample: their requests arrive, and the event loop is never held up."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from typing import Any

import pytest
from tiny_server import TinyServer
from train_runs import Runs

import train.groups
from train.grpo import Trainer
from train.learner import Learner

UPDATE_S = 0.4
NAMES = ("printable", "digits")
BOTH = "--capabilities capability_printable,capability_digits"


@pytest.fixture
def runs(served_runs: Runs) -> Runs:
    return served_runs


def test_the_others_sample_while_one_is_updated(
    runs: Runs, server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates: list[tuple[str, float, float]] = []
    turns: list[tuple[str, float]] = []
    gaps: list[float] = []
    plain_update, plain_run, plain_sample = Learner.update, Trainer.run, server._sample

    def update(self: Learner, *args: Any) -> dict[str, float]:
        begin = time.monotonic()
        time.sleep(UPDATE_S)  # as a GPU would
        metrics = plain_update(self, *args)
        updates.append((self.name, begin, time.monotonic()))
        return metrics

    def completion(prompt: list[int], body: dict[str, Any]) -> list[int]:
        turns.append((body["model"].partition("@")[0], time.monotonic()))
        return plain_sample(prompt, body)

    async def run(self: Trainer) -> None:
        async def heartbeat() -> None:
            last = time.monotonic()
            while True:
                await asyncio.sleep(0.005)
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        beat = asyncio.create_task(heartbeat())
        try:
            await plain_run(self)
        finally:
            beat.cancel()

    monkeypatch.setattr(Learner, "update", update)
    monkeypatch.setattr(Trainer, "run", run)
    server.completion = completion
    runs("r", BOTH, "--max-iters 4 --groups-per-batch 6 --save-every 1 --rollout-log")
    assert len(updates) == 8
    for (_, _, end), (_, begin, _) in itertools.pairwise(updates):
        assert begin >= end, "two updates at once on one model"
    overlapped = 0
    for name, begin, end in updates:
        inside = {model for model, when in turns if begin + 0.02 < when < end - 0.02}
        assert name not in inside, "an adapter sampled during its own update: not on-policy"
        overlapped += any(other in inside for other in NAMES)
    assert overlapped >= 4, "nobody samples while another is updated"
    held_up = [gap for gap in gaps if gap > 0.9 * UPDATE_S]  # by a busy machine now and then, by updates always
    assert len(held_up) <= len(updates) // 2, f"the event loop stood still: {held_up}"
    for name in NAMES:
        metrics = runs.iterations("r", name)
        assert all(0 <= m["idle_share"] <= 1 and 0 <= m["trainer_idle_share"] < 1 for m in metrics)
        assert all(m["update_s"] >= UPDATE_S for m in metrics)


def test_one_capability_alone_leaves_the_sampler_idle_during_its_updates(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What idle_share says: here the updates dominate, so most of the time no episode is in flight."""
    plain = Learner.update

    def update(self: Learner, *args: Any) -> dict[str, float]:
        time.sleep(UPDATE_S)
        return plain(self, *args)

    monkeypatch.setattr(Learner, "update", update)
    runs("r", "--game capability_digits --max-iters 3")
    metrics = runs.iterations("r", "digits")
    for before, now in itertools.pairwise(metrics):
        wall = now["elapsed_s"] - before["elapsed_s"]
        assert now["idle_share"] == pytest.approx(1 - now["sample_s"] / wall, abs=0.1)
        assert now["trainer_idle_share"] == pytest.approx(1 - now["update_s"] / wall, abs=0.1)
        assert now["idle_share"] > 0.3


def test_no_capability_waits_for_slots_that_another_holds(
    runs: Runs, server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--concurrency counts per adapter: with one slot each, both play at the same time, one episode each."""
    playing: Counter[str] = Counter()
    together: set[tuple[int, ...]] = set()
    plain = train.groups.run_episode

    async def run_episode(spec: Any, *args: Any, **options: Any) -> Any:
        playing[spec.name] += 1
        together.add(tuple(sorted(playing.values())))
        try:
            return await plain(spec, *args, **options)
        finally:
            playing[spec.name] -= 1

    monkeypatch.setattr(train.groups, "run_episode", run_episode)
    server.delay_s = 0.02
    runs("r", BOTH, "--max-iters 1 --concurrency 1")
    assert (1, 1) in together and max(max(t) for t in together) == 1
