"""``candidate_capabilities.json``: what discovery proposes and labelling works from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, field_validator

from pipeline.files import InputError, check, read_json
from pipeline.labels import NAME


class Example(BaseModel):
    """An example trajectory with its outcome, as ``reward`` or as ``resolved``, and what it shows."""

    model_config = ConfigDict(extra="forbid")
    task_id: StrictStr
    reward: StrictFloat | StrictInt | None = None
    resolved: StrictBool | None = None
    note: StrictStr = ""


class CandidateCapability(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: StrictStr
    description: StrictStr = Field(min_length=1)
    example_trajectories: list[Example] = []

    @field_validator("name")
    @classmethod
    def _snake_case(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError("expected a snake_case name of 2-5 words (a-z, 0-9, _)")
        return name


class CandidateFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    schema_version: StrictInt = 1
    candidates: list[CandidateCapability] = Field(min_length=1)


def check_candidates(data: Any, where: str) -> CandidateFile:
    """A checked candidates object.

    Raises:
        InputError: schema violation or a name that appears twice.
    """
    parsed = check(CandidateFile, data, where)
    names = [c.name for c in parsed.candidates]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{where}: candidate {name!r} appears twice; merge the two")
    return parsed


def load_candidates(path: str | Path) -> CandidateFile:
    """``check_candidates`` of a file."""
    return check_candidates(read_json(path, "candidates"), f"candidates {path}")
