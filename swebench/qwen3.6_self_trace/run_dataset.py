"""The instances of a run: read from Hugging Face, a file or declared ones, checked, and frozen in the run folder.

Every phase reads ``dataset.jsonl``, so a data set that changes upstream cannot change a run that has begun.
"""

from __future__ import annotations

import collections
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import run_declared
from pydantic import BaseModel, ConfigDict, Field, StrictStr, field_validator
from run_folder import RunFolder, RunRecord, agent_python
from run_settings import ROOT, RunSettings, digest

from pipeline.files import InputError, atomic_path, check, read_json, read_jsonl, resolved

EXPORT_TIMEOUT_S = 1800.0  # a first download
ID = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # becomes a folder name; never a path
SHA = r"^[0-9a-f]{7,64}$"
OFFLINE = re.compile(r"ConnectionError|Couldn't reach|LocalEntryNotFound|OfflineMode|Max retries|timed out", re.I)

# Runs in the agents' environment, which has the official loader.
EXPORT = """
import json, sys
from swebench.harness.utils import load_swebench_dataset
name, split, out = sys.argv[1:]
with open(out, "w", encoding="utf-8") as file:
    for row in load_swebench_dataset(name, split):
        file.write(json.dumps(dict(row), ensure_ascii=False, default=str) + "\\n")
"""


class Instance(BaseModel):
    """One row in SWE-bench's format. Further columns (image, eval_script, log_parser, ...) are kept as they are."""

    model_config = ConfigDict(extra="allow")
    instance_id: StrictStr = Field(pattern=ID)
    repo: StrictStr
    base_commit: StrictStr = Field(pattern=SHA)
    problem_statement: StrictStr = Field(min_length=1)
    patch: StrictStr
    test_patch: StrictStr
    version: StrictStr = ""
    FAIL_TO_PASS: list[StrictStr] = Field(min_length=1)
    PASS_TO_PASS: list[StrictStr]

    @field_validator("FAIL_TO_PASS", "PASS_TO_PASS", mode="before")
    @classmethod
    def _list_or_json(cls, value: Any) -> Any:
        """The Hugging Face rows hold the lists as JSON text."""
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"expected a list or its JSON text ({error})") from None

    def row(self) -> dict[str, Any]:
        """As JSON, every column."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """Of every column: two runs compare only where these are equal."""
        return digest(self.row())


def checked_rows(rows: Iterable[Any], where: str) -> list[Instance]:
    """Rows as instances, sorted by id.

    Raises:
        InputError: a row that is none (its line or number is named), an id twice, or no rows.
    """
    instances = [check(Instance, row, f"{where}: row {n}") for n, row in enumerate(rows, 1)]
    counts = collections.Counter(i.instance_id for i in instances)
    twice = sorted(i for i, n in counts.items() if n > 1)
    if twice:
        raise InputError(f"{where}: instance {twice[0]} appears {counts[twice[0]]} times; keep one row each")
    if not instances:
        raise InputError(f"{where}: holds no instances")
    return sorted(instances, key=lambda i: i.instance_id)


def require_gradable(instances: Sequence[Instance], backend: str) -> None:
    """That the rows have the columns that swebench >= 5 grades by, before hours of agents.

    Raises:
        InputError: one lacks a column.
    """
    wanted = ("eval_script", "log_parser", "eval_type", *(() if backend == "local" else ("image",)))
    for instance in instances:
        row = instance.row()
        if missing := [column for column in wanted if not isinstance(row.get(column), str)]:
            raise InputError(
                f"grading.backend {backend}: {instance.instance_id} has no column {missing[0]!r}; use the data set in "
                "the format of swebench >= 5, as SWE-bench/SWE-bench_Verified"
            )


def source_rows(settings: RunSettings, folder: RunFolder) -> tuple[list[Instance], str]:
    """The instances at their source, and what to call it in messages. Declared ones get their repositories built."""
    name = settings.dataset.name
    path = resolved(Path(name) if Path(name).is_absolute() else ROOT / name, "dataset.name")
    where = f"data set {name}"
    if path.is_dir() and any(path.glob("*.yaml")):
        return checked_rows(run_declared.build(path, folder.root / "repositories"), where), where
    if path.suffix == ".jsonl":
        return checked_rows(read_jsonl(path, "data set"), where), where
    if path.suffix == ".json":
        rows = read_json(path, "data set")
        if not isinstance(rows, list):
            raise InputError(f"{where}: expected a list of rows, found {type(rows).__name__}")
        return checked_rows(rows, where), where
    return checked_rows(_download(settings), where), where


def _download(settings: RunSettings) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        command = [agent_python(settings), "-c", EXPORT, settings.dataset.name, settings.dataset.split, str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_TIMEOUT_S, cwd=folder)
        except subprocess.TimeoutExpired:
            raise InputError(f"data set {settings.dataset.name}: not loaded within {EXPORT_TIMEOUT_S:.0f} s") from None
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            remedy = "check the name"
            if OFFLINE.search(last):
                remedy = "it needs the network once; without it name a .jsonl file of its rows in dataset.name"
            raise InputError(f"data set {settings.dataset.name}: cannot be loaded ({last[:200]}); {remedy}")
        return list(read_jsonl(out, "data set"))


def choose(instances: Sequence[Instance], settings: RunSettings, where: str) -> list[Instance]:
    """The instances that the settings ask for.

    Raises:
        InputError: the data set has another size than expected, or lacks an id that is asked for.
    """
    expected, wanted = settings.dataset.expected_instances, settings.dataset.instances
    if expected is not None and len(instances) != expected:
        raise InputError(f"{where}: expected {expected} instances, found {len(instances)}; check dataset.split")
    if wanted is None:
        return list(instances)
    by_id = {i.instance_id: i for i in instances}
    missing = sorted(set(wanted) - set(by_id))
    if missing or not wanted:
        raise InputError(f"{where}: dataset.instances asks for {missing[0] if missing else 'nothing'}; check the ids")
    return [by_id[i] for i in sorted(set(wanted))]


def freeze(settings: RunSettings, folder: RunFolder) -> list[Instance]:
    """The instances: written to ``dataset.jsonl`` until the run begins (``run.json``), read from there afterwards."""
    if folder.dataset.exists() and folder.run_json.exists():
        return frozen(folder)
    rows, where = source_rows(settings, folder)
    instances = choose(rows, settings, where)
    with atomic_path(folder.dataset) as temporary:
        lines = [json.dumps(i.row(), ensure_ascii=False) + "\n" for i in instances]
        temporary.write_text("".join(lines), encoding="utf-8")
    return instances


def frozen(folder: RunFolder) -> list[Instance]:
    """The instances of a run that has begun.

    Raises:
        InputError: it has not, or the file was damaged.
    """
    return checked_rows(read_jsonl(folder.dataset, "frozen data set"), f"frozen data set {folder.dataset}")


def frozen_as_recorded(folder: RunFolder, record: RunRecord) -> list[Instance]:
    """The instances of a run, once it is sure that they are those with which it began.

    Raises:
        InputError: a row was changed, added or removed since, or the split is of others.
    """
    instances = frozen(folder)
    if dataset_digest(instances) != record.identity.get("instances"):
        raise InputError(f"frozen data set {folder.dataset}: was changed since phase 1 began; restore it")
    ids, recorded = {i.instance_id for i in instances}, {*record.split.mine, *record.split.score}
    if other := sorted(ids ^ recorded):
        raise InputError(f"run {folder.run_json}: its split and {folder.dataset} differ in {other[0]}; restore both")
    return instances


def dataset_digest(instances: Sequence[Instance]) -> str:
    """Of all rows, in the order of their ids."""
    return digest([i.digest() for i in sorted(instances, key=lambda i: i.instance_id)])
