"""Labels that coding agents wrote: candidates, completeness, quotes, blindness, runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stage1_helpers import Done, run_main

from pipeline import _summarize, label_capabilities
from pipeline.labels import find_runs, load_runs

NAMES = ["reading_tables", "checking_rules", "exact_arguments", "long_plans", "plain_answers"]
IDS = ["desk:1", "desk:2", "desk:3", "desk:4"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Summaries and blind summaries of four rollouts, and five candidates with examples."""
    entries = []
    for task in range(1, 5):
        messages = [
            {"role": "user", "content": f"Ship order {task}"},
            {"role": "assistant", "content": "I  shipped\nit"},
        ]
        entries.append(
            {"task_id": str(task), "sample_idx": 0, "reward_info": {"reward": float(task % 2)}, "messages": messages}
        )
    (tmp_path / "rollouts.json").write_text(json.dumps({"info": {"env": "desk"}, "simulations": entries}))
    arguments = ["--input", tmp_path / "rollouts.json", "--output", tmp_path / "summaries.json"]
    assert run_main(_summarize.main, *arguments, "--blind-output", tmp_path / "blind.json").returncode == 0
    examples = [
        {"task_id": "desk:1", "reward": 1.0, "note": "good"},
        {"task_id": "desk:2", "reward": 0.0, "note": "bad"},
    ]
    write(tmp_path / "candidates.json", {"candidates": [candidate(n, examples) for n in NAMES]})
    return tmp_path


def candidate(name: str, examples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "description": f"The agent does {name}.", "example_trajectories": examples}


def write(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


def labels(attempt: int = 1) -> dict[str, Any]:
    cited = {"label": "LACKING", "message": 1, "quote": "shipped it"}
    return {
        "attempt": attempt,
        "labels": {i: {n: dict(cited) if n != NAMES[0] else {"label": "NA"} for n in NAMES} for i in IDS},
    }


def run(folder: Path, *more: str | Path, source: str = "summaries.json") -> Done:
    base = ["--labeler", "files", "--input", folder / source, "--candidates", folder / "candidates.json"]
    return run_main(label_capabilities.main, *base, *more)


def test_candidates_are_checked_and_blinded(folder: Path) -> None:
    done = run(folder, "--blind-candidates", folder / "cb.json")
    assert done.returncode == 0 and "in order" in done.stdout
    blind = json.loads((folder / "cb.json").read_text())
    assert [set(c) for c in blind["candidates"]] == [{"name", "description"}] * 5
    assert "reward" not in (folder / "cb.json").read_text()


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda c: c.pop(), "5 to 10"),
        (lambda c: c.extend([candidate(f"extra_{i}", c[0]["example_trajectories"]) for i in range(6)]), "found 11"),
        (lambda c: c[2]["example_trajectories"].pop(), "no example of a failed"),
        (lambda c: c[2]["example_trajectories"][0].update(task_id="desk:77"), "desk:77"),
        (lambda c: c[0].update(name="Reading"), "snake_case"),
    ],
)
def test_bad_candidates_of_discovery(folder: Path, spoil: Callable[[list[dict[str, Any]]], None], word: str) -> None:
    data = json.loads((folder / "candidates.json").read_text())
    spoil(data["candidates"])
    write(folder / "candidates.json", data)
    done = run(folder, "--blind-candidates", folder / "cb.json")
    assert done.returncode == 2 and word in done.stderr, done.stderr
    assert not (folder / "cb.json").exists()


def test_an_agent_checks_its_file_on_blind_input(folder: Path) -> None:
    path = write(folder / "labels_01.json", labels())
    done = run(folder, "--labels", path, "--check", source="blind.json")
    assert done.returncode == 0 and "in order" in done.stdout, done.stderr
    done = run(folder, "--labels", path, "--output-dir", folder / "runs", "--n-runs", "1", source="blind.json")
    assert done.returncode == 2 and "blind" in done.stderr


def test_label_files_become_runs_with_outcomes_and_evidence(folder: Path) -> None:
    for n in (1, 2):
        write(folder / f"labels_{n:02}.json", labels(n))
    more = ["--labels", folder / "labels_*.json", "--output-dir", folder, "--file-prefix", "p_", "--n-runs", "2"]
    done = run(folder, *more)
    assert done.returncode == 0, done.stderr
    loaded = load_runs(find_runs([str(folder / "p_run_*.json")]))
    assert loaded.ids == tuple(IDS) and loaded.n_failed == 2
    one = json.loads((folder / "p_run_02.json").read_text())
    assert one["labels"]["long_plans"]["lacking_failed"] == ["desk:2", "desk:4"]
    assert one["labels"]["reading_tables"]["na_passed"] == ["desk:1", "desk:3"]
    assert one["evidence"]["long_plans"]["desk:2"] == {"message": 1, "quote": "shipped it"}
    assert one["labeler"]["blind"] is True


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def spoil(data: dict[str, Any]) -> None:
        data["labels"]["desk:3"]["long_plans"][key] = value

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_set("quote", "sold it"), ["desk:3", "long_plans", "does not contain"]),
        (_set("message", 5), ["desk:3", "no message 5"]),
        (_set("message", None), ["long_plans", "needs message and quote"]),
        (_set("quote", "  "), ["needs message and quote"]),
        (_set("label", "MAYBE"), ["label"]),
        (_set("score", 1), ["score"]),
        (lambda d: d["labels"].pop("desk:4"), ["desk:4", "no labels"]),
        (lambda d: d["labels"].update({"desk:9": {}}), ["unknown id 'desk:9'"]),
        (lambda d: d["labels"]["desk:2"].pop("long_plans"), ["desk:2", "long_plans has no label"]),
        (lambda d: d["labels"]["desk:2"].update(other={"label": "NA"}), ["'other' is not a candidate"]),
        (lambda d: d.update(attempt=0), ["attempt"]),
    ],
)
def test_faults_of_a_label_file_are_named(
    folder: Path, spoil: Callable[[dict[str, Any]], Any], words: list[str]
) -> None:
    data = labels()
    spoil(data)
    done = run(folder, "--labels", write(folder / "labels_01.json", data), "--check")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    for word in ["labels_01.json", *words]:
        assert word in done.stderr, done.stderr


def test_missing_or_doubled_runs(folder: Path) -> None:
    write(folder / "labels_01.json", labels(1))
    write(folder / "labels_02.json", labels(1))
    more = ["--labels", str(folder / "labels_*.json"), "--output-dir", str(folder / "runs")]
    assert "same attempt" in run(folder, *more).stderr
    write(folder / "labels_02.json", labels(2))
    assert "expected attempts 1 to 10" in run(folder, *more).stderr
    assert not (folder / "runs").exists()


def test_options_that_are_needed(folder: Path) -> None:
    done = run_main(label_capabilities.main, "--labeler", "files", "--input", folder / "blind.json")
    assert done.returncode == 2 and "--candidates" in done.stderr
    write(folder / "labels_01.json", labels())
    done = run(folder, "--labels", folder / "labels_01.json", "--n-runs", "1")
    assert done.returncode == 2 and "--output-dir" in done.stderr
