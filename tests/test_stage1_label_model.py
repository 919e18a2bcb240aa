"""Discovery and labelling through an endpoint: scripted server for meaning, real one for the schema; faults, resume."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer
from stage1_helpers import ROOT, Done, run_main

from pipeline import _summarize, aggregate_capabilities, label_capabilities
from pipeline.labels import find_runs, load_runs

NAMES = ["check_stock_first", "exact_item_number", "polite_closing", "refund_policy", "reads_whole_order"]
Message_ = dict[str, Any]


# --------------------------------------------------------------------------- a server that knows what is right


def discovery_answer(user: str) -> dict[str, Any]:
    ids = re.findall(r'<trajectory id="([^"]+)" outcome="(\w+)"', user) or [
        (i, "") for i in re.findall(r"Examples: (\S+)", user)
    ]
    examples = [{"task_id": i, "note": "shows it"} for i in list(dict.fromkeys(i for i, _ in ids))[:2]]
    described = "The agent does this before that; lacking it, it does that at once."
    return {"candidates": [{"name": n, "description": described, "examples": examples} for n in NAMES]}


def label_answer(user: str) -> dict[str, Any]:
    """LACKING check_stock_first when the agent ships without a look, all else NA."""
    names = re.findall(r"^- `(\w+)`:", user, re.MULTILINE)
    found: dict[str, Any] = {n: {"label": "NA", "message": first_index(user), "quote": ""} for n in names}
    for index, role, text in re.findall(r"^\[(\d+)\] (\w+)(?: \(part [^)]*\))?: (.*)$", user, re.MULTILINE):
        if role == "assistant" and "ship" in text:
            label = "PRESENT" if "looked" in text else "LACKING"
            found["check_stock_first"] = {"label": label, "message": int(index), "quote": text[:40]}
    return found


def first_index(user: str) -> int:
    return int(re.findall(r"^\[(\d+)\]", user, re.MULTILINE)[0])


def answer(messages: list[Message_], body: dict[str, Any]) -> str:
    user = messages[-1]["content"]
    return json.dumps(label_answer(user) if "Give every capability" in user else discovery_answer(user))


def with_usage(response: dict[str, Any]) -> dict[str, Any]:
    return response | {"usage": {"prompt_tokens": 100, "completion_tokens": 10}}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(chat=answer, edit=with_usage) as running:
        yield running


# --------------------------------------------------------------------------- inputs


def write_summaries(tmp_path: Path, n: int = 8, filler: str = "") -> Path:
    entries = []
    for task in range(n):
        good = task % 2 == 0
        text = f"I looked and ship item {task}." if good else f"I ship item {task}."
        messages = [
            {"role": "user", "content": f"Send item {task}. {filler}"},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Thanks."},
        ]
        entries.append(
            {"task_id": str(task), "sample_idx": 0, "reward_info": {"reward": float(good)}, "messages": messages}
        )
    source = tmp_path / "rollouts.json"
    source.write_text(json.dumps({"info": {"env": "desk"}, "simulations": entries}))
    out = tmp_path / "summaries.json"
    arguments = ["--input", source, "--output", out, "--max-content-chars", "100000"]
    assert run_main(_summarize.main, *arguments).returncode == 0
    return out


def arguments(tmp_path: Path, server: ScriptedServer, *more: str) -> list[str]:
    base = ["--labeler", "model", "--base-url", server.url, "--model", "scripted", "--n-runs", "3"]
    base += ["--input", str(tmp_path / "summaries.json"), "--output-dir", str(tmp_path / "labels"), "--retries", "2"]
    return [*base, *more]


def label(tmp_path: Path, server: ScriptedServer, *more: str) -> Done:
    return run_main(label_capabilities.main, *arguments(tmp_path, server, *more))


def chats(server: ScriptedServer) -> list[dict[str, Any]]:
    return server.calls("/v1/chat/completions")


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.endpoint.FIRST_PAUSE_S", 0.01)


# --------------------------------------------------------------------------- meaning


def test_from_summaries_to_a_selection_with_evidence(tmp_path: Path, server: ScriptedServer) -> None:
    summaries = write_summaries(tmp_path)
    done = label(tmp_path, server, "--price-in", "1", "--price-out", "2")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "labels"
    runs = str(folder / "run_*.json")
    loaded = load_runs(find_runs([runs]))
    assert loaded.attempts == (1, 2, 3) and loaded.capabilities == tuple(sorted(NAMES))
    assert all(labeler["blind"] for labeler in loaded.labelers)
    export = tmp_path / "s.json"
    candidates = folder / "candidate_capabilities.json"
    chosen = ["--runs", runs, "--k", "3", "--candidates", candidates, "--summaries", summaries, "--resamples", "50"]
    found = run_main(aggregate_capabilities.main, *chosen, "--export", export)
    assert found.returncode == 0, found.stderr
    assert [e["skill"] for e in json.loads(export.read_text())] == ["check_stock_first"]
    report = json.loads((tmp_path / "s.report.json").read_text())
    assert report["summaries"]["quotes"] == 24  # 8 trajectories, 3 runs, one cited label each
    n = len(chats(server))
    assert f"{n} answers, {100 * n} prompt and {10 * n} completion tokens, cost" in done.stdout


def test_requests_are_blind_independent_and_constrained(tmp_path: Path, server: ScriptedServer) -> None:
    write_summaries(tmp_path)
    assert label(tmp_path, server).returncode == 0
    labelling = [b for b in chats(server) if "Give every capability" in b["messages"][-1]["content"]]
    assert len(labelling) == 24
    for body in labelling:
        assert len(body["messages"]) == 2  # a fresh context
        text = json.dumps(body["messages"])
        assert "passed" not in text and "failed" not in text and "reward" not in text
        schema = body["response_format"]["json_schema"]["schema"]
        assert set(schema["properties"]) == set(NAMES)
        assert schema["properties"]["polite_closing"]["properties"]["message"]["enum"] == [0, 1, 2]
    assert len({b["seed"] for b in labelling}) == 3
    orders = {tuple(re.findall(r"^- `(\w+)`:", b["messages"][-1]["content"], re.MULTILINE)) for b in labelling}
    assert len(orders) == 3  # each run has its own order of capabilities
    discovering = [b for b in chats(server) if b not in labelling]
    assert discovering and "outcome=" in discovering[0]["messages"][-1]["content"]


def test_outcomes_are_shown_only_when_asked(tmp_path: Path, server: ScriptedServer) -> None:
    write_summaries(tmp_path)
    assert label(tmp_path, server, "--show-outcome").returncode == 0
    run = json.loads((tmp_path / "labels" / "run_01.json").read_text())
    assert run["labeler"]["blind"] is False
    assert any("This trajectory failed" in b["messages"][-1]["content"] for b in chats(server))


def test_given_candidates_replace_discovery(tmp_path: Path, server: ScriptedServer) -> None:
    write_summaries(tmp_path)
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"candidates": [{"name": "check_stock_first", "description": "Looks first."}]}))
    assert label(tmp_path, server, "--candidates", str(mine)).returncode == 0
    assert len(chats(server)) == 24
    assert load_runs(find_runs([str(tmp_path / "labels" / "run_*.json")])).capabilities == ("check_stock_first",)


# --------------------------------------------------------------------------- quotes


def test_a_lacking_without_a_true_quote_is_asked_again(tmp_path: Path, server: ScriptedServer) -> None:
    write_summaries(tmp_path, n=2)

    def lying(messages: list[Message_], body: dict[str, Any]) -> str:
        text = answer(messages, body)
        return text.replace('"quote": "I ship', '"quote": "I never shipped') if body["seed"] % 101 else text

    server.chat = lying
    done = label(tmp_path, server, "--n-runs", "1")
    assert done.returncode == 0
    asked = len(chats(server))
    run = json.loads((tmp_path / "labels" / "run_01.json").read_text())
    lacking = run["labels"]["check_stock_first"]["lacking_failed"]
    downgraded = run["labeler"]["quotes"]["downgraded"]
    assert asked >= 3 and (lacking == ["desk:1"]) == (downgraded == 0)


# --------------------------------------------------------------------------- chunks


def test_long_trajectories_are_chunked_and_merged(tmp_path: Path, server: ScriptedServer) -> None:
    write_summaries(tmp_path, n=4, filler="word " * 400)
    done = label(tmp_path, server, "--chunk-chars", "800", "--n-runs", "1")
    assert done.returncode == 0, done.stderr
    parts = [b["messages"][-1]["content"] for b in chats(server) if "This is part" in b["messages"][-1]["content"]]
    assert len(parts) >= 12 and all("of a long trajectory" in p for p in parts)
    run = json.loads((tmp_path / "labels" / "run_01.json").read_text())
    assert run["labels"]["check_stock_first"]["lacking_failed"] == ["desk:1", "desk:3"]
    assert run["labels"]["check_stock_first"]["present_passed"] == ["desk:0", "desk:2"]


# --------------------------------------------------------------------------- faults of the server


@pytest.mark.parametrize("mode", ["500", "503", "garbage", "die_midway", "refuse"])
def test_faults_that_pass_are_retried(tmp_path: Path, server: ScriptedServer, mode: str) -> None:
    write_summaries(tmp_path, n=2)
    server.fail, server.fail_times = mode, 2
    done = label(tmp_path, server, "--concurrency", "1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", ["500", "garbage", "refuse"])
def test_faults_that_stay_are_one_line_and_exit_2(tmp_path: Path, server: ScriptedServer, mode: str) -> None:
    write_summaries(tmp_path, n=2)
    server.fail = mode
    done = label(tmp_path, server)
    assert done.returncode == 2 and "3 attempts" in done.stderr and server.url in done.stderr
    assert sum(line.startswith("error:") for line in done.stderr.splitlines()) == 1
    assert not list((tmp_path / "labels").glob("run_*"))


def test_a_hanging_server_meets_the_deadline(tmp_path: Path, server: ScriptedServer) -> None:
    write_summaries(tmp_path, n=2)
    server.fail = "hang"
    start = time.monotonic()
    done = label(tmp_path, server, "--timeout", "0.3", "--retries", "1")
    assert done.returncode == 2 and "no answer within 0.3 s" in done.stderr
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "not JSON"),
        ('{"candidates": []}', "violates the schema"),
        ('{"candidates": [{"name": "x"}]}', "violates the schema"),
    ],
)
def test_answers_that_violate_the_schema(tmp_path: Path, server: ScriptedServer, content: str, words: str) -> None:
    write_summaries(tmp_path, n=2)
    server.chat = lambda messages, body: content
    done = label(tmp_path, server)
    assert done.returncode == 2 and words in done.stderr


def test_a_cut_answer_says_what_to_raise(tmp_path: Path, server: ScriptedServer) -> None:
    write_summaries(tmp_path, n=2)
    server.chat = lambda messages, body: {"role": "assistant", "content": "{", "finish_reason": "length"}
    assert "--max-tokens" in label(tmp_path, server).stderr


def test_a_wrong_key_is_reported_at_once(
    tmp_path: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_summaries(tmp_path, n=2)
    server.api_key = "right"
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    done = label(tmp_path, server)
    assert done.returncode == 2 and "401" in done.stderr and len(chats(server)) == 1
    monkeypatch.setenv("VLLM_API_KEY", "right")
    assert label(tmp_path, server).returncode == 0


def test_no_server_at_all(tmp_path: Path, server: ScriptedServer) -> None:
    write_summaries(tmp_path, n=2)
    server.stop()
    done = label(tmp_path, server)
    assert done.returncode == 2 and "cannot be reached" in done.stderr


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (["--base-url", "localhost:80"], "http://"),
        (["--retries", "-1"], "--retries"),
        (["--input", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_options(tmp_path: Path, server: ScriptedServer, change: list[str], word: str) -> None:
    write_summaries(tmp_path, n=2)
    done = label(tmp_path, server, *change)
    assert done.returncode == 2 and word in done.stderr


def test_url_and_model_come_from_the_environment(
    tmp_path: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_summaries(tmp_path, n=2)
    base = ["--labeler", "model", "--n-runs", "1", "--input", str(tmp_path / "summaries.json")]
    base += ["--output-dir", str(tmp_path / "labels")]
    monkeypatch.delenv("VLLM_BASE_URLS", raising=False)
    monkeypatch.delenv("VLLM_BASE_URL", raising=False)
    assert "VLLM_BASE_URLS" in run_main(label_capabilities.main, *base).stderr
    monkeypatch.setenv("VLLM_BASE_URLS", f"{server.url}/v1, http://other")
    monkeypatch.setenv("VLLM_MODEL", "scripted")
    assert run_main(label_capabilities.main, *base).returncode == 0


# --------------------------------------------------------------------------- resume


def _run_files(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(p.read_text()) for p in sorted(folder.glob("run_*.json"))]


def test_after_a_fault_the_same_command_goes_on(tmp_path: Path, server: ScriptedServer) -> None:
    write_summaries(tmp_path)
    count = 0

    def dying(messages: list[Message_], body: dict[str, Any]) -> str:
        nonlocal count
        count += "Give every capability" in messages[-1]["content"]
        return "nonsense" if count > 10 else answer(messages, body)

    server.chat = dying
    assert label(tmp_path, server, "--concurrency", "2", "--retries", "0").returncode == 2
    log = (tmp_path / "labels" / "label_log.jsonl").read_text().splitlines()
    kept = len(log) - 1
    assert 8 <= kept <= 10
    with open(tmp_path / "labels" / "label_log.jsonl", "a") as file:
        file.write('{"run": 3, "id": "desk')  # a kill in the middle of a line
    server.chat = answer
    before = len(chats(server))
    assert label(tmp_path, server).returncode == 0
    assert len(chats(server)) - before == 24 - kept  # nothing is asked twice, discovery neither
    resumed = _run_files(tmp_path / "labels")
    straight = tmp_path / "straight"
    assert label(tmp_path, server, "--output-dir", str(straight)).returncode == 0
    assert resumed == _run_files(straight)


def test_a_killed_process_loses_and_repeats_nothing(tmp_path: Path, server: ScriptedServer) -> None:
    write_summaries(tmp_path)
    server.delay_s = 0.05
    command = [sys.executable, str(ROOT / "pipeline" / "label_capabilities.py")]
    command += arguments(tmp_path, server, "--concurrency", "1")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "labels" / "label_log.jsonl"
    deadline = time.monotonic() + 30
    while not (log.exists() and len(log.read_bytes().splitlines()) > 5):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    server.delay_s = 0.0
    time.sleep(0.2)  # the server finishes what the dead client asked
    before = len(chats(server))
    kept = log.read_bytes().count(b"\n") - 1
    assert label(tmp_path, server).returncode == 0
    assert len(chats(server)) - before == 24 - kept
    pairs = [(e["run"], e["id"]) for e in map(json.loads, log.read_text().splitlines()[1:])]
    assert len(pairs) == len(set(pairs)) == 24


def test_more_runs_can_be_added_but_nothing_else_changed(tmp_path: Path, server: ScriptedServer) -> None:
    write_summaries(tmp_path)
    assert label(tmp_path, server, "--n-runs", "2").returncode == 0
    before = len(chats(server))
    assert label(tmp_path, server, "--n-runs", "3").returncode == 0
    assert len(chats(server)) - before == 8
    done = label(tmp_path, server, "--temperature", "0.1")
    assert done.returncode == 2 and "label_log.jsonl" in done.stderr


@pytest.mark.parametrize("spoil", [lambda e: e.update(labels={"x": ["MAYBE", 1, ""]}), lambda e: e.pop("doubts")])
def test_a_damaged_log_is_refused(
    tmp_path: Path, server: ScriptedServer, spoil: Callable[[dict[str, Any]], Any]
) -> None:
    write_summaries(tmp_path, n=2)
    assert label(tmp_path, server).returncode == 0
    log = tmp_path / "labels" / "label_log.jsonl"
    header, first, *rest = log.read_text().splitlines()
    entry = json.loads(first)
    spoil(entry)
    log.write_text("\n".join([header, json.dumps(entry), *rest]) + "\n")
    done = label(tmp_path, server)
    assert done.returncode == 2 and "line 2" in done.stderr


def test_concurrency_is_used_and_bounded(tmp_path: Path, server: ScriptedServer) -> None:
    write_summaries(tmp_path)
    server.delay_s = 0.02
    assert label(tmp_path, server, "--concurrency", "5").returncode == 0
    assert 3 <= server.max_in_flight <= 5


# --------------------------------------------------------------------------- a real server


@pytest.mark.server
@pytest.mark.slow
def test_a_real_small_model_gives_valid_labels(tmp_path: Path, vllm_server: Any, smollm2: Path) -> None:
    """SmolLM2 is not wise, but constrained decoding makes every answer valid, and quotes are checked all the same."""
    write_summaries(tmp_path, n=4)
    url = getattr(vllm_server, "url", vllm_server)
    base = ["--labeler", "model", "--base-url", url, "--model", str(getattr(vllm_server, "model", smollm2))]
    base += [
        "--n-runs",
        "2",
        "--n-candidates",
        "2",
        "--max-tokens",
        "900",
        "--chunk-chars",
        "1200",
        "--concurrency",
        "4",
    ]
    base += ["--discovery-batches", "1", "--input", str(tmp_path / "summaries.json")]
    done = run_main(label_capabilities.main, *base, "--output-dir", tmp_path / "labels")
    assert done.returncode == 0, done.stderr
    runs = str(tmp_path / "labels" / "run_*.json")
    loaded = load_runs(find_runs([runs]))
    assert loaded.codes.shape[0] == 2 and len(loaded.ids) == 4
    checked = ["--runs", runs, "--k", "1", "--summaries", tmp_path / "summaries.json", "--check", "--resamples", "20"]
    assert run_main(aggregate_capabilities.main, *checked).returncode == 0
    assert int(re.findall(r"(\d+) completion tokens", done.stdout)[0]) > 0
