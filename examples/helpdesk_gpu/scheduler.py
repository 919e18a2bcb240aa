"""Run stages that need one another: several at once, each once, within a time limit, and again after a kill.

A stage that is done leaves a record with its seconds and peak memory under ``RUN/done``. Nothing else decides what is
still to do, except that a stage whose products are gone (a run folder that came from another machine has only what was
packed) runs again when a stage that is not done needs them.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.files import InputError, read_json, write_json

UNFINISHED = 75  # EX_TEMPFAIL: run it again
GRACE_S = 20.0  # for stages to write what they have
SMALLEST_S = 10.0  # with less time left no stage is started
POLL_S = 0.05
PR_SET_PDEATHSIG = 1
RUNNING = "running.json"  # sessions of the stages that run now


@dataclasses.dataclass(frozen=True)
class Stage:
    """One command.

    Args:
        needs: stages that must be done before.
        also_done: exit codes that are a result too, such as 1 for a verdict of no; only when ``proof`` is there.
        proof: a file without which such an exit code is a fault after all.
        makes: what later stages read of it.
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    also_done: tuple[int, ...] = ()
    proof: Path | None = None
    makes: tuple[Path, ...] = ()


Plan = Callable[[], Sequence[Stage]]  # stages known so far, in order of worth; grows as stages end


def record_of(run: Path, name: str) -> Path:
    return run / "done" / f"{name}.json"


def pending(stages: Sequence[Stage], run: Path) -> set[str]:
    """Names of the stages that have to run: without a record, or needed by such a one and their products are gone.

    Raises:
        InputError: a stage needs one that does not come before it.
    """
    known: set[str] = set()
    for stage in stages:
        if missing := [name for name in stage.needs if name not in known]:
            raise InputError(f"stage {stage.name} needs {missing[0]}, which does not come before it")
        known.add(stage.name)
    todo = {stage.name for stage in stages if not record_of(run, stage.name).exists()}
    for stage in reversed(stages):
        wanted = any(stage.name in later.needs for later in stages if later.name in todo)
        if wanted and not all(path.exists() for path in stage.makes):
            todo.add(stage.name)
    return todo


@dataclasses.dataclass
class _Child:
    stage: Stage
    process: subprocess.Popen[bytes]
    begin: float


@dataclasses.dataclass
class Scheduler:
    """Runs the stages of ``plan`` in ``run``, at most ``parallel`` at once, until ``deadline`` (``time.monotonic``)."""

    run: Path
    plan: Plan
    parallel: int
    deadline: float
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    _children: list[_Child] = dataclasses.field(default_factory=list)
    _failed: dict[str, int] = dataclasses.field(default_factory=dict)

    def execute(self) -> int:
        """All stages. A failed one holds up only those that need it.

        Returns:
            0, ``UNFINISHED`` when the time was up, else the exit code of the first stage that failed.
        """
        try:
            with self._alone():
                reap(self.run / RUNNING)
                return self._loop()
        finally:
            self._stop_all()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self.run.mkdir(parents=True, exist_ok=True)
        with open(self.run / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"run folder {self.run}: another run works in it; wait for its end") from None
            yield

    def _loop(self) -> int:
        while True:
            stages = self.plan()
            todo = pending(stages, self.run)
            ready = self._ready(stages, todo)
            late = self.deadline - time.monotonic() < SMALLEST_S
            while ready and len(self._children) < self.parallel and not late:
                self._start(ready.pop(0))
            if not self._children:
                if ready:
                    return UNFINISHED
                return next(iter(self._failed.values()), 0)
            if not self._wait():
                return UNFINISHED

    def _ready(self, stages: Sequence[Stage], todo: set[str]) -> list[Stage]:
        busy = {child.stage.name for child in self._children} | self._failed.keys()
        return [s for s in stages if s.name in todo - busy and not any(need in todo for need in s.needs)]

    def _start(self, stage: Stage) -> None:
        say(f"== {stage.name}: {' '.join(stage.command[1:])}")
        log = self.run / "logs" / f"{stage.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        record_of(self.run, stage.name).unlink(missing_ok=True)
        with open(log, "ab") as sink:
            process = subprocess.Popen(
                stage.command, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, **self.env}, preexec_fn=die_with_parent,
            )  # fmt: skip
        self._children.append(_Child(stage, process, time.perf_counter()))
        self._note_running()

    def _note_running(self) -> None:
        """For the next start, should this one be killed."""
        sessions = {str(c.process.pid): started(c.process.pid) for c in self._children}
        write_json(self.run / RUNNING, {"boot": boot_id(), "sessions": sessions})

    def _wait(self) -> bool:
        """Until a child ends (True) or the time is up."""
        while True:
            for child in self._children:
                pid, status, usage = os.wait4(child.process.pid, os.WNOHANG)
                if pid:
                    self._children.remove(child)
                    child.process.returncode = os.waitstatus_to_exitcode(status)
                    _signal_group(child.process, signal.SIGKILL)  # what it left behind
                    self._note_running()
                    self._end(child, child.process.returncode, usage.ru_maxrss * 1024)
                    return True
            if time.monotonic() >= self.deadline:
                return False
            time.sleep(POLL_S)

    def _end(self, child: _Child, code: int, peak: int) -> None:
        stage = child.stage
        seconds = self._spent(stage) + time.perf_counter() - child.begin
        proven = stage.proof is None or stage.proof.exists()
        if code == 0 or (code in stage.also_done and proven):
            record = {"schema_version": 1, "command": list(stage.command), "seconds": round(seconds, 2)}
            record |= {"peak_bytes": peak} | ({"exit_code": code} if code else {})
            write_json(record_of(self.run, stage.name), record)
            self._unfinished(stage).unlink(missing_ok=True)
            say(f"   {stage.name}: {seconds:.1f} s" + (f", exit {code}" if code else ""))
            return
        self._keep_time(stage, seconds)
        self._failed[stage.name] = code if code > 0 else 1
        tail = (self.run / "logs" / f"{stage.name}.log").read_text(errors="replace").strip()[-600:]
        sys.stderr.write(f"error: stage {stage.name} ended with exit code {code}: {tail}\n")

    def _unfinished(self, stage: Stage) -> Path:
        return self.run / "done" / f"{stage.name}.json.unfinished"

    def _spent(self, stage: Stage) -> float:
        """Seconds of starts that were stopped."""
        file = self._unfinished(stage)
        return float(read_json(file, "stage record")["seconds"]) if file.exists() else 0.0

    def _keep_time(self, stage: Stage, seconds: float) -> None:
        write_json(self._unfinished(stage), {"seconds": round(seconds, 2)})

    def _stop_all(self) -> None:
        """Interrupt what runs; what does not end in time is killed (every stage survives that)."""
        if not self._children:
            return
        say(f"stopping {', '.join(child.stage.name for child in self._children)}")
        for child in self._children:
            _signal_group(child.process, signal.SIGINT)
        end = time.monotonic() + GRACE_S
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, end - time.monotonic()))
            _signal_group(child.process, signal.SIGKILL)  # also what the stage left behind
            child.process.wait()
            self._keep_time(child.stage, self._spent(child.stage) + time.perf_counter() - child.begin)
        self._children.clear()
        self._note_running()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _signal_group(process: subprocess.Popen[bytes], sign: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, sign)


def boot_id() -> str:
    """Tells this start of the machine from others; empty where the kernel does not say."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text(encoding="ascii").strip() if file.exists() else ""


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third (state) on; None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def started(pid: int) -> int:
    """Clock ticks from boot to the start of a process; 0 when it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def reap(file: Path) -> list[int]:
    """Kill what a start that was killed left running: members of the sessions of its stages.

    A stage itself dies with its runner; a server's workers need not. A session's number is not given away while it has
    members, so without a leader they are the stage's; a leader that started at another time is somebody else's.
    """
    if not file.exists():
        return []
    noted = read_json(file, "running stages")
    if noted["boot"] != boot_id():
        return []
    sessions = {int(sid): ticks for sid, ticks in noted["sessions"].items() if started(int(sid)) in (0, ticks)}
    killed = []
    for pid in [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]:
        fields = _stat(pid)
        if fields and int(fields[3]) in sessions and pid != os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    return killed


def die_with_parent() -> None:
    """In a child before exec: the kernel kills it when its parent ends, so that kill -9 of a run leaves no writer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
