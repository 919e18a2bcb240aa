"""Labelling by a benchmark's own checks: contract of the module, outcomes kept apart, equal runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from stage1_helpers import Done, run_main

from pipeline import _summarize, aggregate_capabilities, label_capabilities
from pipeline.labels import find_runs, load_runs

CHECKS = """
CANDIDATES = [
    {"name": "right_order_number", "description": "Uses the number that the user gave."},
    {"name": "polite_closing", "description": "Ends with thanks."},
]


def capability_checks(seed, messages):
    text = messages[-1]["content"]
    return {
        "right_order_number": "PRESENT" if f"order {seed}" in text else "LACKING",
        "polite_closing": "NA" if seed % 2 else ("PRESENT" if "thanks" in text else "LACKING"),
    }
"""


@pytest.mark.parametrize(
    ("info", "refused"),
    [
        ({"env": "desk"}, True),
        ({"settings": {"env": "capability_tool_calling_precision"}}, True),
        ({"env": "helpdesk", "settings": {"env": "other"}}, True),
        ({"single": {"env": "other"}}, True),
        ({"single": {"env": "helpdesk"}}, False),
        ({"settings": {"env": "helpdesk"}}, False),
        ({"env": "helpdesk"}, False),
        ({}, False),
    ],
)
def test_rollouts_of_another_environment_are_refused(tmp_path: Path, info: dict[str, Any], refused: bool) -> None:
    """Its seeds mean other tasks: every label would be wrong, and none would look it."""
    path, single = tmp_path / "rollouts.json", info.get("single", {})
    path.write_text(json.dumps({"info": info, "simulations": [rollout(0, "x", 1.0), rollout(1, "x", 1.0, **single)]}))
    done = label(tmp_path, "games.helpdesk", path)
    assert (done.returncode == 2) is refused, done.stderr
    if refused:
        assert "games.helpdesk checks tasks of 'helpdesk'" in done.stderr and not (tmp_path / "labels").exists()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an importable checks module, new for each test."""
    name = f"checks_{abs(hash(str(tmp_path))):x}"
    (tmp_path / f"{name}.py").write_text(CHECKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def rollout(seed: int, text: str, reward: float | None, sample: int = 0, **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "task_id": str(seed),
        "sample_idx": sample,
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}],
    }
    return base | ({"reward_info": {"reward": reward}} if reward is not None else {}) | more


def write_rollouts(tmp_path: Path) -> Path:
    entries = [rollout(s, f"order {s} thanks", 1.0) for s in range(4)]
    entries += [rollout(s, "order unknown", 0.0, sample=1) for s in range(4)]
    entries += [rollout(8, "", None, outcome="error", error_kind="server"), rollout(9, "order 9", 1.0, hinted=True)]
    path = tmp_path / "rollouts.json"
    path.write_text(json.dumps({"info": {"env": "desk"}, "simulations": entries}))
    return path


def label(tmp_path: Path, module: str, source: Path, *more: str) -> Done:
    out = tmp_path / "labels"
    base = ["--labeler", "checks", "--checks-module", module, "--input", str(source), "--output-dir", str(out)]
    return run_main(label_capabilities.main, *base, *more)


def test_checks_give_runs_that_the_aggregator_takes(tmp_path: Path, module: str) -> None:
    done = label(tmp_path, module, write_rollouts(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "8 rollouts labelled (4 failed, 4 passed; without a label: 1 infrastructure, 1 hinted)" in done.stdout
    folder = tmp_path / "labels"
    labels = load_runs(find_runs([str(folder / "run_*.json")]))
    assert labels.attempts == tuple(range(1, 11))
    assert "desk:0#1" in labels.ids and "desk:8" not in labels.ids and "desk:9" not in labels.ids
    run = json.loads((folder / "run_01.json").read_text())
    assert run["labels"]["right_order_number"]["lacking_failed"] == [f"desk:{s}#1" for s in range(4)]
    assert run["labels"]["polite_closing"]["na_passed"] == ["desk:1", "desk:3"]
    assert run["labeler"] == {"kind": "checks", "module": module, "deterministic": True, "blind": True}
    export = tmp_path / "selected.json"
    arguments = ["--runs", str(folder / "run_*.json"), "--candidates", str(folder / "candidate_capabilities.json")]
    assert run_main(aggregate_capabilities.main, *arguments, "--export", export).returncode == 0
    assert {e["skill"] for e in json.loads(export.read_text())} == {"right_order_number", "polite_closing"}


def test_summaries_of_another_environment_are_refused(tmp_path: Path, module: str) -> None:
    """Also where the rollouts come through their summaries."""
    rollouts, summaries = write_rollouts(tmp_path), tmp_path / "summaries.json"
    assert run_main(_summarize.main, "--input", rollouts, "--output", summaries).returncode == 0
    done = label(tmp_path, "games.helpdesk", summaries)
    assert done.returncode == 2 and "rollouts of 'desk'" in done.stderr and not (tmp_path / "labels").exists()
    assert label(tmp_path, module, summaries).returncode == 0, "a module that names no environment takes all"


def test_runs_are_equal_but_for_their_number(tmp_path: Path, module: str) -> None:
    assert label(tmp_path, module, write_rollouts(tmp_path), "--n-runs", "3").returncode == 0
    runs = [json.loads((tmp_path / "labels" / f"run_{n:02}.json").read_text()) for n in (1, 2, 3)]
    assert [r.pop("attempt") for r in runs] == [1, 2, 3]
    assert runs[0] == runs[1] == runs[2]


def test_candidates_have_examples_of_both_outcomes(tmp_path: Path, module: str) -> None:
    assert label(tmp_path, module, write_rollouts(tmp_path)).returncode == 0
    data = json.loads((tmp_path / "labels" / "candidate_capabilities.json").read_text())
    first = data["candidates"][0]["example_trajectories"]
    assert [(e["task_id"], e["reward"], e["note"]) for e in first] == [
        ("desk:0#1", 0.0, "LACKING"),
        ("desk:1#1", 0.0, "LACKING"),
        ("desk:0", 1.0, "PRESENT"),
        ("desk:1", 1.0, "PRESENT"),
    ]


def test_summaries_as_input_keep_split_and_listed_faults(tmp_path: Path, module: str) -> None:
    source = write_rollouts(tmp_path)
    faults = tmp_path / "faults.json"
    faults.write_text('{"desk:0": "ambiguous task"}')
    out = tmp_path / "summaries.json"
    arguments = ["--input", source, "--output", out, "--faults", faults, "--split", "1:1"]
    assert run_main(_summarize.main, *arguments).returncode == 0
    ids = {}
    for part in ("mine", "score"):
        assert label(tmp_path, module, out, "--part", part).returncode == 0
        ids[part] = set(load_runs(find_runs([str(tmp_path / "labels" / "run_*.json")])).ids)
    assert not ids["mine"] & ids["score"]
    assert ids["mine"] | ids["score"] == {f"desk:{s}" for s in range(1, 4)} | {f"desk:{s}#1" for s in range(4)}


def test_summaries_whose_rollouts_changed_are_refused(tmp_path: Path, module: str) -> None:
    source, out = write_rollouts(tmp_path), tmp_path / "summaries.json"
    assert run_main(_summarize.main, "--input", source, "--output", out).returncode == 0
    data = json.loads(source.read_text())
    data["simulations"].pop(0)
    source.write_text(json.dumps(data))
    done = label(tmp_path, module, out)
    assert done.returncode == 2 and "desk:0" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("CANDIDATES =", "OTHERS =", "CANDIDATES"),
        ("def capability_checks", "def other", "capability_checks"),
        ('"polite_closing": "NA"', '"polite_closings": "NA"', "polite_closing"),
        ('"LACKING"),', '"MISSING"),', "MISSING"),
        ('text = messages[-1]["content"]', "raise KeyError('boom')", "boom"),
        ('"name": "polite_closing"', '"name": "Polite Closing"', "snake_case"),
        ("CANDIDATES = [", "ENVIRONMENT = 3\nCANDIDATES = [", "ENVIRONMENT: expected a name, found 3"),
        ("CANDIDATES = [", "import nowhere_to_be_found\nCANDIDATES = [", "nowhere_to_be_found"),
    ],
)
def test_faults_of_a_checks_module_are_named(tmp_path: Path, module: str, old: str, new: str, word: str) -> None:
    path = tmp_path / f"{module}.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    sys.modules.pop(module, None)
    done = label(tmp_path, module, write_rollouts(tmp_path))
    assert done.returncode == 2 and word in done.stderr and module in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "labels").exists()


def test_bad_options_and_inputs(tmp_path: Path, module: str) -> None:
    source = write_rollouts(tmp_path)
    out = str(tmp_path / "labels")
    done = run_main(label_capabilities.main, "--labeler", "checks", "--input", source, "--output-dir", out)
    assert done.returncode == 2 and "--checks-module" in done.stderr
    assert label(tmp_path, module, tmp_path / "nowhere.json").returncode == 2
    source.write_text(
        '{"info": {}, "simulations": [{"task_id": "x", "sample_idx": 0, "reward_info": {"reward": 1}, "messages": []}]}'
    )
    done = label(tmp_path, module, source)
    assert done.returncode == 2 and "seed" in done.stderr


def test_runs_of_another_labelling_are_not_mixed_in(tmp_path: Path, module: str) -> None:
    source = write_rollouts(tmp_path)
    assert label(tmp_path, module, source, "--n-runs", "4").returncode == 0
    done = label(tmp_path, module, source, "--n-runs", "2")
    assert done.returncode == 2 and "run_03.json" in done.stderr
