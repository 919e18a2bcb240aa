"""One GRPO update of one group, against TRL's update of the same group and against the floating-point limit.

    python benchmarks/bench_grpo_step.py --preset cpu --out /tmp/bench_grpo_step.json
    python benchmarks/bench_grpo_step.py --preset h200 --out benchmarks/results/bench_grpo_step.json

Every variant runs in a process of its own with a time limit; the result file is rewritten after each. Variants:
``tree`` the learner's update as it trains (packing, forward, backward, clipping, optimiser; each update has a shape
that was not met before), ``trl`` TRL's GRPOTrainer loss and backward per micro-batch with gradient checkpointing, its
default, ``check`` gradient of the tree pass against separate sequences in fp32, ``attention`` the attention of one
layer alone, ``small`` an update with hardly anything to compute.
Random weights: speed, memory and exactness do not depend on them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.grpo_step_variants import PRESETS, VARIANTS, say  # noqa: E402
from pipeline.files import InputError, parse_json, read_text, run_cli, write_json  # noqa: E402

PEAK_FLOPS = {"NVIDIA H200": 790e12}  # measured dense bf16 rate of an 8192^3 product


def versions() -> dict[str, str]:
    from importlib import metadata

    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "trl", "triton", "liger-kernel"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def summary(results: dict[str, Any], machine_name: str) -> dict[str, Any]:
    """The published keys, from whatever variants finished."""
    tree, trl = results.get("tree", {}), results.get("trl", {})
    out: dict[str, Any] = {"step_s": tree.get("step_s"), "peak_gib": tree.get("peak_gib")}
    rate = PEAK_FLOPS.get(machine_name)
    if rate and "flops_linear" in tree:
        out["limit_s"] = tree["flops_linear"] / rate
        out["limit_with_attention_s"] = (tree["flops_linear"] + tree["flops_attention"]) / rate
        out["fraction_of_limit"] = out["limit_s"] / tree["step_s"]
    if "step_s" in tree and "step_s" in trl:
        out["trl_step_s"] = trl["step_s"]
        out["speedup_vs_trl"] = trl["step_s"] / tree["step_s"]  # TRL's better micro-batch
        one = trl.get("by_batch", {}).get("1")
        if one:
            out["speedup_vs_trl_per_episode"] = one["step_s"] / tree["step_s"]
    return out


def run_variant(name: str, preset: str, limit: int, brief: bool = False) -> dict[str, Any]:
    """The variant's result from a process of its own, or {"error": ...}."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--preset", preset, "--variant", name, "--out", str(result)]
        command += ["--brief"] if brief else []
        started = time.perf_counter()
        try:
            code = subprocess.run(command, timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            return {"error": f"over its limit of {limit} s"}
        if code != 0:
            return {"error": f"exit code {code}; see its messages above"}
        answer: dict[str, Any] = parse_json(read_text(result, "result"), str(result))
        return answer | {"wall_s": round(time.perf_counter() - started, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu", help="[%(default)s]")
    parser.add_argument("--out", type=Path, required=True, help="JSON result")
    parser.add_argument("--variants", default="", help="comma list [all of the preset]")
    parser.add_argument("--variant", choices=sorted(VARIANTS), help="run this one here (used by the driver)")
    parser.add_argument("--brief", action="store_true", help="TRL timed once")
    args = parser.parse_args()
    preset = dataclasses.replace(PRESETS[args.preset], brief=args.brief)
    if args.variant:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        write_json(args.out, VARIANTS[args.variant](preset, device))
        return 0
    names = [n for n in args.variants.split(",") if n] or list(preset.limits_s)
    unknown = sorted(set(names) - set(preset.limits_s))
    if unknown:
        raise InputError(f"--variants {','.join(unknown)}: preset {args.preset} has {', '.join(preset.limits_s)}")
    shape = {k: v for k, v in dataclasses.asdict(preset).items() if k not in ("limits_s", "brief")}
    record: dict[str, Any] = {"schema_version": 1, "preset": args.preset, "shape": shape, "machine": machine()}
    record |= {"versions": versions(), "variants": {}}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        say(f"== {name} (at most {preset.limits_s[name]} s)")
        record["variants"][name] = run_variant(name, args.preset, preset.limits_s[name], args.brief)
        record |= summary(record["variants"], record["machine"])
        write_json(args.out, record)
    print(json.dumps({k: v for k, v in record.items() if k not in ("variants", "shape")}, indent=2))
    return 0 if all("error" not in r for r in record["variants"].values()) else 1


if __name__ == "__main__":
    run_cli(main)
