"""The standing heap, where it is used, and the benchmark of what an episode costs the client."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from scripted_engine import ScriptedEngine

from game_registry import get_game
from train.chat import ChatCodec
from train.episode import EpisodeParams
from train.heap import standing_heap
from train.rollout import Job, collect


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


@pytest.mark.slow
def test_what_an_episode_costs_is_measured(smollm2: Path, tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    command = [sys.executable, str(ROOT / "benchmarks/bench_episode_cost.py"), "--model", str(smollm2)]
    command += ["--groups", "8", "--rounds", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(out.read_text())
    assert record["episodes"] == 128 and set(record["runs"]) == set(record["cpu_ms"])
    cpu = record["cpu_ms"]
    assert all(0.01 < each < 100 for each in cpu.values())
    assert record["saved"] == pytest.approx(1 - cpu["as_it_is"] / cpu["without_both"], abs=2e-3)
