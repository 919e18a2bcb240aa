"""Whole training runs in tests: in this process (fast), or as commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from train.__main__ import main

FLAGS = (
    "--group-size 4 --groups-per-batch 3 --lora-rank 4 --lora-alpha 8 --lr 1e-2 --dtype float32 --device cpu "
    "--max-seq-length 128 --target-modules q_proj,v_proj,down_proj"
)
TIMES = ("elapsed_s", "sample_s", "update_s", "deliver_s", "idle_share", "trainer_idle_share")


class Runs:
    """Runs of one model below ``tmp``; ``name`` is the run folder's."""

    def __init__(self, model: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.tmp, self._monkeypatch = model, tmp, monkeypatch

    def arguments(self, name: str, *flags: str) -> list[str]:
        where = ["--output-dir", str(self.tmp / name), "--adapter-dir", str(self.tmp / f"{name}_adapters")]
        return ["--model", str(self.model), *where, *FLAGS.split(), *(part for f in flags for part in f.split())]

    def __call__(self, name: str, *flags: str) -> int:
        """``python -m train`` in this process; faults come out as exceptions."""
        self._monkeypatch.setattr(sys, "argv", ["train", *self.arguments(name, *flags)])
        return main()

    def environment(self, **extra: str) -> dict[str, str]:
        path = os.pathsep.join([str(Path(__file__).parent), str(self.tmp), str(ROOT)])
        clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
        return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TRACE_GAME_MODULES": "train_games"} | extra

    def start(self, name: str, *flags: str, launch: tuple[str, ...] = (), **extra: str) -> subprocess.Popen[str]:
        command = [sys.executable, *launch, "-m", "train", *self.arguments(name, *flags)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environment(**extra), stdout=pipe, stderr=pipe, text=True, cwd=ROOT)

    def command(self, name: str, *flags: str, **extra: str) -> tuple[int, str]:
        """``python -m train`` as a command. Returns its exit code and stderr."""
        process = self.start(name, *flags, **extra)
        _, err = process.communicate(timeout=240)
        return process.returncode, err

    def metrics(self, name: str) -> list[dict[str, Any]]:
        lines = (self.tmp / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line]

    def iterations(self, name: str, adapter: str) -> list[dict[str, Any]]:
        return [m for m in self.metrics(name) if m["adapter"] == adapter and "reward" in m]

    def checkpoints(self, name: str, adapter: str) -> list[str]:
        folder = self.tmp / name / "checkpoints" / adapter
        return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []

    def state(self, name: str, adapter: str, iteration: int) -> dict[str, bytes]:
        """Every byte of a checkpoint."""
        folder = self.tmp / name / "checkpoints" / adapter / f"iter_{iteration:06d}"
        return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}

    def timeless(self, name: str) -> list[dict[str, Any]]:
        """Metrics without times, ordered by adapter: what must repeat."""
        records = [{k: v for k, v in m.items() if k not in TIMES} for m in self.metrics(name)]
        return sorted(records, key=lambda m: (m["adapter"], m["iteration"]))


def error_line(err: str) -> str:
    """The single ``error:`` line of a command's stderr."""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in err, err[-3000:]
    return lines[0]
