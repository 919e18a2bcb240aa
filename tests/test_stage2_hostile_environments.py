"""Environments that were written to do harm or to lie: each ends as a typed outcome, in time, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from environment_files import GOOD, Change, changed_in

from game_registry import Failed, GameError, Reply, Scored, Turn, play_sync
from pipeline import remote_worker, sandbox, validate_environment
from pipeline.files import InputError, JsonlLog
from pipeline.panel_evidence import Settings
from pipeline.remote_game import EnvironmentFault, RemoteGame, SandboxedEnvironment, resolve_game

ISOLATION = "bwrap" if sandbox._probe_bwrap()[0] is not None else "process"
needs_bwrap = pytest.mark.skipif(ISOLATION != "bwrap", reason="attack code is run behind bwrap only")

STEP = "        self.steps += 1\n"
SUMMARY = '        return {"reward": reward, "steps": self.steps, "reason": reason, "domain": "capability_ledger"}\n'
END = "register_game(\n"
# every descriptor that could be the worker's pipe gets a line, as a reply forged by the environment would
FORGE = (
    "        import os, time\n\n        for fd in range(3, 12):\n            try:\n"
    "                os.write(fd, {line})\n            except OSError:\n                pass\n"
)

SMALL = sandbox.Limits(cpu_s=None, memory_mb=256)


@pytest.fixture
def changed(tmp_path: Path) -> Change:
    """The good environment with texts replaced."""
    return changed_in(tmp_path)


def before(place: str, code: str) -> tuple[str, str]:
    return place, code + place


async def hello(turn: Turn) -> Reply:
    return Reply(text="hello")


def outcome(file: Path, **options: Any) -> Any:
    with SandboxedEnvironment(file, isolation=ISOLATION, **options) as environment:
        return play_sync(environment.spec, environment.spec.make_env(), hello, 0).outcome


# --------------------------------------------------------------------------- at import


@needs_bwrap
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys\nsys.exit(0)\n", "it ended during load"),
        ("import os\nos._exit(0)\n", "it ended during load"),
        ("raise KeyboardInterrupt\n", "it ended during load"),
        ("import os\nwhile True:\n    os.write(4, b'x' * 65536)\n", "load"),
        ("x = bytearray(8 << 30)\n", "MemoryError"),
        ("def f():\n    yield from f()\n\nnext(f())\n", "RecursionError"),
        ("import __main__\n__main__.json.dumps = lambda *a, **k: '{\"ok\": 1}'\n", "GameSpec.name: expected str"),
    ],
    ids=["exit", "_exit", "interrupt", "flood", "memory", "generators", "patch"],
)
def test_harm_at_import_is_one_line(changed: Change, monkeypatch: pytest.MonkeyPatch, code: str, said: str) -> None:
    monkeypatch.setattr(remote_worker, "START_TIMEOUT_S", 10.0)
    monkeypatch.setattr(remote_worker, "MAX_LINE_BYTES", 4 << 20)
    with pytest.raises(GameError) as caught:
        SandboxedEnvironment(changed(before(END, code)), isolation=ISOLATION, limits=SMALL)
    assert said in str(caught.value) and len(str(caught.value)) < 2500


@needs_bwrap
@pytest.mark.parametrize(
    "place",
    ["/dev/zero", "/etc/shadow", "/trace/environment/../../../etc/shadow", "/trace/game_registry.py/../x.py", ""],
)
def test_only_its_own_files_are_read_outside(changed: Change, place: str) -> None:
    """An environment can say where its source is; reading /dev/zero for its hash would never end."""
    lie = f"import __main__\n\n__main__.Worker._sources_of = lambda self, before: [{place!r}]\n"
    with SandboxedEnvironment(changed(before(END, lie)), isolation=ISOLATION) as environment:  # noqa: SIM117
        with pytest.raises(GameError, match="no Python file it was given"):
            environment.files()


@needs_bwrap
@pytest.mark.parametrize("metadata", ["null", "{}", '{"name": 5}'])
def test_forged_metadata_is_refused(changed: Change, metadata: str) -> None:
    line = f'{{"ok": {metadata}}}\n'.encode()
    forge = "import os, time\nfor fd in range(3, 12):\n    try:\n" + f"        os.write(fd, {line!r})\n"
    forge += "    except OSError:\n        pass\ntime.sleep(5)\n"
    with pytest.raises(GameError, match="expected"):
        SandboxedEnvironment(changed(before(END, forge)), isolation=ISOLATION)


# --------------------------------------------------------------------------- in a step


@needs_bwrap
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"ok": null}\n', "must be list"),
        (b'{"ok": {"messages": 5, "n": 1, "done": true, "max_steps": 5, "us": 1}}\n', "must be list"),
        (b'{"ok": {"messages": [], "n": 1, "done": 0, "max_steps": 5, "us": 1}}\n', "must be bool"),
        (b'{"ok": {"messages": [], "n": 1, "done": false, "max_steps": 1000000000, "us": 1}}\n', "at most 10000"),
        (b'{"user_llm": []}\n', "none was given"),
    ],
)
def test_forged_replies_are_faults(changed: Change, line: bytes, said: str) -> None:
    file = changed((STEP, STEP + FORGE.format(line=repr(line)) + "        time.sleep(5)\n"))
    found = outcome(file, step_timeout_s=3)
    assert isinstance(found, Failed) and found.kind == "environment" and said in found.detail


@needs_bwrap
def test_a_reply_that_is_too_deep_is_a_fault(changed: Change) -> None:
    deep = '            os.write(fd, b"[" * 60000)\n'
    code = "        import os\n\n        for fd in (3, 4, 5, 6):\n            try:\n    " + deep
    code += (
        "            except OSError:\n                continue\n            os.write(fd, b'\\n')\n        os._exit(0)\n"
    )
    found = outcome(changed((STEP, STEP + code)))
    assert isinstance(found, Failed) and "no JSON" in found.detail


@needs_bwrap
def test_a_worker_that_stops_reading_has_a_deadline(changed: Change) -> None:
    """The pipe holds 64 KiB; a longer action to a worker that reads nothing must not wait for ever."""
    line = b'{"ok": {"messages": [], "n": 1, "done": false, "max_steps": 5, "us": 1}}\n'
    file = changed((STEP, STEP + FORGE.format(line=repr(line)) + "        time.sleep(60)\n"))
    with SandboxedEnvironment(file, isolation=ISOLATION, step_timeout_s=0.7) as environment:
        env = environment.spec.make_env()
        assert isinstance(env, RemoteGame)
        env.reset(0)
        env.step('{"name": "respond_to_user", "arguments": {}}')
        began = time.monotonic()
        with pytest.raises(EnvironmentFault, match="did not read step"):
            env.step("x" * (1 << 20))
        assert time.monotonic() - began < 5


@needs_bwrap
def test_memory_of_its_children_counts(changed: Change) -> None:
    code = (
        "        import os, time\n\n        for _ in range(6):\n            if os.fork() == 0:\n"
        "                hoard = bytearray(60 << 20)\n                time.sleep(60)\n        time.sleep(60)\n"
    )
    found = outcome(changed((STEP, STEP + code)), limits=SMALL)
    assert isinstance(found, Failed) and "more memory than its limit" in found.detail


@needs_bwrap
def test_what_it_leaves_running_ends_with_it(changed: Change) -> None:
    mark = f"left-{os.getpid()}-{time.monotonic_ns()}"
    code = (
        "        import os, sys\n\n        if os.fork() == 0:\n            os.setsid()\n"
        "            if os.fork() == 0:\n"
        f"                os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', {mark!r}])\n"
        "            os._exit(0)\n"
    )
    assert isinstance(outcome(changed((STEP, STEP + code))), Scored), "a child of it harms nobody"
    deadline = time.monotonic() + 5
    while _running(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _running(mark)


def _running(mark: str) -> bool:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "cmdline").read_text(errors="replace"):
                    return True
            except OSError:
                continue
    return False


def test_a_user_simulator_is_not_asked_for_ever(changed: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_worker, "MAX_QUESTIONS", 5)
    file = changed(
        ("        make_env=Game,\n", "        make_env=Game,\n        needs_user_llm=True,\n"),
        (
            "    max_steps = 5\n",
            "    max_steps = 5\n\n    def __init__(self, user_llm):\n        self.ask = user_llm\n",
        ),
        (STEP, STEP + "        while True:\n            self.ask([])\n"),
    )
    asked: list[Any] = []
    with SandboxedEnvironment(file, isolation=ISOLATION) as environment:
        env = environment.spec.make_env(user_llm=lambda messages: asked.append(messages) or "yes")
        found = play_sync(environment.spec, env, hello, 0).outcome
    assert isinstance(found, Failed) and "more than 5 times" in found.detail and len(asked) == 6


# --------------------------------------------------------------------------- what no file can hold


@pytest.mark.parametrize(
    ("place", "code", "said"),
    [
        ("Please do it with the tools.", "half \\ud800", "get_messages() holds"),
        (SUMMARY, SUMMARY.replace('"domain"', '"x": float("nan"), "domain"'), "get_summary()"),
        (SUMMARY, SUMMARY.replace('"domain"', '"x": "\\ud800", "domain"'), "get_summary() holds"),
        (STEP, STEP + '        raise ValueError("\\ud800")\n', "ValueError"),
        ('SYSTEM = "You', 'SYSTEM = "\\ud800You', "get_system_prompt() holds"),
        ('"Show a record."', '"Show \\ud800"', "get_tool_schemas() holds"),
        (SUMMARY, SUMMARY.replace('"reward": reward', '"reward": (r for r in [1.0])'), "not JSON serializable"),
        (SUMMARY, SUMMARY.replace('"reward": reward', '"reward": True'), "reward must be"),
        (SUMMARY, SUMMARY.replace('"reward": reward', '"reward": float("nan")'), "reward must be"),
        (SUMMARY, SUMMARY.replace('"reward": reward', '"reward": "1.0"'), "reward must be"),
        (SUMMARY, SUMMARY.replace('"reward": reward', '"reward": 10**400'), "reward must be"),
    ],
    ids=["message", "nan", "summary", "raised", "system", "tools", "generator", "true", "nan reward", "text", "huge"],
)
def test_what_cannot_be_written_is_an_environment_fault(
    changed: Change, tmp_path: Path, place: str, code: str, said: str
) -> None:
    found = outcome(changed((place, code)))
    assert isinstance(found, Failed) and found.kind == "environment" and said in found.detail
    with JsonlLog(tmp_path / "log.jsonl") as log:
        log.append({"error": found.detail})  # a collector writes it, and goes on


def test_a_policy_that_writes_half_a_character_is_told(changed: Change) -> None:
    """Echoed by the environment it would end a collection at its log."""

    async def half(turn: Turn) -> Reply:
        return Reply(text='{"name": "get_record", "arguments": {"record_id": "\\ud83d"}}')

    with SandboxedEnvironment(changed(), isolation=ISOLATION) as environment:
        result = play_sync(environment.spec, environment.spec.make_env(), half, 0)
    assert isinstance(result.outcome, Scored) and result.invalid_calls == result.turns
    json.dumps(result.messages, ensure_ascii=False).encode()
    assert "half of a \\u pair" in result.messages[-1]["content"]


# --------------------------------------------------------------------------- the panel on them


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"x = 1\n", "registers no game"),
        (b"import sys\nsys.exit(0)\n", "ended during load"),
        (b"x = " + b"-" * 30_000 + b"1\n", "import failed"),
        (b"x = 1\x00\n", "import failed"),
        (None, "found"),
    ],
    ids=["empty", "not utf-8", "nothing", "exit", "deep", "null", "folder"],
)
def test_broken_files_are_one_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "capability_x_game.py"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises((InputError, GameError)) as caught:
        validate_environment.main([str(file), "--isolation", ISOLATION, "--seeds", "2"])
    assert said in str(caught.value) or "environment file" in str(caught.value)


def test_windows_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / GOOD.name
    file.write_bytes(b"\xef\xbb\xbf" + GOOD.read_bytes().replace(b"\n", b"\r\n"))
    assert isinstance(outcome(file), Scored)


def test_an_environment_that_wastes_time_is_given_up(changed: Change) -> None:
    """Every step stays under the deadline of a step; all of them together would take hours."""
    file = changed((STEP, STEP + "        import time\n\n        time.sleep(0.2)\n"))
    began = time.monotonic()
    panel = validate_environment.validate(file, Settings(seeds=20, budget_s=0.5), isolation=ISOLATION)
    assert not panel.passed and "given up" in panel.checks[0].found and time.monotonic() - began < 15


def test_what_only_has_the_name_of_an_environment_is_passed_over(tmp_path: Path) -> None:
    """Stage 2 writes into a folder of environments; folders, devices and other encodings there stop nobody else."""
    (tmp_path / "capability_a_game.py").mkdir()
    (tmp_path / "capability_b_game.py").symlink_to("/dev/zero")
    (tmp_path / "capability_c_game.py").write_bytes(b"\xff\xfe'capability_ledger'")
    os.mkfifo(tmp_path / "capability_d_game.py")
    (tmp_path / "capability_e_game.py").symlink_to(tmp_path / "capability_e_game.py")
    (tmp_path / GOOD.name).write_bytes(GOOD.read_bytes())
    assert resolve_game("capability_ledger", tmp_path, ISOLATION).name == "capability_ledger"
    with pytest.raises(GameError, match="unknown game"):
        resolve_game("capability_nothing", tmp_path, ISOLATION)
    code = "import warnings, game_registry as g; warnings.simplefilter('ignore')\n"
    code += f"assert 'capability_ledger' in g.discover({str(tmp_path)!r})\n"
    subprocess.run([sys.executable, "-c", code], cwd=GOOD.parents[3], check=True, timeout=60)
