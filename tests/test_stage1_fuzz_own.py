"""Our own files, damaged in every way: each program that reads them ends with a result or with one ``InputError``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stage1_fuzzing import damaged, mutated
from stage1_helpers import run_main

import render_pipeline
from pipeline import aggregate_capabilities, label_capabilities, report
from pipeline.candidates import load_candidates
from pipeline.file_labels import check_discovery, load_labels, load_subjects
from pipeline.files import InputError
from pipeline.labels import load_runs, run_file
from pipeline.records import read_info, read_summaries
from pipeline.selection import candidates
from pipeline.selection_export import previous_entries, read_entries

RELAXED = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
OUTCOME = {f"desk:{i}": i < 4 for i in range(8)}
LABELS = {n: {i: "LACKING" if f else "PRESENT" for i, f in OUTCOME.items()} for n in ("one_skill", "two_skill")}
QUOTE = {"one_skill": {"desk:1": {"message": 1, "quote": "I ship"}}}
RUN = run_file(1, OUTCOME, LABELS, evidence=QUOTE, labeler={"kind": "x", "blind": True})
CANDIDATES = {
    "schema_version": 1,
    "candidates": [
        {
            "name": n,
            "description": "It does.",
            "example_trajectories": [
                {"task_id": "desk:1", "reward": 0.0, "note": "n"},
                {"task_id": "desk:5", "resolved": True},
            ],
        }
        for n in ("one_skill", "two_skill", "three_skill", "four_skill", "five_skill")
    ],
}
MESSAGES = [
    {"index": 0, "role": "user", "content": "Send it."},
    {"index": 1, "role": "assistant", "content": "I ship", "calls": [{"name": "ship", "arguments": "{}"}]},
]
RECORDS = [
    {
        "id": i,
        "benchmark": "rollouts",
        "domain": "desk",
        "task_id": i[5:],
        "trial": 0,
        "outcome": "failed" if f else "passed",
        "reward": 0.0 if f else 1.0,
        "reason": "because",
        "messages": MESSAGES,
    }
    for i, f in OUTCOME.items()
]
SUMMARIES = {"schema_version": 1, "trajectories": RECORDS, "info": {"counts": {}, "split": None}}
CITED = {"label": "LACKING", "message": 1, "quote": "I ship"}
LABEL_FILE = {"attempt": 1, "labels": {i: {"one_skill": CITED, "two_skill": {"label": "NA"}} for i in OUTCOME}}
SELECTION = [
    {"skill": "one_skill", "description": "d", "mean_cov": 1.0, "status": "DONE", "environment_path": "x.py"},
    {"skill": "two_skill", "status": "PENDING"},
]
CONFIG = {
    "model": "m",
    "run_name": "r",
    "eval_results": "results",
    "n_runs": 10,
    "k_consistency": 8,
    "rho": 0.1,
    "delta": 0.2,
    "benchmark": "tau-bench",
}


def write(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def read_run(folder: Path, content: Any) -> None:
    candidates(load_runs([write(folder, "run_01.json", content)]))


def read_candidates(folder: Path, content: Any) -> None:
    subjects = load_subjects(write(folder, "summaries.json", SUMMARIES), "mine")
    check_discovery(load_candidates(write(folder, "c.json", content)), subjects, 10, "c.json")


def read_records(folder: Path, content: Any) -> None:
    path = write(folder, "s.json", content)
    for record in read_summaries(path):
        record.blind()
    read_info(path)


def read_label_file(folder: Path, content: Any) -> None:
    subjects = load_subjects(write(folder, "summaries.json", SUMMARIES), "mine")
    load_labels(write(folder, "labels_01.json", content), ["one_skill", "two_skill"], subjects)


def read_selection(folder: Path, content: Any) -> None:
    path = write(folder, "selected.json", content)
    read_entries(path)
    previous_entries(path)


def read_config(folder: Path, content: Any) -> None:
    path = folder / "c.yaml"
    path.write_bytes(content if isinstance(content, bytes) else yaml.safe_dump(content).encode())
    config = render_pipeline.load_config(path, "capability")
    render_pipeline.render("general/capability_selection.md", render_pipeline.context_of(config))


READERS: dict[str, tuple[Callable[[Path, Any], None], Any]] = {
    "run": (read_run, RUN),
    "candidates": (read_candidates, CANDIDATES),
    "summaries": (read_records, SUMMARIES),
    "labels": (read_label_file, LABEL_FILE),
    "selection": (read_selection, SELECTION),
    "config": (read_config, CONFIG),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(tempfile.mkdtemp())


@pytest.mark.parametrize("name", READERS)
def test_the_valid_file_is_read(folder: Path, name: str) -> None:
    reader, valid = READERS[name]
    reader(folder, valid)


@pytest.mark.parametrize("name", READERS)
@RELAXED
@given(data=st.data())
def test_mutated_files(folder: Path, name: str, data: st.DataObject) -> None:
    reader, valid = READERS[name]
    try:
        reader(folder, data.draw(mutated(valid)))
    except InputError as error:
        assert "\n" not in str(error) or name == "config"


@pytest.mark.parametrize("name", READERS)
@RELAXED
@given(data=st.data())
def test_damaged_files(folder: Path, name: str, data: st.DataObject) -> None:
    reader, valid = READERS[name]
    try:
        reader(folder, data.draw(damaged(valid)))
    except InputError as error:
        assert str(error)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_commands_end_with_0_1_or_2_and_one_line(folder: Path, data: st.DataObject) -> None:
    """The aggregator with one of its inputs mutated, then the report of whatever was selected."""
    spoiled = data.draw(st.sampled_from(["run", "candidates", "summaries", "selection"]))
    files = {"run": RUN, "candidates": CANDIDATES, "summaries": SUMMARIES, "selection": SELECTION}
    files[spoiled] = data.draw(mutated(files[spoiled]))
    paths = {name: write(folder, f"{name}_01.json", content) for name, content in files.items()}
    for leftover in folder.glob("selection_01*"):
        if leftover != paths["selection"]:
            leftover.unlink()
    arguments = ["--runs", paths["run"], "--candidates", paths["candidates"], "--summaries", paths["summaries"]]
    arguments += ["--export", paths["selection"], "--k", "1", "--resamples", "5"]
    done = run_main(aggregate_capabilities.main, *arguments)
    assert done.returncode in (0, 1, 2)
    assert done.stderr.count("\n") == (1 if done.returncode == 2 else 0), done.stderr
    if done.returncode == 0:
        shown = run_main(report.main, "--selection", paths["selection"], "--output", folder / "r.html")
        assert shown.returncode == 0, shown.stderr


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_label_log_never_ends_in_a_traceback(folder: Path, data: st.DataObject) -> None:
    """Whatever lies in the folder of a model labelling, the command ends with one line (there is no server to ask)."""
    out = folder / "log"
    out.mkdir(exist_ok=True)
    write(out, "candidate_capabilities.json", CANDIDATES)
    log = data.draw(damaged({"kind": "header", "fingerprint": "x"}))
    (out / "label_log.jsonl").write_bytes(log + b"\n" + data.draw(st.binary(max_size=30)))
    base = ["--labeler", "model", "--base-url", "http://127.0.0.1:9", "--model", "m", "--retries", "0", "--n-runs", "1"]
    base += ["--input", str(write(folder, "summaries.json", SUMMARIES)), "--output-dir", str(out)]
    done = run_main(label_capabilities.main, *base)
    assert done.returncode == 2
    assert sum(line.startswith("error:") for line in done.stderr.splitlines()) == 1
