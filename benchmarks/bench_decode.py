"""The local engine's decode steps: packed weights against plain ones, and how many rows the model really runs.

    python benchmarks/bench_decode.py --output benchmarks/results/decode.json
    python benchmarks/bench_decode.py --adapter runs/quickstart/adapters/structured_data_reasoning --output FILE

First turns of one environment, ``--seeds`` prompts x ``--samples`` rollouts at temperature 1, both ways in turn; they
sample the same tokens. ``rows_run_share``: decode rows that the model ran / decode rows that were asked for, below 1
because rollouts that are equal so far run as one. CPU only.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from game_registry import get_game
from pipeline.command_line import Parser, positive_int
from pipeline.files import InputError, run_cli, write_json
from train import packed_linear
from train.chat import ChatCodec
from train.engine import Sample, SamplingParams
from train.local_engine import LocalEngine, load_model


def first_prompts(env_name: str, codec: ChatCodec, seeds: int) -> tuple[list[list[int]], int]:
    """Token ids of the first turn of each seed, and the environment's tokens per turn."""
    spec = get_game(env_name)
    prompts = []
    for seed in range(seeds):
        game = spec.make_env()
        game.reset(seed)
        system = spec.base_prompt if spec.base_prompt is not None else game.get_system_prompt()
        messages = [{"role": "system", "content": system}, *game.get_messages()]
        tools = game.get_tool_schemas() if spec.tools_in == "chat_template" else None
        prompts.append(codec.prompt_ids(messages, tools))
    return prompts, spec.max_gen_tokens


def timed(
    engine: LocalEngine, requests: list[tuple[list[int], SamplingParams]], adapter: str | None, packed: bool
) -> tuple[float, list[Sample], int]:
    """Seconds of one batch, what it sampled, and the decode rows that the model ran."""
    limit, packed_linear.MAX_BYTES = packed_linear.MAX_BYTES, packed_linear.MAX_BYTES if packed else 0
    rows, original = 0, engine._forward

    def forward(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        nonlocal rows
        rows += len(ids) if ids.shape[1] == 1 else 0
        return original(ids, *rest)

    engine._forward = forward  # type: ignore[method-assign, assignment]
    try:
        begin = time.perf_counter()
        samples: list[Sample] = engine.generate(requests, adapter)
        return time.perf_counter() - begin, samples, rows
    finally:
        del engine._forward
        packed_linear.MAX_BYTES = limit


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--model", default="models/smollm2", help="model folder (default models/smollm2)")
    parser.add_argument("--adapter", help="PEFT folder to sample with (default: the base)")
    parser.add_argument("--env", default="capability_structured_data_reasoning", help="environment")
    parser.add_argument("--seeds", type=positive_int, default=8, help="prompts (default 8)")
    parser.add_argument("--samples", type=positive_int, default=8, help="rollouts of each (default 8)")
    parser.add_argument("--repeat", type=positive_int, default=5, help="pairs of measurements (default 5)")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    args = parser.parse_args()
    engine = LocalEngine(load_model(args.model, "bfloat16", "cpu"), ChatCodec.from_model(args.model))
    adapter = None
    if args.adapter is not None:
        import asyncio

        adapter = "measured"
        asyncio.run(engine.load_adapter(adapter, args.adapter))
    if not packed_linear.packable(engine.model):
        raise InputError(f"{args.model}: nothing to pack here (needs bf16 on a CPU with oneDNN); nothing was measured")
    prompts, max_tokens = first_prompts(args.env, engine.codec, args.seeds)
    seeded = [(p, 1000 * i + k) for i, p in enumerate(prompts) for k in range(args.samples)]
    requests = [(p, SamplingParams(max_tokens, 1.0, seed=seed)) for p, seed in seeded]
    timed(engine, requests, adapter, True)  # warm-up
    ratios, times, equal, asked, ran = [], [], True, 0, 0
    for _ in range(args.repeat):
        fast, samples, ran = timed(engine, requests, adapter, True)
        slow, plain, _ = timed(engine, requests, adapter, False)
        ratios.append(slow / fast)
        times.append(fast)
        equal &= samples == plain
        asked = sum(len(s.token_ids) - 1 for s in samples)
    tokens = sum(len(s.token_ids) for s in samples)
    result = {
        "schema_version": 1,
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
        "settings": {k: str(v) for k, v in vars(args).items() if k != "output"},
        "same_samples": equal,
        "plain_over_packed": round(statistics.median(ratios), 3),
        "seconds": round(statistics.median(times), 3),
        "tokens_per_s": round(tokens / statistics.median(times), 1),
        "rows_run_share": round(ran / max(1, asked), 3),
    }
    write_json(args.output, result)
    print(*(f"{k}: {v}" for k, v in result.items() if k != "schema_version"), sep="\n")
    return 0


if __name__ == "__main__":
    run_cli(main)
