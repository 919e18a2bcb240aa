"""tau-bench: a list of episodes. A crashed episode has ``info.error`` and a reward of 0 that means nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from pipeline.files import check
from pipeline.readers.stream import items
from pipeline.readers.trajectory import Trajectory, Verdict, as_id, by_reward

REASON_CHARS = 160


class Episode(BaseModel):
    model_config = ConfigDict(extra="ignore")
    task_id: StrictInt | StrictStr
    trial: StrictInt = Field(default=0, ge=0)
    reward: Annotated[float, Field(allow_inf_nan=False, strict=True)]
    traj: list[Any]
    info: dict[str, Any] = {}


def read(path: Path, threshold: float) -> Iterator[Trajectory]:
    """The episodes of a file; the domain is in the file's name only (``gpt-4o-airline.json``)."""
    named = re.search(r"airline|retail|telecom", path.name)
    domain = named.group() if named else "tau-bench"
    for n, raw in enumerate(items(path, "item")):
        where = f"tau-bench {path}: episode {n}"
        episode = check(Episode, raw, where)
        task = as_id(episode.task_id, f"{where}: task_id")
        verdict = _verdict(episode, threshold)
        yield Trajectory("tau-bench", domain, task, episode.trial, verdict, episode.traj, str(path))


def _verdict(episode: Episode, threshold: float) -> Verdict:
    error = episode.info.get("error")
    if error is not None:
        return Verdict("infrastructure", reason=str(error)[:REASON_CHARS], fault="environment")
    return by_reward(episode.reward, threshold, "; ".join(_components(episode.info)))


def _components(info: dict[str, Any]) -> list[str]:
    """``info.reward_info.info`` is one of two shapes: what the data hash said, or which outputs were missing."""
    rewards = info.get("reward_info")
    detail = rewards.get("info") if isinstance(rewards, dict) else None
    if not isinstance(detail, dict):
        return []
    found = []
    if detail.get("r_actions") in (0, 0.0, False):
        found.append("final database differs from the expected one")
    outputs = detail.get("outputs")
    if isinstance(outputs, dict):
        found += [f"not communicated: {k}"[:REASON_CHARS] for k, said in outputs.items() if said is False]
    expected = info.get("task", {}).get("actions") if isinstance(info.get("task"), dict) else None
    if found and isinstance(expected, list):
        names = [str(a.get("name")) for a in expected if isinstance(a, dict)]
        found.append(f"expected actions: {', '.join(names) or 'none'}"[:REASON_CHARS])
    return found
