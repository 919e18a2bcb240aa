"""What breaks around a run: the harness' environment, disks, files in each other's place. One line, nothing lost."""

from __future__ import annotations

import errno
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import phase2_capability_mining as phase2
import phase3_synthesis as phase3
import pytest
import run_grading
import run_server
from run_accounting import Account, End, account, of_files, of_reports
from run_agents import outcome_of
from run_folder import DryRun, RunFolder
from run_grading import Prediction
from run_settings import ModelSettings, RunSettings
from scripted_server import ScriptedServer
from swe_phase_helpers import PHASES, Run, fill_phase1

from pipeline.files import InputError, ServerError, write_json
from pipeline.readers.swebench import Report, Verdicts, read_verdicts

BROKEN = {"resolved": False, "patch_successfully_applied": False, "infra_failure": True}
REFUSED = {"resolved": False, "patch_successfully_applied": False, "infra_failure": False}
ID = "a__b-1"


def prediction(i: str = ID) -> Prediction:
    return Prediction(instance_id=i, model_name_or_path="m", model_patch="diff")


def logs_of(where: Path, i: str = ID, **files: str) -> Path:
    logs = run_grading.log_folder(where, prediction(i))
    logs.mkdir(parents=True)
    for name, text in ({"patch__diff": "diff"} | files).items():
        (logs / name.replace("__", ".")).write_text(text)
    return logs


# --------------------------------------------------------------------------- an environment that broke


def test_a_broken_environment_is_an_error_of_its_own() -> None:
    """Not the agent's failure; in the denominator of Pass@1, and named."""
    reports = {"a": {"resolved": True}, "b": BROKEN, "c": REFUSED}
    verdicts = of_reports({i: Report.model_validate(r) for i, r in reports.items()})
    value = account(["a", "b", "c"], {i: prediction(i) for i in "abc"}, verdicts, {})
    assert value.ends == {"a": "resolved", "b": "infra_failure", "c": "patch_failed"}
    assert value.errors() == ["b"] and value.pass_at_1.n == 3
    assert value.to_json()["shares"]["error"]["value"] == pytest.approx(1 / 3, abs=1e-6)


def test_a_resolved_instance_stays_resolved_whatever_its_log_says() -> None:
    assert of_reports({"a": Report(resolved=True, infra_failure=True)}) == {"a": "resolved"}


def test_errors_of_every_kind_are_tried_again() -> None:
    ends: dict[str, End] = {
        "a": "agent_error",
        "b": "harness_error",
        "c": "infra_failure",
        "d": "not_run",
        "e": "limit",
    }
    assert Account(ends).errors() == ["a", "b", "c"]


def test_its_report_is_dropped_and_graded_again(tmp_path: Path) -> None:
    text = {i: json.dumps({i: report}) for i, report in (("b", BROKEN), ("c", REFUSED))} | {"d": '{"d": {'}
    logs = {i: logs_of(tmp_path, i, report__json=t).joinpath("report.json") for i, t in text.items()}
    run_grading._drop_stale(tmp_path, {i: prediction(i) for i in text})
    assert {i for i, report in logs.items() if report.exists()} == {"c"}, "the damaged one goes too"


@pytest.mark.parametrize("order", [1, -1])
def test_a_summary_that_lists_broken_environments(tmp_path: Path, order: int) -> None:
    """It also lists graded instances whose log looks like it: there the report decides, in whatever order they come."""
    summary = {"resolved_ids": [], "unresolved_ids": ["a__b-1", "a__b-2", "a__b-3"], "completed_ids": []}
    summary |= {"infra_failure_ids": ["a__b-1", "a__b-2"], "schema_version": 2}
    (tmp_path / "run.json").write_text(json.dumps(summary))
    (tmp_path / "report.json").write_text(json.dumps({"a__b-1": REFUSED | {"patch_successfully_applied": True}}))
    known = Verdicts()
    files: list[tuple[str, Any]] = [("run.json", "swebench-summary"), ("report.json", "swebench-report")]
    for name, kind in files[::order]:
        read_verdicts(tmp_path / name, kind, known)
    outcomes = {i: verdict.outcome for i, (verdict, _) in known.by_id.items()}
    assert outcomes == {"a__b-1": "failed", "a__b-2": "infrastructure", "a__b-3": "failed"}
    assert of_files([tmp_path / "run.json"]) == {"a__b-3": "unresolved"}


# --------------------------------------------------------------------------- no report, and whose fault it is

LOGS = [
    ("2026-01-01 - INFO - >>>>> Patch Apply Failed:\nerror: corrupt patch", True),
    ("swebench.harness.utils.EvaluationError: Test timed out after 1800 seconds.", True),
    ("Error creating container for a__b-1: 500 Server Error", False),
    ("", False),
]


@pytest.mark.parametrize(("log", "fault"), LOGS)
def test_a_patch_that_the_harness_refuses_is_no_error_of_the_harness(tmp_path: Path, log: str, fault: bool) -> None:
    """It writes no report then. An error would end ``run_all.sh`` and be tried for ever; the patch stays what it is."""
    where = tmp_path / "grading"
    logs_of(where, run_instance__log=log)
    reports = run_grading.raw_reports(where, {ID: prediction()})
    assert account([ID], {ID: prediction()}, of_reports(reports), {}).ends[ID] == (
        "patch_failed" if fault else "harness_error"
    )


def test_a_report_counts_more_than_the_log(tmp_path: Path) -> None:
    logs = logs_of(tmp_path, run_instance__log=LOGS[0][0], report__json=json.dumps({ID: {"resolved": True}}))
    assert not run_grading.at_fault(logs)
    assert run_grading.raw_reports(tmp_path, {ID: prediction()})[ID].resolved


def test_a_report_without_its_patch_is_refused(tmp_path: Path) -> None:
    logs = logs_of(tmp_path, report__json=json.dumps({ID: {"resolved": True}}))
    (logs / "patch.diff").unlink()
    with pytest.raises(InputError, match=f"is not the patch that {ID} handed in"):
        run_grading.raw_reports(tmp_path, {ID: prediction()})


# --------------------------------------------------------------------------- disks and folders


def test_a_full_disk_anywhere_in_a_phase_is_one_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with (
        pytest.raises(InputError, match=r"x\.json: No space left on device; .*the same command again"),
        folder.locked(),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "x.json")
    with folder.locked():  # and the folder is free again
        pass


def test_a_busy_file_of_a_phase_is_not_another_phase(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(InputError, match=r"^y: "), folder.locked():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable", "y")
    with folder.locked(), pytest.raises(InputError, match="another phase is running"), folder.locked():
        pass


def test_a_dry_run_says_which_file_it_could_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    checks = DryRun()
    with checks.checking("disk"):
        raise PermissionError(errno.EACCES, "Permission denied", "z")
    assert checks.exit_code == 2 and capsys.readouterr().out == "FAIL  disk: [Errno 13] Permission denied: 'z'\n"


def test_the_folder_stays_held_until_a_killed_phases_child_has_ended(tmp_path: Path) -> None:
    """A trainer that is still writing its checkpoint, and the one of the next start, must not meet."""
    child = (
        "import pathlib, signal, sys, time\n"
        f"def end(*_): time.sleep(2); pathlib.Path('{tmp_path}/last').touch(); sys.exit()\n"
        f"signal.signal(signal.SIGTERM, end); pathlib.Path('{tmp_path}/begun').touch(); time.sleep(60)"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(PHASES)!r}); from pathlib import Path\n"
        "import run_folder, steps\n"
        f"with run_folder.RunFolder(Path({str(tmp_path)!r})).locked(): steps.call([sys.executable, '-c', {child!r}])"
    )
    phase = subprocess.Popen([sys.executable, "-c", code], cwd=PHASES.parents[1])
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    phase.kill()
    phase.wait()
    with pytest.raises(InputError, match="another phase is running on it"), RunFolder(tmp_path).locked():
        pass
    while True:
        try:
            with RunFolder(tmp_path).locked():
                assert (tmp_path / "last").exists()
                return
        except InputError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


# --------------------------------------------------------------------------- texts that no file or header can hold


def test_an_agent_that_hands_in_a_lone_surrogate_does_not_stop_the_run(tmp_path: Path) -> None:
    path = tmp_path / "t.traj.json"
    info = {"exit_status": "Submitted", "submission": "diff \udcff", "exception_str": "\ud800"}
    path.write_text(json.dumps({"info": info, "messages": []}))
    outcome = outcome_of(ID, path, tmp_path / "log", 0.0, 1)
    assert (outcome.kind, outcome.patch, outcome.detail) == ("submitted", "diff ?", "?")
    write_json(tmp_path / "outcome.json", outcome.model_dump(mode="json"))


@pytest.mark.parametrize("key", ["secret\nkey", "secret\u00e9key"])
def test_a_key_that_cannot_be_sent_is_not_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ServerError, match=r"^VLLM_API_KEY: holds a character") as error:
        run_server.request(RunSettings(run_name="r", model=ModelSettings(name="m")), "/v1/models")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("phase", ["2", "3"])
def test_a_server_of_another_model_is_asked_nothing(tmp_path: Path, phase: str) -> None:
    """One that answers under any name would label, write or solve unnoticed."""
    with ScriptedServer(model="another") as server:
        run = Run(tmp_path, server.url)
        fill_phase1(run)
        main: Callable[[], int] = phase2.main
        flags: list[str | Path] = []
        if phase == "3":
            main = functools.partial(phase3.main_for, "deep_call_graph_traversal", "")
            main.__module__ = "phase3"  # type: ignore[attr-defined]
            flags = ["--description", "x"]
        done = run.here(main, *flags)
        assert done.returncode == 2 and "serves another, not scripted" in done.stderr
        assert all("completions" not in path for path, _ in server.requests)
