"""``python -m train.replay``: rewards come out again, and a changed environment is noticed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_game
from scripted_engine import ScriptedEngine, right_answer

from pipeline.files import InputError, read_json, write_json
from train import replay
from train.chat import ChatCodec
from train.engine import SamplingParams
from train.episode import EpisodeParams, run_episode, to_simulation

SAID = {
    0: ["What?", '{"name": "answer", "arguments": {"value": 0}}'],
    1: ['{"name": "answer", "arguments": {"value": 5}}', '{"name": "answer", "arguments": {"value": 1}}'],
    2: ["word " * 100, '{"name": "answer", "arguments": {"value": 2}}'],
    3: [
        '<tool_call>{"name": }</tool_call>',
        '<tool_call>\n{"name": "answer", "arguments": {"value": 3}}\n</tool_call>',
    ],
    4: ["Well. " * 3] * 3,
}


@pytest.fixture(scope="module")
def entries(smollm2: Path) -> list[dict[str, Any]]:
    """Episodes of every shape: plain text, wrong call, cut turn, invalid call, out of turns, hinted, failed."""
    codec = ChatCodec.from_model(str(smollm2))

    def play(seed: int, policy: Any, **options: Any) -> dict[str, Any]:
        engine = ScriptedEngine(codec, policy)
        params = EpisodeParams(max_seq_length=1024)
        episode = asyncio.run(run_episode(tiny_game.SPEC, tiny_game.TinyGame(), engine, codec, seed, params, **options))
        return to_simulation(episode, "m")

    def script(seed: int) -> Any:
        queue = list(SAID[seed])
        return lambda prompt, params: queue.pop(0)

    rows = [play(seed, script(seed)) for seed in SAID]
    rows.append(play(5, right_answer, hinted=True))
    rows.append(play(tiny_game.RAISES, right_answer))
    return rows


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["replay", *flags])
    return replay.main()


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    else:
        write_json(path, {"info": {}, "simulations": rows})
    return str(path)


@pytest.mark.parametrize("name", ["r.json", "r.jsonl"])
def test_every_shape_of_episode_gives_its_reward_again(
    entries: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str
) -> None:
    file = write(tmp_path / name, entries)
    report = tmp_path / "report.json"
    assert run(monkeypatch, file, "--json-output", str(report)) == 0
    expected = "6 episodes replayed, 0 rewards differ, 0 more conversations differ, 1 without a reward skipped"
    assert expected in capsys.readouterr().out
    data = read_json(report)
    assert [r["recomputed"] for r in data["episodes"]] == [0.5, 0.5, 1.0, 1.0, 0.0, 1.0]
    assert data["different"] == 0 and all(r["detail"] == "" for r in data["episodes"])


def test_forged_reward_is_exit_1_and_named(
    entries: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    forged = [dict(e) for e in entries]
    forged[0] = {**forged[0], "reward_info": {"reward": 1.0}}
    assert run(monkeypatch, write(tmp_path / "r.json", forged)) == 1
    assert "capability_tiny seed 0 sample 0: recorded 1.000000, now 0.500000" in capsys.readouterr().out


def test_changed_environment_is_noticed(
    entries: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = write(tmp_path / "r.json", entries)
    monkeypatch.setattr(tiny_game.TinyGame, "get_system_prompt", lambda self: "Another prompt.")
    assert run(monkeypatch, file) == 1
    assert "now none the environment opens with other messages" in capsys.readouterr().out
    monkeypatch.undo()

    plain = tiny_game.TinyGame.step

    def louder(self: Any, action: str) -> None:
        plain(self, action)
        if self.messages[-1]["content"] == "Use the tool.":
            self.messages[-1] = {"role": "user", "content": "USE IT."}

    monkeypatch.setattr(tiny_game.TinyGame, "step", louder)
    assert run(monkeypatch, file) == 0
    assert "0 rewards differ, 2 more conversations differ" in capsys.readouterr().out


def test_page_shows_what_was_said(
    entries: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [{**entries[0], "messages": [dict(m) for m in entries[0]["messages"]]}]
    shown[0]["messages"][-3]["content"] = "<b>bold</b>"
    run(monkeypatch, write(tmp_path / "r.json", shown), "--html", str(tmp_path / "p.html"))
    html = (tmp_path / "p.html").read_text()
    assert "capability_tiny, seed 0" in html and "<b>" not in html and "&lt;b&gt;bold" in html and "http" not in html


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], "no entries"),
        ([{"task_id": "1"}], "entry 0: outcome"),
        ([{"task_id": "1", "outcome": "scored", "messages": []}], "no reward"),
        ([{"task_id": "1", "outcome": "error", "messages": []}], "give --env"),
    ],
)
def test_bad_files_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        run(monkeypatch, write(tmp_path / "r.json", rows))


def test_other_json_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.json").write_text("[1]")
    with pytest.raises(InputError, match="simulations"):
        run(monkeypatch, str(tmp_path / "r.json"))
    with pytest.raises(InputError, match="not found"):
        run(monkeypatch, str(tmp_path / "none.json"))


def test_calls_of_a_server_without_text_are_replayed() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "answer", "arguments": '{"value": 3}'}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    entry = replay.ReplayEntry(task_id="3", outcome="scored", reward_info={"reward": 1.0}, messages=messages)
    (reply,) = replay.recorded_replies(entry, 1)
    assert reply.actions == ({"name": "answer", "arguments": {"value": 3}},)
    assert SamplingParams(1).temperature == 1.0
