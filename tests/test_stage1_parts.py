"""Small parts of stage 1: command-line habits, streams, writers, examples, and every command's two ways to start."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage1_helpers import ROOT, run_main

from pipeline import command_line, files
from pipeline.command_line import Parser, ProgressLine, natural_key, positive_int, rational, rational_option
from pipeline.cross_check import quote_fault, squeeze
from pipeline.files import InputError, sole_writer, write_block
from pipeline.label_output import Labelled, Target, candidates_json, examples, run_json, write_runs
from pipeline.labels import Evidence
from pipeline.readers.stream import describe, items, json_lines, members, open_json, single
from pipeline.records import Call, Message, Record, read_info, read_summaries, summary_writer
from pipeline.selection_export import previous_entries, report_path, retire, stale_path

COMMANDS = ["_summarize", "aggregate_capabilities", "label_capabilities", "run_agent", "report"]


# --------------------------------------------------------------------------- commands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_defaults(name: str) -> None:
    module = importlib.import_module(f"pipeline.{name}")
    done = run_main(module.main, "--help")
    assert done.returncode == 0 and "(default: " in done.stdout and f"pipeline/{name}.py" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_an_unknown_option_in_one_line(name: str) -> None:
    module = importlib.import_module(f"pipeline.{name}")
    done = run_main(module.main, "--no-such-option")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "how", [["pipeline/run_agent.py"], ["-m", "pipeline.label_capabilities"], ["render_pipeline.py"]]
)
def test_commands_start_as_script_and_as_module(how: list[str]) -> None:
    done = subprocess.run([sys.executable, *how, "--help"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


# --------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.20", Fraction(1, 5)), ("1/5", Fraction(1, 5)), (" 1 ", Fraction(1)), ("1e-1", Fraction(1, 10))],
)
def test_rationals_are_exact(text: str, value: Fraction) -> None:
    assert rational(text) == rational_option(text) == value


@pytest.mark.parametrize("text", ["", "nan", "inf", "1/0", "0,2", "1 / 5 x"])
def test_what_is_not_rational(text: str) -> None:
    with pytest.raises(InputError):
        rational(text)
    with pytest.raises(argparse.ArgumentTypeError):
        rational_option(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.0", "", "one", "²"])
def test_what_is_not_a_positive_integer(text: str) -> None:
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        positive_int(text)


@given(st.lists(st.text(max_size=6), max_size=8))
@settings(max_examples=100, deadline=None)
def test_natural_order_is_total_and_stable(names: list[str]) -> None:
    once = sorted(names, key=natural_key)
    assert sorted(once, key=natural_key) == once
    assert sorted(["a10", "a9", "a", "b1"], key=natural_key) == ["a", "a9", "a10", "b1"]


def test_options_cannot_be_abbreviated() -> None:
    parser = Parser("x")
    parser.add_argument("--threshold")
    with pytest.raises(SystemExit):
        parser.parse_args(["--thresh", "1"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_on_a_terminal_and_silent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 1.1, 2.0, 2.0])
    monkeypatch.setattr(command_line.time, "monotonic", lambda: next(now))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = ProgressLine("read", 4)
    progress.advance(2, "airline:1")
    progress.advance(1)  # too soon after the last one
    progress.close("done")
    shown = [line for line in terminal.getvalue().split("\r\x1b[2K") if line]
    assert shown == ["read 2/4, 1 s, 1 s left airline:1", "read 3/4, 2 s, 1 s left done\n"]
    monkeypatch.undo()
    quiet = io.StringIO()
    monkeypatch.setattr(sys, "stderr", quiet)
    ProgressLine("read").advance(5)
    assert quiet.getvalue() == ""


# --------------------------------------------------------------------------- streams


def test_items_members_and_single(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": {"b": 1.5}, "list": [1, {"c": null}], "n": 12345678901}')
    assert list(items(path, "list.item")) == [1, {"c": None}]
    assert dict(members(path)) == {"a": {"b": 1.5}, "list": [1, {"c": None}], "n": 12345678901}
    assert single(path, "a.b") == 1.5 and isinstance(single(path, "a.b"), float)
    assert single(path, "nowhere") is None


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert single(path, "a") == 1
    lines = tmp_path / "x.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}')
    assert list(json_lines(lines)) == [(1, {"a": 1}), (3, {"a": 2})]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b" \n ", "empty"),
        (b'{"a": ', "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": 1}}', "not valid JSON"),
        (b'{"a": 1}\n{"a": 2}\n', "JSON Lines"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"a": 99999999999999999999999}', "not valid JSON"),
    ],
)
def test_faults_of_a_file_are_input_errors(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=word) as caught:
        list(items(path, ""))
    assert "x.json" in str(caught.value) and "\n" not in str(caught.value)


def test_paths_that_cannot_be_opened(tmp_path: Path) -> None:
    for path, word in ((tmp_path / "no", "not found"), (tmp_path, "found a folder")):
        with pytest.raises(InputError, match=word), open_json(path):
            pass


def test_a_generator_that_is_dropped_closes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(list(range(10000))))
    stream = items(path, "item")
    assert next(stream) == 0
    stream.close()
    path.unlink()


@pytest.mark.parametrize(
    ("value", "text"),
    [({"a": 1, "b": 2}, "keys 'a', 'b'"), ([1], "list [1]"), (None, "NoneType null"), (b"x", "bytes")],
)
def test_what_was_found_is_described(value: Any, text: str) -> None:
    assert text in describe(value)


# --------------------------------------------------------------------------- records


def make_record(name: str, **more: Any) -> Record:
    return Record.model_validate({"id": name, "benchmark": "b", "domain": "d", "task_id": name, "trial": 0} | more)


def test_records_survive_the_way_through_a_file(tmp_path: Path) -> None:
    message = {
        "index": 3,
        "role": "assistant",
        "content": "é\n\u2028",
        "calls": [{"name": "f", "arguments": "{}"}],
        "cut_chars": 2,
    }
    first = make_record("d:1", outcome="failed", reward=0.0, reason="r", messages=[message], split="mine", cut_chars=2)
    info: dict[str, Any] = {}
    with summary_writer(tmp_path / "s.json", info) as writer:
        writer.write(first)
        writer.write(make_record("d:2"))
        info["counts"] = {"total": 2}
    found = list(read_summaries(tmp_path / "s.json"))
    assert found[0] == first and found[1].outcome is None
    assert read_info(tmp_path / "s.json") == {"counts": {"total": 2}}
    lines = (tmp_path / "s.json").read_text().split("\n")
    assert sum(line.startswith('{"id"') for line in lines) == 2  # one record a line
    assert json.loads((tmp_path / "s.json").read_text())["schema_version"] == 1


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), summary_writer(tmp_path / "s.json", {}) as writer:
        writer.write(make_record("d:1"))
        raise KeyError("x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ['{"schema_version": 2, "trajectories": []}', '{"trajectories": []}', "[]"])
def test_other_versions_of_summaries_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(InputError, match="schema_version 1"):
        list(read_summaries(tmp_path / "s.json"))


def test_what_may_be_quoted_is_content_and_calls() -> None:
    message = Message(index=1, role="assistant", content="I  look", calls=(Call(name="find", arguments='{"id": 7}'),))
    texts = {1: squeeze(message.text())}
    for quote in ("I look", "find", '{"id": 7}', 'call find({"id": 7})', "look call"):
        assert quote_fault(Evidence(message=1, quote=quote), texts) == "", quote
    assert "does not contain" in quote_fault(Evidence(message=1, quote="I looked"), texts)
    assert "no message 2" in quote_fault(Evidence(message=2, quote="I look"), texts)


# --------------------------------------------------------------------------- what labelling writes


def labelled(n: int = 6) -> list[Labelled]:
    return [
        Labelled(f"d:{i}", i % 2 == 1, float(i % 2 == 0), {"a_skill": "LACKING" if i % 2 else "PRESENT"})
        for i in range(n)
    ]


def test_examples_are_two_of_each_side_that_fit() -> None:
    found = examples("a_skill", labelled())
    assert [(e["task_id"], e["note"]) for e in found] == [
        ("d:1", "LACKING"),
        ("d:3", "LACKING"),
        ("d:0", "PRESENT"),
        ("d:2", "PRESENT"),
    ]
    assert (
        candidates_json({"a_skill": "It does."}, labelled(1))["candidates"][0]["example_trajectories"][0]["reward"]
        == 1.0
    )


def test_runs_get_their_prefix_and_never_mix_with_others(tmp_path: Path) -> None:
    target = Target(tmp_path, "x_")
    run = run_json(1, labelled(), ["a_skill"], labeler={"kind": "t"})
    write_runs(target, None, {1: run})
    assert [p.name for p in tmp_path.iterdir()] == ["x_run_01.json"]
    (tmp_path / "run_09.json").write_text("{}")  # another prefix: not ours
    write_runs(target, {"candidates": []}, {1: run})
    (tmp_path / "x_run_02.json").write_text("{}")
    with pytest.raises(InputError, match="x_run_02"):
        write_runs(target, None, {1: run})


# --------------------------------------------------------------------------- the export beside its report


def test_names_beside_the_export() -> None:
    assert report_path(Path("a/sel.json")) == Path("a/sel.report.json")
    assert report_path(Path("a/sel")) == Path("a/sel.report.json")
    assert stale_path(Path("a/sel.json")) == Path("a/sel.json.stale")


def test_retire_touches_selections_only(tmp_path: Path) -> None:
    export = tmp_path / "s.json"
    assert retire(export) is None
    export.write_text('{"not": "a selection"}')
    assert retire(export) is None and export.exists()
    export.write_text('[{"skill": "a_skill", "status": "DONE"}]')
    assert retire(export) == stale_path(export) and not export.exists()
    assert previous_entries(export)["a_skill"].status == "DONE"


def test_the_export_speaks_louder_than_the_stale_copy_and_the_report(tmp_path: Path) -> None:
    export = tmp_path / "s.json"
    for path, where in ((report_path(export), "report"), (stale_path(export), "stale"), (export, "export")):
        entry = {"skill": "a_skill", "status": "DONE", "environment_path": where}
        path.write_text(json.dumps({"done": [entry]} if where == "report" else [entry]))
        assert previous_entries(export)["a_skill"].environment_path == where


@pytest.mark.parametrize("text", ["[]", '{"x": 1}', '{"done": [{"status": "DONE"}]}', '{"done": 3}'])
def test_a_foreign_report_is_refused(tmp_path: Path, text: str) -> None:
    report_path(tmp_path / "s.json").write_text(text)
    with pytest.raises(InputError, match="move it away"):
        previous_entries(tmp_path / "s.json")


def test_a_block_is_replaced_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a:begin -->\nold\n<!-- a:end -->\n<!-- b:begin -->\nkept\n<!-- b:end -->\nafter\n")
    write_block(page, "a", "| new |\n")
    wanted = "before\n<!-- a:begin -->\n| new |\n<!-- a:end -->\n<!-- b:begin -->\nkept\n<!-- b:end -->\nafter\n"
    assert page.read_text() == wanted
    with pytest.raises(InputError, match="c:begin and c:end"):
        write_block(page, "c", "x")
    assert page.read_text() == wanted


def test_a_folder_is_held_by_one(tmp_path: Path) -> None:
    held = tmp_path / "a" / "b"
    with sole_writer(held):
        with pytest.raises(InputError, match="another process is writing into it"), sole_writer(held):
            pass
        assert held.is_dir()
    assert not held.exists(), "nothing was written"
    with sole_writer(held):
        (held / "x").write_text("1")
    with sole_writer(held):
        pass
    assert (held / "x").exists()
    (tmp_path / "file").write_text("1")
    with pytest.raises(InputError, match="cannot be written"), sole_writer(tmp_path / "file"):
        pass
    code = "import sys, time; sys.path.insert(0, sys.argv[2]); from pipeline.files import sole_writer\n"
    code += "with sole_writer(sys.argv[1]): print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(held), str(ROOT)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    with pytest.raises(InputError, match="another process"), sole_writer(held):
        pass
    process.kill()
    process.wait()
    with sole_writer(held):
        pass


def test_who_is_refused_takes_no_folder_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder appears between a process' look and its attempt; and goes between its attempt and its lock."""
    held = tmp_path / "run"
    with sole_writer(held):
        with pytest.raises(InputError, match="another process"), sole_writer(held):
            pass
        assert held.is_dir()
    lock = files._lock

    def too_late(handle: int, refusal: str) -> None:
        monkeypatch.setattr(files, "_lock", lock)
        held.rmdir()  # by the one who held it
        lock(handle, refusal)

    monkeypatch.setattr(files, "_lock", too_late)
    with sole_writer(held):
        assert held.is_dir()
        with pytest.raises(InputError, match="another process"), sole_writer(held):
            pass
    assert not held.exists()
    held.symlink_to(tmp_path / "nowhere")
    for nowhere in (held, Path("/proc/nowhere")):
        with pytest.raises(InputError, match="cannot be made or is a link to nothing"), sole_writer(nowhere):
            pass
