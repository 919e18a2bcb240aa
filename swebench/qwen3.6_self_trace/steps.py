"""Sub-steps of a phase as commands: done ones are skipped, exit codes are passed on, children never outlive a phase."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from pipeline.files import InputError, parse_json, read_text, write_json

ROOT = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1
PLACES = ("--base-url", "--solver-base-url", "VLLM_BASE_URLS")
TERM_GRACE_S = 20.0  # a trainer finishes writing its checkpoint
HELD_LOCKS: set[int] = set()  # of run folders: children hold them too, so a killed phase's last writer is waited for


@dataclasses.dataclass(frozen=True)
class Step:
    """A command with what it reads and writes.

    Args:
        name: unique within the phase; the mark of a finished step is ``<folder>/done/<name>.json``.
        command: arguments after the interpreter (``-m train ...`` or a script), or a whole command line when ``raw``.
        inputs: files whose content the result depends on; a change of one runs the step again.
        outputs: what must be there when it is done.
        environment: variables beside those of this process.
        good_codes: exit codes that count as done.
        before: called before the command, when it is not done yet: what it needs is there (a server), or it raises.
    """

    name: str
    command: tuple[str, ...]
    inputs: tuple[Path, ...] = ()
    outputs: tuple[Path, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    good_codes: tuple[int, ...] = (0,)
    raw: bool = False
    before: Callable[[], object] | None = None

    def line(self) -> tuple[str, ...]:
        return self.command if self.raw else (sys.executable, *self.command)

    def fingerprint(self) -> str:
        """Digest of the command, its own variables, and the content of its inputs; not of where a server listens."""
        pairs = zip(("", *self.command), self.command, strict=False)
        words = [word for before, word in pairs if before not in PLACES]
        variables = sorted((name, value) for name, value in self.environment.items() if name not in PLACES)
        digest = hashlib.sha256(json.dumps([words, variables]).encode())
        for path in self.inputs:
            digest.update(f"{path.name}\0".encode())
            if path.is_file():
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


def mark_path(folder: Path, step: Step) -> Path:
    return folder / "done" / f"{step.name}.json"


def is_done(folder: Path, step: Step) -> bool:
    """Whether an earlier start finished this step with the same command and inputs, and its outputs are still there."""
    mark = mark_path(folder, step)
    if not mark.is_file() or not all(path.exists() for path in step.outputs):
        return False
    try:
        data = parse_json(read_text(mark, "mark"), str(mark))
    except InputError:
        return False
    return isinstance(data, dict) and data.get("fingerprint") == step.fingerprint()


def run_steps(folder: Path, steps: Sequence[Step]) -> int:
    """Run what is not done, in order; the exit code of the first step that fails, else 0.

    Raises:
        InputError: a step ended well and an output is missing.
    """
    for step in steps:
        if is_done(folder, step):
            sys.stdout.write(f"== {step.name}: done before\n")
            continue
        if step.before is not None:
            step.before()
        sys.stdout.write(f"== {step.name}: {shown(step.line())}\n")
        sys.stdout.flush()
        fingerprint, begin = step.fingerprint(), time.monotonic()
        code = call(step.line(), step.environment)
        if code not in step.good_codes:
            if code != 1:  # 1 is a verdict, and the step has said why
                sys.stderr.write(f"error: step {step.name} ended with exit code {code}; the same command goes on\n")
            return code
        missing = [path for path in step.outputs if not path.exists()]
        if missing:
            raise InputError(f"step {step.name}: ended with exit code {code} but {missing[0]} is not there; report it")
        seconds = round(time.monotonic() - begin, 2)
        mark = {"schema_version": 1, "fingerprint": fingerprint, "exit_code": code, "seconds": seconds}
        write_json(mark_path(folder, step), mark | {"command": list(step.line())})
    return 0


def shown(line: Sequence[str]) -> str:
    """A command as one would type it in the project: ``python``, and paths that start there."""
    words = ["python" if word == sys.executable else word.replace(f"{ROOT}/", "") for word in line]
    return shlex.join(words)


def ending_with_us() -> Callable[[], None]:
    """``preexec_fn`` of a child that gets SIGTERM when this process is killed. To be called in the main thread: the
    signal comes when the thread that started the child ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def ask_for_it() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # killed before the line above
            os._exit(143)

    return ask_for_it


def call(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a command in the project's root and wait; its exit code (128 + n for signal n).

    It gets SIGTERM when this process is asked to stop, and also when this process is killed.

    Raises:
        InputError: it cannot be started.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, preexec_fn=ending_with_us(), pass_fds=tuple(HELD_LOCKS)
        )
    except OSError as error:
        raise InputError(f"{command[0]}: cannot be started ({error.strerror}); check the installation") from None

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        try:
            process.wait(TERM_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code
