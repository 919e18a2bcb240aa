"""Run code that a model wrote: no network, no environment variables, read-only system, private /tmp, limits.

    result = run([PYTHON, "-I", "-c", code], limits=Limits(wall_s=5))

Two kinds of isolation:

``bwrap``    bubblewrap. Own namespaces for processes, network, mounts, IPC and host name; only the system's libraries,
             this Python and the files that the caller binds are visible, all read-only; /tmp is a private tmpfs; every
             capability is dropped and no program can regain one; system calls that get around these limits fail
             (``pipeline.sandbox_seccomp``). Killing it kills everything inside, daemons too.
``process``  the weaker fallback, used only when asked for: a plain process with an empty environment and the same
             resource limits (for root, not that of processes). It can read what its user can read, reach the
             network, and leave daemons behind.

``auto`` (the default everywhere) means bwrap, and an error where it does not work: nothing is weakened silently.

RLIMIT_NPROC counts per user and never binds root. Started by root, bwrap therefore keeps CAP_SETUID for the launcher
alone, which changes to a uid of its own per sandbox before anything foreign runs. ``memory_mb`` bounds the address
space of each process (RLIMIT_AS) and the resident memory of all of them together (``pipeline.sandbox_memory``).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Literal

from pipeline.files import InputError, ServerError
from pipeline.sandbox_memory import WATCH, SandboxProcess
from pipeline.sandbox_seccomp import seccomp_filter

PYTHON = os.path.realpath(sys.executable)
INSIDE = "/trace"  # where the files of the project are seen inside
Kind = Literal["bwrap", "process"]
Stopped = Literal["wall_s", "output_mb", "memory_mb"]

# Runs inside, before anything foreign: own uid, limits, then the program. `ulimit` of a shell cannot change the uid.
_LAUNCHER = """
import json, os, resource, sys
plan = json.loads(sys.argv[1])
if plan["uid"]:
    os.setgroups([])
    os.setresgid(plan["uid"], plan["uid"], plan["uid"])
    os.setresuid(plan["uid"], plan["uid"], plan["uid"])
for name, value in plan["limits"].items():
    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
os.umask(0o077)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a sandbox may use. ``cpu_s`` is None for long-lived workers, whose requests have a deadline each."""

    wall_s: float = 30.0
    cpu_s: int | None = 30
    memory_mb: int = 1024
    processes: int = 32
    file_mb: int = 16
    tmp_mb: int = 64
    output_mb: float = 4.0
    open_files: int = 256

    def rlimits(self) -> dict[str, int]:
        limits = {
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_FSIZE": self.file_mb << 20,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }
        return limits if self.cpu_s is None else {**limits, "RLIMIT_CPU": self.cpu_s}


@dataclasses.dataclass(frozen=True)
class Isolation:
    """How sandboxes are made on this machine. ``own_uid``: each runs as a user of its own (needs root outside)."""

    kind: Kind
    own_uid: bool


@dataclasses.dataclass(frozen=True)
class Finished:
    """``returncode`` is None when it was killed at a limit, which ``stopped`` names."""

    returncode: int | None
    stdout: bytes
    stderr: bytes
    stopped: Stopped | None
    seconds: float


def find_isolation(requested: str = "auto") -> Isolation:
    """The isolation to use.

    Raises:
        InputError: unknown kind, or bubblewrap is asked for and does not work here.
    """
    if requested == "process":
        return Isolation("process", own_uid=False)
    if requested not in ("auto", "bwrap"):
        raise InputError(f"isolation {requested!r}: expected auto, bwrap or process")
    isolation, reason = _probe_bwrap()
    if isolation is None:
        raise InputError(
            f"no sandbox: {reason}; install it (apt-get install bubblewrap) and allow user namespaces, or accept "
            "weaker isolation with --isolation process (files stay readable and the network reachable)"
        )
    return isolation


@functools.cache
def _probe_bwrap() -> tuple[Isolation | None, str]:
    if shutil.which("bwrap") is None:
        return None, "bubblewrap (bwrap) is not installed"
    reason = ""
    for own_uid in (True, False) if os.geteuid() == 0 else (False,):
        isolation = Isolation("bwrap", own_uid)
        probe = run([PYTHON, "-I", "-S", "-c", "print(6 * 7)"], isolation=isolation, limits=Limits(wall_s=20))
        if probe.stdout.strip() == b"42":
            return isolation, ""
        reason = f"bwrap failed here ({probe.stderr.decode(errors='replace').strip()[:200]})"
    return None, reason


_uids = itertools.count(int.from_bytes(os.urandom(3), "big"))


def _fresh_uid() -> int:
    return 20_000 + next(_uids) % 40_000  # containers often map no uid above 65535


def command(
    argv: Sequence[str],
    *,
    isolation: Isolation,
    limits: Limits,
    binds: Sequence[tuple[str, str]] = (),
    environment: dict[str, str] | None = None,
    cwd: str = "/tmp",
    seccomp_fd: int | None = None,
) -> list[str]:
    """The command line that runs ``argv`` inside.

    Args:
        argv: program with an absolute path, as seen inside.
        binds: (path outside, path inside), read-only. Ignored by ``process``, which sees everything anyway.
        environment: variables of the program; nothing else is there.
        seccomp_fd: where bwrap reads its filter.
    """
    own_uid = _fresh_uid() if isolation.own_uid else 0
    plan = json.dumps({"uid": own_uid, "limits": limits.rlimits()})
    inner = [PYTHON, "-I", "-S", "-c", _LAUNCHER, plan, *argv]
    if isolation.kind == "process":
        return inner
    outer = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    outer += [] if own_uid else ["--unshare-user"]
    outer += ["--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox", "--cap-drop", "ALL"]
    outer += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if own_uid else []
    outer += ["--seccomp", str(seccomp_fd)] if seccomp_fd is not None else []
    outer += system_binds()
    for folder in sorted({str(p) for _, target in binds for p in Path(target).parents if p != Path("/")}):
        outer += ["--perms", "0755", "--dir", folder]  # bwrap's own default is 0700, closed to the sandbox's uid
    for source, target in binds:
        outer += ["--ro-bind", _readable(source) if own_uid else source, target]
    outer += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--perms",
        "1777",
        "--size",
        str(limits.tmp_mb << 20),
        "--tmpfs",
        "/tmp",
    ]
    outer += ["--remount-ro", "/dev", "--remount-ro", "/"]
    for name, value in {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", **(environment or {})}.items():
        outer += ["--setenv", name, value]
    return [*outer, "--chdir", cwd, "--", *inner]


def _open_to_others(path: Path) -> bool:
    """Whether a user without rights of its own can read ``path``. Of a folder only its own mode is looked at."""
    wanted = 0o005 if path.is_dir() else 0o004
    return path.stat().st_mode & wanted == wanted


@functools.cache
def _stage() -> Path:
    stage = Path(tempfile.mkdtemp(prefix="trace-sandbox-"))
    stage.chmod(0o755)
    atexit.register(shutil.rmtree, stage, ignore_errors=True)
    return stage


def _readable(source: str) -> str:
    """``source``, or a copy of it that the sandbox's uid may read (a checkout made under umask 077, say)."""
    path = Path(source)
    if _open_to_others(path):
        return source
    copy = Path(tempfile.mkdtemp(dir=_stage())) / path.name
    copy.parent.chmod(0o755)
    if path.is_dir():
        shutil.copytree(path, copy, symlinks=True)
    else:
        shutil.copy(path, copy)
    for item in (copy, *copy.rglob("*")):
        if not item.is_symlink():
            item.chmod(0o755 if item.is_dir() else 0o644)
    return str(copy)


def system_binds() -> list[str]:
    """The system's libraries and this Python, read-only. Never /etc, /home, /root, /var, /run or /sys."""
    out = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/lib", "/lib64", "/lib32"):
        if os.path.islink(name):
            out += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            out += ["--ro-bind", name, name]
    out += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    prefix = os.path.realpath(sys.base_prefix)
    if not prefix.startswith("/usr/"):
        for folder in reversed(Path(prefix).parents[:-1]):
            out += ["--perms", "0755", "--dir", str(folder)]
        out += ["--ro-bind", prefix, prefix]
    return out


def start(
    argv: Sequence[str],
    *,
    isolation: Isolation | None = None,
    limits: Limits | None = None,
    binds: Sequence[tuple[str, str]] = (),
    environment: dict[str, str] | None = None,
    stdin: int | IO[bytes] = subprocess.PIPE,
    stdout: int | IO[bytes] = subprocess.PIPE,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
) -> SandboxProcess:
    """Start a long-lived program inside; the caller talks to it through its pipes and ends it with ``kill``."""
    isolation, limits = isolation or find_isolation(), limits or Limits()
    inside = isolation.kind == "bwrap"
    inherited = {"PATH": os.environ.get("PATH", "/usr/bin:/bin")} if inside else dict(environment or {})
    with _filter_pipe(inside) as seccomp_fd:
        line = command(
            argv, isolation=isolation, limits=limits, binds=binds, environment=environment, seccomp_fd=seccomp_fd
        )
        try:
            process = SandboxProcess(
                line,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=inherited,
                cwd="/",
                bufsize=0,
                pass_fds=(*pass_fds, *(() if seccomp_fd is None else (seccomp_fd,))),
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(
                f"sandbox could not be started ({error}); free memory or processes and try again"
            ) from None
    WATCH.add(process, limits.memory_mb)
    return process


@contextlib.contextmanager
def _filter_pipe(inside: bool) -> Iterator[int | None]:
    """A descriptor from which bwrap reads the filter of system calls; None where there is none."""
    program = seccomp_filter() if inside else None
    if program is None:
        yield None
        return
    source, sink = os.pipe()
    try:
        try:
            os.write(sink, program)  # a few hundred bytes: a pipe holds them
        finally:
            os.close(sink)
        yield source
    finally:
        os.close(source)


def kill(process: SandboxProcess) -> None:
    """End a sandbox and everything in it."""
    process.kill_tree()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def run(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    isolation: Isolation | None = None,
    limits: Limits | None = None,
    binds: Sequence[tuple[str, str]] = (),
    environment: dict[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Finished:
    """Run a program inside to its end or to a limit, and return what it wrote."""
    limits = limits or Limits()
    began = time.monotonic()
    process = start(
        argv,
        isolation=isolation,
        limits=limits,
        binds=binds,
        environment=environment,
        stderr=subprocess.PIPE,
        pass_fds=pass_fds,
    )
    try:
        output, stopped = _communicate(process, stdin, limits, began)
        code = process.returncode if stopped is None else None
    finally:
        kill(process)
    if process.over_memory:
        code, stopped = None, "memory_mb"
    return Finished(code, output["stdout"], output["stderr"], stopped, time.monotonic() - began)


def _communicate(
    process: SandboxProcess, stdin: bytes, limits: Limits, began: float
) -> tuple[dict[str, bytes], Stopped | None]:
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    output = {"stdout": bytearray(), "stderr": bytearray()}
    left = memoryview(stdin)
    cap = int(limits.output_mb * (1 << 20))
    stopped: Stopped | None = None
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, "stdout")
        selector.register(process.stderr, selectors.EVENT_READ, "stderr")
        selector.register(process.stdin, selectors.EVENT_WRITE, "stdin")
        while any(key.data != "stdin" for key in selector.get_map().values()):
            remaining = limits.wall_s - (time.monotonic() - began)
            if remaining <= 0:
                stopped = "wall_s"
                break
            ready = selector.select(min(remaining, 0.25))
            if not ready and process.poll() is not None:
                break  # it ended; a daemon of the weaker kind may hold the pipes open
            for key, _ in ready:
                if key.data == "stdin":
                    left = _feed(process, left)
                    if not left:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                chunk = os.read(key.fd, 65536)
                output[key.data] += chunk
                if not chunk:
                    selector.unregister(key.fileobj)
            if len(output["stdout"]) + len(output["stderr"]) > cap:
                stopped = "output_mb"
                break
    if stopped is None and not _ended(process, limits.wall_s - (time.monotonic() - began)):
        stopped = "wall_s"
    return {name: bytes(data[:cap]) for name, data in output.items()}, stopped


def _ended(process: SandboxProcess, within_s: float) -> bool:
    """Wait for a program that has closed its output: that alone does not end it."""
    try:
        process.wait(max(within_s, 0.01))
    except subprocess.TimeoutExpired:
        return False
    return True


def _feed(process: SandboxProcess, left: memoryview) -> memoryview:
    assert process.stdin is not None
    try:
        return left[os.write(process.stdin.fileno(), left[:65536]) :] if left else left
    except BlockingIOError:
        return left
    except BrokenPipeError:  # it does not read; that is its business
        return left[:0]


def project_binds(*names: str) -> list[tuple[str, str]]:
    """Binds of files or folders of the project (relative to its root) under ``/trace``."""
    root = Path(__file__).resolve().parents[1]
    return [(str(root / name), f"{INSIDE}/{name}") for name in names if (root / name).exists()]
