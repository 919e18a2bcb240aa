"""The benchmark of ranks on two gloo processes: its numbers are the claims it will be read for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from pipeline.files import InputError

sys.path.insert(0, str(ROOT))

from benchmarks.bench_ranks import main, summary


@pytest.mark.slow
def test_two_ranks_give_the_gradient_of_one(tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    command = [sys.executable, str(ROOT / "benchmarks/bench_ranks.py"), "--preset", "cpu", "--out", str(out)]
    flags = ["--groups", "3", "--repeats", "1", "--parts", "whole"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *flags], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(out.read_text())
    assert record["relative_gradient_error"] < 1e-5
    assert record["loss_all"] == pytest.approx(record["loss_one"], abs=1e-6)
    assert record["parts"]["whole"][0]["together"]["packs"] == 3.0 and record["scaling"] > 0


def test_ranks_results_are_put_together(tmp_path: Path) -> None:
    """The slowest rank counts; the sharded gradient is compared with the whole one's."""
    step = {"step_s": 2.0, "loss": 0.5, "held_gib": 10.0, "peak_gib": 12.0}
    whole = [
        {"alone": step, "together": step | {"step_s": 1.0}, "relative_gradient_error": 1e-6,
         "relative_difference_alone": 0.0},
        {"alone": step | {"step_s": 1.8}, "together": step | {"step_s": 1.1}, "relative_gradient_error": 3e-6,
         "relative_difference_alone": 2e-3},
    ]
    held = {"base_bytes": 100, "base_bytes_held": 60, "sharded": step | {"held_gib": 6.0, "loss": 0.4}}
    torch.save(torch.tensor([3.0, 4.0]), tmp_path / "whole.pt")
    torch.save(torch.tensor([3.0, 4.5]), tmp_path / "sharded.pt")
    found = summary({"whole": whole, "sharded": [held, held]}, tmp_path)
    assert found["scaling"] == pytest.approx(2.0 / 1.1, abs=1e-3) and found["relative_gradient_error"] == 3e-6
    assert found["relative_difference_alone"] == 2e-3
    assert found["sharded_gradient_error"] == pytest.approx(0.1) and found["loss_sharded"] == 0.4
    assert found["sharded_held_ratio"] == found["base_share_held"] == 0.6
    on_cpu = held | {"sharded": step | {"held_gib": None}}
    assert summary({"whole": whole, "sharded": [on_cpu, on_cpu]}, tmp_path)["sharded_held_ratio"] == 0.6
    assert "sharded_held_ratio" not in summary({"whole": whole, "sharded": {"error": "x"}}, tmp_path)
    assert summary({"whole": {"error": "x"}}, tmp_path) == {}


def test_one_rank_is_no_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_ranks.py", "--ranks", "1", "--out", str(tmp_path / "x.json")])
    with pytest.raises(InputError, match="--ranks >= 2"):
        main()


def test_job_scripts_are_complete() -> None:
    """Every script that the page names exists, is executable, parses, and is on the page."""
    page = (ROOT / "benchmarks/gpu_jobs.md").read_text()
    scripts = sorted((ROOT / "benchmarks/gpu").glob("*.sh"))
    assert len(scripts) >= 7
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)
        if script.name != "common.sh":
            assert f"{script.name}`" in page and os.access(script, os.X_OK)


def test_a_step_that_fails_leaves_the_others_their_turn(tmp_path: Path) -> None:
    job = tmp_path / "job.sh"
    job.write_text(
        f'. "{ROOT}/benchmarks/gpu/common.sh"\nstep first 5 false\nstep second 1 sleep 30\nstep third 5 echo done\n'
        "exit $failed\n"
    )
    out = tmp_path / "out"
    env = os.environ | {"SIZE": "tiny", "OUT": str(out), "WORK": str(tmp_path / "work")}
    done = subprocess.run(["bash", str(job)], env=env, capture_output=True, text=True, timeout=60)
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [s["exit"] for s in steps] == [1, 124, 0] and done.returncode == 1
    assert (out / "third.log").read_text() == "done\n"
