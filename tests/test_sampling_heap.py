"""The standing heap, where it is used, and the benchmark of what an episode costs the client."""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from scripted_engine import ScriptedEngine

from game_registry import get_game
from train import chat
from train.chat import ChatCodec
from train.episode import EpisodeParams
from train.heap import standing_heap
from train.rollout import Job, collect

sys.path.insert(0, str(ROOT))

from benchmarks import bench_episode_cost


def test_what_exists_is_passed_over_and_what_comes_is_not() -> None:
    class Node:
        me: object = None

    with standing_heap():
        assert gc.get_freeze_count() > 1000
        node = Node()
        node.me = node
        address = id(node)
        del node
        gc.collect()
        assert not any(id(o) == address and isinstance(o, Node) for o in gc.get_objects())
    assert gc.get_freeze_count() == 0
    with pytest.raises(KeyError), standing_heap():
        raise KeyError
    assert gc.get_freeze_count() == 0


async def test_episodes_run_on_it(smollm2: Path) -> None:
    engine = ScriptedEngine(ChatCodec.from_model(str(smollm2)), lambda prompt, params: "no")
    counts: list[int] = []
    await collect(
        get_game("capability_tool_calling_precision"), engine, engine.codec, [Job(1), Job(2)], EpisodeParams(),
        on_episode=lambda job, episode: counts.append(gc.get_freeze_count()),
    )  # fmt: skip
    assert len(counts) == 2 and min(counts) > 1000 and gc.get_freeze_count() == 0


def test_what_an_episode_costs_is_measured(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "KEPT_PROMPTS", 256)  # one form of it takes the cache away
    rendered: list[int] = []
    render = ChatCodec._render
    monkeypatch.setattr(ChatCodec, "_render", lambda *args, **more: rendered.append(1) or render(*args, **more))
    with bench_episode_cost.server(str(smollm2)) as url:
        for form in ("as_it_is", "without_both"):
            without = set(bench_episode_cost.FORMS[form].split(","))
            rendered.clear()
            found = asyncio.run(bench_episode_cost.client(url, str(smollm2), 2, without))
            assert found["cpu_ms"] > 0.0 and found["wall_ms"] >= 50.0 / 32, "a turn takes 50 ms"
            assert (len(rendered) > 96) == (form == "without_both"), "of 6 groups of 16"
