"""Aggregate independent label runs into the selected capabilities.

    python pipeline/aggregate_capabilities.py --runs 'pipeline/run_*.json' --rho 0.10 --delta 0.20 --k 8 \\
        --candidates pipeline/candidate_capabilities.json --export pipeline/selected_capabilities.json

Writes the selection array, best first, and beside it <export>.report.json with all statistics, also of rejected
candidates. Thresholds are exact: 0.20 means 1/5. Exit codes: 0 = selected, 1 = nothing passes, 2 = bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

from pipeline import evidence
from pipeline.candidates import CandidateFile, load_candidates
from pipeline.command_line import Parser, non_negative_int, positive_int, rational
from pipeline.cross_check import cross_check
from pipeline.files import InputError, resolved, run_cli
from pipeline.labels import LabelSet, find_runs, load_runs
from pipeline.selection import Candidate, Thresholds, candidates, ranked
from pipeline.selection_export import (
    descriptions_of,
    entry,
    previous_entries,
    report_path,
    retire,
    statistics,
    write_export,
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--runs", nargs="+", required=True, help="label runs: files or quoted globs")
    parser.add_argument("--rho", default="0.10", help="coverage threshold, inclusive, exact")
    parser.add_argument("--delta", default="0.20", help="gap threshold, inclusive, exact")
    parser.add_argument("--k", type=positive_int, default=8, help="runs in which a capability must pass")
    parser.add_argument("--candidates", help="candidate_capabilities.json, for descriptions and names")
    parser.add_argument("--export", default="pipeline/selected_capabilities.json", help="selection array to write")
    parser.add_argument("--summaries", help="summaries file: checks ids, outcomes and quotes, and reports faults")
    parser.add_argument("--allow-score-ids", action="store_true", help="accept labels for the score part of a split")
    parser.add_argument("--resamples", type=positive_int, default=2000, help="bootstrap samples and permutations")
    parser.add_argument("--seed", type=non_negative_int, default=0, help="seed of the resampling")
    parser.add_argument("--check", action="store_true", help="check the runs, print the table, write nothing")
    return parser.parse_args(arguments)


def read_thresholds(rho: str, delta: str, k: int, n_runs: int) -> Thresholds:
    """The three thresholds as exact numbers.

    Raises:
        InputError: not numbers, out of range, or more runs asked for than there are.
    """
    values: dict[str, Fraction] = {}
    for name, text in (("--rho", rho), ("--delta", delta)):
        try:
            values[name] = rational(text)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    thresholds = Thresholds(values["--rho"], values["--delta"], k)
    if thresholds.k > n_runs:
        raise InputError(f"--k is {k} but only {n_runs} label runs were found; lower --k or add runs")
    return thresholds


def check_names(labels: LabelSet, proposed: CandidateFile | None) -> list[str]:
    """Candidates that no run labels.

    Raises:
        InputError: a run labels a capability that is not a candidate.
    """
    if proposed is None:
        return []
    names = [c.name for c in proposed.candidates]
    for name in labels.capabilities:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            raise InputError(f"label runs: capability {name!r} is not a candidate; nearest candidate: {near[0]}")
    return [name for name in names if name not in labels.capabilities]


def aggregate(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The export and the report of parsed arguments; nothing is written."""
    export = Path(args.export)
    files = find_runs(args.runs)
    if resolved(export, "--export") in {resolved(f) for f in files}:
        raise InputError(f"--export {export} is one of the label runs; choose another path")
    labels = load_runs(files)
    thresholds = read_thresholds(args.rho, args.delta, args.k, len(labels.attempts))
    proposed = load_candidates(args.candidates) if args.candidates else None
    unlabelled = [Candidate(name, (None,) * len(labels.attempts), ()) for name in check_names(labels, proposed)]
    found = ranked(candidates(labels) + unlabelled)
    facts = cross_check(labels, args.summaries, allow_score=args.allow_score_ids) if args.summaries else None
    previous = previous_entries(export)
    described = descriptions_of(proposed)
    entries = [entry(c, thresholds, previous.get(c.name), described) for c in found if c.selected(thresholds)]
    report = build_report(labels, thresholds, found, previous, described)
    report["evidence"] = evidence.build(labels, found, thresholds, resamples=args.resamples, seed=args.seed)
    report["summaries"] = {"file": args.summaries} | dataclasses.asdict(facts) if facts else None
    return entries, report


def build_report(
    labels: LabelSet,
    thresholds: Thresholds,
    found: list[Candidate],
    previous: dict[str, Any],
    described: dict[str, str],
) -> dict[str, Any]:
    """What the export leaves out: every candidate's counts, the evidence, and what earlier runs had finished."""
    return {
        "schema_version": 1,
        "thresholds": {"rho": str(thresholds.rho), "delta": str(thresholds.delta), "k": thresholds.k},
        "total_failed": labels.n_failed,
        "total_passed": labels.n_passed,
        "runs": [{"attempt": a, "file": s} for a, s in zip(labels.attempts, labels.sources, strict=True)],
        "candidates": [
            {"description": described.get(c.name, "")} | statistics(c, thresholds, labels.attempts) for c in found
        ],
        "done": [e.model_dump() for _, e in sorted(previous.items()) if e.status == "DONE"],
    }


def table(report: dict[str, Any]) -> str:
    """The candidates as text, best first, with the 95 % interval of Delta and the agreement of the runs."""
    lines = [f"{'capability':40} {'Cov':>6} {'Delta':>6} {'95 % interval':>16} {'kappa':>6} {'runs':>6}  verdict"]
    for c in report["candidates"]:
        per = report["evidence"]["per_capability"].get(c["skill"])
        interval = "[{:.3f}, {:.3f}]".format(*per["delta_interval"]) if per else "-"
        kappa = f"{per['kappa']:.2f}" if per and per["kappa"] is not None else "-"
        runs = f"{c['n_runs_passed']}/{c['n_runs_total']}"
        lines.append(
            f"{c['skill']:40} {c['mean_cov']:6.3f} {c['mean_delta']:6.3f} {interval:>16} {kappa:>6} {runs:>6}  "
            f"{'selected' if c['selected'] else '-'}"
        )
    lines += [f"warning: {w}" for w in report["evidence"]["warnings"]]
    return "\n".join(lines)


def main() -> int:
    args = parse_arguments()
    export = Path(args.export)
    try:
        entries, report = aggregate(args)
    except InputError as error:
        retired = None if args.check else retire(export)
        note = f" (the old export was renamed to {retired}; it is not the result of these runs)" if retired else ""
        raise InputError(f"{error}{note}") from None
    sys.stdout.write(table(report) + "\n")
    if args.check:
        return 0
    write_export(export, entries, report)
    dropped = [d["skill"] for d in report["done"] if d["skill"] not in {e["skill"] for e in entries}]
    if dropped:
        sys.stdout.write(f"no longer selected although DONE (status kept in the report): {', '.join(dropped)}\n")
    sys.stdout.write(f"{len(entries)} selected -> {export}, statistics -> {report_path(export)}\n")
    return 0 if entries else 1


if __name__ == "__main__":
    run_cli(main)
