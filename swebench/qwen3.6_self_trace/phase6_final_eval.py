"""Phase 6: a trained checkpoint under exactly the conditions of phase 1, and base and trained in one table.

    python swebench/qwen3.6_self_trace/phase6_final_eval.py --serve          # phase 5's export, by a server of its own
    python swebench/qwen3.6_self_trace/phase6_final_eval.py --checkpoint runs/qwen36_self_trace/phase5/exported --serve
    python swebench/qwen3.6_self_trace/phase6_final_eval.py --checkpoint runs/qwen36_self_trace/phase5/adapters/<NAME>
    python swebench/qwen3.6_self_trace/phase6_final_eval.py --checkpoint <NAME OF A SERVED MODEL>

Scores the instances that were not mined (``--instances all`` scores every one; the table then says so). Agent, limits,
sampling, harness and versions must be those recorded by phase 1, instance by instance; anything else is refused. Writes
``phase6/<name>/`` as phase 1 writes ``phase1/``, and ``phase6/comparison.json`` and ``comparison.md`` over all
checkpoints evaluated on the same instances. Exit codes as in phase 1.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import run_server
from checks import require_file
from run_accounting import table
from run_agent_config import shared_config
from run_checkpoint import Checkpoint, available, fits, read_checkpoint
from run_checks import check_evaluation, require_ready
from run_comparison import compare, require_comparable
from run_dataset import Instance, frozen, frozen_as_recorded
from run_evaluation import Subject, Summary, evaluate, protocol_of, read_summary, verified_summary
from run_folder import DryRun, RunFolder, open_phase, phase_parser, read_run
from run_settings import RunSettings, load_settings

from pipeline.files import InputError, ServerError, run_cli

PARTS = {"score": "the score part, never mined", "all": "all, the mined ones too"}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = phase_parser(__doc__)
    parser.add_argument("--checkpoint", help="adapter folder, model folder, or served name (default: phase 5's export)")
    parser.add_argument("--name", help="what to call it in the table (default: its folder's name)")
    parser.add_argument("--instances", choices=sorted(PARTS), default="score", help="which instances to score")
    parser.add_argument("--baseline", help="summary.json of the base model (default: phase 1's)")
    parser.add_argument(
        "--serve",
        action="store_true",
        help="start a server for a model folder, whatever VLLM_BASE_URL names, and stop it",
    )
    return parser.parse_args(arguments)


def main() -> int:
    args = parse_arguments()
    settings, folder = open_phase(args)
    if args.serve:
        settings = run_server.beside(settings, load_settings(args.config))
    run_server.interrupt_on_term()
    if args.dry_run:  # takes no lock: it writes nothing, and may look on while another phase works
        return dry_run(args, settings, folder)
    with folder.locked():
        return run(args, settings, folder, checkpoint_of(args, settings, folder))


def checkpoint_of(args: argparse.Namespace, settings: RunSettings, folder: RunFolder) -> Checkpoint:
    """What ``--checkpoint`` names, phase 5's export when it was not given.

    Raises:
        InputError: it is not there, has the name of phase 1, or cannot be served with ``--serve``.
    """
    if args.checkpoint is None:
        require_file(folder.exported, "phase 5's export", folder.command("phase5_training.py"))
    found = read_checkpoint(args.checkpoint or str(folder.exported), settings, args.name)
    if found.name == "base":
        raise InputError("--name base: that is phase 1; choose another name")
    if args.serve and found.kind != "model":
        raise InputError(f"--serve: starts a model's folder; {found.name} is of kind {found.kind}")
    return found


def chosen(folder: RunFolder, which: str) -> list[Instance]:
    """The instances to score, from the recorded split."""
    record = read_run(folder)
    instances = frozen_as_recorded(folder, record)
    wanted = set(record.split.score) if which == "score" else {i.instance_id for i in instances}
    found = [i for i in instances if i.instance_id in wanted]
    if not found:
        raise InputError(f"run {folder.run_json}: its score part is empty; use another mine_score, or --instances all")
    return found


def baseline(args: argparse.Namespace, settings: RunSettings, folder: RunFolder) -> Summary:
    """Phase 1's summary, once it is sure that phase 6 would run under the same protocol.

    Raises:
        InputError: something differs; its names are in the text.
    """
    path = Path(args.baseline) if args.baseline else folder.phase1 / "summary.json"
    protocol = read_summary(path).protocol
    now = protocol_of(settings, shared_config(settings), protocol.server)  # the server's part: once it is there
    if changed := protocol.differences(now):
        raise InputError(
            f"phase 1 was run with another {', '.join(changed[:3])}; restore it, or run phase 1 again under a new name"
        )
    return verified_summary(path, settings, frozen(folder))  # last: it takes seconds


def dry_run(args: argparse.Namespace, settings: RunSettings, folder: RunFolder) -> int:
    """Check all that the phase needs; the exit code."""
    report = DryRun(args.planned)
    served_name, there = None, folder.run_json.exists()
    with report.checking("checkpoint", there=args.checkpoint is not None or folder.exported.exists()) as found:
        checkpoint = checkpoint_of(args, settings, folder)
        served_name = settings.model.name if checkpoint.kind == "adapter" else None
        served_name = checkpoint.served_name if checkpoint.kind == "served" else served_name
        rests = fits(checkpoint, settings, {} if args.serve else models_there(settings))
        found += [f"{checkpoint.kind} {checkpoint.path or checkpoint.served_name}", *([rests] if rests else [])]
    with report.checking("phase 1 and its protocol", there=(folder.phase1 / "summary.json").exists()) as found:
        base = baseline(args, settings, folder)
        found.append(f"{base.model}, digest {base.protocol_digest[:12]}")
    with report.checking("instances", there=there) as found:
        found.append(f"{len(chosen(folder, args.instances))} of {len(frozen(folder))}: {PARTS[args.instances]}")
    start = run_server.command_line(settings, args.checkpoint or str(folder.exported)) if args.serve else None
    check_evaluation(report, settings, folder, served_name, start, begun=True)
    return report.exit_code


def models_there(settings: RunSettings) -> dict[str, dict[str, Any]]:
    """What the server offers; nothing when it does not answer, which is a line of its own."""
    with contextlib.suppress(ServerError):
        return run_server.served(settings)
    return {}


@contextlib.contextmanager
def server(serve: bool, settings: RunSettings, folder: RunFolder, checkpoint: Checkpoint) -> Iterator[None]:
    """With ``serve`` a server of the checkpoint, else the one that is there."""
    if not serve:
        yield
        return
    fits(checkpoint, settings, {})
    require_ready(settings, folder)
    with run_server.running(settings, folder.root / "server_phase6.log", str(checkpoint.path)):
        yield


def run(args: argparse.Namespace, settings: RunSettings, folder: RunFolder, checkpoint: Checkpoint) -> int:
    """Evaluate the checkpoint and compare; the exit code."""
    base = baseline(args, settings, folder)
    if checkpoint.kind == "adapter" and base.model != settings.model.name:
        raise InputError(f"model.name {settings.model.name}: phase 1 ran {base.model}; an adapter is served over that")
    instances = chosen(folder, args.instances)
    out = folder.evaluation(checkpoint.name)
    with server(args.serve, settings, folder, checkpoint), available(checkpoint, settings) as served_name:
        subject = Subject(checkpoint.name, served_name, str(checkpoint.path or checkpoint.served_name))
        summary = evaluate(settings, folder, out, instances, subject, like=base.protocol)
    require_comparable(base, summary)
    value = summary.to_account()
    path, text = compare(folder, base, comparable_ones(settings, folder, summary), PARTS[args.instances])
    sys.stdout.write("\n".join(table(f"{summary.name} ({PARTS[args.instances]})", value)) + f"\n\n{text}\n{path}\n")
    return 1 if value.errors() else 0


def comparable_ones(settings: RunSettings, folder: RunFolder, newest: Summary) -> list[Summary]:
    """Every finished evaluation of the same instances under the same protocol, by name."""
    instances = frozen(folder)
    found = [verified_summary(path, settings, instances) for path in sorted(folder.phase6.glob("*/summary.json"))]
    same = [s for s in found if s.instances == newest.instances and s.protocol_digest == newest.protocol_digest]
    return sorted(same, key=lambda s: s.name)


if __name__ == "__main__":
    run_cli(main)
