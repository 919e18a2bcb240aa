"""The two-GPU benchmark: what it reads from a run, and that a run which ends early is told as such."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from pipeline.files import ServerError

sys.path.insert(0, str(ROOT))

from benchmarks import bench_two_gpus
from benchmarks.bench_two_gpus import INTERRUPTED, SIZES, GpuMeter, _wait_for, finish, summary
from train.config import build_parser, load_config


def row(iteration: int, elapsed: float, **more: Any) -> dict[str, Any]:
    times = {"sample_s": 1.0, "update_s": 0.5, "deliver_s": 0.1, "idle_share": 0.3, "trainer_idle_share": 0.6}
    base = {"iteration": iteration, "elapsed_s": elapsed, "reward": 0.1 * iteration, "sampled_tokens": 50.0}
    return {**base, "errors": 0.0, "episodes": 8.0, **times, **more}


def test_means_leave_the_iterations_out_that_compile() -> None:
    found = summary([row(1, 10.0, update_s=9.0), row(2, 12.0, update_s=5.0), row(3, 14.0), row(4, 20.0, errors=0.25)])
    assert found["update_s"] == 0.5 and found["wall_s"] == 20.0 and found["tokens_per_s"] == 10.0
    assert found["reward_first"] == 0.1 and found["reward_last"] == 0.4 and found["errors"] == 0.25
    assert summary([row(1, 2.0)])["update_s"] == 0.5, "a short run has nothing else"


def process(tmp_path: Path, code: str) -> subprocess.Popen[str]:
    (tmp_path / "train.log").write_text("what it said last")
    return subprocess.Popen([sys.executable, "-c", code], text=True, start_new_session=True)


def test_a_run_that_fails_or_hangs_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="exit code 3: what it said last"):
        finish(process(tmp_path, "import sys; sys.exit(3)"), tmp_path, 30)
    with pytest.raises(ServerError, match=r"took over 0\.3 s"):
        finish(process(tmp_path, "import time; time.sleep(60)"), tmp_path, 0.3)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"iteration": 1, "sampled_tokens": 3}\n{"warning": "x"}\n')
    assert len(finish(process(tmp_path, f"import sys; sys.exit({INTERRUPTED})"), tmp_path, 30)) == 1
    ended = process(tmp_path, "pass")
    ended.wait(30)
    with pytest.raises(ServerError, match="training ended or was too slow: what it said last"):
        _wait_for(ended, lambda: False, 5.0, tmp_path)


def test_without_a_gpu_there_is_no_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with GpuMeter() as meter:
        pass
    assert meter.idle_shares() == []
    meter._rows = [[100.0, 0.0], [50.0, 0.0]]
    assert meter.idle_shares() == [0.25, 1.0]


@pytest.mark.parametrize("name", sorted(SIZES))
def test_its_flags_are_flags_of_the_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(bench_two_gpus.subprocess, "Popen", lambda command, **more: seen.update(more, command=command))
    args = argparse.Namespace(size=name, model=tmp_path)
    bench_two_gpus.train(args, ["a", "b"], "http://x:1,http://y:2", tmp_path / "f", 7)
    config = load_config(vars(build_parser().parse_args(seen["command"][3:])), {})
    assert config.capabilities == ("capability_a", "capability_b") and config.max_iters == 7
    assert seen["env"]["VLLM_BASE_URLS"] == "http://x:1,http://y:2"
    assert seen["env"].get("CUDA_VISIBLE_DEVICES") == ("1" if name == "gpu" else None)
    assert ("0.8" in SIZES[name].server) == (name == "gpu"), "two servers beside a trainer take another share"
