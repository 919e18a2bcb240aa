"""A run of ``python -m train`` whose settings are right: model, adapters, engine, ranks."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch

from game_registry import GameError, GameMix, GameSpec
from pipeline.files import InputError, write_json
from train.chat import ChatCodec
from train.checkpoint import load_checkpoint
from train.checkpointing import pack_budget
from train.config import TrainConfig
from train.distributed import Ranks, join_ranks, said_once
from train.engine import Engine
from train.engines import EngineOptions, open_engine
from train.forward import base_model, can_pack
from train.groups import Sampler
from train.grpo import Trainer, Worker, checkpoint_settings
from train.kernels import use_deterministic_kernels
from train.learner import Learner, UpdateConfig
from train.local_engine import LocalEngine, load_model
from train.lora import attach_adapter, lora_config
from train.rollout import EnvironmentPool
from train.run_log import RunLog, Tracker
from train.user_llm import UserLLM
from train.vllm_engine import VllmEngine


def run(
    config: TrainConfig, mixes: dict[str, GameMix], specs: dict[str, GameSpec], tasks: range, resume: dict[str, Path]
) -> int:
    """Train; the exit code of this rank.

    Args:
        mixes: the games of each adapter. specs: of every game in them.
        tasks: the seeds to train on, empty for ever new ones.
        resume: the checkpoint that each adapter goes on from; without one it starts anew.
    """
    if config.deterministic:
        use_deterministic_kernels()
    ranks, device = join_ranks(config.device)
    try:
        with said_once():
            if ranks.driver:
                _announce(config, specs)
            worker, model = _build_worker(config, mixes, ranks, device, resume, tasks)
        if ranks.driver:
            return _drive_to_end(config, worker, model, specs)
        logging.disable(logging.WARNING)
        return 0 if worker.serve() else 2
    finally:
        ranks.close()


def _drive_to_end(config: TrainConfig, worker: Worker, model: Any, specs: dict[str, GameSpec]) -> int:
    """Rank 0. The other ranks are let go in any case, and know whether the run was finished."""
    done = False
    try:
        _write_config(config)
        asyncio.run(_drive(config, worker, model, specs))
        done = True
    finally:
        worker.stop(done)
    return 0


def _write_config(config: TrainConfig) -> None:
    """Once everything fits: a run that is refused leaves the settings of the run before as they are."""
    settings = {"schema_version": 1, **config.model_dump(mode="json"), "torch": torch.__version__}
    write_json(Path(config.output_dir) / "config.json", settings)


def _announce(config: TrainConfig, specs: dict[str, GameSpec]) -> None:
    chosen = json.dumps(config.model_dump(mode="json", exclude_defaults=True))
    sys.stderr.write(f"settings: {chosen}; the others as in `python -m train --help`\n")
    for spec in specs.values():
        if spec.needs_user_llm and not config.user_llm_url:
            raise GameError(f"game {spec.name} needs a user simulator; give --user-llm-url and --user-llm-model")


def _build_worker(
    config: TrainConfig, mixes: dict[str, GameMix], ranks: Ranks, device: str, resume: dict[str, Path], tasks: range
) -> tuple[Worker, Any]:
    if device == "cpu" and ranks.world == 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
    _check_sharding(config, ranks)
    # the whole base need never fit into one GPU: layers move there when they are sharded
    if config.shard_base and not ranks.driver:
        from train.sharding import skeleton

        model: Any = skeleton(config.model)  # rank 0 hands its layers out
    else:
        model = load_model(config.model, config.dtype, "cpu" if config.shard_base else device)
    lora = lora_config(config.lora_rank, config.lora_alpha, config.target_modules)
    for index, name in enumerate(mixes):
        model = attach_adapter(model, name, lora, seed=config.seed * 1000 + index)
    if config.shard_base:
        _shard(model, device, ranks)
    learners = {
        name: Learner(
            model, name, mix, lr=config.lr, weight_decay=config.weight_decay, seed=config.seed,
            reduce=ranks.sum, rank=ranks.rank, world=ranks.world, sharded=config.shard_base, tasks=tasks,
        )
        for name, mix in mixes.items()
    }  # fmt: skip
    for name, path in resume.items():
        lacking = load_checkpoint(path, learners[name], checkpoint_settings(config))
        if lacking and ranks.driver:
            sys.stderr.write(f"notice: {path}: of an earlier version, without {', '.join(lacking)}: they start anew\n")
    for name, learner in learners.items():
        ranks.agree(
            float(sum(p.detach().double().sum() for p in learner.parameters.values())), f"the weights of {name}"
        )
    if ranks.driver and not can_pack(model):
        sys.stderr.write(
            f"notice: model type {model.config.model_type}: one episode per training pass "
            "(packing is not exact for it)\n"
        )
    update = UpdateConfig(
        loss=config.loss_config(),
        temperature=config.temperature,
        epochs=config.epochs,
        groups_per_step=config.mini_batch_size,
        max_grad_norm=config.max_grad_norm,
        pack_tokens=config.pack_tokens or ranks.least(pack_budget(base_model(model)) if can_pack(model) else 1),
        logit_chunk=config.logit_chunk,
    )
    return Worker(learners, update, ranks), model


def _check_sharding(config: TrainConfig, ranks: Ranks) -> None:
    if not config.shard_base:
        return
    if ranks.world == 1:
        raise InputError("--shard-base on one process: there is nobody to share with; start it with torchrun")
    if _engine_kind(config) == "local":
        raise InputError("--shard-base: sampling in this process needs the whole base; set VLLM_BASE_URLS")


def _shard(model: Any, device: str, ranks: Ranks) -> None:
    from train.sharding import shard_base

    whole = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "lora_" not in n)
    held = shard_base(model, device.partition(":")[0])
    if ranks.driver:
        sizes = f"{held / 2**20:.3f} of {whole / 2**20:.3f} MiB"
        sys.stderr.write(f"sharded base: {sizes} on each of {ranks.world} ranks\n")


async def _drive(config: TrainConfig, worker: Worker, model: Any, specs: dict[str, GameSpec]) -> None:
    engine, codec, served, context = await _engine(config, model)
    try:
        user = None
        if config.user_llm_url:
            user = UserLLM(
                config.user_llm_url.rstrip("/").removesuffix("/v1"), config.user_llm_model,
                config.user_llm_temperature, config.user_llm_max_tokens,
            )  # fmt: skip
        pools = {name: EnvironmentPool(spec, user) for name, spec in specs.items()}
        sampler = Sampler(engine, codec, specs, pools, asyncio.Semaphore(config.concurrency))
        folder = Path(config.output_dir)
        tracker = Tracker(config.report_to, folder, config.model_dump(mode="json"))
        log = RunLog(folder, {n: learner.iteration for n, learner in worker.learners.items()}, tracker)
        if isinstance(engine, VllmEngine):
            engine.pool.on_event = log.event
        try:
            await Trainer(config, worker, sampler, log, served, min(config.max_seq_length, context)).run()
        finally:
            log.close()
    finally:
        await engine.close()


def _server_urls() -> str:
    return os.environ.get("VLLM_BASE_URLS") or os.environ.get("VLLM_BASE_URL") or ""


def _engine_kind(config: TrainConfig) -> str:
    return config.engine if config.engine != "auto" else ("vllm" if _server_urls() else "local")


async def _engine(config: TrainConfig, model: Any) -> tuple[Engine, ChatCodec, str, int]:
    """Engine, codec, the model's name there, and the most tokens that one episode may have."""
    urls = _server_urls()
    if _engine_kind(config) == "local":
        codec = ChatCodec.from_model(config.model)
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or config.max_seq_length
        return LocalEngine(model, codec), codec, config.model, context
    if not urls:
        raise InputError("--engine vllm needs a server; set VLLM_BASE_URLS=http://HOST:PORT")
    options = EngineOptions(
        model=config.model, kind="vllm", served_model=os.environ.get("VLLM_MODEL"), base_urls=urls,
        api_key=os.environ.get("VLLM_API_KEY"),
    )  # fmt: skip
    opened = await open_engine(options)
    return opened.engine, opened.codec, opened.model, opened.fit(config.max_seq_length)
