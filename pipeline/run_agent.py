"""Let a headless coding agent do a stage: render the prompt, run the agent within limits, check what it left.

    python pipeline/run_agent.py --stage capability --agent claude --config configs/capability_selection.yaml
    python pipeline/run_agent.py --stage environment --agent mini-swe-agent --model M --cost-limit 10
    python pipeline/run_agent.py --stage capability --agent 'my-agent --prompt {prompt_file}'

The agent works in the repository (or --root); prompt, log and result go to --work-dir. Exit codes: 0 = the artefacts
are in order, 1 = something is missing or a limit was hit, 2 = could not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from pipeline import artefacts
from pipeline.agent_commands import KNOWN, Launch, Request, cost_of_line, cost_of_trajectory, launch
from pipeline.command_line import Parser
from pipeline.files import InputError, resolved, run_cli, write_json, write_text
from pipeline.templates import render
from render_pipeline import STAGES, CapabilityConfig, EnvironmentConfig, context_of, load_config

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {"capability": "configs/capability_selection.yaml", "environment": "configs/environment_generation.yaml"}
TERM_GRACE_S = 10.0  # between asking an agent to stop and killing it: it saves its trajectory
POLL_S = 0.5


@dataclasses.dataclass
class Ended:
    """How the agent ended: its exit code, or the limit that stopped it."""

    returncode: int | None
    seconds: float
    cost: float | None
    limit: str | None


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--stage", choices=sorted(STAGES), required=True, help="what the agent shall do")
    parser.add_argument("--agent", required=True, help=f"{', '.join(KNOWN)}, or a command line")
    parser.add_argument("--config", help="configuration of the stage (default: the one in configs/)")
    parser.add_argument("--model", help="model for the agent")
    parser.add_argument("--root", default=str(ROOT), help="folder in which the agent works")
    parser.add_argument("--work-dir", default="runs/agent", help="folder for prompt, log and result")
    parser.add_argument("--time-limit", type=float, default=4 * 3600.0, help="seconds")
    parser.add_argument("--cost-limit", type=float, help="dollars, where the agent reports its cost")
    parser.add_argument("--agent-args", default="", help="further arguments for the agent, as one quoted string")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse_arguments()
    for flag, limit in (("--time-limit", args.time_limit), ("--cost-limit", args.cost_limit)):
        if limit is not None and not (limit > 0 and math.isfinite(limit)):
            raise InputError(f"{flag} {limit}: expected a finite number > 0")
    root, work = resolved(args.root, "--root"), resolved(args.work_dir, "--work-dir")
    config = load_config(Path(args.config) if args.config else ROOT / CONFIGS[args.stage], args.stage)
    before = artefacts.done_skills(root / config.capabilities_file) if isinstance(config, EnvironmentConfig) else set()
    text, _ = render(STAGES[args.stage][1], context_of(config))
    prompt = work / "prompt.md"
    write_text(prompt, text)
    request = Request(prompt, work, args.model, args.cost_limit, tuple(shlex.split(args.agent_args)))
    how = launch(args.agent, request)
    for note in how.notes:
        sys.stdout.write(f"note: {note}\n")
    started_ns = time.time_ns()
    ended = run(how, text, root, work / "agent.log", args.time_limit, args.cost_limit)
    checklist = _check(config, root, started_ns, before)
    return report(args, ended, checklist, work)


def _check(
    config: CapabilityConfig | EnvironmentConfig, root: Path, started_ns: int, before: set[str]
) -> artefacts.Checklist:
    if isinstance(config, CapabilityConfig):
        return artefacts.capability(config, root, started_ns)
    return artefacts.environment(config, root, started_ns, before)


def report(args: argparse.Namespace, ended: Ended, checklist: artefacts.Checklist, work: Path) -> int:
    """Say what is there and what is missing; the exit code."""
    cost = "unknown" if ended.cost is None else f"${ended.cost:.2f}"
    how = f"stopped at the {ended.limit} limit" if ended.limit else f"exit code {ended.returncode}"
    sys.stdout.write(f"agent: {how} after {ended.seconds:.0f} s, cost {cost}; log {work / 'agent.log'}\n")
    for line in checklist.good:
        sys.stdout.write(f"good: {line}\n")
    for line in checklist.faults:
        sys.stdout.write(f"missing or wrong: {line}\n")
    complete = not checklist.faults and ended.limit is None
    result = {"schema_version": 1, "stage": args.stage, "agent": args.agent, "complete": complete}
    result |= {"good": checklist.good, "faults": checklist.faults} | dataclasses.asdict(ended)
    write_json(work / "result.json", result)
    return 0 if complete else 1


def run(how: Launch, prompt: str, root: Path, log: Path, time_limit: float, cost_limit: float | None) -> Ended:
    """Run the agent, show and keep its output, stop it at a limit with all its children."""
    try:
        process = subprocess.Popen(
            how.command,
            cwd=root,
            env=os.environ | how.environment,
            stdin=subprocess.PIPE if how.stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its own process group, so that its children end with it
        )
    except OSError as error:
        raise InputError(f"agent {how.command[0]}: cannot be started ({error.strerror})") from None
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None
    threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
    if how.stdin:
        threading.Thread(target=_feed, args=(process, prompt), daemon=True).start()
    try:
        return _watch(process, lines, how, log, time_limit, cost_limit)
    finally:
        stop_group(process)


def _read_lines(stream: IO[bytes], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line.decode("utf-8", "replace"))
    lines.put(None)


def _feed(process: subprocess.Popen[bytes], prompt: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(prompt.encode())
        process.stdin.close()
    except BrokenPipeError:  # it does not read its input; the checks will say what is missing
        return


def _watch(
    process: subprocess.Popen[bytes],
    lines: queue.Queue[str | None],
    how: Launch,
    log: Path,
    time_limit: float,
    cost_limit: float | None,
) -> Ended:
    start = time.monotonic()
    cost: float | None = None
    limit: str | None = None
    with open(log, "w", encoding="utf-8") as file:
        while limit is None:
            try:
                line = lines.get(timeout=POLL_S)
            except queue.Empty:
                line = ""
            if line is None:
                break
            file.write(line)
            file.flush()
            sys.stdout.write(line)
            seen = cost_of_line(line) if how.trajectory is None else cost_of_trajectory(how.trajectory)
            cost = seen if seen is not None else cost
            if time.monotonic() - start > time_limit:
                limit = "time"
            elif cost_limit is not None and cost is not None and cost > cost_limit:
                limit = "cost"
            elif process.poll() is not None and lines.empty():
                break  # a child that outlives the agent may hold its output open
    returncode = process.wait(TERM_GRACE_S) if limit is None else None
    if how.trajectory is not None:
        cost = cost_of_trajectory(how.trajectory) or cost
    return Ended(returncode, time.monotonic() - start, cost, limit)


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """End the process group that ``run`` started: TERM, a pause, KILL."""
    for sign, grace in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, TERM_GRACE_S)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


if __name__ == "__main__":
    run_cli(main)
