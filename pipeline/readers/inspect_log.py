"""Inspect logs: .json, and .eval (a zip with header.json and samples/*.json)."""

from __future__ import annotations

import contextlib
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from pipeline.files import InputError, check, parse_json
from pipeline.readers.stream import items, single
from pipeline.readers.trajectory import NO_VERDICT, Trajectory, Verdict, as_id, by_reward

LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # correct, partial, incorrect, no answer


class Sample(BaseModel):
    model_config = ConfigDict(extra="ignore")
    id: StrictInt | StrictStr
    epoch: StrictInt = Field(default=1, ge=1)
    messages: list[Any] = []
    scores: dict[StrictStr, dict[StrictStr, Any]] | None = None
    score: dict[StrictStr, Any] | None = None
    error: dict[StrictStr, Any] | None = None
    limit: dict[StrictStr, Any] | None = None


def read(path: Path, threshold: float) -> Iterator[Trajectory]:
    """The samples of a log; trial = epoch - 1."""
    with _zip_faults(path):
        if path.suffix == ".eval":
            yield from _read_zip(path, threshold)
            return
        task = single(path, "eval.task")
        for n, raw in enumerate(items(path, "samples.item")):
            yield _trajectory(raw, task, path, f"Inspect {path}: sample {n}", threshold)


@contextlib.contextmanager
def _zip_faults(path: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        raise InputError(
            f"Inspect {path}: cannot be unpacked ({error}); convert it with `inspect log convert`"
        ) from None


def _read_zip(path: Path, threshold: float) -> Iterator[Trajectory]:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        task = None
        if "header.json" in names:
            header = _member(archive, "header.json", path)
            task = header.get("eval", {}).get("task") if isinstance(header, dict) else None
        for name in sorted(n for n in names if n.startswith("samples/") and n.endswith(".json")):
            yield _trajectory(_member(archive, name, path), task, path, f"Inspect {path}: {name}", threshold)


def _member(archive: zipfile.ZipFile, name: str, path: Path) -> Any:
    try:
        return parse_json(archive.read(name).decode("utf-8-sig"), f"Inspect {path}: {name}")
    except UnicodeDecodeError as error:
        raise InputError(f"Inspect {path}: {name}: not UTF-8 (byte {error.start})") from None


def _trajectory(raw: Any, task: Any, path: Path, where: str, threshold: float) -> Trajectory:
    sample = check(Sample, raw, where)
    domain = task if isinstance(task, str) and task else "inspect"
    name = as_id(sample.id, f"{where}: id")
    verdict = _verdict(sample, threshold)
    return Trajectory("inspect", domain, name, sample.epoch - 1, verdict, sample.messages, str(path))


def _verdict(sample: Sample, threshold: float) -> Verdict:
    if sample.error is not None:
        text = str(sample.error.get("message", "error"))
        return Verdict("infrastructure", reason=text[:160], fault="environment")
    scores = sample.scores or ({"score": sample.score} if sample.score else {})
    for scorer, score in scores.items():  # the first scorer is the task's main one
        value = _number(score.get("value"))
        if value is None:
            return Verdict("unknown", reason=f"{scorer}: value {score.get('value')!r:.60} is not a letter or a number")
        explanation = score.get("explanation")
        limit = f"; stopped by the {sample.limit.get('type')} limit" if sample.limit else ""
        text = f": {explanation[:120]}" if isinstance(explanation, str) and explanation else ""
        return by_reward(value, threshold, f"{scorer} {value:g}{text}{limit}")
    return NO_VERDICT


def _number(value: Any) -> float | None:
    """A letter, a bool or a finite number as a reward."""
    if isinstance(value, str):
        return LETTERS.get(value.strip().upper())
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    return None
