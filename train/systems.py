"""What an evaluation compares: base, single adapters, their merge, the routed mixture. And how each is sampled."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from game_registry import GameSpec
from pipeline.files import InputError, read_json
from train.engines import EngineOptions, OpenEngine, open_engine
from train.episode import Episode, EpisodeParams, to_simulation
from train.progress import EpisodeMeter
from train.rollout import Job, collect
from train.rollout_log import RolloutLog, game_fingerprint

Kind = Literal["base", "adapter", "merge", "routed"]
MODES: dict[str, float] = {"greedy": 0.0, "sampled": 1.0}  # mode -> temperature


@dataclasses.dataclass(frozen=True)
class System:
    """One competitor. ``folder``: the PEFT folder of an adapter or merge; ``gate``: the gate run of a routed one."""

    name: str
    kind: Kind
    folder: str | None = None
    gate: str | None = None

    def fingerprint(self) -> str:
        """Hash of the weights beyond the base, so that results of retrained ones are never reused."""
        digest = hashlib.sha256(self.kind.encode())
        for place in (self.folder, self.gate):
            if place is None:
                continue
            path = Path(place)
            files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
            for file in files:
                digest.update(file.read_bytes())
            if (path / "adapter_config.json").is_file():  # scales are there
                config = read_json(path / "adapter_config.json", "adapter config")
                if not isinstance(config, dict):
                    raise InputError(f"adapter {path}: adapter_config.json: expected an object; export it again")
                digest.update(json.dumps([config.get("r"), config.get("lora_alpha")]).encode())
        return digest.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The fixed part of an evaluation: which seeds, how many trials, how episodes are sampled."""

    seeds: range
    trials: int
    modes: tuple[str, ...]
    max_new_tokens: int | None
    max_seq_length: int
    deadline_s: float
    sampling_seed: int | None
    concurrency: int

    def jobs(self, mode: str) -> list[tuple[int, int]]:
        """(seed, trial) of one mode; greedy decoding has nothing to repeat."""
        return [(s, t) for s in self.seeds for t in range(1 if mode == "greedy" else self.trials)]

    def params(self, mode: str, opened: OpenEngine) -> EpisodeParams:
        return EpisodeParams(
            max_new_tokens=self.max_new_tokens,
            max_seq_length=opened.fit(self.max_seq_length),
            temperature=MODES[mode],
            deadline_s=self.deadline_s,
            seed=self.sampling_seed,
        )


Cell = tuple[str, str, str]  # system, environment, mode


class ResultStore:
    """The episodes of every (system, environment, mode), one resumable rollouts file each under ``folder``."""

    def __init__(self, folder: Path, plan: Plan, model: str) -> None:
        self.folder, self.plan, self.model = folder, plan, model
        self._logs: dict[Cell, RolloutLog] = {}

    def log(self, system: System, spec: GameSpec, mode: str) -> RolloutLog:
        """The log of one cell, with what an earlier start left there."""
        cell = (system.name, spec.name, mode)
        if cell not in self._logs:
            settings = {
                "system": system.name,
                "weights": system.fingerprint(),
                "model": self.model,
                "env": spec.name,
                "env_source": game_fingerprint(spec),
                "temperature": MODES[mode],
                "max_new_tokens": self.plan.max_new_tokens or spec.max_gen_tokens,
                "max_seq_length": self.plan.max_seq_length,
                "seed": self.plan.sampling_seed,
            }
            path = self.folder / f"{system.name}.{spec.name}.{mode}.json"
            self._logs[cell] = RolloutLog(path, settings, discard_other=True)
        return self._logs[cell]

    def missing(self, system: System, spec: GameSpec, mode: str) -> list[tuple[int, int]]:
        """(seed, trial) not there yet."""
        entries = self.log(system, spec, mode).entries
        return [(s, t) for s, t in self.plan.jobs(mode) if (str(s), False, t) not in entries]

    def finish(self, system: System, spec: GameSpec, mode: str) -> list[dict[str, Any]]:
        """Write the final file of a complete cell and return its entries in order."""
        log = self.log(system, spec, mode)
        keys = [(str(s), False, t) for s, t in self.plan.jobs(mode)]
        log.finish(keys, {"command": "train.evaluate", "system": system.name, "mode": mode})
        return [log.entries[key] for key in keys]

    def close(self) -> None:
        for log in self._logs.values():
            log.close()


async def sample_missing(
    opened: OpenEngine,
    systems: Sequence[System],
    specs: Sequence[GameSpec],
    plan: Plan,
    store: ResultStore,
    user_llm: Callable[..., str] | None,
) -> None:
    """Run every missing episode of ``systems``, which share one engine.

    All systems of an environment go through one call, so a server is full until the last episode; the modes and trials
    of one seed are neighbours, so the local engine computes their prompt once.
    """
    names: dict[str, str | None] = {}
    tag = secrets.token_hex(3)  # other evaluations may use the same server with adapters of the same names
    try:
        for spec in specs:
            jobs: list[Job] = []
            cells: dict[tuple[str | None, float], tuple[System, str]] = {}
            for system in systems:
                todo = [(s, mode, t) for mode in plan.modes for s, t in store.missing(system, spec, mode)]
                if not todo:
                    continue
                if system.name not in names:
                    names[system.name] = await _load(opened, system, tag)
                adapter = names[system.name]
                cells |= {(adapter, MODES[mode]): (system, mode) for mode in plan.modes}
                params = {mode: plan.params(mode, opened) for mode in plan.modes}
                jobs += [Job(s, t, adapter=adapter, params=params[mode]) for s, mode, t in sorted(todo)]
            if jobs:
                await _collect_cells(opened, spec, jobs, cells, plan, store, user_llm)
    finally:
        for name in filter(None, names.values()):
            await opened.engine.unload_adapter(name)


async def _load(opened: OpenEngine, system: System, tag: str) -> str | None:
    if system.folder is None:
        return None
    name = f"{system.name}@eval-{tag}"
    await opened.engine.load_adapter(name, system.folder)
    return name


async def _collect_cells(
    opened: OpenEngine,
    spec: GameSpec,
    jobs: list[Job],
    cells: Mapping[tuple[str | None, float], tuple[System, str]],
    plan: Plan,
    store: ResultStore,
    user_llm: Callable[..., str] | None,
) -> None:
    labels = list(dict.fromkeys(system.name for system, _ in cells.values()))
    meter = EpisodeMeter(f"evaluate {spec.name} ({', '.join(labels)})", len(jobs))

    def keep(job: Job, episode: Episode) -> None:
        assert job.params is not None
        system, mode = cells[job.adapter, job.params.temperature]
        entry = to_simulation(episode, opened.model, tokens=system.kind == "routed")
        entry["adapter"] = None if system.kind == "base" else system.name
        store.log(system, spec, mode).add(entry)
        meter.add(episode)

    meter.write()  # a first batch can take long
    first = jobs[0].params
    assert first is not None
    try:
        await collect(
            spec,
            opened.engine,
            opened.codec,
            jobs,
            first,
            concurrency=min(plan.concurrency, len(jobs)),
            on_episode=keep,
            user_llm=user_llm,
        )
    finally:
        meter.write(last=True)


async def open_routed(
    options: EngineOptions, gate: str | None, base_url: str | None, model: str | None
) -> tuple[OpenEngine, Any]:
    """The engine of the routed mixture: a server that has the exported model, or the gate on the base in this process.

    Returns:
        The engine, and the routed model when it is here (None on a server).

    Raises:
        InputError: the gate cannot be loaded.
    """
    if base_url is not None:
        served = dataclasses.replace(
            options, kind="vllm", base_urls=base_url, served_model=model, tokenizer=options.tokenizer or options.model
        )
        return await open_engine(served), None
    if gate is None:
        raise InputError("a routed system needs --gate FOLDER, or --routed-base-url of a server that has it")
    from moe_gate import load_routed
    from train.chat import ChatCodec
    from train.local_engine import LocalEngine, load_model

    codec = ChatCodec.from_model(options.tokenizer or options.model, dict(options.template_kwargs))
    routed = load_routed(gate, base=load_model(options.model, options.dtype))
    length = getattr(routed.config.get_text_config(), "max_position_embeddings", None)
    engine = LocalEngine(routed, codec, max_rows=options.max_rows)
    return OpenEngine(engine, codec, "local", options.model, length), routed


def release_memory() -> None:
    """Give back what the engine before held, before the next model is loaded."""
    gc.collect()
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
