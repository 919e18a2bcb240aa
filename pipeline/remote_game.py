"""Environments in sandboxed worker processes, seen from outside as ordinary games.

    with SandboxedEnvironment("capability_lookup_game.py") as environment:
        result = play_sync(environment.spec, environment.spec.make_env(), agent, seed=7)

``sandboxed_spec`` gives the spec alone. Environment code is never imported here: name, prompts and schemas come through
a pipe. A worker plays many episodes at once. A crash or a hang is an environment fault of the episode that caused it
(outcome ``environment``); other episodes that lived in that worker end as ``worker``, a fault of nobody's policy; the
next ``reset`` finds a fresh worker.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib.util
import json
import os
import re
import select
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from game_registry import AgentError, Game, GameError, GameSpec, Message, get_game
from pipeline import sandbox
from pipeline.files import InputError, resolved
from pipeline.sandbox import INSIDE, PYTHON, Isolation, Limits
from tool_calls import Action, ToolSchema

ROOT = Path(__file__).resolve().parents[1]
WORKER_LIMITS = Limits(cpu_s=None, memory_mb=2048, processes=16, file_mb=1, tmp_mb=16)
START_TIMEOUT_S = 60.0  # imports on a loaded machine
STEP_TIMEOUT_S = 10.0  # a step takes microseconds; this one hangs
MAX_LINE_BYTES = 32 << 20  # a longer reply is a flood


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
        names = ["game_registry.py", "tool_calls.py", "pipeline/game_worker.py"]
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


class Worker:
    """One sandboxed process. ``request`` is a call over its pipe with a deadline; one at a time."""

    def __init__(
        self, source: Source, isolation: Isolation, limits: Limits, *, hash_seed: str, audit: bool, packages: bool
    ):
        inside = isolation.kind == "bwrap"
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
        assert self.process.stdout is not None
        self._poll = select.poll()
        self._poll.register(self.process.stdout.fileno(), select.POLLIN | select.POLLHUP)
        self.gone: str | None = None
        # environments that nobody holds any more; the worker hears of them with the next request
        self.dropped: list[int] = []
        options: dict[str, Any] = {"file": file, "name": source.name, "modules": modules, "folders": folders}
        try:
            self.metadata = self.request("load", timeout_s=START_TIMEOUT_S, audit=audit, **options)
        except EnvironmentFault as error:
            self.close()
            raise GameError(f"environment {source.file or source.name}: {error}") from None

    def outside(self, inside: str) -> Path:
        """The path out here of a file that the worker names."""
        for target, path in self._binds.items():
            if inside == target or inside.startswith(target + "/"):
                return Path(path + inside[len(target) :])
        return Path(inside)

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
            self._write({"op": op, "drop": drop, **arguments})
            while True:
                reply = self._read(op, timeout_s)
                if "user_llm" not in reply:
                    break
                self._answer_user(reply["user_llm"], user_llm)
        if "fault" in reply:
            raise EnvironmentFault(reply["fault"])
        return reply["ok"]

    def _answer_user(self, messages: Any, user_llm: Callable[..., str] | None) -> None:
        if user_llm is None:
            raise self._dead("it asked for a user simulator, and none was given")
        try:
            self._write({"text": user_llm(messages)})
        except AgentError as error:
            # the environment cannot go on, and its state is of no more use
            self.close("the user simulator of an episode failed")
            raise error from None

    def _write(self, data: Any) -> None:
        assert self.process.stdin is not None
        view = memoryview(json.dumps(data).encode() + b"\n")
        try:
            while view:
                view = view[os.write(self.process.stdin.fileno(), view) :]
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
        except ValueError:
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


class SandboxedEnvironment:
    """An environment behind workers. ``spec`` works wherever a GameSpec does; ``close`` ends the workers.

    Args:
        source: a file, or a registered name (then the workers do the discovery).
        workers: processes to spread episodes over.
        isolation: ``auto``, ``bwrap`` or ``process``; see ``pipeline.sandbox``.
        hash_seed: PYTHONHASHSEED of the workers.
        audit: record what the environment does to the world (for validation; slows imports).
        packages: installed third-party packages are visible inside.

    Raises:
        InputError: no such file, or no sandbox.
        GameError: the environment does not import, or registers nothing.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        name: str | None = None,
        workers: int = 1,
        isolation: str = "auto",
        limits: Limits = WORKER_LIMITS,
        step_timeout_s: float = STEP_TIMEOUT_S,
        hash_seed: str = "0",
        audit: bool = False,
        packages: bool = False,
    ) -> None:
        self.source = Source.of(source, name)
        self.isolation = sandbox.find_isolation(isolation)
        self.step_timeout_s = step_timeout_s
        self.restarts = 0
        self._options: dict[str, Any] = {"hash_seed": hash_seed, "audit": audit, "packages": packages}
        self._limits = limits
        self._lock = threading.Lock()
        self._next = 0
        self.step_us: list[int] | None = None  # set to a list to record the time of each step
        self._started: list[Worker] = []
        self._finalizer = weakref.finalize(self, _close_all, self._started)
        self._workers: list[Worker] = [self._start()]
        self.metadata: dict[str, Any] = self._workers[0].metadata
        self._workers += [self._start() for _ in range(1, workers)]
        self.spec = self._make_spec()

    def _start(self) -> Worker:
        worker = Worker(self.source, self.isolation, self._limits, **self._options)
        self._started[:] = [*(w for w in self._started if w.gone is None), worker]
        return worker

    def _make_spec(self) -> GameSpec:
        data = self.metadata
        fields = {f.name: data[f.name] for f in dataclasses.fields(GameSpec) if f.name in data}
        fields |= {key: tuple(fields[key]) for key in ("action_space", "stop_sequences")}
        return GameSpec(
            **fields,
            make_env=self._make_env,
            extract_action=self._extract if data["has_extractor"] else None,
            oracle=self.oracle if data["has_oracle"] else None,
        )

    def _make_env(self, user_llm: Callable[..., str] | None = None) -> RemoteGame:
        return RemoteGame(self, user_llm)

    def worker(self) -> Worker:
        """A live worker, the next in turn; a dead one is replaced."""
        with self._lock:
            index = self._next % len(self._workers)
            self._next += 1
            if self._workers[index].gone is not None:
                self._workers[index] = self._start()
                self.restarts += 1
            return self._workers[index]

    def exclusive_worker(self) -> Worker:
        """A worker for one episode alone, because its steps wait for a user simulator."""
        with self._lock:
            return self._start()

    def oracle(self, seed: int) -> Sequence[Action]:
        actions: list[Action] = self._ask("oracle", seed=seed)
        return actions

    def _extract(self, text: str) -> str | None:
        answer = self._ask("extract", text=text)
        return None if answer is None else str(answer)

    def _ask(self, op: str, **arguments: Any) -> Any:
        try:
            return self.worker().request(op, timeout_s=self.step_timeout_s, **arguments)
        except EnvironmentFault as error:
            raise AgentError("environment", f"{op}: {error}") from None

    def request(self, op: str, **arguments: Any) -> Any:
        """A request to the first worker (validation: ``audit``, ``state``)."""
        return self._workers[0].request(op, timeout_s=self.step_timeout_s, **arguments)

    def files(self) -> list[Path]:
        """The environment's files, for its content hash."""
        return [self._workers[0].outside(path) for path in self.metadata["sources"]]

    def close(self) -> None:
        _close_all(self._started)

    def __enter__(self) -> SandboxedEnvironment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.close()


class RemoteGame:
    """The ``Game`` contract over a worker's pipe: one message per step, everything else from what it brought."""

    def __init__(self, owner: SandboxedEnvironment, user_llm: Callable[..., str] | None) -> None:
        self._owner = owner
        self._user_llm = user_llm
        self._worker: Worker | None = None
        self._env = -1
        self._messages: list[Message] = []
        self._tools: list[ToolSchema] = []
        self._system = ""
        self._done = False
        self._max_steps = 0

    @property
    def done(self) -> bool:
        return self._done

    @property
    def max_steps(self) -> int:
        return self._max_steps

    def reset(self, seed: int) -> None:
        if self._worker is None or self._worker.gone is not None:
            shared = self._user_llm is None
            self._worker = self._owner.worker() if shared else self._owner.exclusive_worker()
            self._env = self._ask("new")["env"]
        reply = self._ask("reset", env=self._env, seed=seed)
        self._system, self._tools, self._messages = reply["system"], reply["tools"], []
        self._take(reply)

    def get_system_prompt(self) -> str:
        return self._system

    def get_tool_schemas(self) -> list[ToolSchema]:
        return self._tools

    def get_messages(self) -> list[Message]:
        return list(self._messages)

    def step(self, action_json: str) -> None:
        reply = self._ask("step", env=self._env, action=action_json)
        self._take(reply)
        if self._owner.step_us is not None:
            self._owner.step_us.append(reply["us"])

    def get_summary(self) -> dict[str, Any]:
        """The worker runs ``_finalize_with_verification`` before, when the environment has one."""
        summary: dict[str, Any] = self._ask("summary", env=self._env)
        return summary

    def _take(self, reply: dict[str, Any]) -> None:
        kept = reply["n"] - len(reply["messages"])
        self._messages = [*self._messages[:kept], *reply["messages"]]
        self._done, self._max_steps = reply["done"], reply["max_steps"]

    def _ask(self, op: str, **arguments: Any) -> Any:
        if self._worker is None:
            raise EnvironmentFault(f"{op} before reset")
        timeout_s = self._owner.step_timeout_s
        return self._worker.request(op, timeout_s=timeout_s, user_llm=self._user_llm, **arguments)

    def __del__(self) -> None:
        worker = self._worker
        if worker is None or worker.gone is not None:
            return
        if self._user_llm is not None:
            worker.close()
            return
        worker.dropped.append(self._env)  # no request here: the collector may run in the middle of one


_open: list[SandboxedEnvironment] = []


def sandboxed_spec(path_or_spec: str | os.PathLike[str], **options: Any) -> GameSpec:
    """The spec of an environment that runs in sandboxed workers until this process ends.

    Args:
        path_or_spec: a file or a registered name.
        options: those of ``SandboxedEnvironment``.
    """
    environment = SandboxedEnvironment(path_or_spec, **options)
    _open.append(environment)
    return environment.spec


def resolve_game(name: str, root: str | os.PathLike[str] | None = None, isolation: str | None = None) -> GameSpec:
    """The spec of a registered name, with model-written environments in the sandbox.

    Shipped environments (``games/``) and modules of TRACE_GAME_MODULES, which somebody chose to install, are imported.
    Files ``capability_*_game.py`` in ``root`` (default: the project's root) are where stage 2 writes: they are not.

    Args:
        isolation: ``auto``, ``bwrap``, ``process``, or ``none`` to import those too. Default: TRACE_ISOLATION, or auto.

    Raises:
        GameError: unknown name, or its file does not import.
        InputError: no sandbox here.
    """
    isolation = isolation or os.environ.get("TRACE_ISOLATION") or "auto"
    if isolation == "none":
        return get_game(name, root)
    folder = resolved(root, "--root") if root is not None else ROOT
    written = sorted(folder.glob("capability_*_game.py"))
    for file in sorted(written, key=lambda f: f.stem != f"{name}_game"):
        if re.search(rf"[\"']{re.escape(name)}[\"']", file.read_text(encoding="utf-8", errors="replace")):
            return sandboxed_spec(file, name=name, isolation=isolation)
    return get_game(name, ROOT / "games")  # only what is shipped: discovery in a folder of files would import them


@atexit.register
def _close_open() -> None:
    for environment in _open:
        environment.close()


_CONTRACT: type[Game] = RemoteGame  # mypy: the proxy is a Game
