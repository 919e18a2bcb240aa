"""What the report shows, as data: votes, quotes, the files behind it; and the artefact checks of a stage."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from stage1_helpers import run_main

from pipeline import aggregate_capabilities, report_data
from pipeline.artefacts import Checklist, done_skills
from pipeline.command_line import rational
from pipeline.evidence import build
from pipeline.files import InputError
from pipeline.labels import LabelSet, RunFile, label_set, run_file
from pipeline.report_data import MAX_QUOTES, quotes_of, votes
from pipeline.selection import Thresholds, candidates

OUTCOME = {f"t:{i}": i < 6 for i in range(12)}


def make(runs: list[dict[str, dict[str, str]]], evidence: list[dict[str, Any]] | None = None) -> LabelSet:
    files = []
    for n, labels in enumerate(runs, 1):
        extra = {"evidence": evidence[n - 1]} if evidence else {}
        files.append((f"run {n}", RunFile.model_validate(run_file(n, OUTCOME, labels, **extra))))
    return label_set(files)


def by_rule(*lacking: int) -> dict[str, str]:
    return {i: "LACKING" if int(i[2:]) in lacking else "PRESENT" for i in OUTCOME}


# --------------------------------------------------------------------------- votes


def test_votes_are_shares_of_the_runs_that_have_the_capability() -> None:
    labels = make([{"a_skill": by_rule(0, 1), "b_skill": by_rule(0)}, {"a_skill": by_rule(0)}])
    found = votes(labels, ["a_skill", "b_skill", "never_labelled"])
    assert found["capabilities"] == ["a_skill", "b_skill"] and found["left_out"] == 0
    share = dict(zip(found["ids"], found["lacking_share"][0], strict=True))
    assert share == {"t:0": 1.0, "t:1": 0.5, "t:2": 0, "t:3": 0, "t:4": 0, "t:5": 0}
    assert dict(zip(found["ids"], found["lacking_share"][1], strict=True))["t:0"] == 1.0  # one run has it
    assert found["ids"][:2] == ["t:0", "t:1"]  # most votes first


def test_columns_that_do_not_fit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_data, "MAX_TASKS", 2)
    found = votes(make([{"a_skill": by_rule(4, 5)}]), ["a_skill"])
    assert found["ids"] == ["t:4", "t:5"] and found["left_out"] == 4


# --------------------------------------------------------------------------- quotes


def quote(text: str) -> dict[str, Any]:
    return {"message": 1, "quote": text}


def test_quotes_come_from_both_outcomes_with_the_clearest_first() -> None:
    lacking = by_rule(0, 1, 11)  # 11 passed and lacks it all the same
    cited = {"a_skill": {i: quote(f"q{i}") for i in ("t:2", "t:11", "t:1", "t:6", "t:0")}}
    found = quotes_of(make([{"a_skill": lacking}], [cited]), ["a_skill", "never_labelled"])
    assert [(q["id"], q["label"], q["outcome"]) for q in found["a_skill"]] == [
        ("t:1", "LACKING", "failed"),
        ("t:0", "LACKING", "failed"),
        ("t:11", "LACKING", "passed"),
        ("t:6", "PRESENT", "passed"),
        ("t:2", "PRESENT", "failed"),
    ]
    assert "never_labelled" not in found


def test_of_a_trajectory_the_first_run_is_quoted_and_their_number_is_bounded() -> None:
    cited = [{"a_skill": {i: quote(f"run{n} {i}") for i in OUTCOME}} for n in (1, 2)]
    found = quotes_of(make([{"a_skill": by_rule(*range(6))}] * 2, cited), ["a_skill"])["a_skill"]
    assert len(found) == 2 * MAX_QUOTES and {q["attempt"] for q in found} == {1}


# --------------------------------------------------------------------------- the files behind it


@pytest.fixture
def selection(tmp_path: Path) -> Path:
    run = run_file(1, OUTCOME, {"a_skill": by_rule(*range(6)), "b_skill": by_rule()})
    (tmp_path / "run_01.json").write_text(json.dumps(run))
    arguments = ["--runs", tmp_path / "run_01.json", "--k", "1", "--export", tmp_path / "s.json", "--resamples", "20"]
    assert run_main(aggregate_capabilities.main, *arguments).returncode == 0
    return tmp_path / "s.json"


def test_everything_is_collected(selection: Path) -> None:
    data = report_data.build(selection, None, None)
    assert [c["skill"] for c in data["candidates"]] == ["a_skill", "b_skill"]
    assert data["status"] == {"a_skill": {"status": "PENDING", "environment_path": None}}
    assert data["quotes"] == {"a_skill": [], "b_skill": []} and data["trajectories"] == {}
    assert json.loads(json.dumps(data, allow_nan=False)) == data


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        ({"thresholds": 3}, "thresholds"),
        ({"runs": "x"}, "runs"),
        ({"total_failed": 7}, "are not those of"),
        ({"candidates": []}, "do not belong together"),
    ],
)
def test_a_report_that_was_changed_is_refused(selection: Path, spoil: dict[str, Any], word: str) -> None:
    path = selection.with_name("s.report.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | spoil))
    with pytest.raises(InputError, match=word):
        report_data.build(selection, None, None)


def test_a_missing_report_names_its_path(selection: Path) -> None:
    selection.with_name("s.report.json").unlink()
    with pytest.raises(InputError, match=r"s\.report\.json: not found"):
        report_data.build(selection, None, None)


# --------------------------------------------------------------------------- warnings of the evidence


def warnings_of(labels: LabelSet, rho: str = "0.1", delta: str = "0.2", k: int = 1) -> list[str]:
    found: list[str] = build(
        labels, candidates(labels), Thresholds(rational(rho), rational(delta), k), resamples=300, seed=1
    )["warnings"]
    return found


def test_thin_support_on_the_passed_side_is_a_warning() -> None:
    thin = {i: "NA" if int(i[2:]) > 7 else by_rule(*range(6))[i] for i in OUTCOME}  # two passed trajectories need it
    assert any("ER+ rests on fewer than 5" in w and "a_skill" in w for w in warnings_of(make([{"a_skill": thin}])))
    assert not any("ER+" in w for w in warnings_of(make([{"a_skill": by_rule(*range(6))}])))


def test_a_selection_that_hangs_on_the_sample_is_a_warning() -> None:
    edge = make([{"a_skill": by_rule(0)}])  # one failure of six: at the threshold of 1/6
    assert any("half of the bootstrap samples" in w for w in warnings_of(edge, rho="1/6", delta="1/6"))
    sure = make([{"a_skill": by_rule(*range(6))}])
    assert not any("bootstrap" in w for w in warnings_of(sure))


def test_disagreement_is_a_warning() -> None:
    labels = make([{"a_skill": by_rule(0, 1, 2)}, {"a_skill": by_rule(3, 4, 5)}])
    assert any("low agreement" in w and "a_skill" in w for w in warnings_of(labels))
    same = make([{"a_skill": by_rule(0, 1, 2)}] * 2)
    assert not any("low agreement" in w for w in warnings_of(same))


# --------------------------------------------------------------------------- artefact checks


def test_a_checklist_collects_and_goes_on(tmp_path: Path) -> None:
    checklist = Checklist(time.time_ns())

    def bad() -> str:
        raise InputError("it is not there")

    checklist.check("one", bad)
    checklist.check("two", lambda: "fine")
    assert checklist.faults == ["one: it is not there"] and checklist.good == ["two: fine"]
    with pytest.raises(ZeroDivisionError):  # a fault of ours is not an artefact's
        checklist.check("three", lambda: str(1 / 0))


def test_freshness(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(InputError, match="missing"):
        Checklist(0).fresh(path)
    path.write_text("x")
    assert Checklist(0).fresh(path) == path
    with pytest.raises(InputError, match="earlier run"):
        Checklist(time.time_ns() + 10**12).fresh(path)


def test_what_is_done_already(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps([{"skill": "a_skill", "status": "DONE"}, {"skill": "b_skill"}]))
    assert done_skills(path) == {"a_skill"}
