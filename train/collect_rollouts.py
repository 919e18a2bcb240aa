"""Sample episodes of one environment and write them as a rollouts file.

    python -m train.collect_rollouts --env capability_NAME --base-url http://localhost:8000/v1 --model M \\
        --num-seeds 100 --num-samples 16 --temperature 1.0 -o rollouts.json

Without a server the model runs in this process. A run that was killed goes on with the same command.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from pathlib import Path
from typing import Any

from game_registry import GameSpec
from pipeline.command_line import non_negative_int
from pipeline.files import InputError, run_cli
from pipeline.remote_game import resolve_game
from train.adapter_folder import as_folders, parse_adapters
from train.engines import EngineOptions, OpenEngine, add_engine_flags, attach_adapter, engine_options, open_engine
from train.episode import Episode, EpisodeParams, to_simulation
from train.identity import base_identity, weights_digest
from train.progress import EpisodeMeter
from train.rollout import Job, collect, jobs_of_group
from train.rollout_log import Key, RolloutLog, game_fingerprint
from train.user_llm import add_user_llm_flags, user_llm_from
from train.vllm_engine import VllmEngine


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.collect_rollouts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--env", required=True, help="registered environment, e.g. capability_NAME")
    parser.add_argument("-o", "--output", type=Path, required=True, help="rollouts file to write (JSON)")
    parser.add_argument("--num-seeds", type=int, default=100, help="tasks [%(default)s]")
    parser.add_argument("--num-samples", type=int, default=16, help="episodes per task [%(default)s]")
    parser.add_argument("--seed-start", type=int, default=0, help="first task seed [%(default)s]")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 = greedy [%(default)s]")
    parser.add_argument("--adapter", help="PEFT folder, .safetensors file, NAME=PATH, or a name that the server has")
    parser.add_argument(
        "--hint-ratio", type=float, default=0.0, help="share of each group that gets the hint [%(default)s]"
    )
    parser.add_argument("--concurrency", type=int, default=256, help="episodes in flight [%(default)s]")
    parser.add_argument("--max-new-tokens", type=int, help="per turn [the environment's max_gen_tokens]")
    parser.add_argument("--max-seq-length", type=int, default=16384, help="tokens of one episode [%(default)s]")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="seconds of one episode [%(default)s]")
    parser.add_argument("--seed", type=non_negative_int, help="sampling seed, for repeatable runs on one engine [none]")
    parser.add_argument("--tokens", action="store_true", help="also write token ids, action mask and log-probs")
    parser.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, default=True, help="go on from what is there"
    )
    parser.add_argument("--root", type=Path, help="folder with capability_*_game.py files [the project's]")
    add_engine_flags(parser)
    add_user_llm_flags(parser)
    return parser


def check_args(args: argparse.Namespace) -> None:
    """Refuse numbers that cannot work, before anything is loaded."""
    for name in ("num_seeds", "num_samples", "concurrency", "max_seq_length"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')}: expected >= 1, found {getattr(args, name)}")
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens: expected >= 1, found {args.max_new_tokens}")
    if not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise InputError(f"--temperature: expected a number >= 0, found {args.temperature}")
    if not 0 <= args.hint_ratio <= 1:
        raise InputError(f"--hint-ratio: expected a share in [0, 1], found {args.hint_ratio}")
    if not args.deadline_s > 0:
        raise InputError(f"--deadline-s: expected seconds > 0, found {args.deadline_s}")
    if args.output.is_dir():
        raise InputError(f"--output {args.output}: expected a file, found a folder")


def settings_of(args: argparse.Namespace, options: EngineOptions, spec: GameSpec) -> dict[str, Any]:
    """What an entry depends on; the number of seeds and samples is not among it, so a file can be extended."""
    return {
        "env": spec.name,
        "env_source": game_fingerprint(spec),
        "model": options.served_model or options.model,
        "base": base_identity(options.model),
        "adapter": args.adapter,
        "adapter_weights": weights_digest(_given_folder(args.adapter).values()),
        "temperature": args.temperature,
        "max_new_tokens": args.max_new_tokens or spec.max_gen_tokens,
        "max_seq_length": args.max_seq_length,
        "hint_ratio": args.hint_ratio,
        "seed": args.seed,
        "tokens": args.tokens,
        "template_kwargs": dict(options.template_kwargs),
        "user_llm": args.user_llm_model,
    }


def all_jobs(args: argparse.Namespace, adapter: str | None) -> list[Job]:
    seeds = range(args.seed_start, args.seed_start + args.num_seeds)
    return [job for seed in seeds for job in jobs_of_group(seed, args.num_samples, args.hint_ratio, adapter)]


def job_key(job: Job) -> Key:
    return str(job.seed), job.hinted, job.sample_idx


def main() -> int:
    args = build_parser().parse_args()
    check_args(args)
    spec = resolve_game(args.env, args.root)
    if args.hint_ratio > 0 and not spec.hint_prompt:
        raise InputError(f"--hint-ratio {args.hint_ratio}: environment {spec.name} has no hint_prompt")
    options = engine_options(args)
    log = RolloutLog(args.output, settings_of(args, options, spec), resume=args.resume)
    try:
        todo = [job for job in all_jobs(args, None) if job_key(job) not in log.entries]
        return asyncio.run(run(args, spec, options, log, todo))
    finally:
        log.close()


async def run(
    args: argparse.Namespace, spec: GameSpec, options: EngineOptions, log: RolloutLog, todo: list[Job]
) -> int:
    """Sample what is missing, then write the final file."""
    total = args.num_seeds * args.num_samples
    meter = EpisodeMeter(f"collect {spec.name}", total, total - len(todo))
    if todo:
        with as_folders(_given_folder(args.adapter)) as folders:
            opened = await open_engine(options)
            if isinstance(opened.engine, VllmEngine):
                opened.engine.exact_logprobs = args.tokens  # else they are not written
            try:
                await _sample(args, spec, opened, folders, log, todo, meter)
            finally:
                await opened.engine.close()
                meter.write(last=True)
    info = {
        "command": "train.collect_rollouts",
        "engine": options.kind,
        "num_seeds": args.num_seeds,
        "num_samples": args.num_samples,
        "seed_start": args.seed_start,
        "wall_s": round(meter.seconds, 3),
        "tokens_per_s": round(meter.tokens / max(meter.seconds, 1e-9), 1),
    }
    keys = [job_key(job) for job in all_jobs(args, None)]
    log.finish(keys, info)
    return _report(args.output, [log.entries[key] for key in keys])


def _given_folder(adapter: str | None) -> dict[str, str]:
    """``--adapter`` as a path, unless it is a bare name that only a server can know."""
    if adapter is None:
        return {}
    given = parse_adapters(adapter)
    if len(given) != 1:
        raise InputError(f"--adapter {adapter!r}: expected one adapter, found {len(given)}")
    ((name, path),) = given.items()
    return {name: path} if "=" in adapter or "/" in adapter or Path(path).exists() else {}


async def _sample(
    args: argparse.Namespace,
    spec: GameSpec,
    opened: OpenEngine,
    folders: dict[str, str],
    log: RolloutLog,
    todo: list[Job],
    meter: EpisodeMeter,
) -> None:
    adapter = None
    if args.adapter is not None:
        name = next(iter(folders), args.adapter)
        adapter = await attach_adapter(opened, name, folders.get(name))
    meter.write()  # a first batch can take long
    params = EpisodeParams(
        max_new_tokens=args.max_new_tokens,
        max_seq_length=opened.fit(args.max_seq_length),
        temperature=args.temperature,
        deadline_s=args.deadline_s,
        seed=args.seed,
    )

    def keep(job: Job, episode: Episode) -> None:
        log.add(to_simulation(episode, opened.model, tokens=args.tokens))
        meter.add(episode)

    jobs = [Job(job.seed, job.sample_idx, job.hinted, adapter) for job in todo]
    user_llm = user_llm_from(args)
    await collect(
        spec,
        opened.engine,
        opened.codec,
        jobs,
        params,
        concurrency=min(args.concurrency, len(jobs)),
        on_episode=keep,
        user_llm=user_llm,
    )
    if adapter is not None:
        await opened.engine.unload_adapter(adapter)


def _report(output: Path, entries: list[dict[str, Any]]) -> int:
    scored = [e for e in entries if e["outcome"] == "scored"]
    errors = [e for e in entries if e["outcome"] != "scored"]
    print(f"{output}: {len(entries)} episodes, {len(scored)} scored, {len(errors)} errors")
    if not scored:
        print(f"no episode could be scored; first error: {errors[0]['error_kind']}: {errors[0]['error']}")
        return 1
    return 0


if __name__ == "__main__":
    run_cli(main)
