"""Discovery through an endpoint: batches, merge, examples and their rewards; what labelling then starts from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer
from stage1_helpers import Done, run_main

from pipeline import _summarize, label_capabilities
from pipeline.chat_client import ChatClient
from pipeline.discovery import DiscoverySettings, discover
from pipeline.endpoint import Endpoint
from pipeline.files import ServerError
from pipeline.labels import find_runs, load_runs
from pipeline.records import Message, Record

NAMES = ["check_stock_first", "exact_item_number", "polite_closing", "refund_policy", "reads_whole_order"]
DESCRIPTION = "The agent does this before that; lacking it, it does that at once."


def records(n: int = 8, words: int = 10) -> list[Record]:
    made = []
    for i in range(n):
        texts = [f"order {i} " + "word " * words, "done"]
        messages = tuple(Message(index=k, role=("user", "assistant")[k], content=t) for k, t in enumerate(texts))
        outcome = "failed" if i % 2 else "passed"
        fields = {"outcome": outcome, "reward": float(i % 2 == 0), "reason": f"because {i}" if i % 2 else ""}
        made.append(
            Record.model_validate(
                {"id": f"t:{i}", "benchmark": "b", "domain": "t", "task_id": str(i), "trial": 0, "messages": messages}
                | fields
            )
        )
    return made


def candidate(name: str, *ids: str) -> dict[str, Any]:
    return {"name": name, "description": DESCRIPTION, "examples": [{"task_id": i, "note": f"note on {i}"} for i in ids]}


class Script:
    """Answers discovery with five names for each batch, and the merge with what ``merged`` makes of the proposals."""

    def __init__(self, merged: Callable[[list[str]], list[dict[str, Any]]]) -> None:
        self.merged = merged
        self.prompts: list[str] = []

    def __call__(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> str:
        user = messages[-1]["content"]
        self.prompts.append(user)
        if "Several readers" in user:
            return json.dumps({"candidates": self.merged(re.findall(r"^- `(\w+)`", user, re.MULTILINE))})
        ids = re.findall(r'<trajectory id="([^"]+)"', user)
        suffix = "abcdefgh"[len(self.prompts) - 1]
        return json.dumps({"candidates": [candidate(f"{n}_{suffix * 2}", *ids[:2]) for n in NAMES]})


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


async def run(server: ScriptedServer, made: list[Record], **options: Any) -> tuple[dict[str, Any], int]:
    async with ChatClient(Endpoint(server.url, "scripted", retries=0)) as client:
        return await discover(client, made, DiscoverySettings(**options))


async def test_batches_are_merged_into_one_list(server: ScriptedServer) -> None:
    script = Script(lambda names: [candidate(n, "t:1") for n in names[:6]])
    server.chat = script
    data, shown = await run(server, records(words=40), chunk_chars=600, batches=3)
    assert len(script.prompts) == 4  # three batches, one merge
    assert "note on" in script.prompts[-1] and script.prompts[-1].count("- `") == 15
    assert [c["name"] for c in data["candidates"]] == [f"{n}_aa" for n in NAMES] + [f"{NAMES[0]}_bb"]
    assert data["candidates"][0]["example_trajectories"] == [{"task_id": "t:1", "reward": 0.0, "note": "note on t:1"}]
    assert 2 < shown < 8  # three batches do not hold all


async def test_one_batch_needs_no_merge(server: ScriptedServer) -> None:
    script = Script(lambda names: [])
    server.chat = script
    data, shown = await run(server, records())
    assert len(script.prompts) == 1 and shown == 8 and len(data["candidates"]) == 5
    assert all(len(c["example_trajectories"]) == 2 for c in data["candidates"])


async def test_discovery_sees_outcomes_and_reasons_and_the_advice(server: ScriptedServer) -> None:
    script = Script(lambda names: [])
    server.chat = script
    await run(server, records(), benchmark="swebench")
    (prompt,) = script.prompts
    assert prompt.count('outcome="failed"') == prompt.count('outcome="passed"') == 4
    assert "(why it failed: because 3)" in prompt
    system = server.calls("/v1/chat/completions")[0]["messages"][0]["content"]
    assert "repairs of real repositories" in system


async def test_a_name_that_comes_twice_is_kept_once(server: ScriptedServer) -> None:
    server.chat = lambda messages, body: json.dumps({"candidates": [candidate("same_name", "t:1")] * 5})
    data, _ = await run(server, records())
    assert [c["name"] for c in data["candidates"]] == ["same_name"]


@pytest.mark.parametrize(
    "spoil",
    [
        {"name": "Bad Name"},
        {"name": "single"},
        {"name": "far_too_many_words_in_one_name"},
        {"description": "short"},
        {"examples": []},
        {"examples": [{"task_id": "t:99", "note": "invented"}]},
        {"examples": [{"task_id": "t:1"}]},
        {"extra": 1},
    ],
)
async def test_what_the_schema_forbids_is_refused(server: ScriptedServer, spoil: dict[str, Any]) -> None:
    answer = {"candidates": [candidate(n, "t:1") for n in NAMES]}
    answer["candidates"][2] |= spoil
    server.chat = lambda messages, body: json.dumps(answer)
    with pytest.raises(ServerError, match="violates the schema"):
        await run(server, records())


async def test_fewer_candidates_can_be_asked_for(server: ScriptedServer) -> None:
    server.chat = lambda messages, body: json.dumps({"candidates": [candidate(n, "t:1") for n in NAMES[:2]]})
    data, _ = await run(server, records(), n_candidates=2)
    assert len(data["candidates"]) == 2
    prompt = server.calls("/v1/chat/completions")[0]["messages"][1]["content"]
    assert "Propose 2 to 2 capabilities" in prompt


# --------------------------------------------------------------------------- in the command


def write_summaries(folder: Path, split: str | None = None) -> Path:
    entries = []
    for task in range(12):
        messages = [{"role": "user", "content": f"order {task}"}, {"role": "assistant", "content": "done"}]
        one = {"task_id": str(task), "sample_idx": 0, "reward_info": {"reward": float(task % 2)}, "messages": messages}
        entries.append(one)
    entries.append({"task_id": "90", "sample_idx": 0, "outcome": "error", "error_kind": "server", "messages": []})
    (folder / "rollouts.json").write_text(json.dumps({"info": {"env": "desk"}, "simulations": entries}))
    arguments = ["--input", folder / "rollouts.json", "--output", folder / "s.json"]
    assert run_main(_summarize.main, *arguments, *(["--split", split] if split else [])).returncode == 0
    return folder / "s.json"


def all_na(messages: list[dict[str, Any]], body: dict[str, Any]) -> str:
    schema = body["response_format"]["json_schema"]["schema"]
    if "candidates" in schema["properties"]:
        ids = re.findall(r'<trajectory id="([^"]+)"', messages[-1]["content"])
        return json.dumps({"candidates": [candidate(n, ids[0]) for n in NAMES]})
    return json.dumps({n: {"label": "NA", "message": 0, "quote": ""} for n in schema["properties"]})


def label(folder: Path, server: ScriptedServer, *more: str) -> Done:
    base = ["--labeler", "model", "--base-url", server.url, "--model", "scripted", "--n-runs", "1", "--retries", "0"]
    base += ["--input", str(folder / "s.json"), "--output-dir", str(folder / "labels")]
    return run_main(label_capabilities.main, *base, *more)


def labelled_ids(folder: Path) -> set[str]:
    return set(load_runs(find_runs([str(folder / "labels" / "run_*.json")])).ids)


@pytest.mark.parametrize("part", ["mine", "score"])
def test_only_one_part_of_a_split_is_shown_and_labelled(tmp_path: Path, server: ScriptedServer, part: str) -> None:
    server.chat = all_na
    path = write_summaries(tmp_path, "1:1")
    wanted = {
        r["id"] for r in json.loads(path.read_text())["trajectories"] if r["split"] == part and r["id"] != "desk:90"
    }
    done = label(tmp_path, server, *(["--part", part] if part == "score" else []))
    assert done.returncode == 0, done.stderr
    assert labelled_ids(tmp_path) == wanted and 0 < len(wanted) < 12
    shown = set(
        re.findall(r'<trajectory id="([^"]+)"', json.dumps(server.calls("/v1/chat/completions")).replace("\\", ""))
    )
    assert shown <= wanted


def test_infrastructure_is_neither_shown_nor_labelled(tmp_path: Path, server: ScriptedServer) -> None:
    server.chat = all_na
    write_summaries(tmp_path)
    assert label(tmp_path, server).returncode == 0
    assert "desk:90" not in labelled_ids(tmp_path)
    assert "desk:90" not in json.dumps(server.calls("/v1/chat/completions"))


def test_candidates_of_an_earlier_start_are_used_again(tmp_path: Path, server: ScriptedServer) -> None:
    server.chat = all_na
    write_summaries(tmp_path)
    assert label(tmp_path, server).returncode == 0
    before = len(server.calls("/v1/chat/completions"))
    (tmp_path / "labels" / "label_log.jsonl").unlink()
    assert label(tmp_path, server).returncode == 0
    assert len(server.calls("/v1/chat/completions")) - before == 12  # labels only


def test_candidates_that_were_edited_do_not_fit_the_log(tmp_path: Path, server: ScriptedServer) -> None:
    server.chat = all_na
    write_summaries(tmp_path)
    assert label(tmp_path, server).returncode == 0
    path = tmp_path / "labels" / "candidate_capabilities.json"
    data = json.loads(path.read_text())
    data["candidates"][0]["description"] = "Something else altogether."
    path.write_text(json.dumps(data))
    done = label(tmp_path, server)
    assert done.returncode == 2 and "label_log.jsonl" in done.stderr


def test_blind_or_one_sided_input_is_refused(tmp_path: Path, server: ScriptedServer) -> None:
    server.chat = all_na
    write_summaries(tmp_path)
    arguments = ["--input", tmp_path / "rollouts.json", "--output", tmp_path / "x.json"]
    assert run_main(_summarize.main, *arguments, "--blind-output", tmp_path / "blind.json").returncode == 0
    done = label(tmp_path, server, "--input", str(tmp_path / "blind.json"))
    assert done.returncode == 2 and "blind file" in done.stderr
    entry = {
        "task_id": "1",
        "sample_idx": 0,
        "reward_info": {"reward": 0.0},
        "messages": [{"role": "user", "content": "x"}],
    }
    (tmp_path / "rollouts.json").write_text(json.dumps({"info": {"env": "desk"}, "simulations": [entry]}))
    assert (
        run_main(_summarize.main, "--input", tmp_path / "rollouts.json", "--output", tmp_path / "s.json").returncode
        == 0
    )
    done = label(tmp_path, server)
    assert done.returncode == 2 and "no passed trajectory" in done.stderr
    assert not server.calls("/v1/chat/completions")


def test_few_candidates_are_a_warning(tmp_path: Path, server: ScriptedServer) -> None:
    def same(messages: list[dict[str, Any]], body: dict[str, Any]) -> str:
        answer = json.loads(all_na(messages, body))
        for one in answer.get("candidates", []):
            one["name"] = "same_name"
        return json.dumps(answer)

    server.chat = same
    write_summaries(tmp_path)
    done = label(tmp_path, server)
    assert done.returncode == 0 and "warning: discovery gave only 1 different candidates" in done.stdout
