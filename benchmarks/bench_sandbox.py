"""What isolation costs: start of a sandbox, start of a worker, steps per second in this process and through workers.

    python benchmarks/bench_sandbox.py --output benchmarks/results/bench_sandbox.json

The environment is the fixture of the tests, a typical small game. Times are the median over repetitions.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from game_registry import GameSpec, get_game, load_game_file
from pipeline import sandbox
from pipeline.command_line import Parser, positive_int
from pipeline.files import run_cli, write_json
from pipeline.remote_game import SandboxedEnvironment

ROOT = Path(__file__).resolve().parents[1]
GAME = ROOT / "tests" / "fixtures" / "environments" / "capability_ledger_game.py"
CALL = json.dumps({"name": "get_record", "arguments": {"record_id": "0000"}})


def _median_s(repeat: int, action: Callable[[], object]) -> float:
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def step_us(spec: GameSpec, steps: int, repeat: int) -> float:
    """Median microseconds of one step, resets not counted."""
    env = spec.make_env()
    times = []
    for _ in range(repeat):
        env.reset(0)
        used = counted = 0.0
        while counted < steps:
            if env.done:
                env.reset(0)
            began = time.perf_counter()
            env.step(CALL)
            used += time.perf_counter() - began
            counted += 1
        times.append(used / counted)
    return statistics.median(times) * 1e6


def measure(steps: int, repeat: int) -> dict[str, Any]:
    hello = [sandbox.PYTHON, "-I", "-S", "-c", "pass"]
    load_game_file(GAME)
    results: dict[str, Any] = {"in_process_step_us": round(step_us(get_game("capability_ledger"), steps, repeat), 1)}
    for kind in ("bwrap", "process"):
        isolation = sandbox.find_isolation(kind)
        started = _median_s(repeat, lambda i=isolation: sandbox.run(hello, isolation=i))  # type: ignore[misc]
        worker = _median_s(repeat, lambda k=kind: SandboxedEnvironment(GAME, isolation=k).close())  # type: ignore[misc]
        with SandboxedEnvironment(GAME, isolation=kind) as environment:
            each = step_us(environment.spec, steps, repeat)
        results[kind] = {
            "run_ms": round(started * 1e3, 1),
            "worker_start_ms": round(worker * 1e3, 1),
            "step_us": round(each, 1),
            "steps_per_s": round(1e6 / each),
            "overhead_us": round(each - results["in_process_step_us"], 1),
        }
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=positive_int, default=2000, help="steps per repetition")
    parser.add_argument("--repeat", type=positive_int, default=5, help="repetitions, of which the median counts")
    parser.add_argument("--output", metavar="F", help="write the JSON here")
    args = parser.parse_args(argv)
    results = measure(args.steps, args.repeat)
    data = {
        "schema_version": 1,
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "settings": {"steps": args.steps, "repeat": args.repeat},
        "results": results,
    }
    if args.output:
        write_json(args.output, data)
    sys.stdout.write(json.dumps(results, indent=2) + "\n")
    return 0 if results["bwrap"]["overhead_us"] < 1000 else 1


if __name__ == "__main__":
    run_cli(main)
