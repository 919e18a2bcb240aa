"""Sub-steps of a phase: what is skipped, what runs again, which exit code comes out, and that no child is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from steps import Step, call, is_done, mark_path, run_steps, shown
from swe_phase_helpers import PHASES, ROOT

from pipeline.files import InputError


def writes(path: Path, text: str = "x", code: int = 0) -> tuple[str, ...]:
    return ("-c", f"open({str(path)!r}, 'a').write({text!r}); raise SystemExit({code})")


def test_a_finished_step_is_not_run_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    step = Step("a", writes(out), (), (out,))
    assert run_steps(tmp_path, [step]) == 0 and run_steps(tmp_path, [step]) == 0
    assert out.read_text() == "x"
    assert is_done(tmp_path, step)


@pytest.mark.parametrize("change", ["input", "command", "output", "mark", "variable"])
def test_what_changed_runs_again(tmp_path: Path, change: str) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text("1")
    step = Step("a", writes(out), (source,), (out,), {"NAME": "1"})
    run_steps(tmp_path, [step])
    if change == "input":
        source.write_text("2")
    elif change == "command":
        step = Step("a", writes(out, "y"), (source,), (out,), {"NAME": "1"})
    elif change == "output":
        out.unlink()
    elif change == "mark":
        mark_path(tmp_path, step).write_text("{")
    else:
        step = Step("a", writes(out), (source,), (out,), {"NAME": "2"})
    assert not is_done(tmp_path, step)
    assert run_steps(tmp_path, [step]) == 0 and is_done(tmp_path, step)


def test_where_a_server_listens_changes_nothing(tmp_path: Path) -> None:
    """A server that came back on another port is the same server: hours of work are not done again."""
    first = Step("a", ("x.py", "--base-url", "http://a:1", "--model", "m"), environment={"VLLM_BASE_URLS": "http://a:1"})
    moved = Step("a", ("x.py", "--base-url", "http://b:2", "--model", "m"), environment={"VLLM_BASE_URLS": "http://b:2"})
    other = Step("a", ("x.py", "--base-url", "http://a:1", "--model", "n"), environment={"VLLM_BASE_URLS": "http://a:1"})
    assert first.fingerprint() == moved.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("code", [1, 2, 7])
def test_the_exit_code_of_a_failing_step_comes_out_and_nothing_follows(tmp_path: Path, code: int) -> None:
    steps = [Step("a", writes(tmp_path / "a", code=code)), Step("b", writes(tmp_path / "b"))]
    assert run_steps(tmp_path, steps) == code
    assert not (tmp_path / "b").exists() and not is_done(tmp_path, steps[0])


def test_a_verdict_may_count_as_done(tmp_path: Path) -> None:
    step = Step("a", writes(tmp_path / "a", code=1), good_codes=(0, 1))
    assert run_steps(tmp_path, [step]) == 0 and is_done(tmp_path, step)


def test_a_step_that_lacks_its_output_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing\.json"):
        run_steps(tmp_path, [Step("a", ("-c", "pass"), (), (tmp_path / "missing.json",))])
    assert not (tmp_path / "done" / "a.json").exists()


def test_a_signal_becomes_128_plus_its_number(tmp_path: Path) -> None:
    assert call((sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")) == 137


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no-such-program"):
        run_steps(tmp_path, [Step("a", ("no-such-program",), raw=True)])


def test_children_see_the_project_and_the_variables_of_the_step(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    code = f"import os, pipeline, game_registry; open({out!r}, 'w').write(os.environ['NAME'] + os.getcwd())"
    assert run_steps(tmp_path, [Step("a", ("-c", code), (), (), {"NAME": "value "})]) == 0
    assert (tmp_path / "out").read_text() == f"value {ROOT}"


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_child_outlives_its_phase(tmp_path: Path, sign: signal.Signals) -> None:
    """A trainer that went on after its phase was killed would write into the folder of the next start."""
    pid = tmp_path / "pid"
    new = f"{pid}.new"
    child = f"import os, time; open({new!r}, 'w').write(str(os.getpid())); os.rename({new!r}, {str(pid)!r})"
    child += "; time.sleep(60)"
    code = (
        f"import sys; sys.path.insert(0, {str(PHASES)!r}); from pathlib import Path; from steps import *\n"
        "from pipeline.files import run_cli\n"
        f"run_cli(lambda: run_steps(Path({str(tmp_path)!r}), [Step('a', ('-c', {child!r}))]))"
    )
    null = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=null, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not pid.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    started = int(pid.read_text())
    process.send_signal(sign)
    _, err = process.communicate(timeout=120)
    assert process.returncode == (130 if sign != signal.SIGKILL else -9)
    assert b"Traceback" not in err
    while time.monotonic() < deadline and _alive(started):
        time.sleep(0.05)
    assert not _alive(started)
    assert not (tmp_path / "done" / "a.json").exists()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


def test_a_command_is_shown_as_one_would_type_it() -> None:
    line = [sys.executable, str(ROOT / "swebench" / "x.py"), "--a", f"b={ROOT}/runs/r 1", "/elsewhere/f"]
    assert shown(line) == "python swebench/x.py --a 'b=runs/r 1' /elsewhere/f"
