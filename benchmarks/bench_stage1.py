"""Speed, memory and robustness of stage 1; the results go to benchmarks/results/stage1.json.

    python benchmarks/bench_stage1.py                    # all; about five minutes on two cores
    python benchmarks/bench_stage1.py --only aggregate   # a million labels
    python benchmarks/bench_stage1.py --only stream --gigabytes 10

aggregate: ten runs, ten capabilities, ten thousand trajectories, from files to selection. stream: peak memory of the
summarizer on growing tau2 files. fuzz: readers on damaged files of every format. Exit code 1 = a target was missed.
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from stage1_fuzzing import FORMATS, documents, mutated_bytes, read_anything  # noqa: E402

from pipeline.command_line import Parser  # noqa: E402
from pipeline.files import run_cli, write_json  # noqa: E402
from pipeline.labels import run_file  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "stage1.json"
N_RUNS, N_CAPABILITIES, N_IDS = 10, 10, 10_000
AGGREGATE_TARGET_S, IMPORT_TARGET_S, MEMORY_TARGET_MIB, FUZZ_TARGET = 5.0, 1.0, 1024, 10_000

# runs a command and prints its times and its peak resident memory; processor time is what a busy machine does not
# falsify
CHILD = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
wall = time.perf_counter() - start
used = resource.getrusage(resource.RUSAGE_CHILDREN)
cpu = used.ru_utime + used.ru_stime
print(json.dumps({"code": code, "wall_s": round(wall, 2), "cpu_s": round(cpu, 2), "peak_mib": used.ru_maxrss // 1024}))
"""


def measure(*command: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", CHILD, *command], capture_output=True, text=True, cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def bench_aggregate(folder: Path, _: float) -> dict[str, Any]:
    """A million labels: the command as a user runs it, with few and with all resamples."""
    rng = random.Random(0)
    outcome = {f"shop:{i}": rng.random() < 0.6 for i in range(N_IDS)}
    for attempt in range(1, N_RUNS + 1):
        labels = {
            f"skill_{'abcdefghij'[c]}": {
                i: rng.choices(("LACKING", "PRESENT", "NA"), (3 if failed else 1, 2, 2))[0]
                for i, failed in outcome.items()
            }
            for c in range(N_CAPABILITIES)
        }
        (folder / f"run_{attempt:02}.json").write_text(json.dumps(run_file(attempt, outcome, labels)))
    command = [sys.executable, "pipeline/aggregate_capabilities.py", "--runs", f"{folder}/run_*.json"]
    command += ["--export", f"{folder}/selected.json", "--resamples"]
    plain, full = measure(*command, "1"), measure(*command, "2000")
    assert plain["code"] == full["code"] == 0, "the aggregator failed"
    found = {"labels": N_RUNS * N_CAPABILITIES * N_IDS, "without_resampling": plain, "with_2000_resamples": full}
    return found | {"target_s": AGGREGATE_TARGET_S, "ok": plain["cpu_s"] < AGGREGATE_TARGET_S}


def bench_import(_: Path, __: float) -> dict[str, Any]:
    """``import pipeline`` and the aggregator's module, in a new interpreter, the best of three."""
    code = "import time; t = time.perf_counter(); import pipeline.aggregate_capabilities, sys; "
    code += "print(time.perf_counter() - t, 'torch' in sys.modules)"
    times = []
    for _n in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
        seconds, torch = done.stdout.split()
        assert torch == "False"
        times.append(float(seconds))
    return {"seconds": round(min(times), 3), "target_s": IMPORT_TARGET_S, "ok": min(times) < IMPORT_TARGET_S}


def write_tau2(path: Path, size: float) -> int:
    """A tau2 file of about ``size`` bytes; the number of simulations."""
    messages: list[dict[str, Any]] = []
    for n in range(30):
        role = ("user", "assistant", "tool")[n % 3]
        raw = {"id": "x" * 20, "content": "y" * 400, "usage": {"prompt_tokens": n, "completion_tokens": 1}}
        messages.append({"role": role, "content": "words and words " * 30, "turn_idx": n, "cost": 0.1, "raw_data": raw})
    info = {"reward": 0.0, "reward_basis": ["DB"], "db_check": {"db_match": False}}
    body = json.dumps(
        {"termination_reason": "user_stop", "reward_info": info, "messages": messages, "policy": "p" * 9000}
    )
    n = 0
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"info": {"environment_info": {"domain_name": "shop"}}, "tasks": [], "simulations": [')
        while file.tell() < size:
            file.write(f'{"," if n else ""}{{"task_id": "{n}", "trial": 0, {body[1:]}')
            n += 1
        file.write("]}")
    return n


def bench_stream(folder: Path, gigabytes: float) -> dict[str, Any]:
    """Peak memory and speed of the summarizer on files of growing size."""
    rows = []
    for share in (0.25, 1.0):
        path = folder / "tau2.json"
        n = write_tau2(path, gigabytes * share * 1e9)
        command = [sys.executable, "pipeline/_summarize.py", "--input", str(path), "--output", f"{folder}/out.json"]
        found = measure(*command)
        assert found["code"] == 0, "the summarizer failed"
        size = path.stat().st_size
        rows.append(
            {"gigabytes": round(size / 1e9, 3), "simulations": n, "mb_per_cpu_s": round(size / 1e6 / found["cpu_s"], 1)}
            | found
        )
        path.unlink()
    growth = rows[1]["peak_mib"] - rows[0]["peak_mib"]
    # what grows is the table of ids; carried on to 10 GB it must stay under the target
    at_ten = rows[1]["peak_mib"] + growth / (rows[1]["gigabytes"] - rows[0]["gigabytes"]) * max(
        0.0, 10 - rows[1]["gigabytes"]
    )
    return {
        "files": rows,
        "peak_mib_at_10_gb_extrapolated": round(at_ten),
        "target_mib": MEMORY_TARGET_MIB,
        "ok": at_ten < MEMORY_TARGET_MIB,
    }


def bench_fuzz(folder: Path, _: float) -> dict[str, Any]:
    """Damaged documents and damaged bytes of every format; any exception but ``InputError`` stops it with the case."""
    per_format = FUZZ_TARGET // (2 * len(FORMATS)) + 1
    options = settings(
        max_examples=per_format,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    counts: Counter[str] = Counter()

    def run(name: str, kind: Callable[[str], Any]) -> None:
        @seed(0)
        @options
        @given(kind(name))
        def case(content: Any) -> None:
            counts[name] += 1
            counts["records"] += read_anything(folder, name, content)

        case()

    start = time.perf_counter()
    for name in FORMATS:
        for kind in (documents, mutated_bytes):
            run(name, kind)
    records = counts.pop("records")
    total = sum(counts.values())
    seconds = round(time.perf_counter() - start, 1)
    return {
        "cases": total,
        "records_read": records,
        "per_format": dict(counts),
        "seconds": seconds,
        "ok": total >= FUZZ_TARGET,
    }


PARTS: dict[str, Callable[[Path, float], dict[str, Any]]] = {
    "import": bench_import,
    "aggregate": bench_aggregate,
    "stream": bench_stream,
    "fuzz": bench_fuzz,
}


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", choices=sorted(PARTS), help="one part; the others keep their last results")
    parser.add_argument("--gigabytes", type=float, default=0.4, help="size of the larger file of `stream`")
    parser.add_argument("--output", default=str(RESULTS), help="JSON file with the results")
    args = parser.parse_args()
    output = Path(args.output)
    results: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    for name in [args.only] if args.only else list(PARTS):
        with tempfile.TemporaryDirectory() as folder:
            results[name] = PARTS[name](Path(folder), args.gigabytes)
        sys.stdout.write(f"{name}: {json.dumps(results[name])}\n")
    results["machine"] = {"python": platform.python_version(), "cpu": platform.machine(), "cores": os.cpu_count()}
    write_json(output, {"schema_version": 1} | results)
    return 0 if all(r.get("ok", True) for r in results.values() if isinstance(r, dict)) else 1


if __name__ == "__main__":
    run_cli(main)
