"""Summaries of tau2 files and of our rollouts: counts, ids, reasons, compaction, secrets, split, blind output."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from stage1_helpers import SHARED, Done, run_main

from pipeline import _summarize
from pipeline.files import InputError
from pipeline.readers.trajectory import Limits, Tally, clean, compact_message, cut, text_of
from pipeline.records import Record, read_info, read_summaries
from pipeline.split import parse_shares, part_of, refuse_mined

FILES = SHARED / "trajectories"
needs_files = pytest.mark.skipif(not FILES.is_dir(), reason=f"{FILES} is not there")


def summarize(tmp_path: Path, *arguments: str | Path) -> Done:
    return run_main(_summarize.main, "--output", tmp_path / "out.json", "--input", *arguments)


def records(tmp_path: Path) -> list[Record]:
    return list(read_summaries(tmp_path / "out.json"))


def counts(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_info(tmp_path / "out.json")["counts"]
    return found


def rollouts_file(tmp_path: Path, entries: list[dict[str, Any]], name: str = "rollouts.json") -> Path:
    path = tmp_path / name
    path.write_text(json.dumps({"info": {"env": "helpdesk"}, "simulations": entries}))
    return path


def entry(task: str = "1", sample: int = 0, reward: float | None = 1.0, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Cancel order 7."}, {"role": "assistant", "content": "Done."}]
    base: dict[str, Any] = {"task_id": task, "sample_idx": sample, "messages": messages}
    if reward is not None:
        base["reward_info"] = {"reward": reward}
    return base | more


def tau2_file(tmp_path: Path, simulations: list[dict[str, Any]], name: str = "tau2.json") -> Path:
    path = tmp_path / name
    info = {"environment_info": {"domain_name": "shop"}, "agent_info": {"llm_args": {"api_key": "hush"}}}
    path.write_text(json.dumps({"info": info, "tasks": [], "simulations": simulations}))
    return path


def simulation(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    return {
        "task_id": "1",
        "trial": 0,
        "termination_reason": "user_stop",
        "reward_info": {"reward": 0.0},
        "messages": messages,
    } | more


# --------------------------------------------------------------------------- real tau2 files


@needs_files
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tau2/activegraph_airline_5tasks.json", (1, 4, 0)),
        ("tau2/split_dir_text_airline", (1, 4, 0)),
        ("tau2/split_dir_text_airline/results.json", (1, 4, 0)),
        ("tau2/activegraph_mock_10tasks.json", (8, 2, 0)),
        ("tau2/activegraph_mock_max_steps_1.json", (0, 1, 0)),
        ("tau2/local_infra_error_2.json", (0, 0, 2)),
        ("tau2/local_too_many_errors_1.json", (0, 1, 0)),
        ("tau2/nemogym_tau2_test_data_max_steps.json", (0, 1, 0)),
    ],
)
def test_pass_and_fail_counts_of_real_files(tmp_path: Path, name: str, expected: tuple[int, int, int]) -> None:
    done = summarize(tmp_path, FILES / name)
    assert done.returncode == 0, done.stderr
    found = counts(tmp_path)
    assert (found["passed"], found["failed"], found["infrastructure"]) == expected
    assert found["unknown"] == 0


@needs_files
def test_single_file_and_folder_of_the_same_run_are_equal(tmp_path: Path) -> None:
    found = []
    for name in ("activegraph_airline_5tasks.json", "split_dir_text_airline"):
        assert summarize(tmp_path, FILES / "tau2" / name).returncode == 0
        found.append([r.model_copy(update={"source": ""}) for r in records(tmp_path)])
    assert found[0] == found[1]
    assert [r.id for r in found[0]] == [f"airline:{i}" for i in range(5)]


@needs_files
def test_reasons_name_the_real_components(tmp_path: Path) -> None:
    assert summarize(tmp_path, FILES / "tau2" / "activegraph_mock_10tasks.json").returncode == 0
    by_id = {r.id: r for r in records(tmp_path)}
    failed = by_id["mock:update_task_with_initialization_data"].reason
    assert "COMMUNICATE=0" in failed and "acknowledged the previous context" in failed
    assert by_id["mock:update_task_with_user_tools"].reason == "ended by max_steps"
    assert by_id["mock:update_task_with_history_and_env_assertions"].outcome == "passed"  # db_match is not in its basis
    assert summarize(tmp_path, FILES / "tau2" / "activegraph_airline_5tasks.json").returncode == 0
    assert all(r.reason for r in records(tmp_path) if r.outcome == "failed")
    assert all(not r.reason for r in records(tmp_path) if r.outcome == "passed")


@needs_files
def test_user_side_tools_are_told_from_the_agents(tmp_path: Path) -> None:
    assert summarize(tmp_path, FILES / "tau2" / "activegraph_mock_10tasks.json").returncode == 0
    roles = {m.role for r in records(tmp_path) for m in r.messages}
    assert "user_tool" in roles and "tool" in roles


@needs_files
def test_secrets_of_real_files_are_not_copied(tmp_path: Path) -> None:
    for name in ("local_infra_error_2.json", "nemogym_tau2_test_data_max_steps.json"):
        assert summarize(tmp_path, FILES / "tau2" / name).returncode == 0
        text = (tmp_path / "out.json").read_text()
        assert "llm_args" not in text and "dummy api key" not in text and "api_base" not in text


# --------------------------------------------------------------------------- outcomes


def test_simulator_faults_leave_the_failed_side(tmp_path: Path) -> None:
    path = tau2_file(
        tmp_path,
        [
            simulation(),
            simulation(task_id="2", termination_reason="user_error"),
            simulation(task_id="3", user_only_review={"critical_user_error": True}),
            simulation(task_id="4", user_only_review={"critical_user_error": True}, reward_info={"reward": 1.0}),
        ],
    )
    assert summarize(tmp_path, path).returncode == 0
    assert [r.outcome for r in records(tmp_path)] == ["failed", "infrastructure", "infrastructure", "passed"]
    assert counts(tmp_path)["faults"] == {"user_simulator": 2}


def test_voice_runs_have_their_reward_in_the_index_and_no_messages(tmp_path: Path) -> None:
    folder = tmp_path / "voice"
    (folder / "simulations").mkdir(parents=True)
    index = [{"id": "a", "reward": 1.0}, {"id": "b", "reward": None}, {"id": "c", "reward": 0.0}]
    info = {"environment_info": {"domain_name": "shop"}}
    (folder / "results.json").write_text(json.dumps({"info": info, "tasks": [], "simulation_index": index}))
    for n, name in enumerate("abc"):
        one = simulation(task_id=str(n), ticks=[{}], messages=None)
        del one["reward_info"]
        (folder / "simulations" / f"{name}.json").write_text(json.dumps(one))
    assert summarize(tmp_path, folder).returncode == 0
    assert [r.outcome for r in records(tmp_path)] == ["passed", "infrastructure", "failed"]
    assert not any(r.messages for r in records(tmp_path))


def test_a_user_simulator_out_of_scope_is_told_but_not_judged(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": "Which size?"}, {"role": "user", "content": "###OUT-OF-SCOPE###"}]
    assert summarize(tmp_path, tau2_file(tmp_path, [simulation(messages=messages)])).returncode == 0
    (record,) = records(tmp_path)
    assert record.outcome == "failed" and "out of its scope" in record.reason


def test_listed_faults_leave_every_rate_and_unknown_ones_are_errors(tmp_path: Path) -> None:
    path = tau2_file(tmp_path, [simulation(), simulation(task_id="2")])
    faults = tmp_path / "faults.json"
    faults.write_text('{"shop:2": "the task contradicts the policy"}')
    assert summarize(tmp_path, path, "--faults", faults).returncode == 0
    assert [(r.outcome, r.reason) for r in records(tmp_path)][1] == (
        "infrastructure",
        "the task contradicts the policy",
    )
    faults.write_text('{"shop:3": "?"}')
    done = summarize(tmp_path, path, "--faults", faults)
    assert done.returncode == 2 and "shop:3" in done.stderr


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"reward_info": {"reward": None}}, "missing reward"),
        ({"reward_info": {"reward": True}}, "reward"),
        ({"reward_info": {"reward": "1.0"}}, "reward"),
        ({"task_id": None}, "task_id"),
        ({"task_id": ""}, "task_id"),
        ({"trial": -1}, "trial"),
        ({"messages": [3]}, "message 0"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "name"),
    ],
)
def test_violations_are_one_line_and_write_nothing(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    done = summarize(tmp_path, tau2_file(tmp_path, [simulation(), simulation(task_id="2") | change]))
    assert done.returncode == 2 and word in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["tau2.json"]


@pytest.mark.parametrize(
    "content",
    [b"", b" ", b"{", b"[]", b"[1]", b"3", b'{"a": 1}', b"\xff\xfe", b'{"simulations": [NaN]}', b'{"a": 1} x'],
)
def test_broken_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in.json"
    path.write_bytes(content)
    for benchmark in ([], ["--benchmark", "tau2"], ["--benchmark", "rollouts"]):
        done = summarize(tmp_path, path, *benchmark)
        assert done.returncode == 2 and "in.json" in done.stderr and done.stderr.count("\n") == 1
        assert [p.name for p in tmp_path.iterdir()] == ["in.json"]


def test_old_output_stays_whole_when_the_input_is_truncated(tmp_path: Path) -> None:
    path = tau2_file(tmp_path, [simulation(), simulation(task_id="2")])
    assert summarize(tmp_path, path).returncode == 0
    before = (tmp_path / "out.json").read_text()
    path.write_text(path.read_text()[:-40])
    assert summarize(tmp_path, path).returncode == 2
    assert (tmp_path / "out.json").read_text() == before


def test_two_runs_of_one_benchmark_collide(tmp_path: Path) -> None:
    first = tau2_file(tmp_path, [simulation()], "a.json")
    second = tau2_file(tmp_path, [simulation()], "b.json")
    done = summarize(tmp_path, first, second)
    assert done.returncode == 2 and "shop:1" in done.stderr and "b.json" in done.stderr


def test_an_input_is_never_overwritten(tmp_path: Path) -> None:
    path = tau2_file(tmp_path, [simulation()], "out.json")
    before = path.read_text()
    assert summarize(tmp_path, path).returncode == 2
    assert path.read_text() == before


def test_missing_input_and_empty_folder(tmp_path: Path) -> None:
    assert "not found" in summarize(tmp_path, tmp_path / "nowhere").stderr
    (tmp_path / "folder").mkdir()
    assert "no results file" in summarize(tmp_path, tmp_path / "folder").stderr


# --------------------------------------------------------------------------- our rollouts


def test_rollouts_have_three_outcomes(tmp_path: Path) -> None:
    path = rollouts_file(
        tmp_path,
        [
            entry(),
            entry(sample=1, reward=0.4, finish_reason="max_steps", invalid_calls=2),
            entry(task="2", reward=None, outcome="error", error_kind="server"),
            entry(task="2", sample=1, reward=0.0, hinted=True),
        ],
    )
    assert summarize(tmp_path, path).returncode == 0
    found = records(tmp_path)
    assert [r.id for r in found] == ["helpdesk:1", "helpdesk:1#1", "helpdesk:2", "helpdesk:2+hint#1"]
    assert [r.outcome for r in found] == ["passed", "failed", "infrastructure", "failed"]
    assert found[1].reason == "reward 0.4; ended by max_steps; 2 invalid tool calls"
    assert counts(tmp_path)["faults"] == {"server": 1}


def test_a_missing_reward_is_an_error_and_a_threshold_can_be_set(tmp_path: Path) -> None:
    done = summarize(tmp_path, rollouts_file(tmp_path, [entry(reward=None)]))
    assert done.returncode == 2 and "reward" in done.stderr
    path = rollouts_file(tmp_path, [entry(reward=0.5), entry(task="2", reward=0.49)])
    assert summarize(tmp_path, path, "--pass-threshold", "0.5").returncode == 0
    assert [r.outcome for r in records(tmp_path)] == ["passed", "failed"]


# --------------------------------------------------------------------------- compaction and redaction


def test_cut_keeps_both_ends_and_counts() -> None:
    tally = Tally()
    text = "".join(map(str, range(1000)))
    short = cut(text, 90, tally)
    assert short.startswith(text[:60]) and short.endswith(text[-30:])
    assert tally.cut_chars == len(text) - 90 and f"{len(text) - 90} chars cut" in short
    assert cut("abc", 3, tally) == "abc"


def test_cuts_are_counted_in_record_and_file(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x" * 500}, {"role": "tool", "content": "y" * 500}]
    assert summarize(tmp_path, rollouts_file(tmp_path, [entry(messages=messages)])).returncode == 0
    (record,) = records(tmp_path)
    assert [m.cut_chars for m in record.messages] == [200, 300]
    assert record.cut_chars == counts(tmp_path)["cut_chars"] == 500
    assert [m.index for m in record.messages] == [0, 1]


def test_all_shapes_of_content_and_calls() -> None:
    assert text_of(None) == "" and text_of("a") == "a"
    assert text_of([{"type": "text", "text": "a"}, "b", {"type": "image", "image": "data:..."}]) == "a\nb\n[image]"
    raw = {
        "role": "assistant",
        "tool_calls": [
            {"name": "flat", "arguments": {"a": 1}},
            {"function": {"name": "nested", "arguments": '{"b": 2}'}},
            {"function": {"name": "broken", "arguments": '{"c": '}},
            {"function": {"name": "none"}},
        ],
    }
    calls = compact_message(raw, 0, Limits(), Tally(), "here")["calls"]
    assert [c["name"] for c in calls] == ["flat", "nested", "broken", "none"]
    assert [c["arguments"] for c in calls] == ['{"a": 1}', '{"b": 2}', '{"c": ', "{}"]


@pytest.mark.parametrize(
    "secret", ["sk-proj-abcdefghijklmnop1234", "ghp_" + "a1" * 15, "hf_" + "b2" * 12, "AKIA" + "ABCD" * 4]
)
def test_keys_inside_texts_are_redacted(tmp_path: Path, secret: str) -> None:
    messages = [
        {"role": "assistant", "content": f"I use {secret} here", "tool_calls": [{"name": "f", "arguments": secret}]}
    ]
    assert summarize(tmp_path, rollouts_file(tmp_path, [entry(messages=messages)])).returncode == 0
    text = (tmp_path / "out.json").read_text()
    assert secret not in text and counts(tmp_path)["redacted_secrets"] == 2


@pytest.mark.parametrize("place", [0, 150, 195, 210, 5000, 9790, 9880, 9960])
def test_no_cut_shows_a_part_of_a_key(place: int) -> None:
    key = "sk-proj-" + "Zq9" * 10
    text = ("word " * 2000)[:place] + " " + key + " " + ("more " * 2000)
    text = text[:10_000]
    shown = cut(text, 300, Tally())
    assert "Zq9" not in shown and len(shown) < 340
    assert cut(text, 100_000, Tally()).count("Zq9") == (0 if key in text else text.count("Zq9"))


def test_clean_handles_lone_surrogates_and_keyed_secrets() -> None:
    assert clean("a\ud800b", Tally()) == "a?b"
    assert "hush" not in clean('{"api_key": "hush", "x": 1}', Tally())
    assert clean("task-force risk-averse sk-ip", Tally()) == "task-force risk-averse sk-ip"


# --------------------------------------------------------------------------- blind and split


def test_blind_output_has_no_trace_of_the_outcome(tmp_path: Path) -> None:
    path = rollouts_file(
        tmp_path,
        [entry(), entry(task="2", reward=0.25), entry(task="3", reward=None, outcome="error", error_kind="server")],
    )
    blind = tmp_path / "blind.json"
    assert summarize(tmp_path, path, "--blind-output", blind).returncode == 0
    found = list(read_summaries(blind))
    assert [r.id for r in found] == ["helpdesk:1", "helpdesk:2"]  # what is outside every rate needs no label
    for record in found:
        assert record.outcome is None and record.reward is None and not record.reason and not record.fault
    text = blind.read_text()
    for word in ("passed", "failed", "reward", "0.25", "outcome", "reason", str(path)):
        assert word not in text


def test_split_is_by_task_and_recorded(tmp_path: Path) -> None:
    path = rollouts_file(tmp_path, [entry(task=str(t), sample=s) for t in range(200) for s in range(2)])
    assert summarize(tmp_path, path, "--split", "60:40").returncode == 0
    parts: dict[str, set[str | None]] = {}
    for record in records(tmp_path):
        parts.setdefault(record.task_id, set()).add(record.split)
    assert all(len(p) == 1 for p in parts.values())  # all trials of a task on one side
    share = sum(p == {"mine"} for p in parts.values()) / len(parts)
    assert 0.5 < share < 0.7
    assert read_info(tmp_path / "out.json")["split"] == "60:40"
    assert summarize(tmp_path, path, "--split", "60:40", "--part", "score").returncode == 0
    assert {r.split for r in records(tmp_path)} == {"score"}


def test_later_stages_refuse_mined_tasks(tmp_path: Path) -> None:
    path = rollouts_file(tmp_path, [entry(task=str(t)) for t in range(50)])
    assert summarize(tmp_path, path, "--split", "1:1").returncode == 0
    summaries = tmp_path / "out.json"
    mined = [(r.domain, r.task_id) for r in read_summaries(summaries) if r.split == "mine"]
    scored = [(r.domain, r.task_id) for r in read_summaries(summaries) if r.split == "score"]
    assert mined and scored
    refuse_mined(scored, summaries)
    with pytest.raises(InputError, match="were mined"):
        refuse_mined(scored + mined[:1], summaries)
    refuse_mined(mined, summaries, allow=True)
    assert summarize(tmp_path, path).returncode == 0
    with pytest.raises(InputError, match="no split"):
        refuse_mined(scored, summaries)


def test_shares_and_parts() -> None:
    assert parse_shares("60:40") == Fraction(3, 5)
    assert part_of("a", "1", Fraction(1)) == "mine"
    for bad in ("60", "0:1", "a:b", "1:2:3", "-1:2"):
        with pytest.raises(InputError):
            parse_shares(bad)
