"""Throughput of one vLLM engine: the base, one LoRA, or the routed model. Part of ``bench_gate.py`` and ``session.py``.

    python benchmarks/gate_engine.py --kind lora --model BASE --adapter ADAPTER --rank 32 --size gpu --out lora.json

``lora`` measures an engine with LoRA enabled twice: without an adapter (``base_on_lora_engine``) and with one
(``one_lora``), so that both need one start. With ``--go`` the engine starts, writes ``GO.ready`` and waits for the
file ``GO``: several engines can start side by side and be measured one after the other. ``--fire`` gives the sign and
waits for the result.

``routed`` also compares log-probs with those that ``bench_gate.py --parts hf`` left beside the model:
``routed_vllm_logprob_error`` (rms, vLLM's against transformers' routed model) and ``routing_logprob_effect`` (rms,
transformers' routed model against its base), which the error must be small beside.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gate_sizes import CHECK_FILE, SIZES, Size, check_prompts  # noqa: E402
from pipeline.files import InputError, ServerError, read_json, run_cli, write_json  # noqa: E402

KINDS = ("base", "one_lora", "routed", "lora")
REPETITIONS = 3


def ensure_plugin(folder: Path) -> None:
    """Let vLLM's processes find our plugin where this project is on ``PYTHONPATH`` but not installed: ``folder`` gets
    its entry point and goes to the front of both paths."""
    from importlib.metadata import entry_points

    if "moe_gate.vllm_plugin:register" in {e.value for e in entry_points(group="vllm.general_plugins")}:
        return
    info = folder / "trace_agents-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trace_agents\nVersion: 0\n", encoding="utf-8")
    text = "[vllm.general_plugins]\ntrace_moe_gate = moe_gate.vllm_plugin:register\n"
    (info / "entry_points.txt").write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)


def start_engine(args: argparse.Namespace, size: Size) -> Any:
    from vllm import LLM

    options: dict[str, Any] = json.loads(args.vllm_options)
    if args.kind in ("one_lora", "lora"):
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": args.rank}
    return LLM(
        args.model, dtype=args.dtype, max_model_len=size.prompt_tokens + size.output_tokens + 16,
        max_num_seqs=min(size.requests, 256), enable_prefix_caching=False, **options,
    )  # fmt: skip


def tokens_per_s(llm: Any, size: Size, lora: Any) -> float:
    """Median over ``REPETITIONS`` of the same requests, after a warm-up."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=size.output_tokens, ignore_eos=True, seed=0, detokenize=False)
    entries = llm.get_tokenizer().vocab_size - 20
    prompts: Any = [
        {"prompt_token_ids": [(7 * i + 31 * j) % min(40_000, entries) + 10 for j in range(size.prompt_tokens)]}
        for i in range(size.requests)
    ]
    llm.generate(prompts[:4], params, lora_request=lora, use_tqdm=False)
    rates = []
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, lora_request=lora, use_tqdm=False)
        rates.append(sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - begin))
    return statistics.median(rates)


def compared(llm: Any, expected: dict[str, list[list[float]]]) -> dict[str, float]:
    """The keys of the comparison with transformers; nothing else may run in the engine."""
    from vllm import SamplingParams

    prompts: Any = [{"prompt_token_ids": p} for p in check_prompts(llm.get_tokenizer().vocab_size)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    errors, effects = [], []
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output, base, routed in zip(prompts, outputs, expected["base"], expected["routed"], strict=True):
        ids = prompt["prompt_token_ids"][1:]
        found = [row[token].logprob for token, row in zip(ids, output.prompt_logprobs[1:], strict=True)]
        errors += [(f - r) ** 2 for f, r in zip(found, routed, strict=True)]
        effects += [(b - r) ** 2 for b, r in zip(base, routed, strict=True)]
    return {
        "routed_vllm_logprob_error": statistics.fmean(errors) ** 0.5,
        "routing_logprob_effect": statistics.fmean(effects) ** 0.5,
    }


def measure(args: argparse.Namespace, size: Size) -> dict[str, Any]:
    """``tokens_per_s`` of each kind of request that this engine answers, and the keys of the comparison."""
    if args.kind == "routed":
        ensure_plugin(args.out.resolve().parent / "plugin")
    from vllm.lora.request import LoRARequest

    llm = start_engine(args, size)
    if args.go:
        write_json(ready_file(args.go), {"pid": os.getpid()})
        while not args.go.exists():
            time.sleep(0.05)
    found = {}
    if args.kind in ("one_lora", "lora"):
        found["one_lora"] = tokens_per_s(llm, size, LoRARequest("a0", 1, args.adapter))
    if args.kind != "one_lora":
        name = "base_on_lora_engine" if args.kind == "lora" else args.kind
        found[name] = tokens_per_s(llm, size, None)
    check = Path(args.model).parent / CHECK_FILE
    if args.kind == "routed" and check.is_file():
        return {"tokens_per_s": found, **compared(llm, read_json(check, "log-probs of transformers"))}
    return {"tokens_per_s": found}


def ready_file(go: Path) -> Path:
    return go.with_name(go.name + ".ready")


def fire(go: Path, out: Path) -> None:
    """Give a waiting engine the sign and wait for its result.

    Raises:
        ServerError: no engine waits, or it ended without a result.
    """
    if not ready_file(go).is_file():
        raise ServerError(f"{ready_file(go)}: no engine waits here; see its log")
    pid = int(read_json(ready_file(go), "ready engine")["pid"])
    go.touch()
    while not out.exists():
        time.sleep(0.1)
        alive = False
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(pid, 0)
            alive = "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
        if not alive and not out.exists():
            raise ServerError(f"the engine {pid} ended without a result; see its log")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="base", help="[%(default)s]")
    parser.add_argument("--model", help="model folder")
    parser.add_argument("--adapter", help="PEFT folder, for one_lora and lora")
    parser.add_argument("--rank", type=int, default=32, help="[%(default)s]")
    parser.add_argument("--dtype", default="bfloat16", help="[%(default)s]")
    parser.add_argument("--size", choices=SIZES, default="cpu", help="[%(default)s]")
    parser.add_argument("--vllm-options", default="{}", help='for vllm.LLM, such as {"enforce_eager": true}')
    parser.add_argument("--go", type=Path, help="start, write GO.ready, and measure when this file appears")
    parser.add_argument("--fire", action="store_true", help="make the file --go and wait for --out")
    parser.add_argument("--out", type=Path, required=True, help="JSON result")
    args = parser.parse_args()
    if args.fire:
        if args.go is None:
            raise InputError("--fire needs --go: the file that the engine waits for")
        fire(args.go, args.out)
    else:
        if args.model is None or (args.kind in ("one_lora", "lora") and args.adapter is None):
            raise InputError("expected --model, and --adapter for the kinds one_lora and lora")
        write_json(args.out, measure(args, SIZES[args.size]))
    print(args.out.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    run_cli(main)
