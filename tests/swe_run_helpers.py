"""What the tests of phases 1 and 6 share: configuration, a stand-in driver, commands as a user starts them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import run_declared
import yaml
from scripted_server import ScriptedServer

ROOT = Path(__file__).resolve().parents[1]
PHASES = ROOT / "swebench" / "qwen3.6_self_trace"
MINIATURE = PHASES / "miniature"
AGENT_PYTHON = ROOT / ".venv-agents" / "bin" / "python"

needs_agents = pytest.mark.skipif(
    not all(any(AGENT_PYTHON.parents[1].glob(f"lib/*/site-packages/{p}")) for p in ("minisweagent", "swebench")),
    reason="mini-swe-agent and swebench are not both there; run make agents",
)

# Stands in for run_agent_driver.py: no litellm, ends as the first line says. Speaks the same protocol.
FAKE_DRIVER = """
import json, os, pathlib, signal, sys, time, urllib.request
calls = pathlib.Path(CALLS)
for line in sys.stdin:
    job = json.loads(pathlib.Path(line.strip()).read_text())
    iid = job["instance"]["instance_id"]
    word = job["instance"]["problem_statement"].split()[0]
    with open(calls, "a") as log:
        log.write(iid + "\\n")
    tries = calls.read_text().split().count(iid)
    pathlib.Path(job["log"]).write_text("last words of the driver\\n")
    if word == "hang": time.sleep(600)
    if word == "slow": time.sleep(0.5)
    if word == "crash" or (word == "crash_once" and tries == 1): os._exit(3)
    status, text = {"limit": ("LimitsExceeded", ""), "empty": ("Submitted", ""), "format": ("RepeatedFormatError", ""),
                    "server": ("APIConnectionError", "")}.get(word, ("Submitted", "diff " + iid))
    out = pathlib.Path(job["output"]) / iid / (iid + ".traj.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    info = {"exit_status": status, "submission": text, "model_stats": {"api_calls": 4}, "exception_str": "why"}
    out.write_text(json.dumps({"info": info, "messages": [], "instance_id": iid}))
    print("over", flush=True)
"""


def settings_data(url: str = "http://127.0.0.1:9", **sections: Any) -> dict[str, Any]:
    """The miniature's configuration with one worker; ``sections`` are merged into it."""
    data = yaml.safe_load((ROOT / "configs" / "swebench_miniature.yaml").read_text())
    data["model"]["base_url"] = url
    data["agent"] |= {"workers": 1, "python": str(AGENT_PYTHON)}
    for name, section in sections.items():
        data[name] = data.get(name, {}) | section if isinstance(section, dict) else section
    return data


def write_config(folder: Path, data: dict[str, Any]) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def command(script: str, config: Path, run_dir: Path, *flags: str) -> list[str]:
    return [sys.executable, str(PHASES / script), "--config", str(config), "--run-dir", str(run_dir), *flags]


def environment() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TRACE_"))}
    return clean | {"OMP_NUM_THREADS": "1"}


def phase(script: str, config: Path, run_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """One phase as a command."""
    line = command(script, config, run_dir, *flags)
    return subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=240, cwd=ROOT)


@functools.cache
def _built() -> tuple[Path, list[dict[str, Any]]]:
    folder = Path(tempfile.mkdtemp(prefix="trace-miniature-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder, run_declared.build(MINIATURE, folder)


def build_miniature(folder: Path) -> list[dict[str, Any]]:
    """What ``run_declared.build`` makes of the miniature in ``folder``, by 32 calls of Git once for each process."""
    made, rows = _built()
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return json.loads(json.dumps(rows))  # type: ignore[no-any-return]


def phase_6_of_routed(url: str, checkpoint: Path, base: str, context: int, tmp: Path) -> Path:
    """Phase 1 with a scripted base that hands in nothing, then phase 6 of a routed folder that is served at ``url``;
    the run folder."""
    empty = "```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
    small = {"base_config": "configs/swebench_small_agent.yaml", "model_class": "litellm_textbased", "step_limit": 2}
    with ScriptedServer(chat=lambda *_: empty, max_model_len=context) as server:
        data = settings_data(
            server.url,
            mine_score="1:999",
            dataset={"instances": ["mini__ledger-1"]},
            sampling={"max_tokens": 32},
            agent=small,
            training={"base_model": base},
        )
        config = write_config(tmp, data)
        first = phase("phase1_baseline_eval.py", config, tmp / "run")
    assert first.returncode == 0, first.stderr
    line = command("phase6_final_eval.py", config, tmp / "run", "--checkpoint", str(checkpoint))
    env = environment() | {"VLLM_BASE_URL": url}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp / "run"


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def row(instance_id: str = "mini__a-1", **columns: Any) -> dict[str, Any]:
    """A row in SWE-bench's format."""
    base = {
        "instance_id": instance_id,
        "repo": "mini/a",
        "base_commit": "0" * 40,
        "problem_statement": "solve it",
        "patch": "",
        "test_patch": "",
        "version": "1",
        "FAIL_TO_PASS": ["t1"],
        "PASS_TO_PASS": ["t2"],
    }
    return base | columns
