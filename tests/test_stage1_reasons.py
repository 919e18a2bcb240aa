"""Why a trajectory failed: the real components of each benchmark, only where they count, and whose fault a fault is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stage1_helpers import SHARED, run_main

from pipeline import _summarize
from pipeline.records import Record, read_info, read_summaries

FILES = SHARED / "trajectories"
needs_files = pytest.mark.skipif(not FILES.is_dir(), reason=f"{FILES} is not there")
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def summarize(tmp_path: Path, data: Any, name: str = "in.json", *more: str) -> list[Record]:
    path = tmp_path / name
    path.write_text(json.dumps(data))
    out = tmp_path / "out.json"
    done = run_main(_summarize.main, "--input", path, "--output", out, *more)
    assert done.returncode == 0, done.stderr
    return list(read_summaries(out))


def tau2(tmp_path: Path, reward_info: Any, end: str = "user_stop", **more: Any) -> Record:
    simulation = {"task_id": "1", "termination_reason": end, "reward_info": reward_info, "messages": TALK} | more
    info = {"environment_info": {"domain_name": "shop"}}
    (record,) = summarize(tmp_path, {"info": info, "tasks": [], "simulations": [simulation]})
    return record


# --------------------------------------------------------------------------- tau2

ACTION = {"action": {"name": "refund", "arguments": {"id": 7}}, "action_match": False}


@pytest.mark.parametrize(
    ("reward_info", "words"),
    [
        ({"reward": 0.0, "reward_basis": ["DB"], "db_check": {"db_match": False}}, ["final database differs"]),
        ({"reward": 0.0, "action_checks": [ACTION]}, ['expected action not made: refund({"id": 7})']),
        (
            {
                "reward": 0.0,
                "env_assertions": [{"env_assertion": {"func_name": "is_open", "arguments": {}}, "met": False}],
            },
            ["assertion on the environment not met: is_open({})"],
        ),
        ({"reward": 0.0, "communicate_checks": [{"info": "the price", "met": False}]}, ["not communicated: the price"]),
        (
            {"reward": 0.0, "nl_assertions": [{"nl_assertion": "refuses", "met": False}]},
            ["statement not true: refuses"],
        ),
        ({"reward": 0.0, "reward_breakdown": {"DB": 0.0, "COMMUNICATE": 1.0}}, ["low components DB=0"]),
        ({"reward": 0.5, "reward_breakdown": {"DB": 0.5, "ACTION": 0.25}}, ["DB=0.5", "ACTION=0.25"]),
        ({"reward": 0.0, "info": {"note": "ended too soon"}}, ["ended too soon"]),
        ({"reward": 0.25}, ["reward 0.25"]),
    ],
)
def test_components_of_tau2(tmp_path: Path, reward_info: dict[str, Any], words: list[str]) -> None:
    record = tau2(tmp_path, reward_info)
    assert record.outcome == "failed"
    for word in words:
        assert word in record.reason


@pytest.mark.parametrize(
    ("reward_info", "absent"),
    [
        ({"reward": 0.0, "reward_basis": ["ACTION"], "db_check": {"db_match": False}}, "database"),
        ({"reward": 0.0, "communicate_checks": [{"info": "told", "met": True}]}, "told"),
        ({"reward": 0.0, "reward_breakdown": {"DB": 1.0, "ACTION": 0.0}}, "DB"),
        ({"reward": 0.0, "action_checks": [ACTION], "info": {"note": "a note"}}, "a note"),
    ],
)
def test_what_does_not_count_is_not_a_reason(tmp_path: Path, reward_info: dict[str, Any], absent: str) -> None:
    assert absent not in tau2(tmp_path, reward_info).reason


@pytest.mark.parametrize(
    ("end", "reward_info", "outcome", "fault"),
    [
        ("max_steps", {"reward": 0.0}, "failed", ""),
        ("too_many_errors", {"reward": 0.0}, "failed", ""),
        ("agent_error", {"reward": 0.0}, "failed", ""),
        ("user_error", {"reward": 0.0}, "infrastructure", "user_simulator"),
        ("user_error", {"reward": 1.0}, "passed", ""),
        ("infrastructure_error", {"reward": 0.0}, "infrastructure", "environment"),
        ("infrastructure_error", None, "infrastructure", "environment"),
        ("unexpected_error", None, "infrastructure", "environment"),
        ("user_stop", None, "infrastructure", "environment"),
    ],
)
def test_how_tau2_ends_decides_whose_fault_it_is(
    tmp_path: Path, end: str, reward_info: dict[str, Any] | None, outcome: str, fault: str
) -> None:
    record = tau2(tmp_path, reward_info, end)
    assert (record.outcome, record.fault) == (outcome, fault)
    if outcome == "failed":
        assert f"ended by {end}" in record.reason


@pytest.mark.parametrize(
    ("reward", "outcome"), [(1.0, "passed"), (1 - 1e-9, "passed"), (0.999, "failed"), (1, "passed")]
)
def test_one_is_one_within_the_benchmarks_tolerance(tmp_path: Path, reward: float, outcome: str) -> None:
    assert tau2(tmp_path, {"reward": reward}).outcome == outcome


def test_long_reasons_are_bounded(tmp_path: Path) -> None:
    checks = [{"info": "x" * 5000, "met": False}]
    assert len(tau2(tmp_path, {"reward": 0.0, "communicate_checks": checks}).reason) < 300


def test_errors_do_not_leak_keys_into_reasons(tmp_path: Path) -> None:
    info = {"error": "AuthenticationError: Incorrect API key provided: sk-proj-aaaaaaaaaaaaaaaaaaaaaaaa"}
    record = tau2(tmp_path, None, "infrastructure_error", info=info, messages=[])
    assert "AuthenticationError" in record.reason and "sk-proj" not in record.reason and record.redacted == 1


# --------------------------------------------------------------------------- tau-bench


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"reward_info": {"info": {"r_actions": 0.0}}, "task": {"actions": [{"name": "book"}]}}, ["database", "book"]),
        ({"reward_info": {"info": {"outputs": {"327": False, "12": True}}}}, ["not communicated: 327"]),
        ({"reward_info": {"info": {"r_actions": 1.0}}}, ["reward 0"]),
        ({"reward_info": {"info": None}}, ["reward 0"]),
        ({"task": "strange"}, ["reward 0"]),
    ],
)
def test_components_of_tau_bench(tmp_path: Path, info: dict[str, Any], words: list[str]) -> None:
    (record,) = summarize(tmp_path, [{"task_id": 0, "reward": 0.0, "info": info, "traj": TALK}])
    assert record.outcome == "failed" and record.domain == "tau-bench"
    for word in words:
        assert word in record.reason
    assert "12" not in record.reason


# --------------------------------------------------------------------------- compaction of real files


@needs_files
@pytest.mark.parametrize(
    "name",
    [
        "mini_swe_agent/v2.2.7_pydicom__pydicom-1256.traj.json",
        "tau2/activegraph_airline_5tasks.json",
        "swe_agent/v0_test-repo-i1.traj",
        "tau1/gpt-4o-airline_first12.json",
    ],
)
def test_real_files_shrink_and_every_index_exists(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out.json"
    source = FILES / name
    assert run_main(_summarize.main, "--input", source, "--output", out).returncode == 0
    assert out.stat().st_size < source.stat().st_size / 2
    for record in read_summaries(out):
        indices = [m.index for m in record.messages]
        assert indices == sorted(set(indices))
        for message in record.messages:
            assert len(message.content) < 300 + 40 and all(len(c.arguments) < 200 + 40 for c in message.calls)
        assert record.cut_chars == sum(m.cut_chars for m in record.messages)


@needs_files
def test_uncut_summaries_hold_every_word(tmp_path: Path) -> None:
    source = FILES / "tau2" / "activegraph_mock_10tasks.json"
    out = tmp_path / "out.json"
    limits = ["--max-content-chars", "1000000", "--max-tool-chars", "1000000"]
    assert run_main(_summarize.main, "--input", source, "--output", out, *limits).returncode == 0
    assert read_info(out)["counts"]["cut_chars"] == 0
    raw = json.loads(source.read_text())["simulations"]
    for simulation, record in zip(raw, read_summaries(out), strict=True):
        assert len(simulation["messages"]) == len(record.messages)
        for message, ours in zip(simulation["messages"], record.messages, strict=True):
            assert (message["content"] or "") == ours.content
            assert [c["name"] for c in message.get("tool_calls") or []] == [c.name for c in ours.calls]
            for call, kept in zip(message.get("tool_calls") or [], ours.calls, strict=True):
                assert json.loads(kept.arguments) == call["arguments"]


@needs_files
def test_what_is_not_needed_is_not_copied(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    for name in ("tau2/activegraph_airline_5tasks.json", "mini_swe_agent/v1.15.0_django__django-16255.traj.json"):
        assert run_main(_summarize.main, "--input", FILES / name, "--output", out).returncode == 0
        text = out.read_text()
        for word in (
            "raw_data",
            "provider_specific_fields",
            "reasoning_details",
            "llm_args",
            '"policy"',
            "model_kwargs",
        ):
            assert word not in text, (name, word)
