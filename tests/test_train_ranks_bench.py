"""The benchmark of ranks on two gloo processes: its numbers are the claims it will be read for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_two_ranks_and_a_sharded_base_give_the_gradient_of_one(tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    command = [sys.executable, str(ROOT / "benchmarks/bench_ranks.py"), "--preset", "cpu", "--out", str(out)]
    flags = ["--groups", "3", "--repeats", "1"]  # three packs: a rank of two has to fill up
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *flags], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(out.read_text())
    assert record["relative_gradient_error"] < 1e-5 and record["sharded_gradient_error"] < 1e-5
    assert record["loss_all"] == pytest.approx(record["loss_one"], abs=1e-6)
    assert record["loss_sharded"] == pytest.approx(record["loss_one"], abs=1e-6)
    assert 0.5 < record["base_share_held"] == record["sharded_held_ratio"] < 0.9  # embeddings stay whole
    assert record["parts"]["whole"][0]["together"]["packs"] == 3.0 and record["scaling"] > 0
    refused = subprocess.run([*command, "--ranks", "1"], env=env, capture_output=True, text=True)
    assert refused.returncode == 2 and "--ranks >= 2" in refused.stderr


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
