"""Validate and calibrate the four shipped capability environments on one model, with the published commands.

    python benchmarks/calibrate_shipped.py --output benchmarks/results/calibration_smollm2.json
    python benchmarks/calibrate_shipped.py --num-seeds 24 --num-samples 8 --output runs/bench/calibration.json

Stage files stay under ``--work-dir``, so a run that was stopped goes on. ``--docs`` writes the table between the marks
in docs/environments.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipeline.command_line import Parser, positive_int
from pipeline.files import InputError, read_json, run_cli, write_block, write_json

ROOT = Path(__file__).resolve().parents[1]
NAMES = (
    "tool_calling_precision",
    "structured_data_reasoning",
    "precondition_verification",
    "multi_step_task_completion",
)


def stage(command: list[str], verdict_ok: tuple[int, ...] = (0,)) -> int:
    """Run one published command; its exit code, when it is one that means "ran"."""
    sys.stderr.write(f"== {' '.join(command)}\n")
    env = {**os.environ, "OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
    code = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, check=False).returncode
    if code not in verdict_ok:
        raise InputError(f"{command[0]} ended with exit code {code}; its own message is above")
    return code


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Panel, rollouts and calibration of one environment; the numbers that the table shows."""
    work = args.work_dir / name
    work.mkdir(parents=True, exist_ok=True)
    panel = ["pipeline/validate_environment.py", f"capability_{name}", "--target-tools", "helpdesk"]
    valid = stage([*panel, "--json-output", str(work / "validation.json")], (0, 1)) == 0
    rollouts = work / "rollouts.json"
    if not rollouts.exists():
        collect = ["-m", "train.collect_rollouts", "--env", f"capability_{name}", "--model", args.model]
        collect += ["--num-seeds", str(args.num_seeds), "--num-samples", str(args.num_samples), "--seed", "0"]
        stage([*collect, "-o", str(rollouts)])
    report = work / "calibration.json"
    calibrate = ["pipeline/calibrate_environment.py", str(rollouts), "--group-size", str(args.num_samples)]
    stage([*calibrate, "--json-output", str(report)], (0, 1))
    found = read_json(report)
    rates = found["unhinted"]
    return {
        "validated": valid,
        "verdict": found["verdict"],
        "failed_criteria": [c["name"] for c in found["criteria"] if not c["passed"]],
        "mean_reward": rates["mean_reward"],
        "success_rate": rates["success_rate"],
        "all_success": rates["all_success"],
        "all_zero": rates["all_zero"],
        "constant": rates["constant"],
        "reward_levels": rates["reward_levels"],
        "truncation": found["truncation"],
        "pass_at_k": {k: v["value"] for k, v in rates["pass_at_k"].items()},
        "wall_s": found["info"]["wall_s"],
    }


def percent(rate: dict[str, Any]) -> str:
    low, high = (100 * max(0.0, x) for x in rate["ci95"])
    return f"{100 * rate['value']:.1f} ({low:.1f}-{high:.1f})"


def table(result: dict[str, Any]) -> str:
    """The rows of docs/environments.md, in Markdown."""
    lines = [
        "| environment | panel | mean reward | success % (95 %) | all-zero groups % | constant % | pass@8 % | bands |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["environments"].items():
        failed = ", ".join(row["failed_criteria"])
        cells = [name, "pass" if row["validated"] else "FAIL", f"{row['mean_reward']['value']:.3f}"]
        cells += [percent(row["success_rate"]), f"{100 * row['all_zero']['value']:.0f}"]
        cells += [f"{100 * row['constant']['value']:.0f}", f"{100 * row['pass_at_k']['8']:.1f}"]
        lines.append("| " + " | ".join([*cells, row["verdict"] + (f": {failed}" if failed else "")]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--model", default="models/smollm2", help="model folder (default models/smollm2)")
    parser.add_argument("--num-seeds", type=positive_int, default=100, help="seeds (default 100)")
    parser.add_argument("--num-samples", type=positive_int, default=16, help="rollouts per seed, >= 8 (default 16)")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/calibrate_shipped"), help="stage files")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument("--docs", action="store_true", help="refresh the table in docs/environments.md")
    args = parser.parse_args()
    if args.num_samples < 8:
        raise InputError(f"--num-samples: expected at least 8 for pass@8, found {args.num_samples}")
    environments = {name: measure(name, args) for name in NAMES}
    settings = {"model": args.model, "num_seeds": args.num_seeds, "num_samples": args.num_samples}
    result = {"schema_version": 1, "settings": settings, "environments": environments}
    write_json(args.output, result)
    sys.stdout.write(table(result) + "\n")
    if args.docs:
        write_block(ROOT / "docs" / "environments.md", "calibration", table(result))
    return 0


if __name__ == "__main__":
    run_cli(main)
