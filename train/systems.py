"""What an evaluation compares: base, adapters, merges, prompt-chosen adapters, routed mixtures. And how each is
sampled."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from game_registry import GameSpec
from pipeline.files import InputError
from train.engines import EngineOptions, OpenEngine, open_engine
from train.episode import Episode, EpisodeParams, to_simulation
from train.evaluation_choice import Option, Pick, load_picks, pick_adapters, save_picks
from train.identity import weights_digest
from train.progress import EpisodeMeter
from train.rollout import Job, collect
from train.rollout_log import RolloutLog, game_fingerprint

Kind = Literal["base", "adapter", "other", "merge", "chosen", "routed"]
RoutingMode = Literal["top1", "soft"]
MODES: dict[str, float] = {"greedy": 0.0, "sampled": 1.0}  # mode -> temperature


@dataclasses.dataclass(frozen=True)
class System:
    """One competitor.

    Args:
        kind: ``adapter`` is part of the composition, ``other`` is an adapter that only stands beside it.
        folder: the PEFT folder of an adapter or merge.
        gate: the gate run of a routed one, or ``base_url`` (and ``served_model``) of the server that has it exported.
        routing_mode: instead of the gate's own.
        options: what the base chooses from.
    """

    name: str
    kind: Kind
    folder: str | None = None
    gate: str | None = None
    base_url: str | None = None
    served_model: str | None = None
    routing_mode: RoutingMode | None = None
    options: tuple[Option, ...] = ()

    def fingerprint(self) -> str:
        """Hash of the weights beyond the base, so that results of retrained ones are never reused."""
        digest = hashlib.sha256(self.kind.encode())
        if self.routing_mode is not None:
            digest.update(self.routing_mode.encode())
        if self.base_url is not None:  # what is behind another address or name may be another export
            digest.update(f"{self.base_url}\0{self.served_model}".encode())
        for option in self.options:
            digest.update(f"{option.name}\0{option.description}\0".encode())
        places = (self.folder, self.gate, *(option.folder for option in self.options))
        digest.update(weights_digest(place for place in places if place is not None).encode())
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
    """The episodes of every (system, environment, mode), one resumable rollouts file each under ``folder``.

    Args:
        model: name of the base model, and ``base`` its ``train.identity.base_identity``.
    """

    def __init__(self, folder: Path, plan: Plan, model: str, base: str) -> None:
        self.folder, self.plan, self.model, self.base = folder, plan, model, base
        self._logs: dict[Cell, RolloutLog] = {}

    def log(self, system: System, spec: GameSpec, mode: str) -> RolloutLog:
        """The log of one cell, with what an earlier start left there."""
        cell = (system.name, spec.name, mode)
        if cell not in self._logs:
            settings = {
                "system": system.name,
                "weights": system.fingerprint(),
                "model": self.model,
                "base": self.base,
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

    def picks_file(self, system: System, spec: GameSpec) -> Path:
        return self.folder / f"{system.name}.{spec.name}.picks.json"

    def pick_settings(self, system: System, spec: GameSpec) -> dict[str, Any]:
        """Everything that a pick depends on."""
        settings = {"weights": system.fingerprint(), "model": self.model, "base": self.base}
        return settings | {"env_source": game_fingerprint(spec)}

    def picks(self, system: System, spec: GameSpec) -> dict[int, Pick]:
        """The base's picks for a ``chosen`` system, as far as they are there."""
        return load_picks(self.picks_file(system, spec), self.pick_settings(system, spec))

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
    loaded = _Loaded(opened)
    try:
        for spec in specs:
            jobs: list[Job] = []
            cells: dict[tuple[str | None, float], tuple[System, str]] = {}
            for system in (s for s in systems if s.kind != "chosen"):
                todo = [(s, mode, t) for mode in plan.modes for s, t in store.missing(system, spec, mode)]
                if not todo:
                    continue
                adapter = await loaded.name_of(system.name, system.folder)
                cells |= {(adapter, MODES[mode]): (system, mode) for mode in plan.modes}
                params = {mode: plan.params(mode, opened) for mode in plan.modes}
                jobs += [Job(s, t, adapter=adapter, params=params[mode]) for s, mode, t in sorted(todo)]
            if jobs:
                await _collect_cells(opened, spec, jobs, cells, plan, store, user_llm)
            for system in (s for s in systems if s.kind == "chosen"):
                await _sample_chosen(opened, loaded, system, spec, plan, store, user_llm)
    finally:
        await loaded.unload()


class _Loaded:
    """The adapters that this evaluation has put on the engine, by the name of the system."""

    def __init__(self, opened: OpenEngine) -> None:
        self.engine = opened.engine
        self.tag = secrets.token_hex(3)  # other evaluations may use the same server with adapters of the same names
        self.names: dict[str, str | None] = {}

    async def name_of(self, name: str, folder: str | None) -> str | None:
        if name not in self.names:
            served = None if folder is None else f"{name}@eval-{self.tag}"
            if served is not None and folder is not None:
                await self.engine.load_adapter(served, folder)
            self.names[name] = served
        return self.names[name]

    async def unload(self) -> None:
        for name in filter(None, self.names.values()):
            await self.engine.unload_adapter(name)


async def _sample_chosen(
    opened: OpenEngine,
    loaded: _Loaded,
    system: System,
    spec: GameSpec,
    plan: Plan,
    store: ResultStore,
    user_llm: Callable[..., str] | None,
) -> None:
    """The base picks an adapter for every seed, then each episode runs on what was picked."""
    todo = [(s, mode, t) for mode in plan.modes for s, t in store.missing(system, spec, mode)]
    picks = store.picks(system, spec)
    if unasked := sorted(set(plan.seeds) - picks.keys()):
        picks |= await pick_adapters(opened, spec, unasked, system.options, plan.max_seq_length, user_llm)
        save_picks(store.picks_file(system, spec), store.pick_settings(system, spec), picks)
    folder_of = {option.name: option.folder for option in system.options}
    jobs: list[Job] = []
    cells: dict[tuple[str | None, float], tuple[System, str]] = {}
    for seed, mode, trial in sorted(todo):
        picked = picks[seed].option
        adapter = await loaded.name_of(picked or "base", folder_of[picked] if picked else None)
        cells[adapter, MODES[mode]] = (system, mode)
        jobs.append(Job(seed, trial, adapter=adapter, params=plan.params(mode, opened)))
    if jobs:
        await _collect_cells(opened, spec, jobs, cells, plan, store, user_llm)


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
        if system.kind == "chosen":
            entry["picked"] = job.adapter.partition("@eval-")[0] if job.adapter else None
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


async def open_routed(options: EngineOptions, system: System) -> tuple[OpenEngine, Any]:
    """The engine of a routed mixture: a server that has the exported model, or the gate on the base in this process.

    Returns:
        The engine, and the routed model when it is here (None on a server).

    Raises:
        InputError: the gate cannot be loaded.
    """
    if system.base_url is not None:
        tokenizer = options.tokenizer or options.model
        served = dataclasses.replace(
            options, kind="vllm", base_urls=system.base_url, served_model=system.served_model, any_model=True,
            tokenizer=tokenizer,
        )  # fmt: skip
        return await open_engine(served), None
    if system.gate is None:
        raise InputError("a routed system needs --gate FOLDER, or --routed-base-url of a server that has it")
    from moe_gate import load_routed, routing_state
    from train.chat import ChatCodec
    from train.local_engine import LocalEngine, load_model

    codec = ChatCodec.from_model(options.tokenizer or options.model, dict(options.template_kwargs))
    routed = load_routed(system.gate, base=load_model(options.model, options.dtype))
    if system.routing_mode is not None:
        routing_state(routed).mode = system.routing_mode
    length = getattr(routed.config.get_text_config(), "max_position_embeddings", None)
    engine = LocalEngine(routed, codec, max_rows=options.max_rows)
    return OpenEngine(engine, codec, "local", options.model, length), routed


def release_memory() -> None:
    """Give back what the engine before held, before the next model is loaded."""
    gc.collect()
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
