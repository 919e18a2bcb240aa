"""A run folder as phase 1 leaves it, made without an agent or a server, for the tests of phases 2-5."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from run_folder import RunFolder, write_run
from run_settings import load_settings
from scripted_answers import ScriptedAnswers
from stage1_helpers import Done, run_main

ROOT = Path(__file__).resolve().parents[1]
PHASES = ROOT / "swebench" / "qwen3.6_self_trace"

MODEL = "scripted"


def settings_of(url: str, **sections: Any) -> dict[str, Any]:
    """A small configuration; ``sections`` are merged into it."""
    data: dict[str, Any] = {
        "run_name": "tiny",
        "mine_score": "50:50",
        "model": {"name": MODEL, "base_url": url},
        "mining": {"n_runs": 3, "k": 2, "discovery_batches": 1, "concurrency": 4},
        "synthesis": {"accept": 1, "max_tries": 3, "rollouts": 3},
        "validation": {"rollouts": 3, "min_confirmed": 1},
    }
    for name, section in sections.items():
        data[name] = {**data[name], **section} if isinstance(data.get(name), dict) else section
    return data


def write_config(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


class Run:
    """A run below ``tmp``. ``phase`` starts one phase's script as a command, as a user would."""

    def __init__(self, tmp: Path, url: str, **sections: Any) -> None:
        self.config = write_config(tmp / "config.yaml", settings_of(url, **sections))
        self.folder = RunFolder(tmp / "run")

    def command(self, script: str, *flags: str | Path) -> list[str]:
        where = ["--config", str(self.config), "--run-dir", str(self.folder.root)]
        return [sys.executable, str(PHASES / script), *where, *map(str, flags)]

    def phase(self, script: str, *flags: str | Path, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TRACE_"))}
        command = self.command(script, *flags)
        env = clean | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)

    def here(self, main: Callable[[], int], *flags: str | Path) -> Done:
        """One phase in this process, for faults and dry runs: what its script would print and exit with."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TRACE_"))}
        with mock.patch.dict(os.environ, kept, clear=True):
            return run_main(main, "--config", self.config, "--run-dir", self.folder.root, *flags)

    def read(self, *parts: str) -> Any:
        return json.loads(self.folder.root.joinpath(*parts).read_text(encoding="utf-8"))


def fill_phase1(run: Run) -> None:
    """Trajectories of mini-swe-agent 2, report and predictions for the miniature's instances: those whose base play is
    wrong are unresolved. The patch of the data set is in none of them."""
    instances = ScriptedAnswers().instances
    settings = load_settings(run.config)
    write_run(run.folder, settings, sorted(instances), "0" * 64)
    report: dict[str, Any] = {}
    preds: dict[str, Any] = {}
    for name, data in instances.items():
        package = name.partition("__")[2].rpartition("-")[0]
        resolved = "trained" not in data["plays"]
        write(run.folder.phase1 / "trajectories" / name / f"{name}.traj.json", trajectory(name, package))
        report[name] = {"patch_is_None": False, "patch_exists": True, "resolved": resolved}
        preds[name] = {"model_name_or_path": MODEL, "instance_id": name, "model_patch": f"diff of {package}"}
    write(run.folder.phase1 / "report.json", report)
    write(run.folder.phase1 / "preds.json", preds)


def trajectory(name: str, package: str) -> dict[str, Any]:
    texts = [
        ("system", "You are a helpful assistant that can interact with a shell."),
        ("user", f"Solve the issue in /testbed: something is wrong in {package}. It belongs to {name}."),
        ("assistant", f"I will look at {package} first.\n\n```bash\ncat {package}/core.py\n```"),
        ("user", "<returncode>0</returncode>\n<output>\nclass Core:\n    pass\n</output>"),
        ("assistant", f"Now I edit {package} and hand it in.\n\n```bash\nsed -i s/a/b/ {package}/core.py\n```"),
        ("exit", f"diff of {package}"),
    ]
    return {
        "info": {"exit_status": "Submitted", "submission": f"diff of {package}", "mini_version": "2.2.7"},
        "messages": [{"role": role, "content": text} for role, text in texts],
        "instance_id": name,
        "trajectory_format": "mini-swe-agent-1.1",
    }


def write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")
