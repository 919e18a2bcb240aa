"""Phase 1: the base model on every instance. mini-swe-agent, the official harness, Pass@1 over all instances.

    swebench/qwen3.6_self_trace/launch_phase1.sh                                       # with a server of its own
    python swebench/qwen3.6_self_trace/phase1_baseline_eval.py --dry-run               # checks everything first
    python swebench/qwen3.6_self_trace/phase1_baseline_eval.py --config configs/swebench_miniature.yaml

Begins the run folder: freezes the instances and records the mine/score split. Resumes when it is called again; what
ended in an infrastructure error is tried again. Exit codes: 0 = every instance ended and was graded, 1 = some ended in
an infrastructure error, 2 = could not run.
"""

from __future__ import annotations

import sys

import run_server
from run_accounting import Account, table
from run_checks import check_evaluation, require_ready
from run_dataset import dataset_digest, freeze, require_gradable
from run_evaluation import Subject, Summary, evaluate
from run_folder import DryRun, RunFolder, open_phase, phase_parser, server_from_environment, write_run
from run_settings import RunSettings

from pipeline.files import run_cli


def main() -> int:
    parser = phase_parser(__doc__)
    parser.add_argument("--serve", action="store_true", help="start a server, unless VLLM_BASE_URL names one")
    args = parser.parse_args()
    settings, folder = open_phase(args)
    run_server.interrupt_on_term()
    serve = args.serve and server_from_environment() is None
    if args.dry_run:  # takes no lock: it writes nothing, and may look on while another phase works
        return dry_run(settings, folder, serve, args.planned)
    with folder.locked():
        if not serve:
            return run(settings, folder)
        require_ready(settings, folder)
        with run_server.running(settings, folder.root / "server.log"):
            return run(settings, folder)


def dry_run(settings: RunSettings, folder: RunFolder, serve: bool, planned: bool = False) -> int:
    """Check all that the phase needs; the exit code."""
    report = DryRun(planned)
    start = run_server.command_line(settings) if serve else None
    check_evaluation(report, settings, folder, settings.model.name, start)
    return report.exit_code


def run(settings: RunSettings, folder: RunFolder) -> int:
    """Evaluate the base model on all instances; the exit code."""
    instances = freeze(settings, folder)
    require_gradable(instances, settings.grading.backend)
    record = write_run(folder, settings, [i.instance_id for i in instances], dataset_digest(instances))
    subject = Subject("base", settings.model.name)
    summary = evaluate(settings, folder, folder.phase1, instances, subject)
    value = summary.to_account()
    parts = {"mine": value.restrict(record.split.mine), "score": value.restrict(record.split.score)}
    sys.stdout.write("\n".join(lines(summary, value, parts)) + "\n")
    sys.stdout.write(f"report: {folder.phase1 / 'report.json'}, summary: {folder.phase1 / 'summary.json'}\n")
    return 1 if value.errors() else 0


def lines(summary: Summary, value: Account, parts: dict[str, Account]) -> list[str]:
    """What the phase prints at its end."""
    agents = summary.agents
    out = table(f"{summary.model}, all", value)
    out += [table(f"  {name} part", part)[0] for name, part in parts.items()]
    out.append(f"  {agents['model_calls']} model calls, {agents['truncated_replies']} replies cut at max_tokens")
    return out


if __name__ == "__main__":
    run_cli(main)
