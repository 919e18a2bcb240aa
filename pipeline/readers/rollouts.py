"""Our own rollouts: ``{"info": {...}, "simulations": [...]}`` as ``train.collect_rollouts`` writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import StrictStr

from pipeline.files import InputError, check
from pipeline.readers.stream import items, single
from pipeline.readers.trajectory import Trajectory, Verdict, by_reward
from pipeline.rollout_schema import RolloutEntry


class Entry(RolloutEntry):
    messages: list[Any]
    env: StrictStr | None = None


def named_environment(info: Any) -> str | None:
    for key in ("env", "environment", "game"):
        if isinstance(info, dict) and isinstance(info.get(key), str) and info[key]:
            return str(info[key])
    return None


def environment_of(path: Path) -> str:
    """The environment's name from ``info``, else from the file's name."""
    return named_environment(single(path, "info")) or path.stem


def recorded_environments(path: Path) -> set[str]:
    """The environments that the file says it is of: in ``info``, in the settings of ``train.collect_rollouts`` there,
    and in single rollouts.

    Ids do not have the one in the settings: those of files that are labelled already would change.
    """
    info = single(path, "info")
    named = [named_environment(info), named_environment(info.get("settings")) if isinstance(info, dict) else None]
    named += [env for env in items(path, "simulations.item.env") if isinstance(env, str)]
    return {name for name in named if name}


def read(path: Path, threshold: float) -> Iterator[Trajectory]:
    """The rollouts of a file; trial = sample_idx. A hinted rollout's task ends in ``+hint``."""
    domain = environment_of(path)
    found = False
    for n, raw in enumerate(items(path, "simulations.item")):
        found = True
        where = f"rollouts {path}: simulation {n}"
        entry = check(Entry, raw, where)
        task = f"{entry.task_id}+hint" if entry.hinted else entry.task_id
        verdict = _verdict(entry, threshold)
        yield Trajectory("rollouts", entry.env or domain, task, entry.sample_idx, verdict, entry.messages, str(path))
    if not found:
        raise InputError(f"rollouts {path}: simulations is empty; collect rollouts first")


def _verdict(entry: Entry, threshold: float) -> Verdict:
    if entry.outcome == "error":
        return Verdict("infrastructure", reason=str(entry.error_kind), fault=str(entry.error_kind))
    assert entry.reward_info is not None and entry.reward_info.reward is not None  # the schema says so for scored ones
    reasons = [f"reward {entry.reward_info.reward:g}"]
    if entry.finish_reason and entry.finish_reason != "done":
        reasons.append(f"ended by {entry.finish_reason}")
    if entry.truncated_turns:
        reasons.append(f"{entry.truncated_turns} turns cut at the token limit")
    if entry.invalid_calls:
        reasons.append(f"{entry.invalid_calls} invalid tool calls")
    return by_reward(entry.reward_info.reward, threshold, "; ".join(reasons))
