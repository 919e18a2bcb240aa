"""tau2-bench: one results.json, or results.json beside simulations/*.json, or a single rollout of NeMo Gym.

``reward_info`` null is an infrastructure error (outside every rate); ``reward_info`` with a reward and nothing else
is an episode that ended early (max_steps, too_many_errors) and counts as failed. Voice runs have audio ticks and no
messages: their outcomes are read, but nobody can label them. ``llm_args`` are never read: they hold keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from pipeline.files import InputError, check
from pipeline.readers.stream import describe, items, single
from pipeline.readers.trajectory import Trajectory, Verdict, as_id, by_reward, text_of

NORMAL_ENDS = ("user_stop", "agent_stop")
INFRASTRUCTURE_ENDS = ("infrastructure_error", "unexpected_error")
SIMULATOR_ENDS = ("user_error",)
OUT_OF_SCOPE = "###OUT-OF-SCOPE###"
REASON_CHARS = 160  # per component

Json = dict[str, Any]


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore")


class RewardInfo(_Lenient):
    reward: Annotated[float, Field(allow_inf_nan=False, strict=True)] | None = None
    reward_basis: list[StrictStr] | None = None
    reward_breakdown: dict[StrictStr, Any] | None = None
    db_check: Json | None = None
    action_checks: list[Json] | None = None
    env_assertions: list[Json] | None = None
    communicate_checks: list[Json] | None = None
    nl_assertions: list[Json] | None = None
    info: Json | None = None


class Simulation(_Lenient):
    task_id: StrictStr | StrictInt
    trial: Annotated[StrictInt, Field(ge=0)] | None = None
    termination_reason: StrictStr | None = None
    reward_info: RewardInfo | None = None
    messages: list[Any] | None = None
    info: Json | None = None
    review: Json | None = None
    user_only_review: Json | None = None


def read_file(path: Path, threshold: float) -> Iterator[Trajectory]:
    """A single-file results.json."""
    domain = _domain(path)
    for n, raw in enumerate(items(path, "simulations.item")):
        yield _trajectory(raw, domain, str(path), f"tau2 {path}: simulation {n}", threshold)


def read_folder(path: Path, threshold: float) -> Iterator[Trajectory]:
    """results.json beside simulations/; in the order of the index, by name without one."""
    results = path / "results.json" if path.is_dir() else path
    domain = _domain(results)
    files = {p.stem: p for p in (results.parent / "simulations").glob("*.json")}
    index = single(results, "simulation_index")
    rewards: dict[str, Any] = {}
    for n, row in enumerate(index if isinstance(index, list) else []):
        if not isinstance(row, dict) or not isinstance(row.get("id"), str):
            raise InputError(
                f"tau2 {results}: simulation_index {n}: expected an object with an id, found {describe(row)}"
            )
        if row["id"] not in files:
            raise InputError(f"tau2 {results}: simulations/{row['id']}.json is in the index but not there; copy it too")
        rewards[row["id"]] = row.get("reward")
    for stem in [*rewards, *sorted(files.keys() - rewards.keys())]:
        file = files[stem]
        raw = single(file, "")
        if isinstance(raw, dict) and "reward_info" not in raw and rewards.get(stem) is not None:
            raw["reward_info"] = {"reward": rewards[stem]}  # voice runs keep it in the index only
        yield _trajectory(raw, domain, str(file), f"tau2 {file}", threshold)


def read_rollout(path: Path, threshold: float) -> Iterator[Trajectory]:
    """One NeMo Gym rollout: the simulation under ``result``, the domain under ``config``."""
    domain = single(path, "config.domain")
    yield _trajectory(single(path, "result"), str(domain or ""), str(path), f"tau2 {path}: result", threshold)


def _domain(path: Path) -> str:
    name = single(path, "info.environment_info.domain_name")
    if not isinstance(name, str) or not name:
        raise InputError(f"tau2 {path}: info.environment_info.domain_name is missing; expected a tau2 results file")
    return name


def _trajectory(raw: Any, domain: str, source: str, where: str, threshold: float) -> Trajectory:
    simulation = check(Simulation, raw, where)
    verdict = _verdict(simulation, where, threshold)
    task = as_id(simulation.task_id, f"{where}: task_id")
    return Trajectory("tau2", domain, task, simulation.trial or 0, verdict, simulation.messages or [], source)


def _verdict(simulation: Simulation, where: str, threshold: float) -> Verdict:
    end = simulation.termination_reason or ""
    info = simulation.reward_info
    if info is None or end in INFRASTRUCTURE_ENDS:
        detail = simulation.info or {}
        error = str(detail.get("error") or detail.get("error_type") or "no reward was computed")
        return Verdict(
            "infrastructure", reason=f"{end or 'no reward_info'}: {error[:REASON_CHARS]}", fault="environment"
        )
    if info.reward is None:
        raise InputError(f"{where}: reward_info.reward is missing; a missing reward is not a zero")
    verdict = by_reward(info.reward, threshold, "; ".join([*_components(info, end), *_out_of_scope(simulation)]))
    if verdict.outcome == "failed" and (end in SIMULATOR_ENDS or _critical_user_error(simulation)):
        return Verdict("infrastructure", info.reward, f"user simulator: {verdict.reason}", fault="user_simulator")
    return verdict


def _critical_user_error(simulation: Simulation) -> bool:
    """tau2's own review blames the user simulator for something that decided the episode."""
    reviews = (simulation.user_only_review, simulation.review)
    return any(r is not None and r.get("critical_user_error") is True for r in reviews)


def _out_of_scope(simulation: Simulation) -> list[str]:
    """The simulated user says so when its script does not tell it how to go on; whose fault it is, a reader judges."""
    texts = [
        text_of(m.get("content")) for m in simulation.messages or [] if isinstance(m, dict) and m.get("role") == "user"
    ]
    return ["the user simulator went out of its scope"] if any(OUT_OF_SCOPE in t for t in texts) else []


def _components(info: RewardInfo, end: str) -> list[str]:
    """Why the reward is below 1: the real components, the ones of the basis first."""
    found = [] if end in NORMAL_ENDS or not end else [f"ended by {end}"]
    basis = info.reward_basis
    breakdown = info.reward_breakdown or {}
    low = [f"{k}={v:g}" for k, v in breakdown.items() if isinstance(v, int | float) and v < 1]
    if low:
        found.append(f"low components {', '.join(low)}")
    if (basis is None or "DB" in basis) and info.db_check and info.db_check.get("db_match") is False:
        found.append("final database differs from the expected one")
    for checks, passed, label in (
        (info.action_checks, "action_match", "expected action not made"),
        (info.env_assertions, "met", "assertion on the environment not met"),
        (info.communicate_checks, "met", "not communicated"),
        (info.nl_assertions, "met", "statement not true"),
    ):
        found += [f"{label}: {_subject(c)}" for c in checks or [] if c.get(passed) is False]
    note = (info.info or {}).get("note")
    if isinstance(note, str) and not found:
        found.append(note[:REASON_CHARS])
    return found


def _subject(checked: Json) -> str:
    """What a check was about: the action with its arguments, the assertion, the text."""
    action = checked.get("action") or checked.get("env_assertion")
    if isinstance(action, dict):
        name = action.get("name") or action.get("func_name")
        text = f"{name}({json.dumps(action.get('arguments') or {}, ensure_ascii=False)})"
    else:
        text = str(checked.get("info") or checked.get("nl_assertion") or checked.get("assertion") or "?")
    return text[:REASON_CHARS]
