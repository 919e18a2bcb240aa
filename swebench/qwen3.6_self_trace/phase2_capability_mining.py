"""Phase 2: which capabilities set the failed trajectories of phase 1 apart from the passed ones.

    python swebench/qwen3.6_self_trace/phase2_capability_mining.py                       # the run's own model labels
    python swebench/qwen3.6_self_trace/phase2_capability_mining.py --agent claude        # a coding agent does it all
    python swebench/qwen3.6_self_trace/phase2_capability_mining.py --candidates F --labels 'labels_*.json'
    python swebench/qwen3.6_self_trace/phase2_capability_mining.py --input trajectories/ report.json --run-dir runs/x

Summaries -> candidates -> N independent blind labellings (NA / PRESENT / LACKING) -> selection (Cov, Delta, K of N) ->
report, by the commands of ``pipeline/``. Only instances of the mine part are read; no gold patch is read at all: the
data set is not opened. Writes ``phase2/selected_capabilities.json``; exit 1 when nothing passes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import agent_mining
from checks import attached, export_key, require_disk, require_file, require_model
from run_folder import DryRun, RunFolder, open_phase, phase_parser, read_run
from run_settings import RunSettings
from steps import Step, run_steps

from pipeline.files import InputError, run_cli
from pipeline.readers.plan import make_plan, trajectories
from pipeline.readers.trajectory import Limits
from pipeline.records import Record, read_summaries
from pipeline.selection_export import read_entries, report_path
from pipeline.split import parse_shares
from pipeline.summarize import Summary, summarize

PHASE1 = "phase1_baseline_eval.py"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = phase_parser(__doc__)
    parser.add_argument("--input", nargs="+", help="trajectories and verdicts, instead of phase 1's")
    parser.add_argument("--mine-all", action="store_true", help="with --input: no split; nothing of it is scored later")
    parser.add_argument("--agent", help="a coding agent does it: claude, codex, mini-swe-agent, or a command")
    parser.add_argument("--agent-model", help="model of the agent")
    parser.add_argument("--time-limit", type=float, default=4 * 3600.0, help="seconds for the agent")
    parser.add_argument("--cost-limit", type=float, help="dollars for the agent, where it reports its cost")
    parser.add_argument("--candidates", help="candidate_capabilities.json, instead of discovery")
    parser.add_argument("--labels", nargs="+", help="label files of coding agents, instead of labelling by a model")
    args = parser.parse_args(arguments)
    if args.labels and not args.candidates:
        raise InputError("--labels needs --candidates, the file that they label")
    if args.agent and (args.candidates or args.labels):
        raise InputError("--agent does discovery and labelling itself; drop --candidates and --labels")
    if args.mine_all and not args.input:
        raise InputError("--mine-all needs --input: phase 1's instances are split, and the score part is never mined")
    return args


# --------------------------------------------------------------------------- input


def inputs(args: argparse.Namespace, folder: RunFolder, settings: RunSettings) -> list[str]:
    """What to summarize: the files that were named, or phase 1's.

    Raises:
        InputError: phase 1 has not been run to its end.
    """
    if args.input:
        return [str(require_input(Path(name)).resolve()) for name in args.input]
    command = folder.command(PHASE1)
    wanted = [("trajectories", "trajectories"), ("report.json", "report"), ("preds.json", "predictions")]
    found = [require_file(folder.phase1 / name, f"phase 1's {what}", command) for name, what in wanted]
    return [str(path) for path in found]


def require_input(path: Path) -> Path:
    if not path.exists():
        raise InputError(f"--input {path}: not found; give files or folders of trajectories and reports")
    return path


def split_flags(args: argparse.Namespace, settings: RunSettings) -> list[str]:
    return [] if args.mine_all else ["--split", settings.mine_score, "--part", "mine"]


def refuse_score_ids(path: Path, folder: RunFolder, *, split: bool) -> int:
    """The number of trajectories that will be mined.

    Raises:
        InputError: one of them is, or may be, scored later.
    """
    score = set(read_run(folder).split.score) if folder.run_json.exists() else set()
    n = 0
    for record in read_summaries(path):
        if record.id in score or (split and record.split != "mine"):
            raise InputError(f"summaries {path}: {record.id} will be scored and must not be mined; delete the file")
        n += 1
    return n


def mined_records(args: argparse.Namespace, folder: RunFolder, settings: RunSettings) -> list[Record]:
    """The records of the mine part as step 1 will write them, for the dry run."""
    mine = None if args.mine_all else parse_shares(settings.mine_score)
    plan = make_plan(inputs(args, folder, settings), None)
    records = summarize(trajectories(plan, 1.0), Limits(50, 50), Summary(), mine=mine)
    return [r for r in records if r.split in (None, "mine")]


# --------------------------------------------------------------------------- steps


def summarize_step(args: argparse.Namespace, folder: RunFolder, settings: RunSettings) -> Step:
    m, out = settings.mining, folder.phase2
    sources = inputs(args, folder, settings)
    limits = ["--max-content-chars", str(m.max_content_chars), "--max-tool-chars", str(m.max_tool_chars)]
    target = ["--output", str(out / "summaries.json"), "--blind-output", str(out / "blind.json")]
    command = ("pipeline/_summarize.py", "--input", *sources, *target, *limits, *split_flags(args, settings))
    files = [Path(p) for p in sources if Path(p).is_file()]
    folders = [file for p in sources if Path(p).is_dir() for file in sorted(Path(p).rglob("*.json"))]
    return Step("1_summaries", command, tuple(files + folders), (out / "summaries.json", out / "blind.json"))


def label_step(args: argparse.Namespace, folder: RunFolder, settings: RunSettings) -> Step:
    """Discovery and labelling by a model, or the check and join of label files."""
    m, out = settings.mining, folder.phase2
    runs = tuple(out / f"run_{n:02}.json" for n in range(1, m.n_runs + 1))
    common = ["--input", str(out / "summaries.json"), "--output-dir", str(out), "--n-runs", str(m.n_runs)]
    common += ["--n-candidates", str(m.n_candidates), "--part", "mine"]
    given = ["--candidates", str(Path(args.candidates).resolve())] if args.candidates else []
    if args.labels:
        command = ["--labeler", "files", *common, *given, "--labels", *(str(Path(p).resolve()) for p in args.labels)]
    else:
        url, model = labeller(settings)
        command = [
            "--labeler",
            "model",
            *common,
            *given,
            "--base-url",
            url,
            "--model",
            model,
            "--benchmark",
            "swebench",
        ]
        command += ["--temperature", str(m.temperature), "--max-tokens", str(m.max_tokens), "--seed", str(m.seed)]
        command += ["--chunk-chars", str(m.chunk_chars), "--discovery-batches", str(m.discovery_batches)]
        command += ["--concurrency", str(m.concurrency), "--timeout", str(m.request_timeout_s)]
    read = (out / "summaries.json", *((Path(args.candidates),) if args.candidates else ()))
    # a server that serves one model answers under any name
    before = None if args.labels else lambda: require_model(settings, *labeller(settings))
    return Step("2_labels", ("pipeline/label_capabilities.py", *command), read, runs, before=before)


def labeller(settings: RunSettings) -> tuple[str, str]:
    """URL and name of the model that labels."""
    return settings.mining.base_url or settings.model.base_url, settings.mining.model or settings.model.name


def select_steps(args: argparse.Namespace, folder: RunFolder, settings: RunSettings) -> list[Step]:
    m, out = settings.mining, folder.phase2
    runs = tuple(out / f"run_{n:02}.json" for n in range(1, m.n_runs + 1))
    candidates = Path(args.candidates).resolve() if args.candidates else out / "candidate_capabilities.json"
    command = [
        "pipeline/aggregate_capabilities.py",
        "--runs",
        str(out / "run_*.json"),
        "--rho",
        m.rho,
        "--delta",
        m.delta,
    ]
    command += ["--k", str(m.k), "--candidates", str(candidates), "--summaries", str(out / "summaries.json")]
    command += ["--export", str(folder.selected)]
    page = out / "selection_report.html"
    report = ("pipeline/report.py", "--selection", str(folder.selected), "--output", str(page))
    read = (*runs, candidates, out / "summaries.json")
    return [
        Step("3_selection", tuple(command), read, (folder.selected, report_path(folder.selected)), good_codes=(0, 1)),
        Step("4_report", report, (report_path(folder.selected),), (page,)),
    ]


def run(args: argparse.Namespace, folder: RunFolder, settings: RunSettings) -> int:
    """All steps; the exit code of the first that fails, 1 when nothing was selected."""
    export_key(settings)
    if args.agent:
        code = agent_mining.run(args, folder, settings, mined_inputs=inputs(args, folder, settings))
        if code == 0:
            refuse_score_ids(folder.phase2 / "summaries.json", folder, split=False)
    else:
        code = run_steps(folder.phase2, [summarize_step(args, folder, settings)])
        if code == 0:
            n = refuse_score_ids(folder.phase2 / "summaries.json", folder, split=not args.mine_all)
            sys.stdout.write(f"{n} trajectories of the mine part; none of them will be scored\n")
            code = run_steps(folder.phase2, [label_step(args, folder, settings)])
    code = code or run_steps(folder.phase2, select_steps(args, folder, settings))
    if code:
        return code
    chosen = [entry.skill for entry in read_entries(folder.selected)]
    sys.stdout.write(f"selected: {', '.join(chosen) or 'nothing'} -> {folder.selected}\n")
    return 0 if chosen else 1


# --------------------------------------------------------------------------- dry run


def dry_run(args: argparse.Namespace, folder: RunFolder, settings: RunSettings) -> int:
    """Every thing that the phase needs, one line each."""
    checks = DryRun(args.planned)
    if not args.input:
        with checks.checking("run folder", there=folder.run_json.exists()) as found:
            split = read_run(folder).split
            found.append(f"{len(split.mine)} instances to mine, {len(split.score)} to score")
    with checks.checking("trajectories to mine", there=(folder.phase1 / "report.json").exists()) as found:
        found.append(both_outcomes(mined_records(args, folder, settings)))
    if args.agent:
        with checks.checking("agent") as found:
            found.append(agent_mining.program(args))
    elif args.labels:
        with checks.checking("label files") as found:
            found.append(f"{len([require_input(Path(p)) for p in args.labels if '*' not in p])} named")
    else:
        with checks.checking("labelling server", there=bool(settings.mining.base_url) or attached()) as found:
            found.append(require_model(settings, *labeller(settings)))
    with checks.checking("disk") as found:
        found.append(require_disk(folder.phase2, 1.0))
    return checks.exit_code


def both_outcomes(records: list[Record]) -> str:
    """How many passed and failed.

    Raises:
        InputError: one side is empty: there is nothing to contrast.
    """
    counts = Counter(str(r.outcome) if r.messages else f"{r.outcome} without a trajectory" for r in records)
    if not (counts["passed"] and counts["failed"]):
        found = ", ".join(f"{n} {side}" for side, n in sorted(counts.items())) or "none"
        raise InputError(f"expected passed and failed trajectories to contrast, found {found}; add results")
    return ", ".join(f"{n} {side}" for side, n in sorted(counts.items()))


def main() -> int:
    args = parse_arguments()
    settings, folder = open_phase(args)
    if args.dry_run:
        return dry_run(args, folder, settings)
    if not args.input:
        if not folder.run_json.exists():
            command = folder.command(PHASE1)
            raise InputError(f"run folder {folder.root}: has no run.json; run {command}")
        read_run(folder)
    with folder.locked():
        return run(args, folder, settings)


if __name__ == "__main__":
    run_cli(main)
