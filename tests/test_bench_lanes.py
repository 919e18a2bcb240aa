"""The jobs of one or two GPUs in lanes: what it refuses, what it leaves out, and that a failure is in its exit code."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT

JOBS = ("session", "helpdesk", "two_gpus", "two_gpus_ranks")


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """The script beside stand-ins for the jobs that it starts; each exits with CODE_<name> and leaves its limits."""
    folder = tmp_path / "benchmarks" / "gpu"
    folder.mkdir(parents=True)
    for name in ("lanes.sh", "common.sh"):
        (folder / name).write_text((ROOT / "benchmarks/gpu" / name).read_text())
    for name in JOBS:
        (folder / f"{name}.sh").write_text(
            f"echo {name} ${{LIMIT_S:-}}${{TOTAL_S:-}} >>$OUT/../calls\n"
            f"echo {name} ${{CUDA_VISIBLE_DEVICES:-all}} >>$OUT/../gpus\n"
            f"sleep ${{SLEEP_{name}:-0}}\nexit ${{CODE_{name}:-0}}\n"
        )
        for out in ("session", "helpdesk", "two_gpus", "ranks"):
            (tmp_path / "out" / out).mkdir(parents=True, exist_ok=True)
    return tmp_path


def lanes(jobs: Path, **more: str) -> subprocess.CompletedProcess[str]:
    given = ("LANES", "END", "LIMIT_S", "TOTAL_S", "WORK", "SESSION_S", "HELPDESK_S")
    given += ("CUDA_VISIBLE_DEVICES",)
    env = {k: v for k, v in os.environ.items() if k not in given}
    env |= {"OUT": str(jobs / "out"), "SIZE": "tiny", "GPUS": "2"} | more
    return subprocess.run(
        ["bash", str(jobs / "benchmarks/gpu/lanes.sh")], env=env, capture_output=True, text=True, timeout=60
    )


def calls(jobs: Path) -> dict[str, int]:
    path = jobs / "out" / "calls"
    return {k: int(v) for k, v in (line.split() for line in path.read_text().splitlines())} if path.exists() else {}


def test_every_part_has_its_turn_and_ends_in_time(jobs: Path) -> None:
    done = lanes(jobs, END=str(int(time.time()) + 200))
    assert done.returncode == 0, done.stderr
    found = calls(jobs)
    assert set(found) == set(JOBS) and all(100 < seconds < 200 for seconds in found.values())
    assert (jobs / "out/lanes.txt").read_text().count("ended with 0") == 4


def test_on_one_gpu_the_parts_that_fit_come_in_turn(jobs: Path) -> None:
    done = lanes(jobs, GPUS="1", END=str(int(time.time()) + 1000), SLEEP_session="2")
    found = calls(jobs)
    assert list(found) == ["session", "helpdesk"], "one after the other"
    assert 240 < found["session"] <= 280, "what the evidence run needs is kept"
    assert 900 < found["helpdesk"] <= 938, "what the session did not use is its own"
    assert set((jobs / "out/gpus").read_text().split("\n")[:-1]) == {"session 0", "helpdesk 0"}
    told = (jobs / "out/lanes.txt").read_text()
    assert done.returncode == 1 and told.count("left out: one GPU is here, it needs two") == 2


def test_on_one_gpu_the_evidence_run_comes_first_where_time_is_short(jobs: Path) -> None:
    done = lanes(jobs, GPUS="1", LANES="session,helpdesk", END=str(int(time.time()) + 700))
    assert done.returncode == 1 and list(calls(jobs)) == ["helpdesk"]
    assert "session left out: " in (jobs / "out/lanes.txt").read_text()
    assert lanes(jobs, GPUS="1", LANES="session", END=str(int(time.time()) + 700)).returncode == 0


@pytest.mark.parametrize("job", JOBS)
def test_a_part_that_fails_is_in_the_exit_code_and_leaves_the_others_their_turn(jobs: Path, job: str) -> None:
    assert lanes(jobs, **{f"CODE_{job}": "3"}).returncode == 1
    assert set(calls(jobs)) == set(JOBS)


def test_the_devices_that_are_given(jobs: Path) -> None:
    assert lanes(jobs, LANES="session, helpdesk", CUDA_VISIBLE_DEVICES="5,6").returncode == 0
    assert set((jobs / "out/gpus").read_text().split("\n")[:-1]) == {"session 5", "helpdesk 6"}
    for given in ("1", ""):  # one device is one GPU
        for name in ("gpus", "calls"):
            (jobs / "out" / name).unlink()
        assert lanes(jobs, LANES="session,helpdesk", GPUS=given, CUDA_VISIBLE_DEVICES="3").returncode == 0
        assert set((jobs / "out/gpus").read_text().split("\n")[:-1]) == {"session 3", "helpdesk 3"}
        assert calls(jobs)["session"] < 900 < calls(jobs)["helpdesk"], "in turn"


@pytest.mark.parametrize(("listed", "second"), [("GPU 0: H200\n  MIG 1g: x\n", 0), ("GPU 0: H200\nGPU 1: H200\n", 1)])
def test_the_gpus_that_are_there(jobs: Path, listed: str, second: int) -> None:
    """Parts of one GPU are no second one."""
    tool = jobs / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\nprintf '{listed}'\n")
    tool.chmod(0o755)
    path = f"{tool.parent}:/usr/bin:/bin"
    assert lanes(jobs, LANES="session,helpdesk", SIZE="gpu", GPUS="", PATH=path).returncode == 0
    assert set((jobs / "out/gpus").read_text().split("\n")[:-1]) == {"session 0", f"helpdesk {second}"}


def test_without_a_gpu_the_remedy_is_told(jobs: Path) -> None:
    done = lanes(jobs, SIZE="gpu", GPUS="", PATH="/usr/bin:/bin")
    assert done.returncode == 2 and done.stderr.startswith("error: no GPU here") and calls(jobs) == {}


def test_a_piece_that_goes_on_later_is_no_failure(jobs: Path) -> None:
    assert lanes(jobs, LANES="helpdesk", CODE_helpdesk="75").returncode == 0 and set(calls(jobs)) == {"helpdesk"}


def test_a_part_without_time_is_told(jobs: Path) -> None:
    done = lanes(jobs, LANES="two_gpus,ranks", END=str(int(time.time()) + 90))
    assert done.returncode == 1 and set(calls(jobs)) == {"two_gpus_ranks"}
    assert "two_gpus left out:" in (jobs / "out/lanes.txt").read_text()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"LANES": "sesion,ranks"}, "LANES: sesion is none of session,"),
        ({"LANES": " , "}, "LANES: expected some of session,"),
        ({"END": "1000"}, "END: expected more than 60 s from now"),
        ({"END": "soon"}, "END: expected a whole number > 0, found 'soon'"),
        ({"GPUS": "1.5"}, "GPUS: expected a whole number > 0, found '1.5'"),
        ({"GPUS": "0"}, "GPUS: expected"),
        ({"HELPDESK_S": "-500"}, "HELPDESK_S: expected"),
        ({"HELPDESK_S": "080"}, "HELPDESK_S: expected"),
        ({"SESSION_S": "12m"}, "SESSION_S: expected"),
    ],
)
def test_what_it_cannot_do_starts_nothing(jobs: Path, given: dict[str, str], told: str) -> None:
    done = lanes(jobs, **given)
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1
    assert calls(jobs) == {}
