"""The layout of two GPUs: servers and trainer on GPUs of their own, and what happens when a server dies.

    python benchmarks/bench_two_gpus.py --model models/smollm2 --out runs/bench/two_gpus.json
    python benchmarks/bench_two_gpus.py --parts layout --model models/smollm2 --out runs/bench/layout.json

All servers that the parts need start side by side, with caches of fixed size; then the parts run one by one:
``killed``: a training run on two servers, one of which is killed (kill -9) in the middle of an iteration and started
again: every iteration must be complete, and the server used again.
``layout``: a server on GPU 0, ``python -m train`` on GPU 1, one capability and then four: tokens/s, delivery time, idle
share of each GPU (from nvidia-smi, once a second) and of each process (from metrics.jsonl).
``servers``: a server of the Qwen3-4B shape (random weights) on each GPU; tokens per second of multi-turn episodes with
one and with both (``bench_rollouts.py``), as many in flight each time.
A part that fails leaves the others their turn. Without a GPU the same runs on the CPU with ``--size tiny``.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_capabilities import CPU_FLAGS, machine  # noqa: E402
from benchmarks.serving import end, launch, wait_until_healthy  # noqa: E402
from pipeline.files import InputError, ServerError, read_json, read_jsonl, run_cli, write_json  # noqa: E402

NAMES = (
    "structured_data_reasoning", "tool_calling_precision", "precondition_verification", "multi_step_task_completion",
)  # fmt: skip


INTERRUPTED = 130  # exit code of a run that was told to stop


@dataclasses.dataclass(frozen=True)
class Size:
    """Flags of training, of the servers of the real model and of those that are compared, and of their episodes.

    Args:
        shape: of the model of the compared servers, flags of ``shape_model.py``.
        endless: iterations of the run that is stopped once the server that died is in use again.
        limit_s: seconds that a training run may take.
    """

    train: str
    server: str
    shape: str
    compared: str
    rollouts: str
    iterations: int
    endless: int
    limit_s: int


# fixed caches: servers that start side by side must not measure each other's memory
GPU_FLAGS = (
    "--attention-backend FLASH_ATTN --dtype bfloat16 --max-model-len 4096 --enable-prefix-caching --max-num-seqs 512 "
    "--gpu-memory-utilization 0.05 --kv-cache-memory-bytes "
)
LORA_FLAGS = " --enable-lora --max-loras 8 --max-lora-rank 32"
TINY_FLAGS = CPU_FLAGS.replace("--max-model-len 1024", "--max-model-len 2048")
SIZES = {
    "gpu": Size(
        "--group-size 16 --groups-per-batch 32 --lora-rank 16 --lora-alpha 32 --lr 3e-4 --max-seq-length 4096",
        GPU_FLAGS + str(12 << 30) + LORA_FLAGS, "--shape qwen3-4b",
        GPU_FLAGS + str(48 << 30) + " --load-format dummy",
        "--size gpu --rounds 1 --episodes 512 --concurrency 512", 10, 500, 200,
    ),
    "tiny": Size(
        "--group-size 4 --groups-per-batch 2 --lora-rank 4 --lora-alpha 4 --lr 1e-4 --max-seq-length 512 --device cpu",
        TINY_FLAGS, "--shape tiny --vocabulary 1024", TINY_FLAGS + " --load-format dummy",
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


def finish(process: subprocess.Popen[str], folder: Path, limit_s: float, expected: int = 0) -> list[dict[str, Any]]:
    """The iterations of a training run that ends with exit code ``expected``.

    Raises:
        ServerError: it failed, took too long, or did not end an iteration.
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
    if code != expected:
        what = f"took over {limit_s:g} s" if code is None else f"exit code {code}"
        raise ServerError(f"training: {what}: {' '.join(text[-500:].split())}")
    rows = [r for r in read_jsonl(folder / "run/metrics.jsonl", "metrics") if "sampled_tokens" in r]
    if not rows:
        raise ServerError(f"training ended without an iteration: {' '.join(text[-500:].split())}")
    return rows


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


@dataclasses.dataclass
class Servers:
    """One model's servers, the first on GPU 0 and so on; all of them end with the block.

    Args:
        name: of their logs and of their caches of compiled code, which nobody else writes.
    """

    args: argparse.Namespace
    model: Path
    flags: list[str]
    work: Path
    name: str
    running: list[tuple[subprocess.Popen[bytes], str]] = dataclasses.field(default_factory=list)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(0)  # at once: `timeout` leaves us seconds, and a server that ends slowly would outlive us

    def start(self, index: int, port: int = 0) -> None:
        """Launch server ``index``; it is not ready yet."""
        env = gpu(index, self.args.size) | {"VLLM_CACHE_ROOT": str(self.work / f"cache_{self.name}{index}")}
        self.running[index : index + 1] = [launch(self.model, self.flags, self.log(index), env, port)]

    def log(self, index: int) -> Path:
        return self.work / f"server_{self.name}{index}.log"

    def wait(self) -> list[str]:
        """Their URLs, once all of them answer."""
        for index, (process, url) in enumerate(self.running):
            wait_until_healthy(process, url, self.args.server_start_s, self.log(index))
        return [url for _, url in self.running]

    def stop(self, index: int) -> None:
        """End server ``index`` and those after it."""
        for process, _ in self.running[index:]:
            end(process, at_once=True)
        del self.running[index:]


def servers(args: argparse.Namespace, work: Path, pair: Servers, save: Callable[[dict[str, Any]], None]) -> None:
    """Two servers against one, with as many episodes in flight."""
    urls, rates = pair.wait(), dict[str, float]()
    for name, given in (("one", urls[:1]), ("two", urls)):
        out = work / f"rollouts_{name}.json"
        command = [sys.executable, "benchmarks/bench_rollouts.py", "--model", str(pair.model), "--base-url"]
        command += [",".join(given), *SIZES[args.size].rollouts.split(), "--json-output", str(out)]
        subprocess.run(command, cwd=ROOT, check=True, timeout=240, stdout=subprocess.DEVNULL)
        found = read_json(out, "result")
        rates |= {f"tokens_per_s_{name}": found["tokens_per_s"], f"saturated_{name}": found["saturated_tokens_per_s"]}
        save(rates)
    save(rates | {"speedup_of_two": round(rates["tokens_per_s_two"] / rates["tokens_per_s_one"], 3)})


def killed(args: argparse.Namespace, work: Path, pair: Servers, save: Callable[[dict[str, Any]], None]) -> None:
    """Kill -9 of the second server in the middle of the third iteration, and its restart on the same port."""
    size, folder = SIZES[args.size], work / "killed"
    metrics, events = folder / "run/metrics.jsonl", folder / "run/events.jsonl"
    urls = pair.wait()
    url = urls[1]
    process = train(args, [NAMES[0]], ",".join(urls), folder, size.endless)
    try:
        _wait_for(process, lambda: _count(metrics, "sampled_tokens") >= 2, size.limit_s, folder)
        time.sleep(0.2)  # into the sampling of the next iteration
        end(pair.running[1][0], at_once=True)
        died = time.monotonic()
        pair.start(1, int(url.rpartition(":")[2]))
        _wait_for(process, lambda: _count(events, "server back") == 1, args.server_start_s + 60, folder)
        restart_s = round(time.monotonic() - died, 1)
        done = _count(metrics, "sampled_tokens")
        _wait_for(process, lambda: _count(metrics, "sampled_tokens") >= done + 2, size.limit_s, folder)
        process.send_signal(signal.SIGINT)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    rows = finish(process, folder, 60, INTERRUPTED)
    kinds = [e["event"] for e in read_jsonl(events, "events") if e["server"] == url]
    group = int(size.train.split("--group-size ")[1].split()[0])
    save(
        summary(rows) | {
            "restart_s": restart_s,
            "lost": kinds.count("server lost"),
            "back": kinds.count("server back"),
            "loaded_after_return": kinds[kinds.index("server back") :].count("loaded"),
            "iterations_in_order": [r["iteration"] for r in rows] == list(range(1, len(rows) + 1)),
            "episodes_beside_whole_groups": sum(r["episodes"] % group for r in rows),
        }
    )  # fmt: skip


def layout(args: argparse.Namespace, work: Path, pair: Servers, save: Callable[[dict[str, Any]], None]) -> None:
    """A server on GPU 0 and the trainer alone on GPU 1, with one and with four capabilities."""
    pair.stop(1)
    [url], found = pair.wait(), dict[str, Any]()
    for n in (1, len(NAMES)):
        folder = work / f"run{n}"
        with GpuMeter() as meter:
            rows = finish(train(args, list(NAMES[:n]), url, folder), folder, SIZES[args.size].limit_s)
        found[str(n)] = summary(rows) | {"gpu_idle_shares": meter.idle_shares()}
        save({"capabilities": found})


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


PARTS = {"killed": killed, "layout": layout, "servers": servers}  # timings last: other work may still end


def run(args: argparse.Namespace, parts: list[str], work: Path, record: dict[str, Any]) -> dict[str, str]:
    """The parts in their order; what was measured is in ``record`` and in ``--out`` at once. Returns what failed."""
    size, failed = SIZES[args.size], dict[str, str]()
    shape = work / "shape"
    if "servers" in parts:
        command = [sys.executable, str(ROOT / "benchmarks/shape_model.py"), *size.shape.split(), "--out", str(shape)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    compared = Servers(args, shape, size.compared.split(), work, "compared")
    real = Servers(args, args.model, size.server.split(), work, "real")
    with compared, real:
        for index in range(2):
            if "servers" in parts:
                compared.start(index)
            if "killed" in parts or ("layout" in parts and index == 0):
                real.start(index)
        for name in [n for n in PARTS if n in parts]:

            def save(found: dict[str, Any], name: str = name) -> None:
                record[name] = found
                write_json(args.out, record)

            try:
                PARTS[name](args, work, compared if name == "servers" else real, save)
            except (ServerError, InputError, subprocess.SubprocessError) as error:
                failed[name] = str(error)
                sys.stderr.write(f"{name}: {error}\n")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma list [%(default)s]")
    parser.add_argument("--model", type=Path, required=True, help="model folder, the same for server and trainer")
    parser.add_argument("--size", choices=sorted(SIZES), default="gpu", help="[%(default)s]")
    parser.add_argument("--out", type=Path, required=True, help="JSON result")
    parser.add_argument("--logs", type=Path, help="folder for the logs of servers and training [temporary]")
    parser.add_argument("--server-start-s", type=float, default=300.0, help="[%(default)s]")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if not set(parts) <= set(PARTS):
        raise InputError(f"--parts {args.parts}: expected some of {', '.join(PARTS)}")
    args.model = args.model.resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends us so; the servers must go too
    record: dict[str, Any] = {"schema_version": 1, "benchmark": "two_gpus", "size": args.size}
    record |= {"model": args.model.name, "settings": dataclasses.asdict(SIZES[args.size]), "machine": machine()}
    with tempfile.TemporaryDirectory(prefix="trace_two_gpus_") as temporary:
        work = (args.logs or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        record["failed"] = run(args, parts, work, record)
        write_json(args.out, record)
    print(json.dumps(record, indent=2))
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    run_cli(main)
