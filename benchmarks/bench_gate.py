"""What routing costs: against one adapter, against peft's mixtures, and in stock vLLM.

    python benchmarks/bench_gate.py --model models/smollm2 --size cpu --out gate.json      # two cores, minutes
    python benchmarks/bench_gate.py --shape qwen3-4b-2layers --size layer --parts hf --out gate.json   # two cores
    bash benchmarks/gpu/bench_gate.sh                                                      # one GPU, random weights
    python benchmarks/bench_gate.py --model models/smollm2 --parts sft --out gate_sft.json # the gate's training

Parts run in the order given, and each adds its results to ``--out`` as it ends; with ``--work`` the models are made
once (``prepare`` does only that), so that parts can run in separate commands. ``vllm`` stands for
``vllm_base,vllm_one_lora,vllm_routed``.

Ratios in the JSON (times are medians over interleaved repetitions, so that a busy machine slows both sides alike):

    routed_over_one_lora_hf       forward, routed / peft with one adapter of the same rank             target <= 1.15
    peft_mixture_over_routed_hf   peft Arrow (token-level top-1 over the same adapters) / routed       target >= 4
    peft_loop_over_routed_hf      peft with all adapters active (its loop, no router) / routed
    routed_over_one_lora_vllm     tokens/s, routed / stock vLLM with one LoRA                          target >= 0.9
    base_over_routed_vllm         tokens/s, base / routed                                              target <= 1.3
    gate_sft_s                    seconds of train_router_sft on 400 prompts, the whole command        target < 60
                                  (gate_sft_cpu_s: CPU seconds of it, which other jobs on the machine do not change)

The claims are about models whose own matmuls dominate: use a published shape. In a toy model the fixed cost per layer
and the rank of the stack (N times that of one adapter) weigh more than they do anywhere else.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import gc
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gate_sizes import CHECK_FILE, SIZES, Size, check_prompts
from benchmarks.serving import end
from pipeline.files import InputError, run_cli, write_json

VLLM_KINDS = ("base", "one_lora", "routed")
PARTS = ("prepare", "hf", "sft", *(f"vllm_{kind}" for kind in VLLM_KINDS))
SFT_PROMPTS = 400


def prepare(args: argparse.Namespace, work: Path) -> Path:
    """The base folder with weights, ``args.adapters`` random adapters and an exported routed model under ``work``.

    What an earlier call with the same settings left there is taken.
    """
    settings = {key: getattr(args, key) for key in ("model", "shape", "dtype", "adapters", "rank", "targets")}
    mark = work / "prepared.json"
    if mark.exists():
        if json.loads(mark.read_text())["settings"] != settings:
            raise InputError(f"--work {work}: prepared with other settings; choose another folder")
    else:
        work.mkdir(parents=True, exist_ok=True)
        _make_models(args, work)
        write_json(mark, {"settings": settings})
    return Path(args.model).resolve() if args.model else work / "base"


def _make_models(args: argparse.Namespace, work: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from moe_gate import build_capability_model, gater_parameters, save_gate
    from moe_gate.export import export

    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    base_folder = work / "base"
    if args.model:
        base_folder = Path(args.model).resolve()
        base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=dtype)
    else:
        script = Path(__file__).parent / "shape_model.py"
        subprocess.run([sys.executable, str(script), "--shape", args.shape, "--out", str(base_folder)], check=True)
        with torch.device(args.device):
            base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base_folder), dtype=dtype)
        base.save_pretrained(base_folder)
    targets = args.targets.split(",")
    adapters = {f"a{i}": str(work / f"a{i}") for i in range(args.adapters)}
    model = get_peft_model(base, LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=targets))
    for folder in adapters.values():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.03)  # so that the wrong route would be seen beside bf16 rounding
        model.save_pretrained(folder)
    routed = build_capability_model(model.unload(), adapters)
    for parameter in gater_parameters(routed):  # random gates: every slot is used
        parameter.data.normal_(0, 1.0) if parameter.ndim == 2 else parameter.data.zero_()
    save_gate(routed, work / "gate", str(base_folder))
    del base, model, routed
    gc.collect()
    export(str(work / "gate"), work / "routed")


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def timed(run: Callable[[], Any], device: str) -> float:
    """Seconds of one call."""
    synchronise(device)
    begin = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - begin


def interleaved(runs: dict[str, Callable[[], Any]], repetitions: int, device: str) -> dict[str, float]:
    """Median seconds of each call, after one warm-up, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repetitions):
        for name, run in runs.items():
            seconds[name].append(timed(run, device))
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_hf(
    args: argparse.Namespace, size: Size, work: Path, base_folder: Path, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Forward times and memory in transformers; ``save`` gets the first part as soon as it is measured."""
    import torch
    from peft import ArrowConfig, PeftModel, create_arrow_model
    from transformers import AutoModelForCausalLM

    from moe_gate import load_routed, trace_routes

    dtype, device = getattr(torch, args.dtype), args.device
    paths = [str(work / f"a{i}") for i in range(args.adapters)]

    loaded = AutoModelForCausalLM.from_pretrained(base_folder, dtype=dtype).to(device).eval()

    def base() -> Any:
        return copy.deepcopy(loaded)

    makers: dict[str, Callable[[], Any]] = {
        "base": base,
        "one_lora": lambda: PeftModel.from_pretrained(base(), paths[0], autocast_adapter_dtype=False).eval(),
        "routed": lambda: load_routed(work / "gate").to(device),
        "peft_loop": lambda: all_active(base(), paths),
        "peft_arrow": lambda: create_arrow_model(
            base(), paths, ArrowConfig(top_k=1), autocast_adapter_dtype=False
        ).eval(),
    }
    models = {name: maker() for name, maker in makers.items()}
    vocabulary = models["base"].config.vocab_size
    ids = torch.randint(10, vocabulary, (size.batch, size.tokens), device=device)
    with torch.no_grad():
        prefill = interleaved(
            {n: functools.partial(m, input_ids=ids, logits_to_keep=1, use_cache=False) for n, m in models.items()},
            size.repetitions,
            device,
        )
        found = {
            "prefill_s": prefill,
            "routed_over_one_lora_hf": prefill["routed"] / prefill["one_lora"],
            "peft_mixture_over_routed_hf": prefill["peft_arrow"] / prefill["routed"],
            "peft_loop_over_routed_hf": prefill["peft_loop"] / prefill["routed"],
            "routed_over_base_hf": prefill["routed"] / prefill["base"],
            "one_lora_over_base_hf": prefill["one_lora"] / prefill["base"],
            "peft_mixture_over_routed_hf_added_time": added(prefill, "peft_arrow"),
            "peft_loop_over_routed_hf_added_time": added(prefill, "peft_loop"),
        }
        save(found)
        check = {name: prompt_logprobs(models[name], check_prompts(vocabulary), device) for name in ("base", "routed")}
        write_json(work / CHECK_FILE, check)
        decode = interleaved(
            {n: decoder(m, ids, size.decode_steps) for n, m in models.items()}, size.repetitions, device
        )
    used = trace_routes(models["routed"], ids[0].tolist()).unique().tolist()  # type: ignore[no-untyped-call]
    memory = {
        n: sum(p.numel() * p.element_size() for p in m.parameters()) for n, m in models.items() if n != "peft_arrow"
    }
    return found | {
        "decode_s": {name: value / size.decode_steps for name, value in decode.items()},
        "routed_over_one_lora_hf_decode": decode["routed"] / decode["one_lora"],
        "peft_mixture_over_routed_hf_decode": decode["peft_arrow"] / decode["routed"],
        "slots_used": used,
        "memory_overhead_over_adapters": (memory["routed"] - memory["base"])
        / (args.adapters * (memory["one_lora"] - memory["base"])),
    }


def prompt_logprobs(model: Any, prompts: list[list[int]], device: str) -> list[list[float]]:
    """Of every token after the first of each prompt."""
    import torch

    ids = torch.tensor(prompts, device=device)
    rows = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1].float(), dim=-1)
    found: list[list[float]] = rows.gather(2, ids[:, 1:, None])[..., 0].tolist()
    return found


def added(seconds: dict[str, float], other: str) -> float | None:
    """What ``other`` adds to the base, over what routing adds; None when routing adds too little to be measured."""
    routing = seconds["routed"] - seconds["base"]
    return (seconds[other] - seconds["base"]) / routing if routing > 0.01 * seconds["base"] else None


def all_active(base: Any, paths: list[str]) -> Any:
    """peft with every adapter active: what its layers do for a mixture, one adapter after the other."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(base, paths[0], adapter_name="a0", autocast_adapter_dtype=False)
    for i, path in enumerate(paths[1:], 1):
        model.load_adapter(path, adapter_name=f"a{i}", autocast_adapter_dtype=False)
    model.base_model.set_adapter([f"a{i}" for i in range(len(paths))])
    return model.eval()


def decoder(model: Any, ids: Any, steps: int) -> Callable[[], Any]:
    """``steps`` single-token forwards behind a filled cache."""
    cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

    def run() -> None:
        own = copy.deepcopy(cache)
        for _ in range(steps):
            model(input_ids=ids[:, :1], past_key_values=own, use_cache=True)

    return run


def measure_vllm(args: argparse.Namespace, work: Path, base_folder: Path, kind: str, known: dict[str, Any]) -> Any:
    """Throughput of base, one LoRA or the routed model in a fresh process, and the ratios as far as they are known.

    Raises:
        InputError: the engine died; its last lines are in the message.
    """
    result = work / f"{kind}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).parent / "gate_engine.py"), "--kind", kind, "--out", str(result)]
    command += ["--model", str(work / "routed" if kind == "routed" else base_folder), "--adapter", str(work / "a0")]
    command += ["--rank", str(args.rank), "--dtype", args.dtype, "--size", args.size]
    command += ["--vllm-options", args.vllm_options]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    log = Path(args.out).with_name(f"{Path(args.out).stem}_engine_{kind}.log")
    with open(log, "wb") as sink:
        process = subprocess.Popen(command, env=env, stdout=sink, stderr=sink, start_new_session=True)
        try:
            process.wait()
        finally:
            end(process)  # told to stop, it must not keep the GPU
    if not result.exists():  # written when all is measured; some versions of vLLM abort afterwards, while they end
        tail = log.read_text(encoding="utf-8", errors="replace")[-800:]
        raise InputError(f"vLLM engine {kind} ended with {process.returncode}, see {log}: {tail}")
    rates = {**known.get("vllm_tokens_per_s", {}), kind: json.loads(result.read_text())["tokens_per_s"][kind]}
    found: dict[str, Any] = {"vllm_tokens_per_s": rates}
    if {"routed", "one_lora"} <= rates.keys():
        found["routed_over_one_lora_vllm"] = rates["routed"] / rates["one_lora"]
    if {"routed", "base"} <= rates.keys():
        found["base_over_routed_vllm"] = rates["base"] / rates["routed"]
    return found


def measure_sft(args: argparse.Namespace, work: Path, base_folder: Path) -> dict[str, Any]:
    """Seconds of ``python -m train.train_router_sft`` on labelled prompts of the shipped environments, process start
    and model loading included.

    Raises:
        InputError: fewer environments than adapters, or the command failed.
    """
    import yaml

    from game_registry import discover

    games = [spec for name, spec in sorted(discover().items()) if name.startswith("capability_")][: args.adapters]
    if len(games) < args.adapters:
        raise InputError(f"--parts sft: expected {args.adapters} capability environments, found {len(games)}")
    data = work / "sft.jsonl"
    with open(data, "w", encoding="utf-8") as file:
        for number in range(args.sft_prompts):
            slot, env = number % len(games), games[number % len(games)].make_env()
            env.reset(number)
            prompt = [{"role": "system", "content": env.get_system_prompt()}, *env.get_messages()]
            file.write(json.dumps({"prompt": prompt, "capability_name": f"a{slot}"}) + "\n")
    config = {
        "output_dir": str(work / "sft"), "base_model": str(base_folder), "adapter_dir": str(work),
        "adapter_names": [f"a{i}" for i in range(args.adapters)], "sft_data": str(data),
    }  # fmt: skip
    (work / "sft.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "train.train_router_sft", "--config", str(work / "sft.yaml")]
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise InputError(f"train_router_sft ended with {done.returncode}: {done.stdout[-800:]}")
    report = json.loads((work / "sft" / "report.json").read_text())
    episodes = sum(report["train_episodes"].values()) + sum(report["validation_episodes"].values())
    return {
        "gate_sft_s": round(seconds, 2),
        "gate_sft_cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        "gate_sft_prompts": episodes,
        "gate_sft_left_out": report["skipped"],
        "gate_sft_accuracy": report["validation_accuracy"],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="base model folder with weights")
    parser.add_argument(
        "--shape", default="qwen3-4b", help="without --model: random weights of this shape [%(default)s]"
    )
    parser.add_argument("--size", choices=SIZES, default="cpu", help="how much is measured [%(default)s]")
    parser.add_argument("--device", help="cuda or cpu [what is there]")
    parser.add_argument("--dtype", default="bfloat16", help="[%(default)s]")
    parser.add_argument("--adapters", type=int, default=4, help="[%(default)s]")
    parser.add_argument("--rank", type=int, default=32, help="of each adapter [%(default)s]")
    parser.add_argument(
        "--targets", default="q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", help="[%(default)s]"
    )
    parser.add_argument("--parts", default="hf,vllm", help=f"comma list of {', '.join(PARTS)}, vllm [%(default)s]")
    parser.add_argument("--vllm-options", default="{}", help='for vllm.LLM, such as {"enforce_eager": true}')
    parser.add_argument("--sft-prompts", type=int, default=SFT_PROMPTS, help="for the part sft [%(default)s]")
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--work", help="folder for models and adapters, kept [a temporary one]")
    return parser.parse_args()


def parts_of(text: str) -> list[str]:
    """The parts in order; ``vllm`` is its three parts."""
    parts: list[str] = []
    for name in filter(None, (p.strip() for p in text.split(","))):
        parts += [f"vllm_{kind}" for kind in VLLM_KINDS] if name == "vllm" else [name]
    if unknown := [p for p in parts if p not in PARTS]:
        raise InputError(f"--parts {unknown[0]!r}: expected a comma list of {', '.join(PARTS)}, vllm")
    return parts


def main() -> int:
    args = parse()
    size = SIZES[args.size]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends us so; an engine must go too
    parts = parts_of(args.parts)
    import torch

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    work = Path(args.work) if args.work else Path(tempfile.mkdtemp(prefix="trace_bench_gate_"))
    try:
        base_folder = prepare(args, work)
        result = start_result(args, size)
        for part in parts:
            if part == "prepare":
                pass
            elif part == "hf":
                save = functools.partial(_save_more, Path(args.out), dict(result))
                result |= measure_hf(args, size, work, base_folder, save)
            elif part == "sft":
                result |= measure_sft(args, work, base_folder)
            else:
                result |= measure_vllm(args, work, base_folder, part.removeprefix("vllm_"), result)
            write_json(args.out, result)
            gc.collect()
            if args.device.startswith("cuda"):
                torch.cuda.empty_cache()
        print(json.dumps({key: value for key, value in result.items() if isinstance(value, float)}, indent=2))
    finally:
        if not args.work:
            shutil.rmtree(work, ignore_errors=True)
    return 0


def _save_more(out: Path, before: dict[str, Any], part: dict[str, Any]) -> None:
    write_json(out, before | part)


def start_result(args: argparse.Namespace, size: Size) -> dict[str, Any]:
    """What is known before the first part: settings and machine, and with ``--work`` the parts measured before."""
    import torch

    hidden = ("parts", "out", "work")
    about = {
        "settings": {k: v for k, v in vars(args).items() if k not in hidden},
        "size": dataclasses.asdict(size),
        "device": torch.cuda.get_device_name(0) if args.device != "cpu" else f"cpu x {torch.get_num_threads()}",
        "torch": torch.__version__,
    }
    out = Path(args.out)
    if args.work and out.exists():
        before = json.loads(out.read_text())
        if before.get("settings") == about["settings"]:
            return dict(before) | about
    return about


if __name__ == "__main__":
    run_cli(main)
