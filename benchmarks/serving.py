"""Start a stock vLLM server for a benchmark, and end it with all its children whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.files import ServerError
from pipeline.ports import free_port


def launch(
    model: str | Path, flags: Sequence[str], log: str | Path, env: Mapping[str, str] | None = None, port: int = 0
) -> tuple[subprocess.Popen[bytes], str]:
    """A server with run-time LoRA in a process group of its own, and its URL; it is not ready yet."""
    port = port or free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", *flags]
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    full = {**defaults, **os.environ, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", **(env or {})}
    with open(log, "ab") as sink:
        process = subprocess.Popen(command, env=full, stdout=sink, stderr=sink, start_new_session=True)
    return process, f"http://127.0.0.1:{port}"


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, limit_s: float, log: str | Path) -> None:
    """Raises ``ServerError`` when the server ends or does not answer in time; the text has the end of its log."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"the server exited with {process.returncode}; see {log}: {_tail(log)}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
            return
        time.sleep(0.5)
    raise ServerError(f"the server did not answer within {limit_s:g} s; see {log}: {_tail(log)}")


def _tail(log: str | Path) -> str:
    text = Path(log).read_text(encoding="utf-8", errors="replace")
    return " ".join(text[-600:].split())


def end(process: subprocess.Popen[bytes], *, at_once: bool = False) -> None:
    """End the process group; ``at_once`` is kill -9."""
    for sign in (signal.SIGKILL,) if at_once else (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        try:
            process.wait(20)
            return
        except subprocess.TimeoutExpired:
            continue


@contextlib.contextmanager
def served(
    model: str | Path, flags: Sequence[str], log: str | Path, limit_s: float, env: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The URL of a server that runs inside the block."""
    process, url = launch(model, flags, log, env)
    try:
        wait_until_healthy(process, url, limit_s, log)
        yield url
    finally:
        end(process)
