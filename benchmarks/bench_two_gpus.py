"""The layout of two GPUs: servers and trainer on GPUs of their own, and what happens when a server dies.

    python benchmarks/bench_two_gpus.py --part layout --model models/smollm2 --out runs/bench/layout.json
    python benchmarks/bench_two_gpus.py --part servers --model models/smollm2 --out runs/bench/servers.json

``layout``: a server on GPU 0, ``python -m train`` on GPU 1, one capability and then four: tokens/s, delivery time, idle
share of each GPU (from nvidia-smi, once a second) and of each process (from metrics.jsonl).
``servers``: a server on each GPU; tokens per second of episodes with one and with both (``bench_rollouts.py``).
``killed``: a training run on two servers, one of which is killed (kill -9) in the middle of an iteration and started
again: every iteration must be complete, and the server used again.
Without a GPU the same runs on the CPU with ``--size tiny``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_capabilities import CPU_FLAGS, GPU_FLAGS, machine  # noqa: E402
from benchmarks.serving import end, launch, served, wait_until_healthy  # noqa: E402
from pipeline.files import ServerError, read_json, read_jsonl, run_cli, write_json  # noqa: E402

NAMES = (
    "structured_data_reasoning", "tool_calling_precision", "precondition_verification", "multi_step_task_completion",
)  # fmt: skip


INTERRUPTED = 130  # exit code of a run that was told to stop


@dataclasses.dataclass(frozen=True)
class Size:
    """Flags of training and of the servers, and seconds that a training run may take.

    Args:
        endless: iterations of the run that is stopped once the server that died is in use again.
    """

    train: str
    server: str
    rollouts: str
    iterations: int
    endless: int
    limit_s: int


SIZES = {
    "gpu": Size(
        "--group-size 16 --groups-per-batch 32 --lora-rank 16 --lora-alpha 32 --lr 3e-4 --max-seq-length 4096",
        GPU_FLAGS + "0.8", "--size gpu --rounds 1", 10, 500, 150,
    ),
    "tiny": Size(
        "--group-size 4 --groups-per-batch 2 --lora-rank 4 --lora-alpha 4 --lr 1e-4 --max-seq-length 512 --device cpu",
        CPU_FLAGS.replace("--max-model-len 1024", "--max-model-len 2048"),
        "--size cpu --rounds 1 --episodes 8 --concurrency 4 --group 4 --turns 2 --tokens 4 --prompt 48", 3, 500, 200,
    ),
}  # fmt: skip


class GpuMeter:
    """Mean utilisation of every GPU while the block runs; empty without nvidia-smi."""

    def __init__(self) -> None:
        self._stop, self._rows = threading.Event(), list[list[float]]()

    def __enter__(self) -> GpuMeter:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _watch(self) -> None:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        while not self._stop.wait(1.0):
            try:
                text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
            except (OSError, subprocess.SubprocessError):
                return
            self._rows.append([float(line) for line in text.split()])

    def idle_shares(self) -> list[float]:
        return [round(1 - statistics.mean(column) / 100, 4) for column in zip(*self._rows, strict=True)]


def gpu(index: int, size: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": str(index)} if size == "gpu" else {}


def train(
    args: argparse.Namespace, names: list[str], urls: str, folder: Path, iterations: int = 0
) -> subprocess.Popen[str]:
    """``python -m train`` on the last GPU, its messages in ``folder/train.log``."""
    size = SIZES[args.size]
    command = [sys.executable, "-m", "train", "--capabilities", ",".join(f"capability_{n}" for n in names)]
    command += ["--model", str(args.model), "--max-iters", str(iterations or size.iterations), *size.train.split()]
    command += ["--output-dir", str(folder / "run"), "--adapter-dir", str(folder / "adapters"), "--dtype", "bfloat16"]
    env = os.environ | gpu(1, args.size) | {"VLLM_BASE_URLS": urls, "VLLM_MODEL": str(args.model)}
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "train.log", "w", encoding="utf-8") as log:
        return subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str], folder: Path, limit_s: float) -> list[dict[str, Any]]:
    """The iterations of a training run.

    Raises:
        ServerError: it failed or took too long.
    """
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    text = (folder / "train.log").read_text(encoding="utf-8", errors="replace")
    sys.stderr.write(text)
    if code not in (0, INTERRUPTED):
        what = f"took over {limit_s:g} s" if code is None else f"exit code {code}"
        raise ServerError(f"training: {what}: {' '.join(text[-500:].split())}")
    return [r for r in read_jsonl(folder / "run/metrics.jsonl", "metrics") if "sampled_tokens" in r]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    late = [r for r in rows if r["iteration"] > 2] or rows  # the first ones compile
    span = max(r["elapsed_s"] for r in rows)
    means = {
        key: round(statistics.mean(r[key] for r in late), 4)
        for key in ("sample_s", "update_s", "deliver_s", "idle_share", "trainer_idle_share")
    }
    ends = (1, late[-1]["iteration"])
    first, last = (statistics.mean(r["reward"] for r in rows if r["iteration"] == k) for k in ends)
    tokens = sum(r["sampled_tokens"] for r in rows)
    return {
        "iterations": len(rows), "wall_s": round(span, 2), "tokens_per_s": round(tokens / span, 1), **means,
        "reward_first": round(first, 4), "reward_last": round(last, 4),
        "errors": sum(r["errors"] for r in rows),
    }  # fmt: skip


def layout(args: argparse.Namespace, work: Path, record: dict[str, Any]) -> None:
    """A server on GPU 0 and the trainer on GPU 1, with one and with four capabilities."""
    size = SIZES[args.size]
    with served(args.model, size.server.split(), work / "server.log", args.server_start_s, gpu(0, args.size)) as url:
        for n in (1, len(NAMES)):
            folder = work / f"run{n}"
            with GpuMeter() as meter:
                rows = finish(train(args, list(NAMES[:n]), url, folder), folder, size.limit_s)
            found = summary(rows) | {"gpu_idle_shares": meter.idle_shares()}
            record.setdefault("capabilities", {})[str(n)] = found
            write_json(args.out, record)


@contextlib.contextmanager
def two_servers(args: argparse.Namespace, work: Path) -> Iterator[list[tuple[subprocess.Popen[bytes], str]]]:
    """One per GPU, started one after the other: the memory profile of a start wants its GPU for itself."""
    running: list[tuple[subprocess.Popen[bytes], str]] = []
    flags = SIZES[args.size].server.replace("0.8", "0.5").split()  # the trainer shares GPU 1
    try:
        for index in range(2):
            log = work / f"server{index}.log"
            running.append(launch(args.model, flags, log, gpu(index, args.size)))
        for index, (process, url) in enumerate(running):
            wait_until_healthy(process, url, args.server_start_s, work / f"server{index}.log")
        yield running
    finally:
        for process, _ in running:
            end(process)


def servers(args: argparse.Namespace, work: Path, record: dict[str, Any]) -> None:
    """Two servers against one."""
    size = SIZES[args.size]
    with two_servers(args, work) as running:
        urls = [url for _, url in running]
        for name, given in (("one", urls[:1]), ("two", urls)):
            out = work / f"rollouts_{name}.json"
            command = [sys.executable, "benchmarks/bench_rollouts.py", "--model", str(args.model), "--base-url"]
            command += [",".join(given), *size.rollouts.split(), "--json-output", str(out)]
            subprocess.run(command, cwd=ROOT, check=True, timeout=240, stdout=subprocess.DEVNULL)
            record[f"tokens_per_s_{name}"] = read_json(out, "result")["tokens_per_s"]
            write_json(args.out, record)
        record["speedup_of_two"] = round(record["tokens_per_s_two"] / record["tokens_per_s_one"], 3)
        write_json(args.out, record)


def killed(args: argparse.Namespace, work: Path, record: dict[str, Any]) -> None:
    """Kill -9 of the second server in the middle of the second iteration, and its restart on the same port."""
    size, folder = SIZES[args.size], work / "killed"
    metrics, events = folder / "run/metrics.jsonl", folder / "run/events.jsonl"
    with two_servers(args, work) as running:
        victim, url = running[1]
        process = train(args, [NAMES[0]], ",".join(u for _, u in running), folder, size.endless)
        try:
            _wait_for(process, lambda: _count(metrics, "sampled_tokens") >= 2, size.limit_s, folder)
            time.sleep(0.2)  # into the sampling of the next iteration
            end(victim, at_once=True)
            died = time.monotonic()
            flags, port = size.server.replace("0.8", "0.5").split(), int(url.rpartition(":")[2])
            running[1] = launch(args.model, flags, work / "server1_again.log", gpu(1, args.size), port)
            _wait_for(process, lambda: _count(events, "server back") == 1, args.server_start_s + 60, folder)
            record["restart_s"] = round(time.monotonic() - died, 1)
            done = _count(metrics, "sampled_tokens")
            _wait_for(process, lambda: _count(metrics, "sampled_tokens") >= done + 2, size.limit_s, folder)
            process.send_signal(signal.SIGINT)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        rows = finish(process, folder, 60)
    kinds = [e["event"] for e in read_jsonl(events, "events") if e["server"] == url]
    group = int(size.train.split("--group-size ")[1].split()[0])
    record |= summary(rows) | {
        "lost": kinds.count("server lost"),
        "back": kinds.count("server back"),
        "loaded_after_return": kinds[kinds.index("server back") :].count("loaded"),
        "iterations_in_order": [r["iteration"] for r in rows] == list(range(1, len(rows) + 1)),
        "episodes_beside_whole_groups": sum(r["episodes"] % group for r in rows),
    }


def _count(path: Path, what: str) -> int:
    return path.read_text(encoding="utf-8").count(what) if path.is_file() else 0


def _wait_for(process: subprocess.Popen[str], ready: Callable[[], bool], limit_s: float, folder: Path) -> None:
    """Raises ``ServerError`` when training ends before ``ready``, or that takes too long."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and process.poll() is None:
        if ready():
            return
        time.sleep(0.05)
    text = (folder / "train.log").read_text(encoding="utf-8", errors="replace")
    raise ServerError(f"training ended or was too slow: {' '.join(text[-400:].split())}")


PARTS = {"layout": layout, "servers": servers, "killed": killed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted(PARTS), required=True)
    parser.add_argument("--model", type=Path, required=True, help="model folder, the same for server and trainer")
    parser.add_argument("--size", choices=sorted(SIZES), default="gpu", help="[%(default)s]")
    parser.add_argument("--out", type=Path, required=True, help="JSON result")
    parser.add_argument("--logs", type=Path, help="folder for the logs of servers and training [temporary]")
    parser.add_argument("--server-start-s", type=float, default=300.0, help="[%(default)s]")
    args = parser.parse_args()
    args.model = args.model.resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends us so; the servers must go too
    record: dict[str, Any] = {"schema_version": 1, "benchmark": f"two_gpus_{args.part}", "size": args.size}
    record |= {"model": args.model.name, "settings": dataclasses.asdict(SIZES[args.size])}
    with tempfile.TemporaryDirectory(prefix="trace_two_gpus_") as temporary:
        work = args.logs or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        try:
            PARTS[args.part](args, work, record)
        finally:  # what was measured before a fault counts
            record["machine"] = machine()
            write_json(args.out, record)
    print(json.dumps(record, indent=2))
    return 0


if __name__ == "__main__":
    run_cli(main)
