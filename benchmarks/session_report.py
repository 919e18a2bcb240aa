"""What a session shows against its targets, and its results as the files of ``benchmarks/results/``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.files import write_json


@dataclasses.dataclass(frozen=True)
class Target:
    """``key`` of a step's result and the bound that it must keep."""

    step: str
    key: str
    sign: str
    bound: float


TARGETS = (
    Target("bench_grpo_step", "speedup_vs_trl_per_episode", ">=", 12.0),
    Target("bench_grpo_step", "speedup_vs_trl", ">=", 12.0),
    Target("bench_grpo_step", "peak_gib", "<=", 60.0),
    Target("gate_hf", "routed_over_one_lora_hf", "<=", 1.15),
    Target("gate_hf", "peft_mixture_over_routed_hf", ">=", 4.0),
    Target("gate_vllm", "routed_over_one_lora_vllm", ">=", 0.9),
    Target("gate_vllm", "base_over_routed_vllm", "<=", 1.3),
    Target("gate_sft", "gate_sft_s", "<=", 60.0),
    Target("bench_rollouts", "share_of_saturated", ">=", 0.9),
    Target("bench_capabilities", "wall_ratio_4_vs_1", "<=", 1.5),
    Target("delivery_8b", "delivery_s", "<=", 0.5),
)


def gate_vllm(steps: Mapping[str, Any]) -> dict[str, Any]:
    """Throughputs of all engines that were measured, and their ratios.

    The base comes from an engine without LoRA where that one ran, else from the engine with LoRA enabled but no adapter
    (``base_engine`` says which).
    """
    rates: dict[str, float] = {}
    for name in ("gate_vllm_lora", "gate_vllm_routed", "gate_vllm_base"):
        rates |= (steps.get(name, {}).get("result") or {}).get("tokens_per_s", {})
    found: dict[str, Any] = {"vllm_tokens_per_s": rates} if rates else {}
    routed = steps.get("gate_vllm_routed", {}).get("result") or {}
    found |= {key: routed[key] for key in ("routed_vllm_logprob_error", "routing_logprob_effect") if key in routed}
    if {"routed", "one_lora"} <= rates.keys():
        found["routed_over_one_lora_vllm"] = rates["routed"] / rates["one_lora"]
    base = rates.get("base", rates.get("base_on_lora_engine"))
    if base is not None and "routed" in rates:
        found["base_over_routed_vllm"] = base / rates["routed"]
        found["base_engine"] = "stock" if "base" in rates else "LoRA enabled, no adapter"
    return found


def results_of(steps: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The results by the names that ``TARGETS`` use."""
    found = {name: entry["result"] for name, entry in steps.items() if isinstance(entry.get("result"), dict)}
    return found | {"gate_vllm": gate_vllm(steps)}


def table(steps: Mapping[str, Any]) -> dict[str, Any]:
    """``text``: a line per target; ``values``: what was measured; ``missed``: keys beyond their bounds."""
    results = results_of(steps)
    text, values, missed = [], {}, []
    for target in TARGETS:
        value = results.get(target.step, {}).get(target.key)
        verdict = "not measured"
        if value is not None:
            kept = value >= target.bound if target.sign == ">=" else value <= target.bound
            values[target.key], verdict = value, f"{value:.4g} {'ok' if kept else 'MISSED'}"
            missed += [] if kept else [target.key]
        text.append(f"{target.step:20s} {target.key:32s} {target.sign} {target.bound:<6g} {verdict}")
    return {"text": text, "values": values, "missed": missed}


def publish(session: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the results of ``session`` as one file per benchmark; returns a line for each."""
    steps, results = session["steps"], results_of(session["steps"])
    about = {"machine": session["machine"], "size": session["size"]}
    files: dict[str, dict[str, Any]] = {}
    for name in ("bench_grpo_step", "bench_rollouts", "delivery_8b", "bench_capabilities"):
        if name in results:
            files[name] = {**results[name], "session": about | {"seconds": steps[name]["seconds"]}}
    if "bench_grpo_step" in files and "grpo_check" in results:
        variants = files["bench_grpo_step"]["variants"] | results["grpo_check"]["variants"]
        files["bench_grpo_step"] = files["bench_grpo_step"] | {"variants": variants}
    gate = results.get("gate_hf", {}) | results["gate_vllm"]
    gate |= {key: value for key, value in results.get("gate_sft", {}).items() if key.startswith("gate_sft")}
    if gate:
        files["bench_gate"] = {"schema_version": 1, "benchmark": "bench_gate", **gate, "session": about}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_json(folder / f"{name}.json", content)
    return [str(folder / f"{name}.json") for name in files] or ["the session has no results"]
