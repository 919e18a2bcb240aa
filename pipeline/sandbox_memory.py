"""A limit on the memory of a sandbox as a whole: a thread sums over each sandbox's processes and kills what is over it.

RLIMIT_AS bounds each process, so twenty processes may have twenty times of it. Control groups would bound the sum, but
most containers let nobody make one. What is summed is resident memory that belongs to the processes themselves
(``RssAnon`` and ``RssShmem`` of proc(5)); code that is mapped from files is not. Between two looks a program can go
over the limit by what it fills in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time

INTERVAL_S = 0.1


class SandboxProcess(subprocess.Popen[bytes]):
    """The outermost process of a sandbox; ``over_memory`` says that it was killed for the memory of its tree."""

    over_memory: bool = False
    memory_limit_kib: int = 0

    def kill_tree(self) -> None:
        """SIGKILL to its group and to itself; bwrap takes everything inside with it. Nothing once it was waited for."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.kill()


class MemoryWatch:
    """Looks at the sandboxes that run, ten times a second; no thread while there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, SandboxProcess] = {}
        self._owner: dict[int, int] = {}  # process -> outermost process of its sandbox, or 0
        self._thread: threading.Thread | None = None

    def add(self, process: SandboxProcess, limit_mb: int) -> None:
        """Watch a sandbox until it ends."""
        process.memory_limit_kib = limit_mb << 10
        with self._lock:
            self._watched[process.pid] = process
            if self._thread is None or not self._thread.is_alive():  # also in a child that was forked
                self._thread = threading.Thread(target=self._loop, name="sandbox memory", daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        while True:
            time.sleep(INTERVAL_S)
            with self._lock:
                self._watched = {pid: p for pid, p in self._watched.items() if p.returncode is None}
                if not self._watched:
                    self._thread = None
                    return
                watched = dict(self._watched)
            for pid, kib in self.used_kib(watched).items():
                if kib > watched[pid].memory_limit_kib:
                    watched[pid].over_memory = True
                    watched[pid].kill_tree()

    def used_kib(self, watched: dict[int, SandboxProcess]) -> dict[int, int]:
        """Memory of each sandbox, by its outermost process."""
        now = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        # a descendant stays one, whoever its parent becomes, so each process is looked up once
        known = {pid: owner for pid, owner in self._owner.items() if pid in now and (owner in watched or owner == 0)}
        known |= {pid: pid for pid in watched}
        for pid in now - known.keys():
            _find_owner(pid, known)
        self._owner = known
        used = dict.fromkeys(watched, 0)
        for pid, owner in known.items():
            if owner:
                used[owner] += _own_memory_kib(pid)
        return used


def _find_owner(pid: int, known: dict[int, int]) -> None:
    """Add ``pid`` and its unknown ancestors to ``known``."""
    chain = []
    while pid not in known and pid > 0:
        chain.append(pid)
        pid = _parent(pid)
    known |= dict.fromkeys(chain, known.get(pid, 0))


def _parent(pid: int) -> int:
    """The parent's process id; 0 when there is none, or the process ended meanwhile."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b") ")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _own_memory_kib(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith((b"RssAnon:", b"RssShmem:")))


WATCH = MemoryWatch()
