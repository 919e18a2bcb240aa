"""Processor time of the client per episode, against a server that answers at once.

    python benchmarks/bench_episode_cost.py --model models/smollm2 --out benchmarks/results/episode_cost.json

Everything between two answers of a server runs in one Python process, beside the update: chat template, tokens, HTTP,
environment. ``cpu_ms`` is its time per episode of a one-turn environment (22 sampled tokens) as it is, and without one
of the two things that make it cheap: ``prompts``: the prompt of a group is rendered once; ``heap``: the garbage
collector passes over what existed before. Each form runs in processes of its own, one after the other, ``--rounds``
times; ``saved`` is the share of the time without both that they save.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_grpo_step import versions  # noqa: E402
from pipeline.files import InputError, ServerError, run_cli, write_json  # noqa: E402
from pipeline.ports import free_port  # noqa: E402

FORMS = {"as_it_is": "", "without_prompts": "prompts", "without_heap": "heap", "without_both": "prompts,heap"}
GAME = "capability_structured_data_reasoning"
TOKENS = 22


def serve(port: int, stop: int) -> None:
    """Completions that are done after 50 ms; ends with the process that started it."""
    from aiohttp import web

    async def complete(request: web.Request) -> web.Response:
        prompt = json.loads(await request.read())["prompt"]
        await asyncio.sleep(0.05)
        found = {"token_logprobs": [-0.1] * TOKENS, "tokens": ["token_id:100"] * TOKENS}
        choice = {"finish_reason": "stop", "prompt_token_ids": prompt, "token_ids": [100] * (TOKENS - 1) + [stop]}
        return web.json_response({"choices": [choice | {"text": "", "logprobs": found}]})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "root": "m", "parent": None, "max_model_len": 4096}]})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


async def client(url: str, model: str, groups: int, without: set[str]) -> dict[str, float]:
    """Seconds of ``groups`` groups of 16 and of the processor, per episode in milliseconds."""
    import train.chat
    from game_registry import get_game
    from train.chat import ChatCodec
    from train.episode import EpisodeParams
    from train.groups import Sampler
    from train.heap import standing_heap
    from train.rollout import EnvironmentPool
    from train.vllm_engine import VllmEngine

    if "prompts" in without:
        train.chat.KEPT_PROMPTS = 0
    import peft  # noqa: F401  # what a training process has loaded

    codec, spec = ChatCodec.from_model(model), get_game(GAME)
    engine = VllmEngine(url, "m", codec.stop_token_ids)
    sampler = Sampler(engine, codec, {GAME: spec}, {GAME: EnvironmentPool(spec)}, asyncio.Semaphore(256))
    params = EpisodeParams(max_seq_length=4096, seed=1)
    try:
        await sampler.groups([(GAME, seed) for seed in range(4)], 16, params, None)
        with contextlib.nullcontext() if "heap" in without else standing_heap():
            wall, cpu = time.perf_counter(), time.process_time()
            found = await sampler.groups([(GAME, 10 + seed) for seed in range(groups)], 16, params, None)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        await engine.close()
    episodes = [e for group in found for e in group.episodes]
    if not all(e.scored for e in episodes):
        raise ServerError(f"an episode failed: {next(e.result.outcome for e in episodes if not e.scored)}")
    return {"wall_ms": 1e3 * wall / len(episodes), "cpu_ms": 1e3 * cpu / len(episodes)}


@contextlib.contextmanager
def server(model: str) -> Iterator[str]:
    from train.chat import ChatCodec

    port = free_port()
    stop = ChatCodec.from_model(model).end_of_turn
    process = subprocess.Popen([sys.executable, __file__, "--serve", f"{port}:{stop}"])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2", help="for its tokenizer and template [%(default)s]")
    parser.add_argument("--groups", type=int, default=64, help="of 16 episodes [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--out", type=Path, help="JSON result")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(*map(int, args.serve.split(":")))
        return 0
    if args.client:
        url, _, without = args.client.partition("|")
        print(json.dumps(asyncio.run(client(url, args.model, args.groups, set(without.split(","))))))
        return 0
    if args.out is None or args.groups < 1 or args.rounds < 1:
        raise InputError("expected --out FILE, --groups >= 1 and --rounds >= 1")
    runs: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
    with server(args.model) as url:
        for _ in range(args.rounds):
            for form, without in FORMS.items():
                command = [sys.executable, __file__, "--model", args.model, "--groups", str(args.groups)]
                done = subprocess.run([*command, "--client", f"{url}|{without}"], capture_output=True, text=True)
                if done.returncode != 0:
                    raise ServerError(f"{form}: exit {done.returncode}: {done.stderr.strip()[-300:]}")
                runs[form].append(json.loads(done.stdout))
    cpu = {form: round(statistics.median(r["cpu_ms"] for r in rows), 3) for form, rows in runs.items()}
    record: dict[str, Any] = {
        "schema_version": 1, "benchmark": "bench_episode_cost", "episodes": 16 * args.groups, "rounds": args.rounds,
        "versions": versions(), "cpu_ms": cpu, "saved": round(1 - cpu["as_it_is"] / cpu["without_both"], 3),
        "runs": runs,
    }  # fmt: skip
    write_json(args.out, record)
    print(json.dumps({k: v for k, v in record.items() if k != "runs"}, indent=2))
    return 0


if __name__ == "__main__":
    run_cli(main)
