"""The evidence run on helpdesk: every stage once, several at a time, within a time limit; the same command goes on.

    python examples/helpdesk_gpu/run.py --size gpu --limit-s 530     # one GPU; exit 75 = not finished, run it again
    python examples/helpdesk_gpu/run.py --size tiny                  # two CPU cores, some minutes: shows that it runs
    python examples/helpdesk_gpu/run.py --size gpu --list            # the commands

With VLLM_BASE_URLS (and VLLM_MODEL) in the environment rollouts, training and the evaluation of adapters sample from
those servers, without from this process. However it ends, ``table.py`` writes what is there by then.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import machine
import plan as stages
from scheduler import UNFINISHED, Scheduler, Stage, pending, say
from sizes import SIZES, Size

from pipeline.files import InputError, run_cli

HERE = stages.HERE
INTERRUPTED = 130  # as run_cli ends then


def environment(size: Size) -> dict[str, str]:
    """What every stage gets: the candidates' module, and its share of the cores."""
    root = HERE.parent.parent
    places = [str(root), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = max(1, len(os.sched_getaffinity(0)) // size.parallel)
    found = {"PYTHONPATH": os.pathsep.join(places), **stages.ENVIRONMENT}
    if shutil.which("bwrap") is None:  # the environments here are the project's own
        found["TRACE_ISOLATION"] = os.environ.get("TRACE_ISOLATION", "process")
    return found | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default=os.environ.get("SIZE", "gpu"), help="[$SIZE or gpu]")
    parser.add_argument("--run", type=Path, help="folder of all artefacts [runs/helpdesk_SIZE]")
    parser.add_argument("--model", default=os.environ.get("MODEL", "models/smollm2"), help="[$MODEL or %(default)s]")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop after this many seconds [never]")
    parser.add_argument("--parallel", type=int, help="stages at once [the size's]")
    parser.add_argument("--list", action="store_true", help="print the stages that are still to do, and end")
    parser.add_argument("--results", type=Path, help="[results/helpdesk_gpu; RUN/results for other sizes than gpu]")
    parser.add_argument("--readme", type=Path, help="also write the table into this file, between its marks")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    begin = time.monotonic()
    if not args.limit_s > 0:
        raise InputError(f"--limit-s: expected seconds > 0, found {args.limit_s}")
    run = args.run or Path("runs") / f"helpdesk_{args.size}"
    size, plugin = SIZES[args.size], importlib.util.find_spec("vllm") is not None

    def plan() -> list[Stage]:
        return stages.all_stages(run, args.model, size, plugin)

    if args.list:
        todo = pending(plan(), run)
        for stage in plan():
            if stage.name in todo:
                say(f"{stage.name}: {' '.join(stage.command[1:])}")
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    machine.begin(run)
    parallel = args.parallel or size.parallel
    try:
        code = Scheduler(run, plan, parallel, begin + args.limit_s, environment(size)).execute()
    except KeyboardInterrupt:
        machine.end(run, time.monotonic() - begin, INTERRUPTED)
        raise
    machine.end(run, time.monotonic() - begin, code)
    todo = pending(plan(), run)
    if code == UNFINISHED:
        say(f"time is up; {len(todo)} stages are left of those known; run the same command again")
    if not (run / "done" / "04_selection_a.json").exists():
        return code
    results = args.results or (Path("results/helpdesk_gpu") if args.size == "gpu" else run / "results")
    table = [str(HERE / "table.py"), "--run", str(run), "--size", args.size, "--out", str(results)]
    table += ["--readme", str(args.readme)] if args.readme else []
    done = subprocess.run([sys.executable, *table], check=False, env={**os.environ, **environment(size)}).returncode
    return code or done


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    run_cli(main)
