"""The runner of the evidence run: every stage once, several at a time, in time, and after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipeline.files import InputError, read_json, write_json

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "helpdesk_gpu"))

import scheduler
from scheduler import UNFINISHED, Scheduler, Stage, record_of

ROOT = Path(__file__).resolve().parent.parent


def stage(name: str, code: str, needs: tuple[str, ...] = (), **more: object) -> Stage:
    return Stage(name, (sys.executable, "-c", code), needs, **more)  # type: ignore[arg-type]


def run(
    stages: Sequence[Stage] | Callable[[], Sequence[Stage]], folder: Path, limit_s: float = 60.0, n: int = 3
) -> int:
    plan = stages if callable(stages) else lambda: stages
    return Scheduler(folder, plan, n, time.monotonic() + limit_s).execute()


def note(file: Path, text: str) -> str:
    return f"open({str(file)!r}, 'a').write({text!r})"


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def wait_for(file: Path) -> str:
    for _ in range(200):
        if file.exists() and file.read_text():
            return file.read_text()
        time.sleep(0.05)
    raise AssertionError(f"{file} did not come")


def test_a_stage_runs_once_and_leaves_its_record(tmp_path: Path) -> None:
    file = tmp_path / "count"
    for _ in range(2):
        assert run([stage("one", note(file, "x"))], tmp_path) == 0
    assert file.read_text() == "x"
    record = read_json(record_of(tmp_path, "one"))
    assert record["command"][1] == "-c" and record["peak_bytes"] > 2**20 and record["seconds"] > 0


def test_stages_wait_for_what_they_need_and_others_run_beside(tmp_path: Path) -> None:
    order = tmp_path / "order"
    meet = "import pathlib, time\n"
    meet += f"mine, theirs = pathlib.Path({str(tmp_path)!r}, '%s'), pathlib.Path({str(tmp_path)!r}, '%s')\n"
    meet += (
        "mine.touch()\nend = time.time() + 20\nwhile not theirs.exists():\n assert time.time() < end\n time.sleep(.02)"
    )
    stages = [
        stage("a", meet % ("a", "b")),  # each ends only when the other runs too
        stage("b", meet % ("b", "a")),
        stage("c", note(order, "c"), ("a", "b")),
        stage("d", note(order, "d"), ("c",)),
    ]
    assert run(stages, tmp_path) == 0
    assert order.read_text() == "cd"


def test_no_more_than_the_limit_run_at_once(tmp_path: Path) -> None:
    code = (
        f"import os, time; open(os.path.join({str(tmp_path)!r}, 'at_%d'), 'w').write(str(time.time())); time.sleep(.3)"
    )
    assert run([stage(str(i), code % i) for i in range(3)], tmp_path, n=1) == 0
    times = sorted(float((tmp_path / f"at_{i}").read_text()) for i in range(3))
    assert times[1] - times[0] > 0.29 and times[2] - times[1] > 0.29


def test_a_plan_may_grow_with_what_stages_find(tmp_path: Path) -> None:
    found = tmp_path / "found"

    def plan() -> list[Stage]:
        more = [stage("later", "pass", ("first",))] if found.exists() else []
        return [stage("first", note(found, "x")), *more]

    assert run(plan, tmp_path) == 0
    assert record_of(tmp_path, "later").exists()


def test_a_verdict_of_no_is_a_result_and_a_failure_is_not(tmp_path: Path) -> None:
    no = "raise SystemExit(1)"
    assert run([stage("no", no, also_done=(1,))], tmp_path) == 0
    assert read_json(record_of(tmp_path, "no"))["exit_code"] == 1
    assert run([stage("two", "raise SystemExit(2)", also_done=(1,))], tmp_path) == 2
    assert run([stage("bad", no)], tmp_path) == 1
    assert run([stage("unproven", no, also_done=(1,), proof=tmp_path / "absent")], tmp_path) == 1
    for name in ("two", "bad", "unproven"):
        assert not record_of(tmp_path, name).exists()


def test_a_failure_holds_up_only_what_needs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [
        stage("bad", "import sys; sys.stderr.write('why it failed'); raise SystemExit(3)"),
        stage("needs_bad", "pass", ("bad",)),
        stage("other", "pass"),
    ]
    assert run(stages, tmp_path, n=1) == 3
    assert record_of(tmp_path, "other").exists() and not record_of(tmp_path, "needs_bad").exists()
    error = capsys.readouterr().err
    assert "stage bad ended with exit code 3" in error and "why it failed" in error


def test_a_stage_whose_products_are_gone_runs_again_for_those_that_need_them(tmp_path: Path) -> None:
    made, log = tmp_path / "made", tmp_path / "log"
    maker = stage("maker", f"{note(made, 'm')}; {note(log, 'm')}", makes=(made,))
    assert run([maker], tmp_path) == 0
    made.unlink()
    assert run([maker], tmp_path) == 0 and log.read_text() == "m"  # nobody needs it
    assert run([maker, stage("user", note(log, "u"), ("maker",))], tmp_path) == 0
    assert log.read_text() == "mmu"


def test_time_up_stops_the_stages_with_their_children_and_the_next_start_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "SMALLEST_S", 0.2)
    pid = tmp_path / "pid"
    child = f"p = subprocess.Popen(['sleep', '60']); open({str(pid)!r}, 'w').write(str(p.pid)); p.wait()"
    begin = time.monotonic()
    assert (
        run([stage("long", f"import subprocess; {child}"), stage("next", "pass", ("long",))], tmp_path, 1.5)
        == UNFINISHED
    )
    assert time.monotonic() - begin < 15 and not record_of(tmp_path, "long").exists()
    assert not alive(int(pid.read_text()))
    spent = read_json(tmp_path / "done" / "long.json.unfinished")["seconds"]
    assert spent > 1.0
    assert run([stage("long", "pass"), stage("next", "pass", ("long",))], tmp_path) == 0
    assert read_json(record_of(tmp_path, "long"))["seconds"] > spent
    assert not (tmp_path / "done" / "long.json.unfinished").exists()


def test_a_stage_may_save_what_it_has_when_it_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SMALLEST_S", 0.2)
    saved = tmp_path / "saved"
    code = f"import time\ntry:\n time.sleep(60)\nexcept KeyboardInterrupt:\n {note(saved, 's')}"
    assert run([stage("saver", code)], tmp_path, 1.5) == UNFINISHED
    assert saved.read_text() == "s" and not record_of(tmp_path, "saver").exists()


def test_no_stage_is_started_at_the_last_moment(tmp_path: Path) -> None:
    assert run([stage("late", "pass")], tmp_path, 1.0) == UNFINISHED
    assert not (tmp_path / "done").exists()


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    inner = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'examples' / 'helpdesk_gpu')!r}]\n"
    inner += "import scheduler, pathlib\n"
    inner += f"scheduler.Scheduler(pathlib.Path({str(tmp_path)!r}), lambda: [], 1, 1e18).execute()"
    assert run([stage("second", inner)], tmp_path) == 1
    assert "another run works in it" in (tmp_path / "logs" / "second.log").read_text()


def scheduler_process(folder: Path, code: str) -> subprocess.Popen[bytes]:
    """A run of one stage, ``code``, in a process that can be killed."""
    outer = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'examples' / 'helpdesk_gpu')!r}]\n"
    outer += "import scheduler, pathlib, sys\n"
    outer += f"stage = scheduler.Stage('s', (sys.executable, '-c', {code!r}))\n"
    outer += f"scheduler.Scheduler(pathlib.Path({str(folder)!r}), lambda: [stage], 1, 1e18).execute()"
    return subprocess.Popen([sys.executable, "-c", outer])


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_no_writer_behind(tmp_path: Path, sign: signal.Signals) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    process = scheduler_process(tmp_path, code)
    try:
        child = int(wait_for(pid))
        process.send_signal(sign)
        process.wait(10)
        for _ in range(100):
            if not alive(child):
                break
            time.sleep(0.05)
        assert not alive(child)
        assert run([stage("s", "pass")], tmp_path) == 0  # and the folder is free again
    finally:
        process.kill()
        process.wait()


def test_workers_that_outlive_a_killed_run_end_with_the_next_start(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    worker = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {worker!r}]).wait()"
    process = scheduler_process(tmp_path, code)
    child = int(wait_for(pid))
    process.kill()
    process.wait(10)
    assert alive(child)  # nobody tells a grandchild
    assert run([stage("s", "pass")], tmp_path) == 0
    assert not alive(child)
    assert read_json(tmp_path / scheduler.RUNNING)["sessions"] == {}


def test_processes_of_others_are_never_reaped(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "30"], start_new_session=True)
    try:
        ticks = scheduler.started(process.pid)
        file = tmp_path / scheduler.RUNNING
        for noted in (
            {"boot": scheduler.boot_id(), "sessions": {str(process.pid): ticks - 1}},  # the number was given away
            {"boot": "another", "sessions": {str(process.pid): ticks}},
        ):
            write_json(file, noted)
            assert scheduler.reap(file) == [] and process.poll() is None
        write_json(file, {"boot": scheduler.boot_id(), "sessions": {str(process.pid): ticks}})
        assert scheduler.reap(file) == [process.pid] and process.wait(5) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def test_what_a_stage_leaves_behind_is_killed_at_its_end(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import subprocess; open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))"
    assert run([stage("careless", code)], tmp_path) == 0
    assert not alive(int(pid.read_text()))


def test_output_of_a_stage_goes_to_its_log(tmp_path: Path) -> None:
    assert run([stage("talks", "print('hello'); import sys; sys.stderr.write('there')")], tmp_path) == 0
    text = (tmp_path / "logs" / "talks.log").read_text()
    assert "hello" in text and "there" in text


def test_needs_that_are_not_known_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs ghost"):
        run([stage("a", "pass", ("ghost",))], tmp_path)
    assert not (tmp_path / "done").exists() and not (tmp_path / "logs").exists()
