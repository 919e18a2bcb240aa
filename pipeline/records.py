"""The one schema of stage 1's input: a trajectory with its outcome and compacted messages, whatever it came from.

A summaries file is ``{"schema_version": 1, "trajectories": [record, one per line], "info": {...}}``. It is written
and read as a stream. A blind file has the same shape without outcome, reward and reason: what a labeller may see.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from pipeline.files import InputError, atomic_path, check
from pipeline.readers.stream import items, single

Outcome = Literal["passed", "failed", "infrastructure", "unknown"]
SPLIT_PARTS = ("mine", "score")


class Call(BaseModel):
    """A tool call: its name and its arguments as text, perhaps cut."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: StrictStr
    arguments: StrictStr


class Message(BaseModel):
    """A message; ``index`` is its place in the original conversation, which evidence cites."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    index: StrictInt = Field(ge=0)
    role: StrictStr
    content: StrictStr = ""
    calls: tuple[Call, ...] = ()
    cut_chars: StrictInt = Field(default=0, ge=0)

    def text(self) -> str:
        """What a labeller sees of the message and may quote: its content and its calls."""
        lines = [self.content] if self.content else []
        return "\n".join([*lines, *(f"call {c.name}({c.arguments})" for c in self.calls)])


class Record(BaseModel):
    """One trajectory.

    ``outcome``: ``passed`` (D+), ``failed`` (D-), ``infrastructure`` (not the agent's fault, outside every rate;
    ``fault`` says whose it was) or ``unknown`` (no verdict in the input, outside every rate). Blind records have None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: StrictStr = Field(min_length=1)
    benchmark: StrictStr
    domain: StrictStr
    task_id: StrictStr
    trial: StrictInt = Field(ge=0)
    split: Literal["mine", "score"] | None = None
    outcome: Outcome | None = None
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    fault: StrictStr = ""
    reason: StrictStr = ""
    messages: tuple[Message, ...] = ()
    cut_chars: StrictInt = Field(default=0, ge=0)
    redacted: StrictInt = Field(default=0, ge=0)
    source: StrictStr = ""

    def blind(self) -> Record:
        """The record without anything that tells how it ended."""
        return self.model_copy(update={"outcome": None, "reward": None, "fault": "", "reason": "", "source": ""})

    def compact(self) -> dict[str, Any]:
        """As JSON, without the fields that are empty."""
        return self.model_dump(exclude_defaults=True, mode="json") | {"trial": self.trial, "domain": self.domain}


class SummaryWriter:
    """Writes a summaries file record by record."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._file.write('{"schema_version": 1, "trajectories": [')
        self._count = 0

    def write(self, record: Record) -> None:
        line = json.dumps(record.compact(), ensure_ascii=False, allow_nan=False)
        self._file.write(f"{',' if self._count else ''}\n{line}")
        self._count += 1

    def close(self, info: dict[str, Any]) -> None:
        self._file.write(f'\n], "info": {json.dumps(info, ensure_ascii=False, indent=1, allow_nan=False)}}}\n')
        self._file.close()

    def abandon(self) -> None:
        self._file.close()


@contextlib.contextmanager
def summary_writer(path: Path, info: dict[str, Any]) -> Iterator[SummaryWriter]:
    """A writer whose file appears at ``path`` only when the block succeeds; ``info`` is read at its end."""
    with atomic_path(path) as temporary:
        writer = SummaryWriter(temporary)
        try:
            yield writer
        except BaseException:
            writer.abandon()
            raise
        writer.close(info)


def read_summaries(path: str | Path) -> Iterator[Record]:
    """The records of a summaries file (or of a blind one), one at a time.

    Raises:
        InputError: not a summaries file, or a record that violates the schema.
    """
    version = single(path, "schema_version")
    if version != 1:
        raise InputError(f"summaries {path}: expected schema_version 1, found {version!r}; write it with _summarize.py")
    for n, raw in enumerate(items(path, "trajectories.item")):
        yield check(Record, raw, f"summaries {path}: trajectory {n}")


def read_info(path: str | Path) -> dict[str, Any]:
    """The ``info`` of a summaries file: counts, limits, split."""
    info = single(path, "info")
    if not isinstance(info, dict):
        raise InputError(f"summaries {path}: has no info object; write it again with _summarize.py")
    return info
