"""Phase 2 by a coding agent: a folder that holds the mine part and nothing else, the rendered prompt, and the checks.

The agent works in ``phase2/agent_root``: the programs of stage 1, copies of the mined trajectories, their verdicts. No
trajectory or verdict of an instance that will be scored is in it, and no data set, so no gold patch either.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import yaml
from run_folder import RunFolder
from run_settings import ROOT, RunSettings
from steps import Step, run_steps

from pipeline.agent_commands import Request, launch, mini_program
from pipeline.files import InputError, read_json, write_json, write_text
from pipeline.readers import swebench
from pipeline.readers.plan import READERS, make_plan
from pipeline.split import parse_shares, part_of

PROGRAMS = ("pipeline", "game_registry.py", "environment_calls.py", "tool_calls.py", "render_pipeline.py", "prompts")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "rendered", "adapters", "*.pyc", "run_*.json", "selected_*.json")


def program(args: argparse.Namespace) -> str:
    """The agent's command line, when it can be started.

    Raises:
        InputError: its program is not installed.
    """
    if args.agent == "mini-swe-agent":  # its command holds the text of the prompt, which is not rendered yet
        return mini_program()
    return launch(args.agent, Request(Path("prompt.md"), Path(), args.agent_model, args.cost_limit)).command[0]


def run(args: argparse.Namespace, folder: RunFolder, settings: RunSettings, mined_inputs: list[str]) -> int:
    """Prepare the agent's folder, let it work, and take over its candidates, runs and summaries."""
    root = folder.phase2 / "agent_root"
    config = root / "config.yaml"
    if not config.is_file() or config.read_text(encoding="utf-8") != config_text(settings):
        prepare(root, args, settings, mined_inputs)
    command = ["pipeline/run_agent.py", "--stage", "capability", "--agent", args.agent, "--root", str(root)]
    command += ["--config", str(root / "config.yaml"), "--work-dir", str(folder.phase2 / "agent")]
    command += ["--time-limit", str(args.time_limit)]
    command += ["--model", args.agent_model] if args.agent_model else []
    command += ["--cost-limit", str(args.cost_limit)] if args.cost_limit else []
    done = (root / "labels" / "selected_capabilities.json",)
    code = run_steps(folder.phase2, [Step("2_agent", tuple(command), (root / "config.yaml",), done)])
    if code == 0:
        take_over(root / "labels", folder.phase2)
    return code


def prepare(root: Path, args: argparse.Namespace, settings: RunSettings, mined_inputs: list[str]) -> None:
    """Make the agent's folder; ``config.yaml`` comes last and says that it is whole."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for name in PROGRAMS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=LEFT_OUT)
        else:
            shutil.copyfile(ROOT / name, root / name)
    n = copy_mined(mined_inputs, root / "results", None if args.mine_all else settings.mine_score)
    if n == 0:
        raise InputError("phase 2: the mine part has no trajectory; check phase 1's output and mine_score")
    write_text(root / "config.yaml", config_text(settings))


def config_text(settings: RunSettings) -> str:
    """The configuration that the agent's prompt is rendered from."""
    m = settings.mining
    config = {
        "model": settings.model.name, "run_name": settings.run_name, "benchmark": "swebench", "output_dir": "labels",
        "eval_results": "results/trajectories", "eval_labels": "results/evaluation", "n_runs": m.n_runs,
        "n_candidates": m.n_candidates, "k_consistency": m.k, "rho": m.rho, "delta": m.delta,
    }  # fmt: skip
    return yaml.safe_dump(config, sort_keys=False)


def copy_mined(sources: list[str], target: Path, shares: str | None) -> int:
    """Copy the mined trajectories to ``target/trajectories`` and write their verdicts to ``target/evaluation``.

    Returns:
        How many trajectories were copied.
    """
    verdicts = swebench.Verdicts()
    copied: list[str] = []
    (target / "trajectories").mkdir(parents=True)
    for path, kind in make_plan(sources, None).inputs:
        if kind not in READERS:
            swebench.read_verdicts(path, kind, verdicts)
            continue
        for trajectory in READERS[kind](path, 1.0):
            if _mined(trajectory.task_id, shares):
                shutil.copyfile(path, target / "trajectories" / f"{trajectory.task_id}.traj.json")
                copied.append(trajectory.task_id)
    report: dict[str, Any] = {}
    for instance in copied:
        if instance in verdicts.by_id and verdicts.by_id[instance][0].outcome in ("passed", "failed"):
            report[instance] = {"resolved": verdicts.by_id[instance][0].outcome == "passed"}
    write_json(target / "evaluation" / "report.json", report)
    return len(copied)


def _mined(instance: str, shares: str | None) -> bool:
    return shares is None or part_of(swebench.repository(instance), instance, parse_shares(shares)) == "mine"


def take_over(labels: Path, target: Path) -> None:
    """The agent's artefacts, which ``run_agent`` has checked, become phase 2's; the selection is computed again."""
    for file in sorted(labels.glob("*.json")):
        if file.name.startswith("selected_capabilities"):
            continue
        write_text(target / file.name, json.dumps(read_json(file, "artefact"), ensure_ascii=False, indent=1) + "\n")
