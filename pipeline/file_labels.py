"""Labels that coding agents wrote into files: checked against the trajectories, then turned into label runs.

One file for each labelling agent::

    {"attempt": 1, "labels": {"airline:12": {"tool_use": {"label": "LACKING", "message": 7, "quote": "..."},
                                             "planning": {"label": "NA"}}}}

LACKING and PRESENT cite the message that shows it, with a verbatim quote; NA cites nothing. The agent sees no
outcome; it is joined here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, model_validator

from pipeline.candidates import CandidateFile
from pipeline.cross_check import labelable, message_texts, quote_fault
from pipeline.files import InputError, check, read_json
from pipeline.label_output import Labelled
from pipeline.labels import Evidence
from pipeline.records import Record, read_summaries

MIN_CANDIDATES = 5


class CitedLabel(BaseModel):
    """A label with its evidence."""

    model_config = ConfigDict(extra="forbid")
    label: Literal["NA", "PRESENT", "LACKING"]
    message: StrictInt | None = Field(default=None, ge=0)
    quote: StrictStr | None = None

    @model_validator(mode="after")
    def _cited(self) -> CitedLabel:
        if self.label != "NA" and (self.message is None or not (self.quote or "").strip()):
            raise ValueError(f"{self.label} needs message and quote")
        return self

    @property
    def evidence(self) -> Evidence | None:
        if self.message is None or not self.quote:
            return None
        return Evidence(message=self.message, quote=self.quote)


class LabelFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    schema_version: StrictInt = 1
    attempt: StrictInt = Field(ge=1)
    labels: dict[StrictStr, dict[StrictStr, CitedLabel]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """What labels are checked against: the text of each message, and the outcome unless the file is blind."""

    texts: dict[int, str]
    outcome: str | None
    reward: float | None


def load_subjects(path: str | Path, part: str) -> dict[str, Subject]:
    """The trajectories to label, from a summaries file (of its ``part``, when it has a split) or from a blind one.

    Raises:
        InputError: nothing in it can be labelled.
    """
    found: dict[str, Subject] = {}
    for record in read_summaries(path):
        if record.split not in (None, part) or not _wanted(record):
            continue
        found[record.id] = Subject(message_texts(record), record.outcome, record.reward)
    if not found:
        raise InputError(f"summaries {path}: holds no trajectory with an outcome and messages to label")
    return found


def _wanted(record: Record) -> bool:
    return bool(record.messages) if record.outcome is None else labelable(record)


def check_discovery(candidates: CandidateFile, subjects: dict[str, Subject], limit: int, where: str) -> None:
    """Check what discovery proposed: how many, and that the examples are real and of both outcomes.

    Raises:
        InputError: the first violation.
    """
    n = len(candidates.candidates)
    if not min(MIN_CANDIDATES, limit) <= n <= limit:
        raise InputError(f"{where}: expected {min(MIN_CANDIDATES, limit)} to {limit} candidates, found {n}")
    for candidate in candidates.candidates:
        seen = set()
        for example in candidate.example_trajectories:
            if example.task_id not in subjects:
                raise InputError(f"{where}: {candidate.name}: example {example.task_id!r} is not a trajectory id")
            seen.add(subjects[example.task_id].outcome)
        missing = {"passed", "failed"} & {s.outcome for s in subjects.values()} - seen
        if missing:
            raise InputError(f"{where}: {candidate.name}: has no example of a {min(missing)} trajectory; add one")


def load_labels(path: Path, names: Sequence[str], subjects: dict[str, Subject]) -> LabelFile:
    """One agent's labels, complete and with every quote found in its message.

    Raises:
        InputError: names file, id and capability of the first fault.
    """
    where = f"labels {path}"
    file = check(LabelFile, read_json(path, "labels"), where)
    for unknown in file.labels.keys() - subjects.keys():
        raise InputError(f"{where}: unknown id {unknown!r}; label the ids of the blind file only")
    for name, subject in subjects.items():
        if name not in file.labels:
            raise InputError(f"{where}: id {name!r} has no labels; label every trajectory")
        _check_one(file.labels[name], names, subject, f"{where}: id {name!r}")
    return file


def _check_one(given: Mapping[str, CitedLabel], names: Sequence[str], subject: Subject, where: str) -> None:
    for unknown in given.keys() - set(names):
        raise InputError(f"{where}: {unknown!r} is not a candidate")
    for name in names:
        if name not in given:
            raise InputError(f"{where}: {name} has no label; use NA when the task does not need it")
        evidence = given[name].evidence
        fault = quote_fault(evidence, subject.texts) if evidence else ""
        if fault:
            raise InputError(f"{where}: {name}: {fault}; copy the quote from that message")


def labelled(file: LabelFile, subjects: dict[str, Subject]) -> list[Labelled]:
    """The labels with their outcomes, in the order of the summaries.

    Raises:
        InputError: the summaries are blind.
    """
    found = []
    for name, subject in subjects.items():
        if subject.outcome is None:
            raise InputError("the summaries are blind: runs need outcomes; give the file with outcomes, or --check")
        labels: dict[str, str] = {c: given.label for c, given in file.labels[name].items()}
        found.append(Labelled(name, subject.outcome == "failed", subject.reward, labels))
    return found


def evidence_of(file: LabelFile) -> dict[str, dict[str, Any]]:
    """capability -> id -> evidence."""
    found: dict[str, dict[str, Any]] = {}
    for name, given in file.labels.items():
        for capability, one in given.items():
            if one.evidence is not None:
                found.setdefault(capability, {})[name] = one.evidence.model_dump()
    return found
