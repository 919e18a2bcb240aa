"""One sandboxed worker process of an environment, seen from outside: how it starts, and the requests to it.

Whatever comes through its pipe was written by foreign code, also when it looks like our own reply: it is checked here
for its form, and every wait has a deadline.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import select
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from game_registry import AgentError, GameError
from pipeline import sandbox
from pipeline.files import InputError, resolved
from pipeline.sandbox import INSIDE, PYTHON, Isolation, Limits

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 60.0  # imports on a loaded machine
STEP_TIMEOUT_S = 10.0  # a step takes microseconds; this one hangs
MAX_LINE_BYTES = 32 << 20  # a longer reply is a flood
MAX_QUESTIONS = 64  # to the user simulator, in one step
METADATA: dict[str, tuple[type, ...]] = {  # of a spec, as a worker sends them
    "name": (str,),
    "action_space": (list,),
    "stop_sequences": (list,),
    "system_prompt": (str, type(None)),
    "max_gen_tokens": (int,),
    "needs_user_llm": (bool,),
    "hint_prompt": (str, type(None)),
    "base_prompt": (str, type(None)),
    "tools_in": (str,),
    "description": (str,),
    "has_oracle": (bool,),
    "has_extractor": (bool,),
    "sources": (list,),
}


class EnvironmentFault(RuntimeError):
    """Environment code raised, crashed, hung or flooded; the text says which."""


class WorkerGone(AgentError):
    """Another episode took this one's worker down. Outcome kind ``worker``: collect it again."""

    def __init__(self, detail: str) -> None:
        super().__init__("worker", detail)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where an environment comes from: one file, or a registered name."""

    file: Path | None
    name: str | None

    @classmethod
    def of(cls, path_or_name: str | os.PathLike[str], name: str | None = None) -> Source:
        """A path when it looks like one (a suffix ``.py`` or a separator), else a registered name."""
        text = os.fspath(path_or_name)
        if not (text.endswith(".py") or os.sep in text):
            return cls(None, text)
        path = resolved(text, "environment file")
        if not path.is_file():
            raise InputError(
                f"environment file {text}: not found; give a capability_<name>_game.py or a registered name"
            )
        return cls(path, name)

    def inside(self) -> tuple[str | None, list[tuple[str, str]]]:
        """The path of the file as the worker sees it, and what must be bound for it."""
        names = ["game_registry.py", "environment_calls.py", "tool_calls.py", "pipeline/game_worker.py"]
        shipped = self.file is not None and self.file.parent == ROOT / "games"
        if self.file is None:
            names += ["games", *(p.name for p in sorted(ROOT.glob("capability_*_game.py")))]
        elif shipped:
            names.append("games")  # shipped environments share modules
        binds = sandbox.project_binds(*names)
        if self.file is None:
            return None, binds
        path = f"{INSIDE}/games/{self.file.name}" if shipped else f"{INSIDE}/environment/{self.file.name}"
        return path, binds if shipped else [*binds, (str(self.file), path)]


def _modules_from_variable() -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """Modules of TRACE_GAME_MODULES, and folders and binds that make them importable inside; none is imported here."""
    modules = [m.strip() for m in os.environ.get("TRACE_GAME_MODULES", "").split(",") if m.strip()]
    binds = []
    for top in sorted({m.split(".")[0] for m in modules}):
        found = importlib.util.find_spec(top)
        if found is None or found.origin is None:
            raise InputError(f"TRACE_GAME_MODULES: {top}: not found; install it or add its folder to PYTHONPATH")
        origin = Path(found.origin)
        path = origin.parent if found.submodule_search_locations else origin
        binds.append((str(path), f"{INSIDE}/modules/{path.name}"))
    return modules, [f"{INSIDE}/modules"] if modules else [], binds


def _checked_metadata(data: Any) -> dict[str, Any]:
    """What a worker says of its spec, checked: an environment can reach the pipe of its own worker.

    Raises:
        EnvironmentFault: a field is missing or of another type.
    """
    data = data if isinstance(data, dict) else {}
    for key, kinds in METADATA.items():
        value = data.get(key)
        if type(value) not in kinds or (isinstance(value, list) and not all(isinstance(v, str) for v in value)):
            expected = " or ".join("a list of texts" if kind is list else kind.__name__ for kind in kinds)
            raise EnvironmentFault(f"GameSpec.{key}: expected {expected}, found {value!r:.60}")
    return {key: data[key] for key in METADATA}


class Worker:
    """One sandboxed process. ``request`` is a call over its pipe with a deadline; one at a time."""

    def __init__(
        self, source: Source, isolation: Isolation, limits: Limits, *, hash_seed: str, audit: bool, packages: bool
    ):
        inside = self._inside = isolation.kind == "bwrap"
        self.home = INSIDE if inside else str(ROOT)
        modules, folders, binds = _modules_from_variable() if source.file is None else ([], [], [])
        file, files = source.inside()
        binds += files
        if packages:
            binds.append((sysconfig.get_paths()["purelib"], f"{INSIDE}/packages"))
            folders.append(f"{INSIDE}/packages")
        if not inside:  # everything is visible where it is
            folders = sorted({str(Path(path).parent) for path, target in binds if "/modules/" in target})
            folders += [path for path, target in binds if target.endswith("/packages")]
            file = str(source.file) if source.file is not None else None
        self._binds = {target: outside for outside, target in binds}
        self.process = sandbox.start(
            # -P -s and not -I: the variables below are wanted, the current folder and user packages are not
            [PYTHON, "-P", "-s", "-B", f"{self.home}/pipeline/game_worker.py"],
            isolation=isolation,
            limits=limits,
            binds=binds,
            environment={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": self.home},
        )
        self._lock = threading.Lock()
        self._buffer = b""
        assert self.process.stdout is not None and self.process.stdin is not None
        self._poll, self._writable = select.poll(), select.poll()
        self._poll.register(self.process.stdout.fileno(), select.POLLIN | select.POLLHUP)
        self._writable.register(self.process.stdin.fileno(), select.POLLOUT)
        os.set_blocking(self.process.stdin.fileno(), False)
        self.gone: str | None = None
        # environments that nobody holds any more; the worker hears of them with the next request
        self.dropped: list[int] = []
        options: dict[str, Any] = {"file": file, "name": source.name, "modules": modules, "folders": folders}
        try:
            self.metadata = _checked_metadata(self.request("load", timeout_s=START_TIMEOUT_S, audit=audit, **options))
        except EnvironmentFault as error:
            self.close()
            raise GameError(f"environment {source.file or source.name}: {error}") from None

    def outside(self, inside: str) -> Path:
        """The path out here of a file that the worker names: a Python file below what was bound, and nothing else.

        Raises:
            GameError: any other, since the worker may name what it likes.
        """
        for target, path in self._binds.items():
            seen = target if self._inside else path  # the weaker kind sees everything where it is
            if inside == seen or inside.startswith(seen + "/"):
                file = Path(path + inside[len(seen) :])
                below = file.resolve().is_relative_to(Path(path).resolve())
                if below and file.suffix == ".py" and file.is_file():
                    return file
        raise GameError(f"the environment names {inside[:200]!r} as its source; that is no Python file it was given")

    def request(
        self,
        op: str,
        *,
        timeout_s: float = STEP_TIMEOUT_S,
        user_llm: Callable[..., str] | None = None,
        **arguments: Any,
    ) -> Any:
        """Send one request and wait for its reply.

        Raises:
            EnvironmentFault: environment code raised, or the worker died, hung or flooded because of this request.
            WorkerGone: the worker was already dead.
        """
        with self._lock:
            if self.gone is not None:
                raise WorkerGone(self.gone)
            drop, self.dropped = self.dropped, []
            self._write({"op": op, "drop": drop, **arguments}, op, timeout_s)
            for _ in range(MAX_QUESTIONS + 1):
                reply = self._read(op, timeout_s)
                if "user_llm" not in reply:
                    break
                self._answer_user(reply["user_llm"], user_llm, timeout_s)
            else:
                raise self._dead(f"{op} asked the user simulator more than {MAX_QUESTIONS} times")
        if "fault" in reply:
            raise EnvironmentFault(str(reply["fault"])[:2000])
        return reply["ok"]

    def _answer_user(self, messages: Any, user_llm: Callable[..., str] | None, timeout_s: float) -> None:
        if user_llm is None:
            raise self._dead("it asked for a user simulator, and none was given")
        try:
            self._write({"text": user_llm(messages)}, "the user's answer", timeout_s)
        except AgentError as error:
            # the environment cannot go on, and its state is of no more use
            self.close("the user simulator of an episode failed")
            raise error from None

    def _write(self, data: Any, op: str, timeout_s: float) -> None:
        """Send one line; a worker that reads nothing while the pipe is full is a hang like any other."""
        assert self.process.stdin is not None
        deadline = time.monotonic() + timeout_s
        view = memoryview(json.dumps(data).encode() + b"\n")
        try:
            while view:
                try:
                    view = view[os.write(self.process.stdin.fileno(), view) :]
                except BlockingIOError:
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._writable.poll(left * 1000):
                        raise self._dead(f"it did not read {op} within {timeout_s:g} s") from None
        except OSError:
            raise self._dead("it ended") from None

    def _read(self, op: str, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        chunks = [self._buffer]
        size = len(self._buffer)
        while not chunks[-1].count(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not self._poll.poll(left * 1000):
                raise self._dead(f"{op} took longer than {timeout_s:g} s")
            chunk = os.read(self.process.stdout.fileno(), 1 << 20)
            size += len(chunk)
            if not chunk:
                raise self._dead(f"it ended during {op}")
            if size > MAX_LINE_BYTES:
                raise self._dead(f"{op} returned more than {MAX_LINE_BYTES >> 20} MiB")
            chunks.append(chunk)
        line, _, self._buffer = b"".join(chunks).partition(b"\n")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            raise self._dead(f"{op} returned no JSON") from None
        if not isinstance(reply, dict) or not reply.keys() & {"ok", "fault", "user_llm"}:
            raise self._dead(f"{op} returned {str(reply)[:60]!r}")
        return reply

    def _dead(self, reason: str) -> EnvironmentFault:
        self.close(reason)
        code = self.process.returncode
        how = f" (exit {code})" if code not in (None, -9) else ""
        how = " (more memory than its limit)" if self.process.over_memory else how
        return EnvironmentFault(f"the environment's worker was lost: {reason}{how}")

    def close(self, reason: str = "closed") -> None:
        self.gone = self.gone or reason
        sandbox.kill(self.process)
