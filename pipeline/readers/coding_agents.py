"""Trajectories of mini-swe-agent (1.x, 2.x) and SWE-agent (0.x, 1.x). They hold no verdict; ``swebench`` joins it.

How the agent stopped is known, though: an exception of the model's server or of the container is infrastructure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictStr

from pipeline.files import InputError, check
from pipeline.readers.stream import describe, single
from pipeline.readers.swebench import repository
from pipeline.readers.trajectory import Trajectory, Verdict, as_id

REASON_CHARS = 160

# Ways to stop that are the agent's own; every other one that is not a submission is an exception of what is around it.
AGENT_ENDS = re.compile(
    r"submitted|limits?exceeded|timeexceeded|contextwindowexceedederror|.*formaterror|userinterruption|exit_(cost|context|format|forfeit|total_cost)"
    r"|exit_total_execution_time|exit_command_timeout|submitted \(.*\)|skipped|early_exit|max_?steps?|",
    re.IGNORECASE,
)


class Info(BaseModel):
    model_config = ConfigDict(extra="ignore")
    exit_status: StrictStr | None = None
    submission: StrictStr | None = None
    exception_str: StrictStr | None = None


class MiniFile(BaseModel):
    model_config = ConfigDict(extra="ignore")
    info: Info = Info()
    messages: list[Any]
    instance_id: StrictStr | None = None


class SweAgentFile(BaseModel):
    model_config = ConfigDict(extra="ignore")
    info: Info = Info()
    history: list[Any] | None = None
    trajectory: list[Any] | None = None
    replay_config: Any = None
    instance_id: StrictStr | None = None


def _verdict(info: Info) -> Verdict:
    status = info.exit_status or ""
    if AGENT_ENDS.fullmatch(status):
        if status and not (info.submission or "").strip():
            return Verdict("failed", 0.0, f"ended by {status} without a patch")
        return Verdict(
            "unknown", reason=f"{status or 'no exit status'}; no verdict in the input, add the harness report"
        )
    detail = f": {info.exception_str[:REASON_CHARS]}" if info.exception_str else ""
    return Verdict("infrastructure", reason=f"{status}{detail}", fault="environment")


def _stem(path: Path) -> str:
    return path.name.removesuffix(".json").removesuffix(".traj")


def read_mini(path: Path, _threshold: float) -> Iterator[Trajectory]:
    """One mini-swe-agent trajectory."""
    raw = single(path, "")
    file = check(MiniFile, raw, f"mini-swe-agent {path}")
    instance = as_id(file.instance_id or _stem(path), f"mini-swe-agent {path}: instance_id")
    yield Trajectory("swebench", repository(instance), instance, 0, _verdict(file.info), file.messages, str(path))


def read_swe_agent(path: Path, _threshold: float) -> Iterator[Trajectory]:
    """One SWE-agent trajectory. Demonstrations (a whole foreign trajectory in one message) are left out."""
    where = f"SWE-agent {path}"
    file = check(SweAgentFile, single(path, ""), where)
    if file.history:
        messages = [None if isinstance(m, dict) and m.get("is_demo") else m for m in file.history]
    elif file.trajectory is not None:
        messages = list(_from_steps(file.trajectory, where))
    else:
        raise InputError(f"{where}: has neither history nor trajectory")
    instance = file.instance_id or _problem_id(file.replay_config) or _stem(path)
    name = as_id(instance, f"{where}: id")
    yield Trajectory("swebench", repository(name), name, 0, _verdict(file.info), messages, str(path))


def _problem_id(config: Any) -> str | None:
    """``replay_config.problem_statement.id``; the config is JSON inside a string in some versions."""
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except (ValueError, RecursionError):
            return None
    problem = config.get("problem_statement") if isinstance(config, dict) else None
    name = problem.get("id") if isinstance(problem, dict) else None
    return name if isinstance(name, str) and name else None


def _from_steps(steps: list[Any], where: str) -> Iterator[dict[str, Any]]:
    for n, step in enumerate(steps):
        if not isinstance(step, dict):
            raise InputError(f"{where}: step {n}: expected an object, found {describe(step)}")
        yield {"role": "assistant", "content": step.get("response") or step.get("action")}
        yield {"role": "tool", "content": step.get("observation")}
