"""Which format a file has, told from its first keys, never from its name alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import ijson

from pipeline.readers.stream import json_lines, open_json

Format = Literal[
    "tau2",
    "tau2_dir",
    "tau2_rollout",
    "rollouts",
    "tau-bench",
    "mini-swe-agent",
    "swe-agent",
    "swebench-report",
    "swebench-flat-report",
    "swebench-summary",
    "swebench-preds",
    "toolsandbox",
    "inspect",
    "openai",
]

FAMILIES: dict[str, tuple[Format, ...]] = {
    "tau2": ("tau2", "tau2_dir", "tau2_rollout"),
    "tau-bench": ("tau-bench",),
    "swebench": (
        "mini-swe-agent",
        "swe-agent",
        "swebench-report",
        "swebench-flat-report",
        "swebench-summary",
        "swebench-preds",
    ),
    "toolsandbox": ("toolsandbox",),
    "inspect": ("inspect",),
    "openai": ("openai",),
    "rollouts": ("rollouts",),
}


@dataclasses.dataclass
class Shape:
    """The outline of a JSON file: kind of the top level, its keys, and the keys one level down.

    ``inner`` holds, for each top-level key (or ``""`` for a top-level array), the keys of its value when that is an
    object, of its first element when that is an array of objects.
    """

    kind: Literal["object", "array", "other"] = "other"
    keys: list[str] = dataclasses.field(default_factory=list)
    inner: dict[str, set[str]] = dataclasses.field(default_factory=dict)


MAX_KEYS = 200  # a preds dictionary has thousands of keys of one kind; the first ones tell


def outline(path: Path) -> Shape:
    """The outline of a file; reading stops as soon as the format can be told."""
    if path.suffix in (".jsonl", ".ndjson"):
        first = next(json_lines(path), (0, None))[1]
        shape = Shape("array")
        shape.inner[""] = set(first) if isinstance(first, dict) else set()
        return shape
    shape = Shape()
    depth, key, element_depth = 0, "", 1
    complete: set[str] = set()  # top-level keys whose first inner object was seen
    with open_json(path) as file:
        for event, value in ijson.basic_parse(file, use_float=True):
            if event in ("start_map", "start_array"):
                if depth == 0:
                    shape.kind = "object" if event == "start_map" else "array"
                elif depth == 1 and shape.kind == "object":
                    element_depth = 1 if event == "start_map" else 2  # depth outside the object that is looked at
                depth += 1
            elif event in ("end_map", "end_array"):
                depth -= 1
                if event == "end_map" and depth == element_depth:
                    complete.add(key)
                    if shape.kind == "array" or key == "simulations":
                        break
            elif event == "map_key":
                if shape.kind == "object" and depth == 1:
                    key = value
                    shape.keys.append(value)
                    if len(shape.keys) >= MAX_KEYS:
                        break
                elif depth == element_depth + 1 and key not in complete:
                    shape.inner.setdefault(key, set()).add(value)
    return shape


SUMMARY_KEYS = {"resolved_ids", "resolved", "unresolved_ids", "error_ids", "completed_ids", "ids_resolved"}


def detect(path: Path) -> Format | None:
    """The format of ``path``, None when it is none that we know.

    Raises:
        InputError: the file cannot be read or is not JSON.
    """
    if path.is_dir():
        return "tau2_dir" if (path / "results.json").is_file() and (path / "simulations").is_dir() else None
    if path.suffix == ".eval":
        return "inspect"
    shape = outline(path)
    if shape.kind == "array":
        return _of_array(shape.inner.get("", set()), path)
    if shape.kind == "object":
        return _of_object(set(shape.keys), shape)
    return None


def _of_array(first: set[str], path: Path) -> Format | None:
    if {"traj", "task_id"} <= first or {"traj", "reward"} <= first:
        return "tau-bench"
    if "model_patch" in first:
        return "swebench-preds"
    if "messages" in first:
        return "openai"
    if "role" in first and path.name == "conversation.json":
        return None  # ToolSandbox: read through its result_summary.json
    return None


def _of_object(keys: set[str], shape: Shape) -> Format | None:
    if "simulations" in keys:
        return "rollouts" if "sample_idx" in shape.inner.get("simulations", set()) else "tau2"
    rules: list[tuple[bool, Format]] = [
        ("simulation_index" in keys and "tasks" in keys, "tau2_dir"),
        ({"result", "task", "config"} <= keys and "reward" in keys, "tau2_rollout"),
        ("per_scenario_results" in keys, "toolsandbox"),
        ({"eval", "status"} <= keys, "inspect"),
        ("history" in keys or "trajectory" in keys, "swe-agent"),
        ("trajectory_format" in keys or {"messages", "info"} <= keys, "mini-swe-agent"),
        ("messages" in keys, "openai"),
        ("tests_status" in keys or "patch_successfully_applied" in keys, "swebench-flat-report"),
        (bool(keys & SUMMARY_KEYS), "swebench-summary"),
    ]
    for matches, name in rules:
        if matches:
            return name
    inner = [shape.inner.get(k, set()) for k in shape.keys]
    if inner and all("model_patch" in i for i in inner if i):
        return "swebench-preds" if any(inner) else None
    if inner and any("resolved" in i or "patch_exists" in i for i in inner):
        return "swebench-report"
    return None
