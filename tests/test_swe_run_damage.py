"""Files that were damaged and servers that answer nonsense: one line, at once, and nothing waits for ever."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import phase4_env_validation as phase4
import phase5_training as phase5
import phase6_final_eval as phase6
import pytest
import run_agent_config
import run_agents
import run_checkpoint
import run_evaluation
import run_grading
import run_server
from run_folder import RunFolder
from run_settings import RunSettings
from swe_run_helpers import AGENT_PYTHON, needs_agents, settings_data
from test_swe_run_integrity import IDS, Run, finished, verified, write

from pipeline.files import InputError, ServerError, read_text

__all__ = ["finished"]  # a fixture

VALUES: tuple[Any, ...] = (None, True, -1, 1.5, 1 << 70, "x", "", "\ud800", [], ["x"], {}, {"x": 1})


def one_line(error: BaseException, words: str = "") -> None:
    assert words in str(error) and "\n" not in str(error) and isinstance(error, InputError | ServerError)


# ---------------------------------------------------------------------- files


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a JSON document."""
    yield at
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*at, key))


def changed(data: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    data = copy.deepcopy(data)
    holder = data
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = value
    return data


def refused_or_same(run: Run, good: run_evaluation.Summary) -> bool:
    """What phase 6 reads before it starts; whether it refused. Any other end than these two is an error."""
    try:
        phase6.chosen(run.folder, "score")
        again = verified(run)
    except (InputError, OSError) as error:  # a phase makes one line of an OSError
        assert "\n" not in str(error)
        return True
    assert again.ends == good.ends and again.account == good.account
    return False


def test_a_wrong_value_anywhere_in_a_run_changes_no_result(finished: Run) -> None:
    """Drawn from all (file, place, value): refused in one line, or without meaning for the result."""
    good = verified(finished)
    files = sorted([*finished.folder.root.rglob("*.json"), finished.folder.dataset])
    drawn = [(f, at, v) for f in files for at in places(documents(f)) for v in VALUES]
    refused = 0
    for file, at, value in random.Random(0).sample(drawn, 150):
        kept = file.read_bytes()
        data = changed(documents(file), at, value)
        lines = data if file.suffix == ".jsonl" and isinstance(data, list) else [data]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        refused += refused_or_same(finished, good)
        file.write_bytes(kept)
    assert refused > 75


def documents(file: Path) -> Any:
    return [json.loads(s) for s in file.read_text().splitlines()] if file.suffix == ".jsonl" else json.loads(
        file.read_text()
    )  # fmt: skip


@pytest.mark.parametrize("how", ["gone", "empty", "cut", "folder", "loop", "pipe", "bytes"])
def test_a_file_of_a_run_that_is_none(finished: Run, how: str) -> None:
    good = verified(finished)
    out = finished.folder.phase1
    first = out / "trajectories" / IDS[0] / f"{IDS[0]}.traj.json"
    (raw,) = (out / "grading").rglob(f"{IDS[0]}/report.json")
    for file in (finished.folder.run_json, finished.summary, out / "report.json", out / "preds.json",
                 out / "outcomes" / f"{IDS[0]}.json", first, raw):  # fmt: skip
        kept = file.read_bytes()
        file.unlink()
        damage(file, kept, how)
        assert refused_or_same(finished, good), f"{file}: {how}"
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
        file.write_bytes(kept)
    verified(finished)


def damage(file: Path, text: bytes, how: str) -> None:
    if how == "folder":
        file.mkdir()
    elif how == "loop":
        file.symlink_to(file)
    elif how == "pipe":
        os.mkfifo(file)  # nobody writes into it: a plain read would wait for ever
    elif how != "gone":
        file.write_bytes({"empty": b"", "cut": text[: len(text) // 2], "bytes": b"\xff\xfe{}"}[how])


def test_a_pipe_of_the_shell_is_read() -> None:
    """``<(...)`` has a writer."""
    done, sink = os.pipe()
    os.write(sink, b"text")
    os.close(sink)
    assert read_text(f"/dev/fd/{done}") == "text"
    os.close(done)


def test_the_remedy_of_a_changed_trajectory_and_report_is_one(finished: Run) -> None:
    """A finished instance is not run again by itself, so it must be said what to delete."""
    out = finished.folder.phase1
    write(out / "trajectories" / IDS[0] / f"{IDS[0]}.traj.json", {"info": {"exit_status": "x"}, "messages": []})
    with pytest.raises(InputError) as error:
        verified(finished)
    one_line(error.value, f"delete {out / 'outcomes' / IDS[0]}.json and run the evaluation again")


@pytest.mark.parametrize("stats", [{"api_calls": "many"}, 3, {"api_calls": [1]}, {"api_calls": None}])
def test_statistics_of_an_agent_that_are_none(tmp_path: Path, stats: Any) -> None:
    info = {"exit_status": "Submitted", "submission": "diff", "model_stats": stats}
    write(tmp_path / "t.json", {"info": info, "messages": []})
    outcome = run_agents.outcome_of(IDS[0], tmp_path / "t.json", tmp_path, 0.0, 1)
    assert outcome.kind == ("submitted" if stats == {"api_calls": None} else "infrastructure")


def test_a_model_folder_without_a_configuration(tmp_path: Path) -> None:
    """Else a server would be started for it, and die a minute later."""
    (tmp_path / "config.json").write_text("null")
    settings = RunSettings.model_validate(settings_data())
    with pytest.raises(InputError, match=r"config\.json: expected an object, found NoneType"):
        run_checkpoint.fits(run_checkpoint.read_checkpoint(str(tmp_path), settings), settings, {})


@pytest.mark.parametrize("value", [{}, {"floor": 0.1}, {"floor": "x", "checks": []}, {"floor": 0.1, "checks": [{}]}, 3])
def test_a_damaged_panel_of_phase_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    monkeypatch.setattr(phase4.generated_env, "digest_of", lambda *_: "d")
    write(tmp_path / "phase4" / "panel" / "a_b-d.json", value)
    with pytest.raises(InputError) as error:
        phase4.panel_of("a_b", RunFolder(tmp_path), RunSettings.model_validate(settings_data()), [])
    one_line(error.value, "a_b-d.json")


@pytest.mark.parametrize("value", [{"simulations": 3}, {"simulations": {"a": 1}}, {"simulations": [3]}, []])
def test_damaged_rollouts_of_phase_4(tmp_path: Path, value: Any) -> None:
    write(tmp_path / "r.json", value)
    with pytest.raises(InputError) as error:
        phase4.rates_of(tmp_path / "r.json", [], 1)
    one_line(error.value, "r.json")


@pytest.mark.parametrize("value", [{}, {"validation_accuracy": "x"}, {"validation_accuracy": None}, 3])
def test_a_damaged_report_of_the_gate(tmp_path: Path, value: Any) -> None:
    folder = RunFolder(tmp_path)
    write(folder.phase5 / "grpo" / "metrics.jsonl", 3)
    write(folder.gate / "report.json", value)
    with pytest.raises(InputError) as error:
        phase5.metrics(["a_b"], folder)
    one_line(error.value, "report.json")


# ---------------------------------------------------------------------- programs and servers


@needs_agents
@pytest.mark.parametrize("what", ["package", "report code"])
def test_a_program_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def never(command: list[str], timeout: float = 0, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    settings = RunSettings.model_validate(settings_data(agent={"python": str(AGENT_PYTHON)}))
    monkeypatch.setattr(subprocess, "run", never)
    with pytest.raises((InputError, ServerError)) as error:
        if what == "package":
            run_agent_config.base_config(settings)
        else:
            run_grading._drive(settings, tmp_path, "again")
    one_line(error.value, "within")


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n"
ANSWERS: dict[str, tuple[Iterable[bytes], str]] = {
    "no HTTP": ([b"hello\r\n"], "no answer (hello)"),
    "nothing": ([], "no answer"),
    "cut": ([HEAD, b"{"], "no list of models"),
    "for ever": (itertools.chain([HEAD], itertools.repeat(b"x")), "timed out while it answered"),
    "an error for ever": (itertools.chain([HEAD.replace(b"200", b"500")], itertools.repeat(b"x")), "answered 500"),
    "too much": (itertools.chain([HEAD], itertools.repeat(b"x" * (1 << 22))), "more than 0 MiB"),
}


@contextlib.contextmanager
def raw_server(pieces: Iterable[bytes], pause_s: float) -> Iterator[str]:
    """Answers its first request with ``pieces``."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 16)
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(pause_s)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)


@pytest.mark.parametrize("answer", sorted(ANSWERS))
def test_a_server_that_answers_nonsense(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """The socket's own time limit begins anew with every byte."""
    monkeypatch.setattr(run_server, "PROBE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(run_server.request, "__defaults__", (None, 0.5))
    monkeypatch.setattr(run_server, "ANSWER_BYTES", 1 << 18)
    pieces, words = ANSWERS[answer]
    with raw_server(pieces, 0.0 if answer == "too much" else 0.05) as url:
        began = time.monotonic()
        with pytest.raises(ServerError) as error:
            run_server.served(RunSettings.model_validate(settings_data(url)))
        assert time.monotonic() - began < 8
    one_line(error.value, words)
