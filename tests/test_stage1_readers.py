"""Every reader on real files and on the shapes that trip naive parsers: counts, joins, ids, infrastructure."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from stage1_helpers import SHARED, Done, run_main

from pipeline import _summarize
from pipeline.files import InputError
from pipeline.readers.plan import make_plan
from pipeline.readers.sniff import detect
from pipeline.readers.trajectory import from_responses
from pipeline.records import Record, read_info, read_summaries

FILES = SHARED / "trajectories"
needs_files = pytest.mark.skipif(not FILES.is_dir(), reason=f"{FILES} is not there")
MINI = FILES / "mini_swe_agent"
SWE = FILES / "swebench"


def summarize(tmp_path: Path, *arguments: str | Path) -> Done:
    return run_main(_summarize.main, "--output", tmp_path / "out.json", "--input", *arguments)


def records(tmp_path: Path) -> dict[str, Record]:
    return {r.id: r for r in read_summaries(tmp_path / "out.json")}


def counts(tmp_path: Path) -> tuple[int, int, int, int]:
    found = read_info(tmp_path / "out.json")["counts"]
    return found["passed"], found["failed"], found["infrastructure"], found["unknown"]


def write(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


# --------------------------------------------------------------------------- detection


@needs_files
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tau2/activegraph_airline_5tasks.json", "tau2"),
        ("tau2/split_dir_text_airline", "tau2_dir"),
        ("tau2/split_dir_text_airline/results.json", "tau2_dir"),
        ("tau2/nemogym_tau2_test_data_max_steps.json", "tau2_rollout"),
        ("tau1/gpt-4o-airline_first12.json", "tau-bench"),
        ("mini_swe_agent/v1.9.1_missing_colon.traj.json", "mini-swe-agent"),
        ("mini_swe_agent/v2.2.7_reasoner_error_pvlib__pvlib-python-1154.traj.json", "mini-swe-agent"),
        ("swe_agent/v0_test-repo-i1.traj", "swe-agent"),
        ("swe_agent/v1_toolcalls_6e44b9.traj", "swe-agent"),
        ("swebench/flat_report/django__django-10999/report.json", "swebench-flat-report"),
        ("swebench/keyed_report/pydicom__pydicom-1256/report.json", "swebench-report"),
        ("swebench/summary_harness_deepseek_23.json", "swebench-summary"),
        ("swebench/preds_mini_v2.2.7_deepseek_23.json", "swebench-preds"),
        ("toolsandbox/scripted_run/result_summary.json", "toolsandbox"),
        ("inspect/tool_call_error.json", "inspect"),
        ("openai_messages/evalprotocol_function_calling_13.jsonl", "openai"),
    ],
)
def test_the_format_is_detected(name: str, expected: str) -> None:
    assert detect(FILES / name) == expected


def test_an_unknown_format_lists_the_known_ones_and_can_be_overridden(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", {"hello": 1})
    done = summarize(tmp_path, path)
    assert done.returncode == 2 and "tau2" in done.stderr and "--benchmark" in done.stderr
    rows = write(tmp_path / "rows.json", [{"messages": [{"role": "user", "content": "hi"}], "traj": [], "task_id": 3}])
    assert detect(rows) == "tau-bench"
    assert summarize(tmp_path, rows, "--benchmark", "openai").returncode == 0
    assert list(records(tmp_path)) == ["3"]


@needs_files
def test_a_folder_of_everything_is_planned_and_what_is_unknown_is_named(tmp_path: Path) -> None:
    write(tmp_path / "in" / "notes.json", {"hello": 1})
    write(tmp_path / "in" / "sub" / "report.json", {"django__django-1": {"resolved": True}})
    plan = make_plan([str(tmp_path / "in")], None)
    assert [f for _, f in plan.inputs] == ["swebench-report"]
    assert [p.name for p in plan.skipped] == ["notes.json"]
    done = summarize(tmp_path, tmp_path / "in")
    assert "skipped (no known format)" in done.stdout and "notes.json" in done.stdout


# --------------------------------------------------------------------------- tau-bench


@needs_files
def test_tau_bench_counts_trials_and_reasons(tmp_path: Path) -> None:
    assert summarize(tmp_path, FILES / "tau1" / "gpt-4o-airline_first12.json").returncode == 0
    assert counts(tmp_path) == (2, 10, 0, 0)
    found = records(tmp_path)
    assert "airline:0" in found
    assert "final database differs" in found["airline:0"].reason
    assert "book_reservation" in found["airline:0"].reason


def test_tau_bench_crashes_are_not_failures_of_the_agent(tmp_path: Path) -> None:
    rows = [
        {"task_id": 0, "reward": 0.0, "info": {"error": "RateLimitError", "traceback": "..."}, "traj": [], "trial": 0},
        {"task_id": 0, "reward": 1.0, "info": {}, "traj": [{"role": "user", "content": "x"}], "trial": 1},
    ]
    assert summarize(tmp_path, write(tmp_path / "m-retail.json", rows)).returncode == 0
    assert counts(tmp_path) == (1, 0, 1, 0)
    assert list(records(tmp_path)) == ["retail:0", "retail:0#1"]


# --------------------------------------------------------------------------- SWE-bench


@needs_files
def test_mini_2_joins_with_reports_summary_and_predictions(tmp_path: Path) -> None:
    inputs = [
        SWE / "preds_mini_v2.2.7_deepseek_23.json",
        SWE / "summary_harness_deepseek_23.json",
        SWE / "keyed_report",
        MINI / "v2.2.7_pydicom__pydicom-1256.traj.json",
        MINI / "v2.2.7_sqlfluff__sqlfluff-2419.traj.json",
    ]
    assert summarize(tmp_path, *inputs).returncode == 0
    assert counts(tmp_path) == (8, 15, 0, 0)
    found = records(tmp_path)
    assert found["pydicom__pydicom-1256"].outcome == found["sqlfluff__sqlfluff-2419"].outcome == "passed"
    assert sum(bool(r.messages) for r in found.values()) == 2
    assert found["pydicom__pydicom-1256"].domain == "pydicom"
    roles = [m.role for m in found["pydicom__pydicom-1256"].messages]
    assert roles[0] == "system" and roles[-1] == "exit" and "tool" in roles


@needs_files
def test_mini_1_joins_with_flat_reports(tmp_path: Path) -> None:
    traces = sorted(MINI.glob("v1.15.0*"))
    assert summarize(tmp_path, SWE / "flat_report", *traces).returncode == 0
    assert counts(tmp_path) == (1, 1, 0, 0)
    failed = records(tmp_path)["django__django-10999"]
    assert failed.outcome == "failed" and "FAIL_TO_PASS tests still fail: test_negative" in failed.reason


@needs_files
def test_submitted_is_not_a_verdict(tmp_path: Path) -> None:
    for path in (MINI / "v1.9.1_missing_colon.traj.json", *sorted((FILES / "swe_agent").iterdir())):
        assert summarize(tmp_path, path).returncode == 0
        assert counts(tmp_path) == (0, 0, 0, 1), path
        (record,) = records(tmp_path).values()
        assert "no verdict" in record.reason


@needs_files
def test_empty_patches_do_not_vanish(tmp_path: Path) -> None:
    preds = SWE / "preds_empty_patches_reasoner_15.json"
    assert summarize(tmp_path, preds).returncode == 0
    assert counts(tmp_path) == (0, 0, 10, 5)
    error = MINI / "v2.2.7_reasoner_error_pvlib__pvlib-python-1154.traj.json"
    assert summarize(tmp_path, preds, error).returncode == 0
    record = records(tmp_path)["pvlib__pvlib-python-1154"]
    assert record.outcome == "infrastructure" and "Timeout" in record.reason and len(record.messages) == 3


@needs_files
def test_swe_agent_demonstrations_are_left_out_and_indices_kept(tmp_path: Path) -> None:
    path = FILES / "swe_agent" / "v0_test-repo-i1.traj"
    history = json.loads(path.read_text())["history"]
    demo = next(i for i, m in enumerate(history) if m.get("is_demo"))
    assert summarize(tmp_path, path).returncode == 0
    (record,) = records(tmp_path).values()
    indices = [m.index for m in record.messages]
    assert demo not in indices and indices == [i for i in range(len(history)) if i != demo]
    assert summarize(tmp_path, FILES / "swe_agent" / "v1_toolcalls_6e44b9.traj").returncode == 0
    assert list(records(tmp_path)) == ["SWE-agent__test-repo-i1"]  # from the replay config, a JSON string


def test_swe_agent_without_history_uses_its_steps(tmp_path: Path) -> None:
    step = {"action": "ls", "observation": "a.py", "response": "I list."}
    path = write(
        tmp_path / "a__b-1.traj", {"trajectory": [step], "info": {"exit_status": "exit_cost", "submission": None}}
    )
    assert summarize(tmp_path, path).returncode == 0
    record = records(tmp_path)["a__b-1"]
    assert [(m.role, m.content) for m in record.messages] == [("assistant", "I list."), ("tool", "a.py")]
    assert record.outcome == "failed" and "exit_cost" in record.reason


@pytest.mark.parametrize("layout", ["dict", "list", "jsonl"])
def test_three_layouts_of_predictions(tmp_path: Path, layout: str) -> None:
    rows = [{"instance_id": "a__b-1", "model_patch": "diff"}, {"instance_id": "a__b-2", "model_patch": ""}]
    path = tmp_path / ("preds.jsonl" if layout == "jsonl" else "preds.json")
    if layout == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        write(path, rows if layout == "list" else {r["instance_id"]: r for r in rows})
    assert summarize(tmp_path, path).returncode == 0
    assert {i: r.outcome for i, r in records(tmp_path).items()} == {"a__b-1": "unknown", "a__b-2": "infrastructure"}


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ({"resolved_ids": ["a__b-1"], "unresolved_ids": ["a__b-2"], "error_ids": ["a__b-3"]}, (1, 1, 1, 0)),
        ({"ids_resolved": ["a__b-1"], "submitted_ids": ["a__b-1", "a__b-2"]}, (1, 1, 0, 0)),
        ({"resolved": ["a__b-1"], "no_generation": ["a__b-2"], "resolved_instances": 1}, (1, 1, 0, 0)),
        ({"resolved": 1, "resolved_ids": ["a__b-1"], "completed_ids": ["a__b-1", "a__b-2"]}, (1, 1, 0, 0)),
        # an incomplete instance that was never submitted is not part of the run
        ({"resolved_ids": ["a__b-1"], "submitted_ids": ["a__b-1"], "incomplete_ids": ["a__b-9"]}, (1, 0, 0, 0)),
        ({"resolved_ids": [], "submitted_ids": ["a__b-9"], "incomplete_ids": ["a__b-9"]}, (0, 0, 1, 0)),
    ],
)
def test_shapes_of_summaries(tmp_path: Path, summary: dict[str, Any], expected: tuple[int, int, int, int]) -> None:
    assert summarize(tmp_path, write(tmp_path / "summary.json", summary)).returncode == 0
    assert counts(tmp_path) == expected


@pytest.mark.parametrize(
    ("report", "outcome", "word"),
    [
        ({"resolved": False, "patch_is_None": True}, "failed", "no patch"),
        ({"resolved": False, "patch_successfully_applied": False}, "failed", "does not apply"),
        ({"patch_exists": False}, "failed", "no patch"),
        ({"patch_exists": True}, "unknown", "no resolved field"),
        ({"resolved": True, "patch_successfully_applied": False}, "passed", ""),
        ({"resolved": False, "tests_status": {"PASS_TO_PASS": {"failure": list("abcde")}}}, "failed", "5 PASS_TO_PASS"),
    ],
)
def test_reports(tmp_path: Path, report: dict[str, Any], outcome: str, word: str) -> None:
    assert summarize(tmp_path, write(tmp_path / "x.json", {"a__b-1": report})).returncode == 0
    record = records(tmp_path)["a__b-1"]
    assert record.outcome == outcome and word in record.reason


def test_contradictions_between_verdict_files_are_errors(tmp_path: Path) -> None:
    first = write(tmp_path / "a.json", {"a__b-1": {"resolved": True}})
    second = write(tmp_path / "b.json", {"resolved_ids": [], "unresolved_ids": ["a__b-1"]})
    done = summarize(tmp_path, first, second)
    assert done.returncode == 2 and "a__b-1" in done.stderr and "b.json" in done.stderr
    both = write(tmp_path / "c.json", {"resolved_ids": ["a__b-1"], "unresolved_ids": ["a__b-1"]})
    assert "both resolved and unresolved" in summarize(tmp_path, both).stderr
    flat = write(tmp_path / "flat.json", {"resolved": True, "patch_successfully_applied": True})
    assert "report.json" in summarize(tmp_path, flat).stderr
    rows = write(tmp_path / "p.json", [{"instance_id": "a__b-1", "model_patch": ""}] * 2)
    assert "second prediction" in summarize(tmp_path, rows).stderr


@pytest.mark.parametrize(
    ("status", "submission", "outcome"),
    [
        ("Submitted", "diff", "unknown"),
        ("LimitsExceeded", "", "failed"),
        ("ContextWindowExceededError", "", "failed"),  # the agent used its context up, as SWE-agent's exit_context
        ("submitted (exit_cost)", "diff", "unknown"),
        ("exit_environment_error", "", "infrastructure"),
        ("APIError", "", "infrastructure"),
        ("CalledProcessError", None, "infrastructure"),
    ],
)
def test_how_a_coding_agent_stopped(tmp_path: Path, status: str, submission: str | None, outcome: str) -> None:
    data = {"info": {"exit_status": status, "submission": submission}, "messages": [], "instance_id": "a__b-1"}
    assert summarize(tmp_path, write(tmp_path / "x.traj.json", data)).returncode == 0
    assert records(tmp_path)["a__b-1"].outcome == outcome


def test_messages_of_the_responses_api() -> None:
    raw = {
        "object": "response",
        "output": [
            {"type": "message", "content": [{"type": "output_text", "text": "hi"}]},
            {"type": "function_call", "name": "ls", "arguments": "{}"},
        ],
    }
    assert from_responses(raw)["content"] == "hi" and from_responses(raw)["tool_calls"][0]["name"] == "ls"
    assert from_responses({"type": "function_call_output", "output": "x"}) == {"role": "tool", "content": "x"}


# --------------------------------------------------------------------------- ToolSandbox, Inspect, messages


@needs_files
def test_toolsandbox(tmp_path: Path) -> None:
    run = FILES / "toolsandbox" / "scripted_run"
    done = summarize(tmp_path, run)
    assert done.returncode == 0 and "similarities, not verdicts; passed means >= 1\n" in done.stdout
    assert counts(tmp_path) == (2, 6, 1, 0)  # 2 at 1.0; 4 partial and 2 of the 3 zeros; the third zero is an exception
    found = records(tmp_path)
    crashed = found["toolsandbox:update_contact_with_id_and_phone_number"]
    assert crashed.outcome == "infrastructure" and not crashed.messages
    assert "similarity 0.950" in found["toolsandbox:cellular_off"].reason
    assert found["toolsandbox:cellular_off"].messages
    assert summarize(tmp_path, run / "result_summary.json", "--pass-threshold", "0.8").returncode == 0
    assert counts(tmp_path)[0] > 2


def test_toolsandbox_names_stay_inside_the_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "result_summary.json", {"per_scenario_results": [{"name": "../../etc", "similarity": 1.0}]})
    assert "not a folder name" in summarize(tmp_path, path).stderr


@needs_files
def test_inspect_fixture_has_no_verdict_but_tool_errors(tmp_path: Path) -> None:
    assert summarize(tmp_path, FILES / "inspect" / "tool_call_error.json").returncode == 0
    assert counts(tmp_path) == (0, 0, 0, 1)
    (record,) = records(tmp_path).values()
    assert record.trial == 3 and "[error parsing]" in record.messages[0].content


def inspect_log(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"version": 2, "status": "success", "eval": {"task": "quiz"}, "samples": samples}


SAMPLES: list[dict[str, Any]] = [
    {"id": "a", "epoch": 1, "messages": [], "scores": {"match": {"value": "C"}}},
    {"id": "a", "epoch": 2, "messages": [], "scores": {"match": {"value": "I", "explanation": "said 4"}}},
    {"id": 2, "messages": [], "scores": {"match": {"value": "P"}}},
    {"id": 3, "messages": [], "scores": {"match": {"value": "N"}}},
    {"id": 4, "messages": [], "scores": {"match": {"value": 1}}},
    {"id": 5, "messages": [], "scores": {"match": {"value": True}}},
    {"id": 6, "messages": [], "scores": {"match": {"value": {"a": 1}}}},
    {"id": 7, "messages": [], "error": {"message": "docker died"}, "scores": {"match": {"value": "I"}}},
    {"id": 8, "messages": []},
]
VERDICTS = ["passed", "failed", "failed", "failed", "passed", "passed", "unknown", "infrastructure", "unknown"]


@pytest.mark.parametrize("packed", [False, True])
def test_inspect_letters_numbers_and_errors(tmp_path: Path, packed: bool) -> None:
    if packed:
        path = tmp_path / "log.eval"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("header.json", json.dumps({"eval": {"task": "quiz"}}))
            for n, sample in enumerate(SAMPLES):
                archive.writestr(f"samples/{n}_epoch_1.json", json.dumps(sample))
    else:
        path = write(tmp_path / "log.json", inspect_log(SAMPLES))
    assert summarize(tmp_path, path).returncode == 0
    found = records(tmp_path)
    assert [r.outcome for r in found.values()] == VERDICTS
    assert found["quiz:a#1"].reason == "match 0: said 4"


def test_an_eval_file_with_broken_escapes(tmp_path: Path) -> None:
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.json", '{"eval": {"task": "quiz\\ud800"}}')
        archive.writestr("samples/1.json", '{"id": "x\\ud800", "messages": [], "scores": {"m": {"value": "I"}}}')
    assert summarize(tmp_path, path).returncode == 0
    assert list(records(tmp_path)) == ["quiz?:x?"]


def test_a_broken_eval_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "log.eval").write_bytes(b"PK nonsense")
    done = summarize(tmp_path, tmp_path / "log.eval")
    assert done.returncode == 2 and "log.eval" in done.stderr and done.stderr.count("\n") == 1


@needs_files
def test_openai_messages(tmp_path: Path) -> None:
    assert summarize(tmp_path, FILES / "openai_messages" / "evalprotocol_function_calling_13.jsonl").returncode == 0
    assert counts(tmp_path) == (6, 7, 0, 0)
    found = records(tmp_path)
    assert "weather_london_perfect" in found
    assert found["weather_london_perfect"].messages[1].calls[0].name == "get_weather"
    assert "Exact tool match" in found["joke_unexpected_call"].reason


def test_cumulative_snapshots_count_once(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    rows = [{"messages": turns[:1]}, {"messages": turns[:2]}, {"messages": turns, "reward": 1.0}]
    rows += [{"messages": turns[:1], "reward": 0.0}, {"messages": turns[:2], "reward": 0.0}]  # verdicts: own episodes
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert summarize(tmp_path, path).returncode == 0
    assert counts(tmp_path) == (1, 2, 0, 0)
    assert len(records(tmp_path)["rows-3"].messages) == 3


@pytest.mark.parametrize(
    ("row", "outcome"),
    [
        ({"success": True}, "passed"),
        ({"resolved": False}, "failed"),
        ({"reward_info": {"reward": 0.5}}, "failed"),
        ({"evaluation_result": {"score": 1.0, "is_score_valid": False}}, "infrastructure"),
        ({"error": "timeout"}, "infrastructure"),
        ({}, "unknown"),
    ],
)
def test_verdicts_of_message_rows(tmp_path: Path, row: dict[str, Any], outcome: str) -> None:
    path = write(tmp_path / "one.json", {"messages": [{"role": "user", "content": "x"}], "id": "t"} | row)
    assert summarize(tmp_path, path).returncode == 0
    assert records(tmp_path)["t"].outcome == outcome


@pytest.mark.parametrize(
    "line", ["3", "[1]", '{"messages": 3}', "{", '{"messages": [], "trial": -1}', '{"messages": [NaN]}']
)
def test_bad_lines_name_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": [], "id": "a"}\n' + line + "\n")
    done = summarize(tmp_path, path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "2" in done.stderr and "rows.jsonl" in done.stderr


def test_broken_escapes_become_text_that_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"id": "a\ud800", "domain": "d\udfff", "reward": 0.0, "reason": "r\ud800"}
    row["messages"] = [
        {"role": "user\ud800", "content": "c\ud800", "tool_calls": [{"name": "n\ud800", "arguments": "\ud800"}]}
    ]
    path.write_text(json.dumps(row))
    assert summarize(tmp_path, path).returncode == 0
    (record,) = records(tmp_path).values()
    assert record.id == "d?:a?" and record.messages[0].content == "c?" and record.messages[0].calls[0].name == "n?"


def test_a_split_tau2_folder_with_a_missing_simulation(tmp_path: Path) -> None:
    info = {"environment_info": {"domain_name": "shop"}}
    write(tmp_path / "run" / "results.json", {"info": info, "tasks": [], "simulation_index": [{"id": "x"}]})
    (tmp_path / "run" / "simulations").mkdir()
    done = summarize(tmp_path, tmp_path / "run")
    assert done.returncode == 2 and "simulations/x.json" in done.stderr


def test_unreadable_paths(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not found"):
        make_plan([str(tmp_path / "no")], None)
    (tmp_path / "empty.json").write_bytes(b"")
    with pytest.raises(InputError, match="empty"):
        make_plan([str(tmp_path / "empty.json")], None)
