"""What was changed by hand or fits no run is refused in one line: names, servers, rows, splits, ends, settings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import phase6_final_eval
import pytest
import run_agents
import run_checkpoint
import run_dataset
import run_evaluation
import run_folder
import run_grading
import run_server
from run_accounting import account, of_reports
from run_folder import RunFolder
from run_settings import RunSettings, load_settings
from scripted_server import ScriptedServer
from swe_run_helpers import read, row, settings_data, write_config

from pipeline.files import InputError, ServerError
from pipeline.readers.swebench import Report

IDS = [f"mini__a-{n}" for n in range(1, 9)]
ENDS = ["resolved", "unresolved", "patch_failed", "empty_patch", "limit", "format", "agent_error", "harness_error"]
KINDS = {"empty_patch": "empty_patch", "limit": "limit", "format": "format", "agent_error": "infrastructure"}


def one_line(error: pytest.ExceptionInfo[Exception], words: str) -> None:
    assert words in str(error.value) and "\n" not in str(error.value)


class Run:
    """A finished phase 1 of eight instances, one of each end, as its files; no agent ran."""

    def __init__(self, tmp: Path) -> None:
        self.folder = RunFolder(tmp / "run")
        self.settings = RunSettings.model_validate(settings_data())
        self.instances = run_dataset.checked_rows([row(i) for i in IDS], "rows")
        out = self.folder.phase1
        (out / "outcomes").mkdir(parents=True)
        self.write_rows([i.row() for i in self.instances])
        digest = run_dataset.dataset_digest(self.instances)
        self.record = run_folder.write_run(self.folder, self.settings, IDS, digest)
        outcomes = {}
        reports: dict[str, Any] = {}
        for i, end in zip(IDS, ENDS, strict=True):
            kind: Any = KINDS.get(end, "submitted")
            patch = "diff" if kind == "submitted" else ""
            outcomes[i] = run_agents.Outcome(instance_id=i, kind=kind, exit_status="x", patch=patch)
            (out / "outcomes" / f"{i}.json").write_text(outcomes[i].model_dump_json())
            if end in ("resolved", "unresolved", "patch_failed"):
                reports[i] = {"resolved": end == "resolved", "patch_successfully_applied": end != "patch_failed"}
            trajectory = out / "trajectories" / i / f"{i}.traj.json"
            status = {"submitted": "Submitted", "empty_patch": "Submitted", "limit": "LimitsExceeded"}.get(kind, kind)
            status = "FormatError" if kind == "format" else status
            write(trajectory, {"info": {"exit_status": status, "submission": patch}, "messages": []})
        run_agents.write_predictions(out, outcomes, "scripted")
        (out / "report.json").write_text(json.dumps(reports))
        for i, prediction in run_grading.read_predictions(out / "preds.json").items():
            if i in reports:
                logs = run_grading.log_folder(out / "grading", prediction)
                write(logs / "report.json", {i: reports[i]})
                (logs / "patch.diff").write_text("diff")
        verdicts = of_reports({i: Report.model_validate(r) for i, r in reports.items()})
        value = account(IDS, run_grading.read_predictions(out / "preds.json"), verdicts, outcomes)
        assert list(value.ends.values()) == ENDS
        protocol = run_evaluation.Protocol(agent={}, sampling={}, grading={}, server={}, versions={})
        summary = run_evaluation.Summary(
            run_name="r",
            name="base",
            model="scripted",
            checkpoint=None,
            protocol=protocol,
            protocol_digest=protocol.digest(),
            instances={i.instance_id: i.digest() for i in self.instances},
            ends=value.ends,
            account=value.to_json(),
            agents={},
        )
        self.summary = out / "summary.json"
        self.summary.write_text(summary.model_dump_json())

    def write_rows(self, rows: list[dict[str, Any]]) -> None:
        self.folder.root.mkdir(parents=True, exist_ok=True)
        self.folder.dataset.write_text("".join(json.dumps(r) + "\n" for r in rows))


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(run_folder, "versions", lambda settings: {})  # a process of the agents' Python for each test
    run = Run(tmp_path)
    graded = run_grading.raw_reports(
        run.folder.phase1 / "grading", run_grading.read_predictions(run.folder.phase1 / "preds.json")
    )
    # what the official code makes of the tests' output; test_swe_run_end_to_end.py has the real one
    monkeypatch.setattr(run_evaluation, "regraded", lambda *_: graded)
    return run


def write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


def verified(run: Run) -> run_evaluation.Summary:
    return run_evaluation.verified_summary(run.summary, run.settings, run.instances)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    data = read(path)
    change(data)
    path.write_text(json.dumps(data))


# ---------------------------------------------------------------------- names


BAD_NAMES = ["", ".", "..", "../../zz", "a/b", "comparison.json", "x.MD", "a\n", "a|b", "a b", "-x", "x" * 101, "é"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_no_folder_of_phase_6(name: str) -> None:
    with pytest.raises(InputError) as error:
        run_checkpoint.read_checkpoint("scripted", RunSettings.model_validate(settings_data()), name)
    one_line(error, "choose another with --name")


def test_names_that_follow_from_the_checkpoint_are_checked_too(tmp_path: Path) -> None:
    settings = RunSettings.model_validate(settings_data())
    for text in ("org/a b", "x" * 101, "m|n"):
        with pytest.raises(InputError, match="choose another with --name"):
            run_checkpoint.read_checkpoint(text, settings)
        assert run_checkpoint.read_checkpoint(text, settings, "good").name == "good"
    for file in ("config.json", "adapter_config.json", "adapter_model.safetensors"):
        folder = tmp_path / "my model.md"
        folder.mkdir(exist_ok=True)
        (folder / file).write_text("{}")
        if file != "adapter_config.json":
            with pytest.raises(InputError, match="choose another with --name"):
                run_checkpoint.read_checkpoint(str(folder), settings)
    assert run_checkpoint.read_checkpoint("Qwen/Qwen3.6-27B@v1.0_b", settings).name == "Qwen__Qwen3.6-27B@v1.0_b"


def test_the_phase_writes_nothing_outside_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "deep" / "er" / "run"
    line = ["phase6", "--config", str(write_config(tmp_path, settings_data())), "--run-dir", str(run)]
    monkeypatch.setattr("sys.argv", [*line, "--checkpoint", "scripted", "--name", "../../zzevil"])
    monkeypatch.setattr(run_server, "interrupt_on_term", lambda: None)  # it would stay set
    with pytest.raises(InputError) as error:
        phase6_final_eval.main()
    one_line(error, "zzevil")
    assert not list(tmp_path.rglob("zzevil"))


# ---------------------------------------------------------------------- the server's base model


def test_an_adapter_needs_its_base_model_on_the_server(tmp_path: Path) -> None:
    config = {"base_model_name_or_path": "another-base", "r": 4}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_text("w")
    with ScriptedServer(model="another-base") as server:
        settings = RunSettings.model_validate(settings_data(server.url))
        checkpoint = run_checkpoint.read_checkpoint(str(tmp_path), settings, "x")
        with (
            pytest.raises(InputError, match="rests on another-base, the run is about scripted"),
            run_checkpoint.available(checkpoint, settings),
        ):
            pass
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "scripted"}))
        with (
            pytest.raises(ServerError, match="serves another-base, not scripted"),
            run_checkpoint.available(checkpoint, settings),
        ):
            pass
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        assert not server.calls("/v1/load_lora_adapter")
        right = settings.model_copy(update={"model": settings.model.model_copy(update={"name": "another-base"})})
        with run_checkpoint.available(checkpoint, right) as name:
            assert name in server.adapters


def test_an_adapter_over_another_model_than_that_of_phase_1(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM_MODEL names another base, which the server does serve."""
    base = run_evaluation.read_summary(finished.summary)
    monkeypatch.setattr(phase6_final_eval, "baseline", lambda *_: base)
    model = finished.settings.model.model_copy(update={"name": "another-base"})
    checkpoint = run_checkpoint.Checkpoint("adapter", "x", "r.x.0", tmp_path)
    args = phase6_final_eval.parse_arguments(["--checkpoint", str(tmp_path)])
    settings = finished.settings.model_copy(update={"model": model})
    with pytest.raises(InputError) as error:
        phase6_final_eval.run(args, settings, finished.folder, checkpoint)
    one_line(error, "phase 1 ran scripted")


# ---------------------------------------------------------------------- frozen rows and split


def test_phase_6_scores_the_frozen_rows_of_the_recorded_split(finished: Run) -> None:
    chosen = phase6_final_eval.chosen(finished.folder, "score")
    assert [i.instance_id for i in chosen] == finished.record.split.score and 0 < len(chosen) < len(IDS)
    assert phase6_final_eval.chosen(finished.folder, "all") == finished.instances


@pytest.mark.parametrize("how", ["changed", "removed", "added"])
def test_frozen_rows_that_were_changed(finished: Run, how: str) -> None:
    rows = [i.row() for i in finished.instances]
    if how == "changed":
        rows[-1]["FAIL_TO_PASS"] = ["an easier one"]
    elif how == "removed":
        rows = [r for r in rows if r["instance_id"] != finished.record.split.score[0]]
    else:
        rows.append(row("mini__a-9"))
    finished.write_rows(rows)
    with pytest.raises(InputError) as error:
        phase6_final_eval.chosen(finished.folder, "score")
    one_line(error, "was changed since phase 1 began")


@pytest.mark.parametrize("how", ["moved", "shares", "twice"])
def test_a_split_that_was_changed(finished: Run, how: str) -> None:
    def change(data: dict[str, Any]) -> None:
        split = data["split"]
        if how == "moved":
            split["score"] = sorted([*split["score"], split["mine"].pop()])
        elif how == "shares":
            split["shares"] = "1:1"
        else:
            split["mine"].insert(0, split["mine"][0])

    edit(finished.folder.run_json, change)
    with pytest.raises(InputError) as error:
        run_folder.read_run(finished.folder)
    one_line(error, "its split was changed")


def test_a_split_that_lost_an_instance(finished: Run) -> None:
    lost = finished.record.split.score[0]
    edit(finished.folder.run_json, lambda data: data["split"]["score"].remove(lost))
    with pytest.raises(InputError) as error:
        phase6_final_eval.chosen(finished.folder, "score")
    one_line(error, f"differ in {lost}")


# ---------------------------------------------------------------------- outcomes and summaries


def test_the_outcome_of_another_instance(finished: Run) -> None:
    folder = finished.folder.phase1 / "outcomes"
    (folder / f"{IDS[0]}.json").replace(folder / f"{IDS[1]}.json")
    with pytest.raises(InputError) as error:
        run_agents.read_outcomes(finished.folder.phase1, IDS)
    one_line(error, f"is of '{IDS[0]}'")


def test_a_summary_is_what_its_files_say(finished: Run) -> None:
    assert verified(finished) == run_evaluation.read_summary(finished.summary)


def raise_end(data: dict[str, Any]) -> None:
    data["ends"][IDS[1]] = "resolved"


def raise_account(data: dict[str, Any]) -> None:
    data["account"]["resolved"] = 8


def drop_end(data: dict[str, Any]) -> None:
    del data["ends"][IDS[3]]


def drop_row(data: dict[str, Any]) -> None:
    del data["instances"][IDS[3]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (raise_end, f"says resolved of {IDS[1]}, the files beside it unresolved"),
        (raise_account, "its account does not follow"),
        (drop_end, f"instances and ends differ in {IDS[3]}"),
        (drop_row, f"instances and ends differ in {IDS[3]}"),
    ],
)
def test_a_summary_that_was_changed(finished: Run, change: Callable[[Any], None], words: str) -> None:
    edit(finished.summary, change)
    with pytest.raises(InputError) as error:
        verified(finished)
    one_line(error, words)


@pytest.mark.parametrize("file", ["report.json", "preds.json"])
@pytest.mark.parametrize("text", [None, "[", "3"])
def test_a_summary_without_its_files(finished: Run, file: str, text: str | None) -> None:
    path = finished.folder.phase1 / file
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(InputError) as error:
        verified(finished)
    one_line(error, file)


def forge(run: Run, *, raw: bool) -> None:
    """An unresolved instance becomes a resolved one in the summary, in the report, and in the harness' own file."""
    i = IDS[1]
    edit(run.folder.phase1 / "report.json", lambda data: data[i].update(resolved=True))
    reports = {k: Report.model_validate(r) for k, r in read(run.folder.phase1 / "report.json").items()}
    predictions = run_grading.read_predictions(run.folder.phase1 / "preds.json")
    value = account(IDS, predictions, of_reports(reports), run_agents.read_outcomes(run.folder.phase1, IDS))
    edit(run.summary, lambda data: data.update(ends=value.ends, account=value.to_json()))
    if raw:
        logs = run_grading.log_folder(run.folder.phase1 / "grading", predictions[i])
        edit(logs / "report.json", lambda data: data[i].update(resolved=True))


@pytest.mark.parametrize(
    ("raw", "words"),
    [(False, "does not follow from the harness' own reports"), (True, "does not follow from the tests' output")],
)
def test_a_consistent_edit_by_hand_is_found(finished: Run, raw: bool, words: str) -> None:
    forge(finished, raw=raw)
    with pytest.raises(InputError) as error:
        verified(finished)
    one_line(error, f"{words} for {IDS[1]}")


def test_a_patch_that_the_agent_did_not_hand_in(finished: Run) -> None:
    """The gold patch in the predictions, and then in the outcome too."""
    out = finished.folder.phase1
    edit(out / "preds.json", lambda data: data[IDS[1]].update(model_patch="gold"))
    with pytest.raises(InputError, match=f"{IDS[1]} is not what its agent handed in"):
        verified(finished)
    edit(out / "outcomes" / f"{IDS[1]}.json", lambda data: data.update(patch="gold"))
    with pytest.raises(InputError, match=f"outcome of {IDS[1]} .*does not follow from its trajectory"):
        verified(finished)


def test_a_report_of_another_patch(finished: Run) -> None:
    predictions = run_grading.read_predictions(finished.folder.phase1 / "preds.json")
    logs = run_grading.log_folder(finished.folder.phase1 / "grading", predictions[IDS[0]])
    (logs / "patch.diff").write_text("gold")
    with pytest.raises(InputError, match="is not the patch that"):
        verified(finished)


def test_another_checkpoint_s_summary_that_was_changed(finished: Run) -> None:
    """It would stand in the table beside the newest one."""
    other = finished.folder.evaluation("older")
    other.parent.mkdir()
    finished.folder.phase1.rename(other)
    newest = run_evaluation.read_summary(other / "summary.json")
    assert phase6_final_eval.comparable_ones(finished.settings, finished.folder, newest) == [newest]
    for change in (raise_end, drop_end):
        edit(other / "summary.json", change)
        with pytest.raises(InputError):
            phase6_final_eval.comparable_ones(finished.settings, finished.folder, newest)


def test_an_evaluation_s_folder_that_is_a_file(finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_evaluation, "shared_config", lambda settings: {})
    finished.folder.phase6.write_text("")
    subject = run_evaluation.Subject("x", "scripted")
    with pytest.raises(InputError) as error:
        run_evaluation.evaluate(
            finished.settings, finished.folder, finished.folder.evaluation("x"), finished.instances, subject
        )
    one_line(error, "cannot be made (Not a directory)")


# ---------------------------------------------------------------------- reports of patches


@pytest.mark.parametrize(
    ("patch", "kept"), [(b"a\r\nb\r\n", True), (b"a\nb\n", False), (b"\xff\xfe", False), (None, False)]
)
def test_a_report_belongs_to_the_bytes_of_its_patch(tmp_path: Path, patch: bytes | None, kept: bool) -> None:
    """CRLF included: read as text it would look changed, and be graded again at every resumption."""
    prediction = run_grading.Prediction(instance_id="a", model_name_or_path="m", model_patch="a\r\nb\r\n")
    logs = run_grading.log_folder(tmp_path, prediction)
    logs.mkdir(parents=True)
    (logs / "patch.diff").mkdir() if patch is None else (logs / "patch.diff").write_bytes(patch)
    (logs / "report.json").write_text("{}")
    run_grading._drop_stale(tmp_path, {"a": prediction})
    assert logs.exists() == kept


def test_a_file_in_the_place_of_the_logs(tmp_path: Path) -> None:
    prediction = run_grading.Prediction(instance_id="a", model_name_or_path="m", model_patch="p")
    logs = run_grading.log_folder(tmp_path, prediction)
    logs.parent.mkdir(parents=True)
    logs.write_text("")
    run_grading._drop_stale(tmp_path, {"a": prediction})
    assert not logs.exists()


# ---------------------------------------------------------------------- settings


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("space", {"model": {"base_url": "http://a b"}}, "expected http://HOST:PORT"),
    ("control", {"model": {"base_url": "http://a\tb"}}, "expected http://HOST:PORT"),
    ("scheme", {"model": {"base_url": "ftp://a"}}, "expected http://HOST:PORT"),
    ("no host", {"model": {"base_url": "http://"}}, "expected http://HOST:PORT"),
    ("port", {"model": {"base_url": "http://a:99999"}}, "base_url"),
    ("brackets", {"model": {"base_url": "http://[a"}}, "base_url"),
    ("query", {"model": {"base_url": "http://a?b"}}, "without ? and #"),
    ("labeller", {"mining": {"base_url": "a:1"}}, "expected http://HOST:PORT"),
    ("writer", {"synthesis": {"writer_base_url": "http://a b"}}, "expected http://HOST:PORT"),
    ("nan", {"agent": {"environment": {"env": {"a": math.nan}}}}, "a finite number"),
    ("key", {"agent": {"environment": {"env": {1: "a"}}}}, "expected text as a key"),
    ("class", {"agent": {"environment": {"environment_class": "local"}}}, "follows from agent.backend"),
    ("top_k 0", {"sampling": {"top_k": 0}}, "expected an integer >= 1, -1"),
    ("top_k -2", {"sampling": {"top_k": -2}}, "expected an integer >= 1, -1"),
    ("max_tokens", {"sampling": {"max_tokens": 10**7 + 1}}, "max_tokens"),
    ("quote", {"server": {"args": "--a 'b"}}, "No closing quotation"),
    ("command", {"server": {"command": []}}, "server.command"),
    ("word", {"server": {"command": [""]}}, "server.command"),
    ("nul", {"agent": {"python": "a\0b"}}, "agent: python: holds NUL"),
    ("nul in a list", {"server": {"command": ["a\0b"]}}, "server: command: holds NUL"),
    ("huge", {"mine_score": "1e999:1"}, "both parts at least 1/1000"),
    ("tiny", {"mine_score": "1:1e999"}, "both parts at least 1/1000"),
]


@pytest.mark.parametrize(("change", "words"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_settings_that_would_fail_later(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        load_settings(write_config(tmp_path, settings_data(**change)))
    one_line(error, words)


@pytest.mark.parametrize("value", ["2026-01-01", "2026-01-01 10:00:00", "!!set {a: null}", '"\\ud800"'])
def test_values_of_yaml_that_json_has_not(tmp_path: Path, value: str) -> None:
    path = write_config(tmp_path, settings_data(agent={"environment": {"env": "MARK"}}))
    path.write_text(path.read_text().replace("MARK", value))
    with pytest.raises(InputError) as error:
        load_settings(path)
    assert "\n" not in str(error.value) and "environment" in str(error.value)


def test_settings_that_are_right(tmp_path: Path) -> None:
    good = {
        "model": {"base_url": "https://example.org:8443/v1"},
        "sampling": {"top_k": -1, "max_tokens": 10**7},
        "agent": {"environment": {"run_args": ["--rm", "--memory=8g"], "env": {"A": "1", "B": ""}, "timeout": 1.5}},
        "server": {"args": "--a 'b c'"},
        "mine_score": "1/3:2/3",
    }
    settings = load_settings(write_config(tmp_path, settings_data(**good)))
    assert settings.sampling.top_k == -1 and settings.agent.environment == good["agent"]["environment"]  # type: ignore[index]


@pytest.mark.parametrize("how", ["", "folder", "no program"])
def test_an_agents_python_that_is_none(tmp_path: Path, how: str) -> None:
    python = tmp_path / "python"
    if how == "folder":
        python.mkdir()
    elif how:
        python.write_bytes(b"\0\0")
        python.chmod(0o755)
    settings = RunSettings.model_validate(settings_data(agent={"python": str(python) if how else ""}))
    with pytest.raises(InputError) as error:
        run_folder.agent_versions(settings)
    one_line(error, "does not run" if how == "no program" else "not found")


def test_the_address_in_the_environment_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = run_folder.phase_parser("").parse_args(["--config", str(write_config(tmp_path, settings_data()))])
    monkeypatch.setenv("VLLM_BASE_URL", "http://a b")
    with pytest.raises(InputError) as error:
        run_folder.open_phase(args)
    one_line(error, "VLLM_BASE_URL or VLLM_MODEL: base_url")
