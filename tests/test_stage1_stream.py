"""Large inputs and sudden ends: memory that does not grow with the file, outputs that are whole or absent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from stage1_helpers import ROOT, run_main

from pipeline import _summarize, aggregate_capabilities
from pipeline.labels import run_file
from pipeline.readers.sniff import detect, outline
from pipeline.readers.stream import items
from pipeline.records import read_summaries

PEAK = "import resource, runpy, sys; sys.argv = sys.argv[1:]; code = 0\n"
PEAK += "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\nexcept SystemExit as stop:\n    code = stop.code\n"
PEAK += "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024); raise SystemExit(code)"


def write_tau2(path: Path, n: int, words: int = 400) -> None:
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": "word " * words, "raw_data": {"x": "y" * 500}}
        for i in range(20)
    ]
    body = json.dumps({"termination_reason": "user_stop", "reward_info": {"reward": 0.0}, "messages": messages})
    with open(path, "w") as file:
        file.write('{"info": {"environment_info": {"domain_name": "shop"}}, "tasks": [], "simulations": [')
        for i in range(n):
            file.write(f'{"," if i else ""}{{"task_id": "{i}", {body[1:]}')
        file.write("]}")


def peak_mib(*arguments: str | Path) -> int:
    command = [sys.executable, "-c", PEAK, str(ROOT / "pipeline" / "_summarize.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.rsplit("peak", 1)[1])


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    peaks = []
    for n in (40, 1000):  # 2 MB and 52 MB
        write_tau2(tmp_path / "in.json", n)
        peaks.append(peak_mib("--input", tmp_path / "in.json", "--output", tmp_path / "out.json"))
    assert (tmp_path / "in.json").stat().st_size > 45e6
    assert peaks[1] - peaks[0] < 12, peaks


def test_the_format_of_a_large_file_is_told_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    write_tau2(path, 2)
    with open(path, "rb+") as file:  # what follows the first simulation is never looked at
        file.seek(path.stat().st_size // 2 + 2000)
        file.write(b"}}}}]]]]")
    assert detect(path) == "tau2"
    shape = outline(path)
    assert shape.inner["simulations"] >= {"task_id", "messages"} and "raw_data" not in shape.inner["simulations"]


def test_reading_is_lazy(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    write_tau2(path, 50)
    text = path.read_text()
    path.write_text(text[: len(text) * 3 // 4])  # cut off: the beginning is still read
    stream = items(path, "simulations.item")
    assert [next(stream)["task_id"] for _ in range(3)] == ["0", "1", "2"]


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_killed_summarizer_leaves_the_old_output_whole(tmp_path: Path, sign: signal.Signals) -> None:
    write_tau2(tmp_path / "in.json", 1)
    out = tmp_path / "out.json"
    assert run_main(_summarize.main, "--input", tmp_path / "in.json", "--output", out).returncode == 0
    before = out.read_bytes()
    write_tau2(tmp_path / "in.json", 15000, words=100)  # seconds of work: the signal comes in the middle
    command = [sys.executable, str(ROOT / "pipeline" / "_summarize.py")]
    command += ["--input", str(tmp_path / "in.json"), "--output", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not any(p.stat().st_size > 100_000 for p in tmp_path.glob(".out.json.*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(sign)
    _, err = process.communicate(timeout=30)
    assert process.returncode != 0 and out.read_bytes() == before
    assert len(list(read_summaries(out))) == 1
    if sign == signal.SIGINT:
        assert "interrupted" in err and "Traceback" not in err


def make_run(folder: Path) -> str:
    outcome = {f"a:{i}": i < 4 for i in range(8)}
    labels = {i: "LACKING" if f else "PRESENT" for i, f in outcome.items()}
    path = folder / "run_01.json"
    path.write_text(json.dumps(run_file(1, outcome, {"a_skill": labels})))
    return str(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / "locked").mkdir(mode=0o500)
    export = tmp_path / "locked" / "s.json"
    done = run_main(aggregate_capabilities.main, "--runs", run, "--k", "1", "--export", export)
    assert done.returncode == 2 and "cannot be written" in done.stderr


def test_an_output_below_a_file_is_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / "file").write_text("x")
    export = tmp_path / "file" / "s.json"
    done = run_main(aggregate_capabilities.main, "--runs", run, "--k", "1", "--export", export, "--resamples", "2")
    assert done.returncode == 2 and "cannot be written" in done.stderr and done.stderr.count("\n") == 1


def test_a_full_disk_leaves_the_old_export_retired_or_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, export = make_run(tmp_path), tmp_path / "s.json"
    arguments = ["--runs", run, "--k", "1", "--export", str(export), "--resamples", "2"]
    assert run_main(aggregate_capabilities.main, *arguments).returncode == 0
    before = export.read_text()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.files.os.fsync", full)
        done = run_main(aggregate_capabilities.main, *arguments)
    assert done.returncode == 2 and "No space left" in done.stderr
    assert export.read_text() == before
    assert not list(tmp_path.glob(".*.tmp"))
