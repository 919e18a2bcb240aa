"""From what a user names to what is read: folders, overrides, files of others, shapes told from few keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.files import InputError
from pipeline.readers.plan import READERS, make_plan, trajectories
from pipeline.readers.sniff import FAMILIES, Format, detect, outline
from pipeline.readers.swebench import Verdicts, repository
from pipeline.readers.trajectory import Trajectory, Verdict

INFO = {"environment_info": {"domain_name": "shop"}}
SIMULATION = {"task_id": "1", "reward_info": {"reward": 1.0}, "messages": [{"role": "user", "content": "hi"}]}
MINI = {
    "info": {"exit_status": "Submitted", "submission": "d"},
    "messages": [],
    "trajectory_format": "mini-swe-agent-1.1",
}


def write(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def plan_of(folder: Path, family: str | None = None) -> dict[str, str]:
    plan = make_plan([str(folder)], family)
    return {str(p.relative_to(folder)): f for p, f in plan.inputs}


# --------------------------------------------------------------------------- folders


def test_a_folder_is_walked_in_order_and_a_tau2_folder_is_one_input(tmp_path: Path) -> None:
    write(tmp_path / "b" / "results.json", {"info": INFO, "tasks": [], "simulation_index": []})
    write(tmp_path / "b" / "simulations" / "x.json", SIMULATION)
    write(tmp_path / "a.json", {"info": INFO, "tasks": [], "simulations": [SIMULATION]})
    write(tmp_path / "c" / "d" / "e.traj.json", MINI)
    assert plan_of(tmp_path) == {"a.json": "tau2", "b": "tau2_dir", "c/d/e.traj.json": "mini-swe-agent"}


def test_hidden_and_foreign_files_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "a.traj.json", MINI)
    for name in (".hidden.json", ".git/config.json", "notes.txt", "log.yaml", "conversation.json", ".a.json.x.tmp"):
        write(tmp_path / name, "not json at all")
    assert plan_of(tmp_path) == {"a.traj.json": "mini-swe-agent"}
    assert make_plan([str(tmp_path)], None).skipped == ()


def test_unknown_json_is_named_and_broken_json_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.traj.json", MINI)
    other = write(tmp_path / "settings.json", {"colour": "blue"})
    assert make_plan([str(tmp_path)], None).skipped == (other,)
    write(tmp_path / "torn.json", '{"simulations": [')
    with pytest.raises(InputError, match=r"torn\.json"):
        list(trajectories(make_plan([str(tmp_path)], None), 1.0))


def test_a_family_filters_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "a.traj.json", MINI)
    write(tmp_path / "b.json", {"info": INFO, "tasks": [], "simulations": [SIMULATION]})
    assert plan_of(tmp_path, "tau2") == {"b.json": "tau2"}
    assert plan_of(tmp_path, "swebench") == {"a.traj.json": "mini-swe-agent"}
    with pytest.raises(InputError, match="no results file"):
        plan_of(tmp_path, "inspect")


def test_a_family_that_does_not_fit_says_what_is_wrong(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", MINI)
    for family in ("tau2", "tau-bench", "inspect", "rollouts", "toolsandbox"):
        with pytest.raises(InputError):
            found = list(trajectories(make_plan([str(path)], family), 1.0))
            if not found:
                raise InputError("nothing in it")  # a format of rows reads none from another format


def test_several_inputs_keep_their_order(tmp_path: Path) -> None:
    first = write(tmp_path / "z.traj.json", MINI | {"instance_id": "a__b-1"})
    second = write(tmp_path / "a.traj.json", MINI | {"instance_id": "a__b-2"})
    found = trajectories(make_plan([str(first), str(second)], None), 1.0)
    assert [t.task_id for t in found] == ["a__b-1", "a__b-2"]


def test_every_format_has_a_reader_or_is_a_verdict_file() -> None:
    formats = {f for family in FAMILIES.values() for f in family}
    verdicts = {f for f in formats if f not in READERS}
    assert verdicts == {"swebench-report", "swebench-flat-report", "swebench-summary", "swebench-preds"}


# --------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"simulations": [{"sample_idx": 0}]}, "rollouts"),
        ({"simulations": [{"task_id": "1", "inner": {"sample_idx": 3}}]}, "tau2"),
        ({"simulations": []}, "tau2"),
        ([{"traj": [], "task_id": 1}], "tau-bench"),
        ([{"traj": [], "reward": 1.0}], "tau-bench"),
        ([{"messages": [{"role": "user"}]}], "openai"),
        ([{"model_patch": ""}], "swebench-preds"),
        ({"a__b-1": {"model_patch": ""}}, "swebench-preds"),
        ({"a__b-1": {"resolved": True}}, "swebench-report"),
        ({"a__b-1": {"patch_exists": False}}, "swebench-report"),
        ({"resolved": True, "tests_status": {}}, "swebench-flat-report"),
        ({"resolved_ids": []}, "swebench-summary"),
        ({"history": [], "info": {}}, "swe-agent"),
        ({"trajectory": [], "environment": "x"}, "swe-agent"),
        ({"info": {}, "messages": []}, "mini-swe-agent"),
        ({"messages": []}, "openai"),
        ({"eval": {}, "status": "success"}, "inspect"),
        ({"per_scenario_results": []}, "toolsandbox"),
        ([], None),
        ({}, None),
        (3, None),
        ("text", None),
        ([[1]], None),
        ([{"role": "user"}], None),
    ],
)
def test_shapes(tmp_path: Path, data: Any, expected: Format | None) -> None:
    assert detect(write(tmp_path / "x.json", json.dumps(data))) == expected


def test_the_outline_holds_keys_of_two_levels_only(tmp_path: Path) -> None:
    data = {"a": {"b": {"c": 1}}, "d": [{"e": [{"f": 1}]}, {"g": 1}], "h": [[{"i": 1}]], "j": 1}
    shape = outline(write(tmp_path / "x.json", data))
    assert shape.kind == "object" and shape.keys == ["a", "d", "h", "j"]
    assert shape.inner["a"] == {"b"} and shape.inner["d"] == {"e"}


def test_predictions_with_thousands_of_keys_are_told_from_the_first(tmp_path: Path) -> None:
    data = {f"a__b-{n}": {"model_patch": "x" * 50} for n in range(5000)}
    path = write(tmp_path / "preds.json", data)
    assert detect(path) == "swebench-preds" and len(outline(path).keys) == 200


# --------------------------------------------------------------------------- verdicts


def trajectory(name: str, verdict: Verdict) -> Trajectory:
    return Trajectory("swebench", repository(name), name, 0, verdict, [], "t")


UNKNOWN = Verdict("unknown")
CRASHED = Verdict("infrastructure", reason="Timeout", fault="environment")


@pytest.mark.parametrize(
    ("own", "harness", "expected"),
    [
        (UNKNOWN, Verdict("passed", 1.0), "passed"),
        (UNKNOWN, Verdict("failed", 0.0), "failed"),
        (CRASHED, Verdict("failed", 0.0), "infrastructure"),  # no patch because it crashed
        (CRASHED, Verdict("passed", 1.0), "passed"),
        (Verdict("failed", 0.0), Verdict("passed", 1.0), "passed"),  # a limit was hit after the patch was right
        (UNKNOWN, None, "unknown"),
    ],
)
def test_the_harness_decides_except_on_crashes(own: Verdict, harness: Verdict | None, expected: str) -> None:
    verdicts = Verdicts()
    if harness is not None:
        verdicts.add("a__b-1", harness, "report")
    assert verdicts.join(trajectory("a__b-1", own)).verdict.outcome == expected
    assert list(verdicts.without_trajectory()) == []


def test_of_two_that_agree_the_one_that_says_more_is_kept() -> None:
    verdicts = Verdicts()
    verdicts.add("a__b-1", Verdict("failed", 0.0, "unresolved"), "summary")
    verdicts.add("a__b-1", Verdict("failed", 0.0, "2 FAIL_TO_PASS tests still fail: x, y"), "report")
    verdicts.add("a__b-1", Verdict("failed", 0.0, ""), "another")
    (found,) = verdicts.without_trajectory()
    assert "FAIL_TO_PASS" in found.verdict.reason and found.verdict.reason.endswith("no trajectory")


@pytest.mark.parametrize(("name", "expected"), [("django__django-1", "django"), ("plain", ""), ("a__b__c", "a")])
def test_repositories(name: str, expected: str) -> None:
    assert repository(name) == expected
    assert trajectory(name, UNKNOWN).id == name  # an instance id is an id as it is
