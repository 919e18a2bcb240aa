"""Label trajectories with capabilities: by a benchmark's own checks, by a model, or from a coding agent's files.

    python pipeline/label_capabilities.py --labeler checks --checks-module games.helpdesk \\
        --input runs/base_rollouts.json --output-dir runs/labels
    python pipeline/aggregate_capabilities.py --runs 'runs/labels/run_*.json' \\
        --candidates runs/labels/candidate_capabilities.json --export runs/selected_capabilities.json

    # discovery and labelling by a model behind an OpenAI-compatible endpoint; run again to resume
    python pipeline/label_capabilities.py --labeler model --base-url http://localhost:8000/v1 --model M \\
        --input summaries.json --output-dir runs/labels

    # labels that coding agents wrote: check one agent's file on the blind summaries, then make the runs
    python pipeline/label_capabilities.py --labeler files --check --input blind.json \\
        --candidates candidates_blind.json --labels labels_01.json
    python pipeline/label_capabilities.py --labeler files --input summaries.json \\
        --candidates candidate_capabilities.json --labels 'labels_*.json' --output-dir runs/labels

Writes candidate_capabilities.json and run_01.json ... to --output-dir.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from pipeline import checks_labeler, file_labels, model_options
from pipeline.candidates import load_candidates
from pipeline.command_line import Parser, positive_int
from pipeline.files import InputError, run_cli, write_json
from pipeline.label_output import Target, candidates_json, run_json, write_runs
from pipeline.labels import find_runs


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--labeler", choices=["checks", "model", "files"], required=True, help="who labels")
    parser.add_argument("--input", required=True, help="summaries file, or a rollouts file for --labeler checks")
    parser.add_argument("--output-dir", help="folder for the candidates and the runs")
    parser.add_argument("--file-prefix", default="", help="what the names of the written files begin with")
    parser.add_argument("--n-runs", type=positive_int, default=10, help="independent labellings")
    parser.add_argument(
        "--n-candidates", type=positive_int, default=10, help="most candidates that discovery may propose"
    )
    parser.add_argument("--candidates", help="candidate_capabilities.json (--labeler model: instead of discovery)")
    parser.add_argument("--part", choices=["mine", "score"], default="mine", help="part of a split input to label")
    checks = parser.add_argument_group("--labeler checks")
    checks.add_argument("--checks-module", help="module with CANDIDATES and capability_checks(seed, messages)")
    checks.add_argument("--pass-threshold", type=float, default=1.0, help="reward from which a rollout has passed")
    model_options.add_options(parser)
    files = parser.add_argument_group("--labeler files")
    files.add_argument(
        "--labels", nargs="+", help="label files: paths or quoted globs; without them candidates are checked"
    )
    files.add_argument("--check", action="store_true", help="check only, write no run")
    files.add_argument("--blind-candidates", help="write names and descriptions without examples, for labellers")
    return parser.parse_args(arguments)


def target_of(args: argparse.Namespace) -> Target:
    if not args.output_dir:
        raise InputError("--output-dir is missing; name the folder for the runs")
    return Target(Path(args.output_dir), args.file_prefix)


def label_by_checks(args: argparse.Namespace) -> str:
    """Deterministic labels; all runs are equal and say so."""
    if not args.checks_module:
        raise InputError("--labeler checks needs --checks-module, e.g. games.helpdesk")
    module = checks_labeler.load_module(args.checks_module)
    skipped = checks_labeler.Skipped()
    found = checks_labeler.trajectories(Path(args.input), args.pass_threshold, args.part, module)
    labelled = checks_labeler.label(module, found, skipped)
    labeler = {"kind": "checks", "module": module.name, "deterministic": True, "blind": True}
    runs = {a: run_json(a, labelled, module.described, labeler=labeler) for a in range(1, args.n_runs + 1)}
    write_runs(target_of(args), candidates_json(module.described, labelled), runs)
    n_failed = sum(item.failed for item in labelled)
    return (
        f"{len(labelled)} rollouts labelled ({n_failed} failed, {len(labelled) - n_failed} passed; without a label: "
        f"{skipped.infrastructure} infrastructure, {skipped.hinted} hinted); {args.n_runs} equal runs (deterministic) "
        f"-> {args.output_dir}"
    )


def label_by_files(args: argparse.Namespace) -> str:
    """Check candidates or label files of coding agents; make runs of the latter."""
    if not args.candidates:
        raise InputError("--labeler files needs --candidates candidate_capabilities.json")
    subjects = file_labels.load_subjects(args.input, args.part)
    candidates = load_candidates(args.candidates)
    names = [c.name for c in candidates.candidates]
    if not args.labels:
        file_labels.check_discovery(candidates, subjects, args.n_candidates, f"candidates {args.candidates}")
        if args.blind_candidates:
            blind = [{"name": c.name, "description": c.description} for c in candidates.candidates]
            write_json(args.blind_candidates, {"schema_version": 1, "candidates": blind})
        return f"candidates are in order: {', '.join(names)}"
    loaded = {path: file_labels.load_labels(path, names, subjects) for path in find_runs(args.labels)}
    attempts = sorted(f.attempt for f in loaded.values())
    if len(set(attempts)) != len(attempts):
        raise InputError(f"labels: two files have the same attempt number ({attempts}); number them 1, 2, ...")
    if args.check:
        return f"{len(loaded)} label files are in order: {len(subjects)} trajectories, {len(names)} capabilities each"
    if attempts != list(range(1, args.n_runs + 1)):
        raise InputError(f"labels: expected attempts 1 to {args.n_runs}, found {attempts}; see --n-runs")
    runs = {
        f.attempt: run_json(
            f.attempt,
            file_labels.labelled(f, subjects),
            names,
            evidence=file_labels.evidence_of(f),
            labeler={"kind": "files", "blind": True},
        )
        for f in loaded.values()
    }
    write_runs(target_of(args), None, runs)
    return f"{len(runs)} runs of {len(subjects)} trajectories and {len(names)} capabilities -> {args.output_dir}"


def label_by_model(args: argparse.Namespace) -> str:
    """Discovery (unless there are candidates) and labelling through an endpoint."""
    return asyncio.run(model_options.label(args, target_of(args)))


LABELERS = {"checks": label_by_checks, "files": label_by_files, "model": label_by_model}


def main() -> int:
    args = parse_arguments()
    sys.stdout.write(f"{LABELERS[args.labeler](args)}\n")
    return 0


if __name__ == "__main__":
    run_cli(main)
