"""The evidence run on helpdesk: every stage once, in order, within a time limit; the same command goes on.

    python examples/helpdesk_gpu/run.py --size gpu --limit-s 530     # one GPU; exit 75 = not finished, run it again
    python examples/helpdesk_gpu/run.py --size tiny                  # two CPU cores, a few minutes: shows that it runs

With VLLM_BASE_URLS (and VLLM_MODEL) in the environment rollouts and training sample from those servers, without from
this process. Ends with ``table.py``, which writes ``results/helpdesk_gpu/``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import plan as stages

from pipeline.files import InputError, run_cli

UNFINISHED = 75  # EX_TEMPFAIL: run it again
GRACE_S = 20.0  # for a stage to write what it has
SMALLEST_S = 10.0  # with less time left no stage is started


def all_stages(run: Path, model: str, size: stages.Size, vllm: bool) -> Iterator[stages.Stage]:
    """The stages in order; those after the selection depend on it, so they are made when it is there."""
    yield from stages.mining_stages(run, model, size)
    names = stages.capability_names(run, size.count)
    yield from stages.environment_stages(run, model, size, names)
    yield from stages.training_stages(run, model, size, names)
    yield from stages.final_stages(run, model, size, names)
    if vllm:
        yield stages.vllm_stage(run, model, size)


def execute(stage: stages.Stage, run: Path, deadline: float) -> int:
    """Run one stage unless it is done. Returns its exit code, ``UNFINISHED`` when the time was up."""
    record = run / "done" / f"{stage.name}.json"
    if record.exists():
        print(f"== {stage.name}: done before", flush=True)
        return 0
    left = deadline - time.monotonic()
    if left < SMALLEST_S:
        return UNFINISHED
    print(f"== {stage.name}: {' '.join(stage.command[1:])}", flush=True)
    record.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(stages.QUICKSTART / "measure.py"), "--output", str(record)]
    command += [part for code in stage.also_done for part in ("--also-done", str(code))]
    process = subprocess.Popen([*command, "--", *stage.command], start_new_session=True)
    try:
        return process.wait(None if left == float("inf") else left)
    except subprocess.TimeoutExpired:
        stop(process)
        return UNFINISHED
    except KeyboardInterrupt:
        stop(process)
        raise


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a stage and its children; what does not end in time is killed (every stage survives that)."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(GRACE_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def has_vllm(size: str) -> bool:
    return size == "gpu" and importlib.util.find_spec("vllm") is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=stages.SIZES, default=os.environ.get("SIZE", "gpu"), help="[$SIZE or gpu]")
    parser.add_argument("--run", type=Path, help="folder of all artefacts [runs/helpdesk_SIZE]")
    parser.add_argument("--model", default=os.environ.get("MODEL", "models/smollm2"), help="[$MODEL or %(default)s]")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop after this many seconds [never]")
    parser.add_argument("--until", help="stop before the first stage whose name begins so")
    parser.add_argument("--results", type=Path, help="[results/helpdesk_gpu; RUN/results for other sizes than gpu]")
    parser.add_argument("--readme", type=Path, help="also write the table into this file, between its marks")
    args = parser.parse_args()
    if not args.limit_s > 0:
        raise InputError(f"--limit-s: expected seconds > 0, found {args.limit_s}")
    deadline = time.monotonic() + args.limit_s
    run = args.run or Path("runs") / f"helpdesk_{args.size}"
    size = stages.SIZES[args.size]
    for stage in all_stages(run, args.model, size, has_vllm(args.size)):
        if args.until and stage.name.startswith(args.until):
            return 0
        code = execute(stage, run, deadline)
        if code == UNFINISHED:
            print(f"time is up at {stage.name}; run the same command again", flush=True)
        if code:
            return code
    results = args.results or (Path("results/helpdesk_gpu") if args.size == "gpu" else run / "results")
    table = [str(Path(__file__).with_name("table.py")), "--run", str(run), "--size", args.size, "--out", str(results)]
    table += ["--readme", str(args.readme)] if args.readme else []
    return subprocess.run([sys.executable, *table], check=False).returncode


if __name__ == "__main__":
    run_cli(main)
