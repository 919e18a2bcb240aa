"""OpenAI messages: JSONL or a JSON array with ``messages`` in each row, and a verdict under one of the usual names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.files import InputError
from pipeline.readers.sniff import outline
from pipeline.readers.stream import describe, items, json_lines, single
from pipeline.readers.trajectory import NO_VERDICT, Trajectory, Verdict, as_id, by_reward

ID_KEYS = ("id", "task_id", "instance_id", "row_id", "rollout_id")
TRUTH_KEYS = ("resolved", "success", "passed", "correct")
REWARD_KEYS = ("reward", "score")


def read(path: Path, threshold: float) -> Iterator[Trajectory]:
    """The rows of a file. Rows that only repeat the beginning of the next row (snapshots while it grew) are dropped."""
    held: tuple[int, dict[str, Any]] | None = None
    for number, row in _rows(path):
        if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
            raise InputError(f"messages {path} row {number}: expected an object with messages, found {describe(row)}")
        if held is not None and not _snapshot(held[1], row):
            yield _trajectory(held[1], held[0], path, threshold)
        held = (number, row)
    if held is not None:
        yield _trajectory(held[1], held[0], path, threshold)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix in (".jsonl", ".ndjson"):
        yield from json_lines(path)
    elif outline(path).kind == "array":
        yield from enumerate(items(path, "item"), 1)
    else:
        yield 1, single(path, "")


def _snapshot(earlier: dict[str, Any], later: dict[str, Any]) -> bool:
    """``earlier`` has no verdict of its own, the same id, and is a proper beginning of ``later``."""
    before, after = earlier["messages"], later["messages"]
    same_id = _identifier(earlier) == _identifier(later)
    no_verdict = _verdict(earlier, 1.0) is NO_VERDICT
    return same_id and no_verdict and 0 < len(before) < len(after) and after[: len(before)] == before


def _places(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row, and the objects in it where verdicts and ids live."""
    nested = [row.get(k) for k in ("evaluation_result", "input_metadata", "reward_info", "metadata", "info")]
    return [row, *(n for n in nested if isinstance(n, dict))]


def _identifier(row: dict[str, Any]) -> Any:
    for place in _places(row):
        for key in ID_KEYS:
            if isinstance(place.get(key), str | int) and not isinstance(place[key], bool) and place[key] != "":
                return place[key]
    return None


def _verdict(row: dict[str, Any], threshold: float) -> Verdict:
    if row.get("error"):
        return Verdict("infrastructure", reason=str(row["error"])[:160], fault="environment")
    for place in _places(row):
        if place.get("is_score_valid") is False:
            return Verdict("infrastructure", reason="the score is marked as not valid", fault="harness")
        reason = place.get("reason")
        text = reason[:160] if isinstance(reason, str) else ""
        for key in TRUTH_KEYS:
            if isinstance(place.get(key), bool):
                return by_reward(float(place[key]), 1.0, text or f"{key} is false")
        for key in REWARD_KEYS:
            value = place.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                return by_reward(float(value), threshold, text or f"{key} {value:g}")
    return NO_VERDICT


def _trajectory(row: dict[str, Any], number: int, path: Path, threshold: float) -> Trajectory:
    where = f"messages {path} row {number}"
    identifier = _identifier(row)
    task = as_id(identifier, where) if identifier is not None else f"{path.stem}-{number}"
    trial = row.get("trial", 0)
    if isinstance(trial, bool) or not isinstance(trial, int) or trial < 0:
        raise InputError(f"{where}: trial: expected an integer >= 0, found {trial!r:.40}")
    domain = as_id(row["domain"], f"{where}: domain") if row.get("domain") else ""
    return Trajectory("openai", domain, task, trial, _verdict(row, threshold), row["messages"], str(path))
