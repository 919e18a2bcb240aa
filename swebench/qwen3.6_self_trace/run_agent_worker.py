"""The processes that run mini-swe-agent: one for each thread of the phase, restarted when one dies or hangs."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

DRIVER = Path(__file__).resolve().with_name("run_agent_driver.py")
POLL_S = 0.2

Ended = Literal["over", "died", "stopped", "hung"]


class Worker:
    """One process of the agents' environment. Started at its first job; killed with everything that it started."""

    def __init__(self, python: str, environment: Mapping[str, str], folder: Path) -> None:
        self._command = [python, "-I", str(DRIVER)]
        self._environment, self._folder = dict(environment), folder
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, job: Path, stop: threading.Event, limit_s: float) -> Ended:
        """Run a job to its end. Only ``over`` leaves the process for the next job."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + limit_s
        try:
            process.stdin.write(f"{job}\n".encode())
            process.stdin.flush()
        except OSError:
            self.kill()
            return "died"
        ended = self._wait(process, stop, deadline)
        if ended != "over":
            self.kill()
        return ended

    def _wait(self, process: subprocess.Popen[bytes], stop: threading.Event, deadline: float) -> Ended:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if selector.select(POLL_S):
                    return "over" if process.stdout.readline() == b"over\n" else "died"
                if stop.is_set():
                    return "stopped"
                if time.monotonic() > deadline:
                    return "hung"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.kill()
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / "worker.log", "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,  # closes when this process dies, which ends the driver
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                cwd=self._folder,
                bufsize=0,
                start_new_session=True,
            )
        return self._process

    def kill(self) -> None:
        """End the process and its group."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Workers:
    """A ``Worker`` for each thread that asks for one."""

    def __init__(self, python: str, environment: Mapping[str, str], folder: Path) -> None:
        self._arguments = (python, environment, folder)
        self._all: list[Worker] = []
        self._local = threading.local()

    def mine(self) -> Worker:
        """The worker of the calling thread."""
        if not hasattr(self._local, "worker"):
            self._local.worker = Worker(*self._arguments)
            self._all.append(self._local.worker)
        worker: Worker = self._local.worker
        return worker

    def kill(self) -> None:
        for worker in self._all:
            worker.kill()
