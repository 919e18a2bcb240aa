"""Strategies for damaged result files of every format, and the property that readers must have."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from pipeline.files import InputError
from pipeline.readers.plan import make_plan, trajectories
from pipeline.readers.trajectory import Limits
from pipeline.summarize import Summary, summarize

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be good."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": "42", "tool_call_id": "1"},
]
SIMULATION: dict[str, Any] = {
    "id": "s",
    "task_id": "1",
    "trial": 0,
    "termination_reason": "user_stop",
    "reward_info": {
        "reward": 0.0,
        "reward_basis": ["DB"],
        "reward_breakdown": {"DB": 0.0},
        "db_check": {"db_match": False},
        "action_checks": [{"action": {"name": "f", "arguments": {}}, "action_match": False}],
        "communicate_checks": [{"info": "x", "met": False}],
        "env_assertions": [{"env_assertion": {"func_name": "g", "arguments": {}}, "met": False}],
        "nl_assertions": [{"nl_assertion": "x", "met": False}],
        "info": {"note": "n"},
    },
    "messages": MESSAGES,
    "info": None,
    "review": {"critical_user_error": False},
}
INFO: dict[str, Any] = {"environment_info": {"domain_name": "shop"}}
TESTS: dict[str, Any] = {
    "FAIL_TO_PASS": {"success": [], "failure": ["t"]},
    "PASS_TO_PASS": {"success": ["u"], "failure": []},
}
REPORT: dict[str, Any] = {
    "resolved": False,
    "patch_exists": True,
    "patch_successfully_applied": True,
    "tests_status": TESTS,
}
AGENT_INFO: dict[str, Any] = {"exit_status": "Submitted", "submission": "diff", "exception_str": "x"}

VALID: dict[str, Any] = {
    "tau2": {"info": INFO, "tasks": [], "simulations": [SIMULATION]},
    "tau2_dir": {"info": INFO, "tasks": [], "simulation_index": [{"id": "s"}]},
    "tau2_rollout": {"result": SIMULATION, "task": {}, "config": {"domain": "shop"}, "reward": 0.0},
    "rollouts": {
        "info": {"env": "desk"},
        "simulations": [
            {"task_id": "1", "sample_idx": 0, "outcome": "scored", "reward_info": {"reward": 1.0}, "messages": MESSAGES}
        ],
    },
    "tau-bench": [
        {
            "task_id": 0,
            "trial": 0,
            "reward": 0.0,
            "traj": MESSAGES,
            "info": {
                "task": {"actions": [{"name": "f"}]},
                "reward_info": {"info": {"r_actions": 0.0, "outputs": {"x": False}}},
            },
        }
    ],
    "mini-swe-agent": {"info": AGENT_INFO, "messages": MESSAGES, "trajectory_format": "x", "instance_id": "a__b-1"},
    "swe-agent": {
        "info": AGENT_INFO,
        "history": MESSAGES,
        "trajectory": [{"response": "r", "observation": "o"}],
        "replay_config": '{"problem_statement": {"id": "a__b-2"}}',
    },
    "swebench-report": {"a__b-1": REPORT},
    "swebench-flat-report": REPORT,
    "swebench-summary": {
        "resolved_ids": ["a__b-1"],
        "unresolved_ids": ["a__b-2"],
        "error_ids": [],
        "incomplete_ids": [],
    },
    "swebench-preds": [{"instance_id": "a__b-1", "model_patch": ""}],
    "toolsandbox": {"per_scenario_results": [{"name": "x", "similarity": 0.5, "exception_type": None}]},
    "inspect": {
        "version": 2,
        "status": "success",
        "eval": {"task": "quiz"},
        "samples": [{"id": 1, "epoch": 1, "messages": MESSAGES, "scores": {"m": {"value": "I", "explanation": "e"}}}],
    },
    "openai": [{"messages": MESSAGES, "id": "x", "evaluation_result": {"score": 0.0, "reason": "r"}}],
}
FORMATS = sorted(VALID)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),  # NaN and infinity too
    st.text(max_size=8),
    st.sampled_from(["", "0", "nan", "../x", "\ud800", "a\x00b", "sk-aaaaaaaaaaaaaaaaaaaa"]),
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def valid_document(name: str) -> Any:
    return copy.deepcopy(VALID[name])


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside a document."""
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _places(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            found += _places(inner, (*path, i))
    return found


@st.composite
def mutated(draw: st.DrawFn, valid: Any) -> Any:
    """A copy of ``valid`` in which one to three places were replaced, removed or doubled."""
    document = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        places = [p for p in _places(document) if p]
        if not places:
            break
        *path, last = draw(st.sampled_from(places))
        parent = document
        for key in path:
            parent = parent[key]
        action = draw(st.sampled_from(["replace", "replace", "remove", "double"]))
        if action == "remove":
            del parent[last]
        elif action == "double" and isinstance(parent, list):
            parent.insert(last, copy.deepcopy(parent[last]))
        else:
            parent[last] = draw(anything)
    return document


@st.composite
def damaged(draw: st.DrawFn, valid: Any) -> bytes:
    """The JSON text of ``valid``, cut off or with bytes overwritten."""
    raw = bytearray(json.dumps(valid).encode())
    if draw(st.booleans()):
        del raw[draw(st.integers(0, len(raw))) :]
    for _ in range(draw(st.integers(0, 4))):
        if raw:
            raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


def documents(name: str) -> st.SearchStrategy[Any]:
    """Documents of a format with one to three faults."""
    return mutated(VALID[name])


def mutated_bytes(name: str) -> st.SearchStrategy[bytes]:
    """Damaged bytes of a format."""
    return damaged(VALID[name])


def _path(folder: Path, name: str) -> Path:
    if name == "tau2_dir":
        return folder / "tau2" / "results.json"
    return folder / "a__b-9" / "report.json" if name == "swebench-flat-report" else folder / f"{name}.json"


def read_anything(folder: Path, name: str, content: Any) -> int:
    """Read ``content`` (a document or bytes) as format ``name``, as detected and as named; the number of records.

    Raises:
        Exception: whatever a reader lets out that is not an ``InputError``: the bug that is looked for.
    """
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    path = _path(folder, name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(raw)
    if name == "tau2_dir":
        shutil.rmtree(path.parent / "simulations", ignore_errors=True)
        (path.parent / "simulations").mkdir()
        (path.parent / "simulations" / "s.json").write_text(json.dumps(SIMULATION))
    family = {"tau2_dir": "tau2", "tau2_rollout": "tau2"}.get(name, name)
    family = "swebench" if "swe" in family else family
    best = 0
    for choice in (None, family):
        try:
            plan = make_plan([str(path)], choice)
            best = max(best, len(list(summarize(trajectories(plan, 1.0), Limits(), Summary()))))
        except InputError as error:
            assert str(error)
    return best
