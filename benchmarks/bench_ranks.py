"""Two ranks against one: equal gradients, the speed of the update step, and what a sharded base saves.

    python benchmarks/bench_ranks.py --preset cpu --out runs/bench/ranks.json            # gloo, a tiny model
    python benchmarks/bench_ranks.py --preset h200 --out benchmarks/results/bench_ranks.json   # NCCL, Qwen3-4B shape

Keys: ``relative_gradient_error`` (two ranks against one, same batch), ``relative_difference_alone`` (the ranks' own
results from their mean: kernels that were chosen by timing, or that add up in any order, differ in rounding, in bf16 by
a per cent of the gradient; with ``--deterministic``, as with that flag of ``python -m train``, by nothing), ``scaling``
(one rank's step time over that of all), ``sharded_gradient_error`` and ``sharded_held_ratio`` (memory that a rank holds
with a sharded base over that with a whole one; on a CPU the bytes of the base).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_grpo_step import machine, versions  # noqa: E402
from benchmarks.grpo_step_variants import PRESETS  # noqa: E402
from pipeline.files import InputError, ServerError, read_json, run_cli, write_json  # noqa: E402


def torchrun(ranks: int, arguments: list[str], limit_s: int) -> None:
    """Raises ``ServerError`` when the job fails or takes too long."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    command += [str(ROOT / "benchmarks/ranks_worker.py"), *arguments]
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        code = subprocess.run(command, env=os.environ | threads, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        raise ServerError(f"{' '.join(arguments)}: over its limit of {limit_s} s") from None
    if code != 0:
        raise ServerError(f"{' '.join(arguments)}: exit code {code}; see its messages above")


def whole_keys(per_rank: list[dict[str, Any]]) -> dict[str, Any]:
    one = max(r["alone"]["step_s"] for r in per_rank)
    all_ranks = max(r["together"]["step_s"] for r in per_rank)
    return {
        "relative_gradient_error": max(r["relative_gradient_error"] for r in per_rank),
        "relative_difference_alone": max(r["relative_difference_alone"] for r in per_rank),
        "loss_one": per_rank[0]["alone"]["loss"],
        "loss_all": per_rank[0]["together"]["loss"],
        "step_s_one": round(one, 4),
        "step_s_all": round(all_ranks, 4),
        "scaling": round(one / all_ranks, 3),
    }


def sharded_keys(whole: list[dict[str, Any]], sharded: list[dict[str, Any]], error: float) -> dict[str, Any]:
    base = max(r["base_bytes_held"] for r in sharded) / sharded[0]["base_bytes"]
    held = [r["sharded"]["held_gib"] for r in sharded]
    before = [r["alone"]["held_gib"] for r in whole]
    ratio = max(held) / max(before) if held[0] is not None else base
    return {
        "sharded_gradient_error": error,
        "loss_sharded": sharded[0]["sharded"]["loss"],
        "step_s_sharded": round(max(r["sharded"]["step_s"] for r in sharded), 4),
        "base_share_held": round(base, 4),
        "sharded_held_ratio": round(ratio, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu", help="[%(default)s]")
    parser.add_argument("--ranks", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--groups", type=int, default=4, help="per update, one pack each [%(default)s]")
    parser.add_argument("--repeats", type=int, default=3, help="timed updates [%(default)s]")
    parser.add_argument("--parts", default="whole,sharded", help="comma list [%(default)s]")
    parser.add_argument("--deterministic", action="store_true", help="kernels that give the same bits every time")
    parser.add_argument("--limit-s", type=int, default=240, help="of each part [%(default)s]")
    parser.add_argument("--out", type=Path, required=True, help="JSON result")
    args = parser.parse_args()
    parts = [p for p in args.parts.split(",") if p]
    if args.ranks < 2 or args.groups < 1 or args.repeats < 1 or not set(parts) <= {"whole", "sharded"} or not parts:
        raise InputError("expected --ranks >= 2, --groups and --repeats >= 1, --parts of whole and sharded")
    record: dict[str, Any] = {
        "schema_version": 1, "benchmark": "bench_ranks", "preset": args.preset, "ranks": args.ranks,
        "deterministic": args.deterministic,
        "groups": args.groups, "versions": versions(), "parts": {},
    }  # fmt: skip
    failed = False
    with tempfile.TemporaryDirectory(prefix="trace_ranks_") as work:
        common = ["--preset", args.preset, "--groups", str(args.groups), "--repeats", str(args.repeats), "--out", work]
        common += ["--deterministic"] if args.deterministic else []
        for part in parts:
            try:
                torchrun(args.ranks, common + (["--shard"] if part == "sharded" else []), args.limit_s)
            except ServerError as error:  # the other part can still be measured
                failed, record["parts"][part] = True, {"error": str(error)}
            else:
                files = [Path(work) / f"{part}_rank{r}.json" for r in range(args.ranks)]
                record["parts"][part] = [read_json(file) for file in files]
                record |= summary(record["parts"], Path(work))
            write_json(args.out, record)
    record["machine"] = machine()
    write_json(args.out, record)
    print(json.dumps({k: v for k, v in record.items() if k != "parts"}, indent=2))
    return 1 if failed else 0


def summary(parts: dict[str, Any], work: Path) -> dict[str, Any]:
    """The published keys, from whatever parts finished."""
    whole, sharded = (parts.get(name) for name in ("whole", "sharded"))
    found = whole_keys(whole) if isinstance(whole, list) else {}
    if isinstance(whole, list) and isinstance(sharded, list):
        import torch

        one, other = (torch.load(work / f"{name}.pt") for name in ("whole", "sharded"))
        found |= sharded_keys(whole, sharded, float((other - one).norm() / one.norm()))
    return found


if __name__ == "__main__":
    run_cli(main)
