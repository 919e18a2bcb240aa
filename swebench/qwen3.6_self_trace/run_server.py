"""The model's server: is it there, what does it serve, and a server of our own that ends with the command it is for.

    python swebench/qwen3.6_self_trace/run_server.py --config C -- python phase1_baseline_eval.py --config C

starts vLLM with the configuration's flags, waits until it is healthy, runs the command with ``VLLM_BASE_URL`` set, and
stops the server that it started, by its process id, however the command ends. Where ``VLLM_BASE_URL`` is set already,
that server is used and left alone.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from run_folder import open_phase, phase_parser, server_from_environment
from run_settings import RunSettings, ServerSettings, server_flag
from steps import ending_with_us

from pipeline.files import InputError, ServerError, run_cli
from pipeline.ports import free_port

PROBE_TIMEOUT_S = 10.0
ANSWER_BYTES = 16 << 20  # no list of models is longer
POLL_S = 0.5
VLLM_PORT = 8000
STOP_GRACE_S = 30.0  # vLLM ends its workers and frees the GPUs
LOG_CHARS = 400  # of a dead server's log that are shown


def root_url(base_url: str) -> str:
    """``base_url`` without ``/v1``."""
    return base_url.rstrip("/").removesuffix("/v1")


def request(settings: RunSettings, path: str, body: Any = None, timeout_s: float = PROBE_TIMEOUT_S) -> bytes:
    """GET, or POST of JSON, to the server.

    Raises:
        ServerError: no answer in time, one that says no, or one that is no HTTP.
    """
    url = root_url(settings.model.base_url) + path
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(settings.model.api_key_env):
        if not (key.isascii() and key.isprintable()):  # the library's own error would show the key
            raise ServerError(f"{settings.model.api_key_env}: holds a character that no HTTP header can; set it again")
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    deadline = time.monotonic() + timeout_s
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout_s) as answer:
            return _whole(answer, deadline)
    except urllib.error.HTTPError as error:
        text = "no text"
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):  # the code says enough
            text = " ".join(_whole(error, deadline).decode(errors="replace").split())[:200]
        raise ServerError(f"server {url}: answered {error.code} ({text}); check the server and its key") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        why = getattr(why, "strerror", None) or why
        why = " ".join(str(why).split())[:200] or type(why).__name__
        raise ServerError(f"server {url}: no answer ({why}); start it, or set VLLM_BASE_URL") from None


def _whole(answer: IO[bytes], deadline: float) -> bytes:
    """The body of an answer. The socket's own limit begins anew at every byte, which a server may send for ever."""
    body = b""
    while piece := answer.read1(1 << 16):  # type: ignore[attr-defined]
        body += piece
        if time.monotonic() > deadline:
            raise TimeoutError("timed out while it answered")
        if len(body) > ANSWER_BYTES:
            raise ValueError(f"more than {ANSWER_BYTES >> 20} MiB")
    return body


def alive(settings: RunSettings) -> bool:
    """Whether the server answers at all."""
    try:
        request(settings, "/v1/models")
    except ServerError:
        return False
    return True


def served(settings: RunSettings) -> dict[str, dict[str, Any]]:
    """What the server offers: model name -> its entry of ``/v1/models``.

    Raises:
        ServerError: no server, or an answer that is none of ``/v1/models``.
    """
    raw = request(settings, "/v1/models")
    try:
        return {str(entry["id"]): dict(entry) for entry in json.loads(raw)["data"]}
    except (ValueError, KeyError, TypeError):
        raise ServerError(f"server {settings.model.base_url}: /v1/models answered no list of models") from None


def require_served(settings: RunSettings, name: str) -> None:
    """Raises ServerError unless the server offers ``name``."""
    names = served(settings)
    if name not in names:
        offered = ", ".join(sorted(names)) or "nothing"
        url = settings.model.base_url
        raise ServerError(f"server {url}: serves {offered}, not {name}; set VLLM_MODEL or model.name")


def command_line(settings: RunSettings, model: str | None = None) -> list[str]:
    """The command that starts the server; ``python`` means this Python.

    Args:
        model: a model's folder instead of the base. It is served whole, so without run-time adapters, whose layers
            would take the place of a routed model's own.
    """
    command = [sys.executable if part == "python" else part for part in settings.server.command]
    flags = shlex.split(settings.server.args)
    if model is not None:
        flags = without_adapters(flags)
    return [*command, "--model", model or settings.model.name, *flags]


def port_of(settings: RunSettings) -> int:
    """The port of a server that the configuration starts: ``--port`` of ``server.args``, vLLM's 8000 without it.

    Raises:
        InputError: it is not that of ``model.base_url``, where the server would be waited for.
    """
    parts = urllib.parse.urlsplit(settings.model.base_url)
    port = server_flag(settings, "--port", VLLM_PORT)
    of_vllm = settings.server.command == ServerSettings().command  # another program may have another default
    if ("--port" in settings.server.args or of_vllm) and port != (
        parts.port or (443 if parts.scheme == "https" else 80)
    ):
        raise InputError(f"server.args: the server would listen on port {port}, model.base_url is {parts.geturl()}")
    return port


def beside(settings: RunSettings, configured: RunSettings) -> RunSettings:
    """The settings of a server of our own, whatever ``VLLM_BASE_URL`` names: at the configuration's address, or on
    another port when that one is taken.

    Args:
        settings: of the run. configured: as the configuration file has them.
    """
    model = settings.model.model_copy(update={"base_url": configured.model.base_url})
    own = settings.model_copy(update={"model": model})
    if server_from_environment() is None or not alive(own):
        return own
    port_of(own)
    port = free_port()
    parts = urllib.parse.urlsplit(own.model.base_url)
    model = model.model_copy(update={"base_url": f"{parts.scheme}://{parts.hostname}:{port}"})
    server = settings.server.model_copy(update={"args": f"{settings.server.args} --port {port}"})  # the last one counts
    return own.model_copy(update={"model": model, "server": server})


def without_adapters(flags: Sequence[str]) -> list[str]:
    """``flags`` without those of run-time LoRA and their values (``--flag=value`` or ``--flag value ...``)."""
    kept, dropping = [], False
    for flag in flags:
        if flag.startswith("--"):
            dropping = "lora" in flag.partition("=")[0]
        if not dropping:
            kept.append(flag)
    return kept


@contextlib.contextmanager
def running(settings: RunSettings, log: Path, model: str | None = None) -> Iterator[int]:
    """A server with the configuration's flags, healthy; its process id. Stopped at the end with all its children.

    Raises:
        InputError: the port is taken, or the command cannot be started.
        ServerError: it died, or was not healthy in time.
    """
    if alive(settings):
        raise InputError(f"server {settings.model.base_url}: already there; set VLLM_BASE_URL to use it, or stop it")
    port_of(settings)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = command_line(settings, model)
    try:
        with open(log, "ab") as sink:
            process = subprocess.Popen(
                command, env=os.environ | settings.server.env, stdout=sink, stderr=sink, start_new_session=True,
                preexec_fn=ending_with_us(),
            )  # fmt: skip
    except OSError as error:
        raise InputError(f"server.command {command[0]}: cannot be started ({error.strerror})") from None
    try:
        url, limit = settings.model.base_url, settings.server.start_timeout_s
        sys.stdout.write(f"server {url}: starting as process {process.pid}, up to {limit:.0f} s, log {log}\n")
        sys.stdout.flush()
        _wait(process, settings, log)
        sys.stdout.write(f"server {url}: healthy\n")
        sys.stdout.flush()
        try:
            yield process.pid
        except ServerError as error:
            raise ServerError(f"{error}; its log is {log}") from None
    finally:
        stop(process)


def _wait(process: subprocess.Popen[bytes], settings: RunSettings, log: Path) -> None:
    deadline = time.monotonic() + settings.server.start_timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = " ".join(log.read_text(errors="replace").split())[-LOG_CHARS:]
            raise ServerError(f"server: ended with {process.returncode} while starting; {log} ends with: {tail}")
        if alive(settings):
            return
        time.sleep(POLL_S)
    raise ServerError(f"server: not healthy within {settings.server.start_timeout_s:.0f} s; see {log}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started as leader of its group, and the group."""
    for sign, grace in ((signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, STOP_GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
            if sign == signal.SIGTERM:  # workers that ignored it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            return


def interrupt_on_term() -> None:
    """Make SIGTERM end a command as Ctrl-C does, through its ``finally`` blocks."""

    def handler(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handler)


def run_with_server(settings: RunSettings, log: Path, command: Sequence[str]) -> int:
    """Exit code of ``command``, which runs beside a server: one that is there, or one of its own."""
    if (there := server_from_environment()) is not None:
        sys.stdout.write(f"server {there}: attached, will be left running\n")
        return _run(command, os.environ.copy())
    with running(settings, log) as pid:
        code = _run(command, os.environ | {"VLLM_BASE_URL": settings.model.base_url})
    sys.stdout.write(f"server: process {pid} stopped\n")
    return code


def _run(command: Sequence[str], env: dict[str, str]) -> int:
    try:
        process = subprocess.Popen(command, env=env, preexec_fn=ending_with_us())
    except OSError as error:
        raise InputError(f"command {command[0]}: cannot be started ({error.strerror})") from None
    try:
        return process.wait()
    except KeyboardInterrupt:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        process.wait()
        raise


def main() -> int:
    parser = phase_parser(__doc__)
    parser.add_argument("command", nargs="+", metavar="-- command", help="what to run beside the server")
    args = parser.parse_args()
    settings, folder = open_phase(args)
    interrupt_on_term()
    if args.dry_run:
        sys.stdout.write(shlex.join(command_line(settings)) + "\n")
        return 0
    return run_with_server(settings, folder.root / "server.log", args.command)


if __name__ == "__main__":
    run_cli(main)
