"""Input that nobody means to give: every command answers with one line and exit code 2, and writes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_game
from stage1_helpers import run_main

import render_pipeline
from moe_gate.config import load_gate_config
from pipeline import aggregate_capabilities, calibrate_environment, folders, new_environment, run_agent
from pipeline import validate_environment as validate
from pipeline.command_line import non_negative_int, positive_int, rational
from pipeline.files import InputError, JsonlLog, parse_json, read_json, read_yaml, resolved, write_text
from pipeline.labels import run_file
from train import adapter_folder, replay
from train.checkpoint import load_checkpoint
from train.config import load_config
from train.rollout import EnvironmentPool

LONG = "9" * 5000  # Python refuses to read it as an integer


def refused(main: Any, *arguments: str | Path) -> str:
    """The one line of a command that must end with exit code 2."""
    done = run_main(main, *arguments)
    assert done.returncode == 2, done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and done.stdout == ""
    return done.stderr


# --------------------------------------------------------------------------- replay


def entry(**changes: Any) -> dict[str, Any]:
    base = {"task_id": "3", "outcome": "scored", "game": "capability_tiny", "reward_info": {"reward": 1.0}}
    return base | {"messages": [{"role": "user", "content": "q"}]} | changes


@pytest.mark.parametrize("n_messages", [0, 1, 2])
def test_a_recording_without_a_turn_is_replayed(n_messages: int) -> None:
    opening = [{"role": "user", "content": "q"}] * n_messages
    assert replay.recorded_replies(replay.ReplayEntry(**entry(messages=opening)), 2) == []
    played = asyncio.run(
        replay.replay_entry(
            tiny_game.SPEC, EnvironmentPool(tiny_game.SPEC), replay.ReplayEntry(**entry(messages=opening))
        )
    )
    assert played.recomputed is None and "opens with other messages" in played.detail


@pytest.mark.parametrize(
    "changes",
    [
        {"task_id": "abc"},
        {"task_id": "9" * 6000},
        {"task_id": "-1"},
        {"task_id": True},
        {"reward_info": {"reward": 1.5}},
        {"reward_info": {"reward": True}},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": 5}]}]},
        {"messages": [{"role": "assistant", "raw_content": 5}]},
    ],
)
def test_replay_checks_its_entries(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"simulations": [entry(**changes)]}))
    assert next(iter(changes)) in refused(replay.main, path)


def test_replay_names_a_file_that_is_no_dump(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"garbage without a newline")
    assert "expected a collected file or a dump" in refused(replay.main, path)


# --------------------------------------------------------------------------- numbers on the command line


@pytest.mark.parametrize("text", ["-1", "", "x", "1.5", LONG])
def test_integer_options(text: str) -> None:
    for kind in (non_negative_int, positive_int):
        with pytest.raises(Exception, match="expected an integer >= ") as caught:
            kind(text)
        assert type(caught.value).__name__ == "ArgumentTypeError"  # argparse's own way to exit 2
    assert non_negative_int("0") == 0


@pytest.mark.parametrize("flags", [("--seed", "-1"), ("--k", LONG), ("--k", "0")])
def test_aggregate_refuses_numbers(flags: tuple[str, str]) -> None:
    assert f"argument {flags[0]}: expected" in refused(aggregate_capabilities.main, "--runs", "none.json", *flags)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--seed", "-1"], "--seed"),
        (["--mean-min", "0.7"], "--mean-min 0.7 is above --mean-max 0.6"),
        (["--success-max", "0.1"], "--success-min 0.2 is above --success-max 0.1"),
    ],
)
def test_calibrate_refuses_numbers(flags: list[str], expected: str) -> None:
    assert expected in refused(calibrate_environment.main, "none.json", *flags)


@pytest.mark.parametrize("flag", ["--time-limit", "--cost-limit"])
@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_run_agent_refuses_limits(flag: str, value: str) -> None:
    message = refused(run_agent.main, "--stage", "capability", "--agent", "true", f"{flag}={value}")
    assert "expected a finite number > 0" in message


@pytest.mark.parametrize("text", ["1e9999999999", "1e-9999999999", "1E+1000", "1" * 101, "nan", "1/0"])
def test_rational_numbers_stay_small(text: str) -> None:
    began = time.monotonic()
    with pytest.raises(InputError, match="expected a number such as"):
        rational(text)
    assert time.monotonic() - began < 1
    assert rational("2e-1") == Fraction(1, 5)


# --------------------------------------------------------------------------- YAML and settings


@pytest.mark.parametrize(
    "text",
    ["x: 2020-99-99", f"x: {LONG}", "x: !!bool maybe", 'x: !!int ""', "x: !!timestamp y", "a: 1\na: 2", "? [a]\n: b"],
)
def test_yaml_that_cannot_be_built(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    for read in (
        read_yaml,
        load_gate_config,
        lambda p: load_config({"config": str(p)}, {}),
        lambda p: render_pipeline.load_config(p, "capability"),
    ):
        with pytest.raises(InputError, match="not valid YAML"):
            read(path)


def test_deep_yaml(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("[" * 3000)
    with pytest.raises(InputError, match="nested too deeply"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("key", "text"),
    [("lr", ".nan"), ("lr", ".inf"), ("lr", "true"), ("seed", str(2**31 + 1)), ("seed", "-1"), ("seed", "1.0")],
)
def test_settings_are_finite_and_typed(tmp_path: Path, key: str, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"model: m\ncapabilities: [a]\n{key}: {text}\n")
    with pytest.raises(InputError, match=f"settings: {key}: "):
        load_config({"config": str(path)}, {})
    path.write_text(f"output_dir: o\nbase_model: m\nadapter_dir: a\nadapter_names: [a]\n{key}: {text}\n")
    with pytest.raises(InputError, match=f": {key}: "):
        load_gate_config(path)


def test_true_is_no_rank_and_text_is_a_float(tmp_path: Path) -> None:
    good = {"model": "m", "capabilities": ("a",)}
    with pytest.raises(InputError, match=r"lora_rank: .*expected an integer"):
        load_config(good | {"lora_rank": True}, {})
    (tmp_path / "c.yaml").write_text("lr: 1e-5")  # text for YAML 1.1
    assert load_config(good | {"config": str(tmp_path / "c.yaml")}, {}).lr == 1e-5


# --------------------------------------------------------------------------- files


def test_loops_of_links(tmp_path: Path) -> None:
    loop, game = tmp_path / "loop.json", tmp_path / "loop_game.py"
    loop.symlink_to(loop)
    game.symlink_to(game)
    assert "cannot be followed" in refused(aggregate_capabilities.main, "--runs", loop)
    assert "cannot be followed" in refused(validate.main, game)
    refused(validate.main, loop)
    with pytest.raises(InputError, match="cannot be followed"):
        resolved("a\0b")


def test_lone_surrogates_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lone surrogate"):
        write_text(tmp_path / "a.json", "good \udcff")
    with JsonlLog(tmp_path / "log.jsonl") as log:
        with pytest.raises(InputError, match="lone surrogate"):
            log.append({"a": "\ud800"})
        log.append({"a": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]
    assert (tmp_path / "log.jsonl").read_text() == '{"a": 1}\n'


def test_json_keys_are_unique_and_numbers_finite(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x": {"b": 1, "a": 2, "b": 3}}')
    with pytest.raises(InputError, match="key 'b' appears twice"):
        read_json(tmp_path / "a.json")
    for text in ("1e999", "[-1e999]"):
        with pytest.raises(InputError, match="1e999 is too large"):
            parse_json(text, "x")
    assert parse_json("[1e308, 0.5]", "x") == [1e308, 0.5]
    run = json.dumps(run_file(1, {"a": True}, {"some_skill": {"a": "LACKING"}}))
    (tmp_path / "run_01.json").write_text(run.replace('"attempt": 1', '"attempt": 1, "attempt": 2'))
    message = refused(aggregate_capabilities.main, "--runs", tmp_path / "run_01.json", "--check", "--k", "1")
    assert "key 'attempt' appears twice" in message


def test_a_dangling_link_is_not_replaced(tmp_path: Path) -> None:
    link = tmp_path / "x_game.py"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="exists"):
        new_environment.main(["capability_x", "-o", str(link)])
    assert link.is_symlink() and not link.exists()


# --------------------------------------------------------------------------- adapters and checkpoints


@pytest.mark.parametrize("change", [{"target_modules": 5}, {"target_modules": [1]}, {"r": "x"}, {"r": 0}])
def test_adapter_config_is_checked(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8} | change))
    (tmp_path / "adapter_model.safetensors").touch()
    for use in (adapter_folder.check_folder, lambda p: adapter_folder.describe(str(p))):
        with pytest.raises(InputError, match=next(iter(change))):
            use(tmp_path)


@pytest.mark.parametrize(
    ("targets", "expected"), [("all-linear", "targets all-linear"), (["a", "b"], "2 target kinds")]
)
def test_adapter_is_described(tmp_path: Path, targets: Any, expected: str) -> None:
    config = {"peft_type": "LORA", "r": 8, "target_modules": targets}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert adapter_folder.describe(str(tmp_path)) == f"rank 8, {expected}"


COUNTERS = {"version": 1, "iteration": 1, "next_seed": {}, "mix": {}}


@pytest.mark.parametrize(
    "change",
    [{"settings": []}, {"settings": None}, {"counters": None}, {"counters": COUNTERS | {"mix": []}}, {"counters": {}}],
)
def test_checkpoint_state_is_checked(tmp_path: Path, change: dict[str, Any]) -> None:
    state = {"schema_version": 1, "adapter": "a", "settings": {}, "counters": COUNTERS} | change
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match=next(iter(change))):
        load_checkpoint(tmp_path, SimpleNamespace(name="a"), {"lora_rank": 8})  # type: ignore[arg-type]


@pytest.mark.parametrize("old", ["folder", "file", "link", "nothing"])
@pytest.mark.parametrize("atomic", [True, False])
def test_a_folder_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, atomic: bool) -> None:
    new, target = tmp_path / ".new", tmp_path / "adapter"
    new.mkdir()
    (new / "weights").write_text("new")
    if old == "folder":
        target.mkdir()
        (target / "weights").write_text("old")
    elif old == "file":
        target.touch()
    elif old == "link":
        target.symlink_to(tmp_path / "nowhere")
    if not atomic:
        monkeypatch.setattr(folders, "exchange", lambda first, second: False)
    folders.replace_folder(new, target)
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]
    assert (target / "weights").read_text() == "new"


def test_the_exchange_is_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before its cleanup, a replacement has left the new folder in place and the old one beside it."""
    for name in ("new", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not folders.exchange(tmp_path / "new", tmp_path / "target"):
        pytest.skip("this file system cannot exchange names")
    assert os.listdir(tmp_path / "target") == ["new"] and os.listdir(tmp_path / "new") == ["target"]
    with pytest.raises(OSError, match="No such file"):
        folders.exchange(tmp_path / "new", tmp_path / "missing")

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        folders.replace_folder(tmp_path / "new", tmp_path / "target")
    assert os.listdir(tmp_path / "target") == ["target"]
