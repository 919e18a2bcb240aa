"""ToolSandbox: result_summary.json, with trajectories/<scenario>/conversation.json beside it.

There is no pass/fail field: the similarity is a float (correct runs often score 0.8-0.95 because part of it is
ROUGE), so what counts as passed is ``--pass-threshold``. A scenario that raised has similarity 0 and is
infrastructure.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictStr

from pipeline.files import InputError, check
from pipeline.readers.stream import items, single
from pipeline.readers.trajectory import Trajectory, Verdict, by_reward

Similarity = Annotated[float, Field(allow_inf_nan=False, strict=True)]


class Scenario(BaseModel):
    model_config = ConfigDict(extra="ignore")
    name: StrictStr = Field(min_length=1)
    similarity: Similarity
    milestone_similarity: Similarity | None = None
    minefield_similarity: Similarity | None = None
    exception_type: StrictStr | None = None
    traceback: StrictStr | None = None


def read(path: Path, threshold: float) -> Iterator[Trajectory]:
    """The scenarios of a run."""
    for n, raw in enumerate(items(path, "per_scenario_results.item")):
        scenario = check(Scenario, raw, f"ToolSandbox {path}: scenario {n}")
        if Path(scenario.name).name != scenario.name or scenario.name in (".", ".."):
            raise InputError(f"ToolSandbox {path}: scenario name {scenario.name!r} is not a folder name")
        conversation = path.parent / "trajectories" / scenario.name / "conversation.json"
        messages = single(conversation, "") if conversation.is_file() else []
        if not isinstance(messages, list):
            raise InputError(f"ToolSandbox {conversation}: expected a list of messages")
        yield Trajectory(
            "toolsandbox", "toolsandbox", scenario.name, 0, _verdict(scenario, threshold), messages, str(path)
        )


def _verdict(scenario: Scenario, threshold: float) -> Verdict:
    if scenario.exception_type or scenario.traceback:
        return Verdict("infrastructure", reason=f"raised {scenario.exception_type}", fault="environment")
    reasons = [f"similarity {scenario.similarity:.3f}"]
    if scenario.milestone_similarity is not None:
        reasons.append(f"milestones {scenario.milestone_similarity:.3f}")
    if scenario.minefield_similarity:
        reasons.append(f"minefields touched {scenario.minefield_similarity:.3f}")
    return by_reward(scenario.similarity, threshold, "; ".join(reasons))
