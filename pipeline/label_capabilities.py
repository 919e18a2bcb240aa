"""Label trajectories with capabilities: by a benchmark's own checks, by a model, or from a coding agent's files.

    python pipeline/label_capabilities.py --labeler checks --checks-module games.helpdesk \\
        --input runs/base_rollouts.json --output-dir runs/labels
    python pipeline/aggregate_capabilities.py --runs 'runs/labels/run_*.json' \\
        --candidates runs/labels/candidate_capabilities.json --export runs/selected_capabilities.json

Writes candidate_capabilities.json and run_01.json ... to --output-dir.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipeline import checks_labeler
from pipeline.command_line import Parser, positive_int
from pipeline.files import InputError, run_cli
from pipeline.label_output import candidates_json, run_json, write_runs


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--labeler", choices=["checks"], required=True, help="who labels")
    parser.add_argument("--input", required=True, help="summaries file, or a rollouts file for --labeler checks")
    parser.add_argument("--output-dir", required=True, help="folder for the candidates and the runs")
    parser.add_argument("--n-runs", type=positive_int, default=10, help="independent labellings")
    parser.add_argument("--part", choices=["mine", "score"], default="mine", help="part of a split input to label")
    checks = parser.add_argument_group("--labeler checks")
    checks.add_argument("--checks-module", help="module with CANDIDATES and capability_checks(seed, messages)")
    checks.add_argument("--pass-threshold", type=float, default=1.0, help="reward from which a rollout has passed")
    return parser.parse_args(arguments)


def label_by_checks(args: argparse.Namespace) -> str:
    """Deterministic labels; all runs are equal and say so."""
    if not args.checks_module:
        raise InputError("--labeler checks needs --checks-module, e.g. games.helpdesk")
    module = checks_labeler.load_module(args.checks_module)
    skipped = checks_labeler.Skipped()
    found = checks_labeler.trajectories(Path(args.input), args.pass_threshold, args.part)
    labelled = checks_labeler.label(module, found, skipped)
    labeler = {"kind": "checks", "module": module.name, "deterministic": True, "blind": True}
    runs = {a: run_json(a, labelled, module.described, labeler=labeler) for a in range(1, args.n_runs + 1)}
    write_runs(Path(args.output_dir), candidates_json(module.described, labelled), runs)
    n_failed = sum(item.failed for item in labelled)
    return (
        f"{len(labelled)} rollouts labelled ({n_failed} failed, {len(labelled) - n_failed} passed; without a label: "
        f"{skipped.infrastructure} infrastructure, {skipped.hinted} hinted); {args.n_runs} equal runs (deterministic)"
    )


def main() -> int:
    args = parse_arguments()
    sys.stdout.write(f"{label_by_checks(args)} -> {args.output_dir}\n")
    return 0


if __name__ == "__main__":
    run_cli(main)
