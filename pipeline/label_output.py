"""Writing what labelling produces: ``candidate_capabilities.json`` and ``run_01.json`` ... in one folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.candidates import check_candidates
from pipeline.files import InputError, write_json
from pipeline.labels import RunFile, label_set, run_file

MAX_EXAMPLES_PER_SIDE = 2


@dataclasses.dataclass(frozen=True)
class Labelled:
    """A trajectory that a run speaks of: its outcome, its reward, and its label for each capability."""

    id: str
    failed: bool
    reward: float | None
    labels: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Target:
    """Where artefacts go: a folder, and what their names begin with."""

    folder: Path
    prefix: str = ""

    @property
    def candidates(self) -> Path:
        return self.folder / f"{self.prefix}candidate_capabilities.json"

    def run(self, attempt: int) -> Path:
        return self.folder / f"{self.prefix}run_{attempt:02}.json"

    def refuse_foreign_runs(self, attempts: Iterable[int]) -> None:
        """Stop when the folder holds label runs that this labelling would leave among its own.

        Raises:
            InputError: a run with another number is there: the aggregator's glob would mix the two.
        """
        ours = {self.run(a) for a in attempts}
        for path in sorted(self.folder.glob(f"{self.prefix}run_*.json")):
            if path not in ours:
                raise InputError(
                    f"{path}: a label run of another labelling; move it away or choose another --output-dir"
                )


def examples(name: str, labelled: Iterable[Labelled]) -> list[dict[str, Any]]:
    """Example trajectories of both outcomes: failed ones that lack the capability, passed ones that show it."""
    chosen: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for item in labelled:
        wanted = "LACKING" if item.failed else "PRESENT"
        if item.labels[name] == wanted and len(chosen[item.failed]) < MAX_EXAMPLES_PER_SIDE:
            example: dict[str, Any] = {"task_id": item.id, "note": wanted}
            chosen[item.failed].append(example | ({"reward": item.reward} if item.reward is not None else {}))
    return chosen[True] + chosen[False]


def candidates_json(described: Mapping[str, str], labelled: Iterable[Labelled]) -> dict[str, Any]:
    """A candidates object from names, descriptions and labels."""
    items = list(labelled)
    data = {
        "schema_version": 1,
        "candidates": [
            {"name": n, "description": d, "example_trajectories": examples(n, items)} for n, d in described.items()
        ],
    }
    check_candidates(data, "candidates")
    return data


def run_json(attempt: int, labelled: Iterable[Labelled], names: Iterable[str], **extra: Any) -> dict[str, Any]:
    """One run, checked by the program that will read it."""
    items = list(labelled)
    outcome = {i.id: i.failed for i in items}
    data = run_file(attempt, outcome, {n: {i.id: i.labels[n] for i in items} for n in names}, **extra)
    label_set([(f"run {attempt}", RunFile.model_validate(data))])
    return data


def write_runs(target: Target, candidates: dict[str, Any] | None, runs: Mapping[int, dict[str, Any]]) -> None:
    """Write the runs, and the candidates unless they are there already; each file atomically."""
    target.refuse_foreign_runs(runs)
    if candidates is not None:
        write_json(target.candidates, candidates)
    for attempt, data in runs.items():
        write_json(target.run(attempt), data)
