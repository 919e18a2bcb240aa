"""The rollouts file as its readers see it: entries with three-valued outcomes, checked before any arithmetic.

    {"info": {...}, "simulations": [{"task_id": "7", "sample_idx": 0, "outcome": "scored",
      "reward_info": {"reward": 0.5}, "finish_reason": "done", "hinted": false, "messages": [...]}]}

Files without the fields that we added (``outcome``, ``finish_reason``, ``hinted``) are read too: an entry with a reward
is scored. An entry without a reward and without an error is a fault of the file, never a zero.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pipeline.files import InputError, PathLike, check, read_json

TRUNCATED_REASONS = frozenset({"length", "context"})

Reward = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]


class RewardInfo(BaseModel):
    model_config = ConfigDict(extra="ignore")
    reward: Reward | None = None


class RolloutEntry(BaseModel):
    """One element of ``simulations``. Messages are not looked at here."""

    model_config = ConfigDict(extra="ignore")
    task_id: str
    sample_idx: Annotated[int, Field(ge=0, strict=True)] = 0
    outcome: Literal["scored", "error"] = "scored"
    error_kind: str | None = None
    reward_info: RewardInfo | None = None
    finish_reason: str | None = None
    truncated_turns: Annotated[int, Field(ge=0)] = 0
    invalid_calls: Annotated[int, Field(ge=0)] = 0
    turns: Annotated[int, Field(ge=0)] | None = None
    hinted: bool = False

    @field_validator("task_id", mode="before")
    @classmethod
    def _id_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _three_valued(self) -> RolloutEntry:
        reward = self.reward_info.reward if self.reward_info is not None else None
        if self.outcome == "scored" and reward is None:
            raise ValueError('a scored entry needs reward_info.reward; an entry without one is outcome "error"')
        if self.outcome == "error" and not self.error_kind:
            raise ValueError("an entry with outcome error needs error_kind")
        return self


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One rollout. ``reward`` is None exactly when it failed for a reason that is not the policy's."""

    task_id: str
    sample_idx: int
    reward: float | None
    error_kind: str | None
    truncated: bool
    out_of_turns: bool
    invalid_calls: int
    hinted: bool


@dataclasses.dataclass(frozen=True)
class RolloutFile:
    """A checked rollouts file: ``info`` as it stands, the rollouts, and the hash of the bytes that were read."""

    info: dict[str, Any]
    rollouts: tuple[Rollout, ...]
    sha256: str


def load_rollouts(path: PathLike) -> RolloutFile:
    """Read and check a rollouts file.

    Raises:
        InputError: not JSON, wrong shape, a reward outside [0, 1], no entries, or the same sample twice.
    """
    data = read_json(path, "rollouts file")
    if not isinstance(data, dict) or not isinstance(data.get("simulations"), list):
        found = f"keys {sorted(data)[:5]}" if isinstance(data, dict) else type(data).__name__
        raise InputError(
            f'rollouts file {path}: expected an object with "simulations", found {found}; collect it again'
        )
    if not data["simulations"]:
        raise InputError(f"rollouts file {path}: simulations is empty; collect rollouts first")
    info = data.get("info", {})
    if not isinstance(info, dict):
        raise InputError(f"rollouts file {path}: info: expected an object, found {type(info).__name__}")
    entries = (
        check(RolloutEntry, raw, f"rollouts file {path}: simulations[{i}]") for i, raw in enumerate(data["simulations"])
    )
    return RolloutFile(info, tuple(_distinct(entries, path)), hashlib.sha256(Path(path).read_bytes()).hexdigest())


def _distinct(entries: Iterable[RolloutEntry], path: PathLike) -> Iterable[Rollout]:
    seen: set[tuple[str, bool, int]] = set()
    for entry in entries:
        key = (entry.task_id, entry.hinted, entry.sample_idx)
        if key in seen:
            raise InputError(
                f"rollouts file {path}: task {entry.task_id} sample {entry.sample_idx} appears twice; "
                "every (task_id, sample_idx) must be there once"
            )
        seen.add(key)
        scored = entry.outcome == "scored"
        yield Rollout(
            task_id=entry.task_id,
            sample_idx=entry.sample_idx,
            reward=entry.reward_info.reward if scored and entry.reward_info is not None else None,
            error_kind=None if scored else entry.error_kind,
            truncated=entry.finish_reason in TRUNCATED_REASONS or entry.truncated_turns > 0,
            out_of_turns=entry.finish_reason == "max_steps",
            invalid_calls=entry.invalid_calls,
            hinted=entry.hinted,
        )
