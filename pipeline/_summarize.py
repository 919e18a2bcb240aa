"""Summarize result files of a benchmark for stage 1.

    python pipeline/_summarize.py --input results.json --output summaries.json
    python pipeline/_summarize.py --input run_folder preds.json --output summaries.json --blind-output blind.json

Formats (detected): tau2, tau-bench, mini-swe-agent and SWE-agent joined with SWE-bench reports and predictions,
ToolSandbox, Inspect, OpenAI messages (JSON, JSONL), our rollouts. Memory does not grow with the input.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic import RootModel, StrictStr

from pipeline.command_line import Parser, ProgressLine, positive_int
from pipeline.files import InputError, check, read_json, resolved, run_cli
from pipeline.readers.plan import Plan, make_plan, trajectories
from pipeline.readers.sniff import FAMILIES
from pipeline.readers.trajectory import Limits
from pipeline.records import summary_writer
from pipeline.split import parse_shares
from pipeline.summarize import Summary, summarize


class Faults(RootModel[dict[StrictStr, StrictStr]]):
    """``--faults``: id -> why it is not the agent's fault."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--input", nargs="+", required=True, help="result files or folders")
    parser.add_argument("--output", required=True, help="summaries file to write")
    parser.add_argument("--benchmark", choices=sorted(FAMILIES), help="read the input as this, whatever it looks like")
    parser.add_argument("--max-content-chars", type=positive_int, default=300, help="characters kept of a message")
    parser.add_argument(
        "--max-tool-chars", type=positive_int, default=200, help="characters kept of a tool call or result"
    )
    parser.add_argument("--pass-threshold", type=float, default=1.0, help="reward from which a trajectory has passed")
    parser.add_argument("--split", metavar="MINE:SCORE", help="record a split of the tasks, e.g. 60:40")
    parser.add_argument("--part", choices=["mine", "score"], help="write only this part of the split")
    parser.add_argument("--faults", help="JSON object id -> reason: trajectories that are not the agent's fault")
    parser.add_argument("--blind-output", help="also write the records without outcomes, for labellers")
    return parser.parse_args(arguments)


def _read_faults(path: str | None) -> dict[str, str]:
    return check(Faults, read_json(path, "faults"), f"faults {path}").root if path else {}


def _info(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    return {
        "inputs": [{"path": str(p), "format": f} for p, f in plan.inputs],
        "skipped_files": [str(p) for p in plan.skipped],
        "max_content_chars": args.max_content_chars,
        "max_tool_chars": args.max_tool_chars,
        "pass_threshold": args.pass_threshold,
        "split": args.split,
        "part": args.part,
    }


def write(args: argparse.Namespace) -> tuple[Summary, Plan]:
    """Read the inputs and write the summaries (and the blind file)."""
    if args.part and not args.split:
        raise InputError("--part needs --split MINE:SCORE")
    if not 0 < args.pass_threshold <= 1:
        raise InputError(f"--pass-threshold: expected a reward in (0, 1], found {args.pass_threshold}")
    mine: Fraction | None = parse_shares(args.split) if args.split else None
    plan = make_plan(args.input, args.benchmark)
    _refuse_overwriting(args, plan)
    limits = Limits(args.max_content_chars, args.max_tool_chars)
    summary, info = Summary(), _info(args, plan)
    progress = ProgressLine("summarized")
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(summary_writer(Path(args.output), info))
        blind = None
        if args.blind_output:
            blind = stack.enter_context(summary_writer(Path(args.blind_output), {"blind": True, "split": args.split}))
        found = trajectories(plan, args.pass_threshold)
        for record in summarize(found, limits, summary, mine=mine, faults=_read_faults(args.faults)):
            progress.advance(note=record.id)
            if args.part and record.split != args.part:
                continue
            writer.write(record)
            if blind is not None and record.outcome in ("passed", "failed"):
                blind.write(record.blind())
        info["counts"] = summary.as_json()
    return summary, plan


def _refuse_overwriting(args: argparse.Namespace, plan: Plan) -> None:
    inputs = {resolved(p, "input") for p, _ in plan.inputs}
    for output in filter(None, (args.output, args.blind_output)):
        if resolved(output, "output") in inputs:
            raise InputError(f"output {output} is one of the inputs; choose another path")
    if args.blind_output and resolved(args.blind_output) == resolved(args.output):
        raise InputError("--blind-output and --output are the same file; choose two paths")


def main() -> int:
    args = parse_arguments()
    summary, plan = write(args)
    for path in plan.skipped:
        sys.stdout.write(f"skipped (no known format): {path}\n")
    sys.stdout.write(f"{summary.line()} -> {args.output}\n")
    if not (summary.outcomes["passed"] and summary.outcomes["failed"]):
        sys.stdout.write(
            "note: capability selection contrasts passed with failed trajectories; one side is empty here\n"
        )
    if any(name == "toolsandbox" for _, name in plan.inputs):
        sys.stdout.write(
            f"note: ToolSandbox gives similarities, not verdicts; passed means >= {args.pass_threshold:g}\n"
        )
    return 0


if __name__ == "__main__":
    run_cli(main)
