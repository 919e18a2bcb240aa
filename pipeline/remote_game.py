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
import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from game_registry import AgentError, Game, GameSpec, Message, get_game
from pipeline import sandbox
from pipeline.files import resolved
from pipeline.remote_worker import ROOT, EnvironmentFault, Source, Worker, WorkerGone
from pipeline.sandbox import Limits
from tool_calls import Action, ToolSchema

WORKER_LIMITS = Limits(cpu_s=None, memory_mb=2048, processes=16, file_mb=1, tmp_mb=16)
STEP_TIMEOUT_S = 10.0  # a step takes microseconds; this one hangs
MAX_STEPS = 10_000  # a longer episode is a mistake in max_steps, or never ends
__all__ = ["EnvironmentFault", "RemoteGame", "SandboxedEnvironment", "WorkerGone", "resolve_game", "sandboxed_spec"]


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
        actions = self._ask("oracle", seed=seed)
        if not isinstance(actions, list):
            raise AgentError("environment", f"oracle: expected a list of actions, found {actions!r:.60}")
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


STATE: dict[str, type] = {"messages": list, "n": int, "done": bool, "max_steps": int, "us": int}


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
            self._env = self._ask_for({"env": int}, "new")["env"]
        reply = self._ask_for({"system": object, "tools": list, **STATE}, "reset", env=self._env, seed=seed)
        self._system, self._tools, self._messages = reply["system"], reply["tools"], []
        self._take(reply)

    def get_system_prompt(self) -> str:
        return self._system

    def get_tool_schemas(self) -> list[ToolSchema]:
        return self._tools

    def get_messages(self) -> list[Message]:
        return list(self._messages)

    def step(self, action_json: str) -> None:
        reply = self._ask_for(STATE, "step", env=self._env, action=action_json)
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

    def _ask_for(self, fields: dict[str, type], op: str, **arguments: Any) -> dict[str, Any]:
        """A reply that has these fields; an environment that writes to its worker's pipe can send any other."""
        reply = self._ask(op, **arguments)
        for key, kind in fields.items():
            if not isinstance(reply, dict) or not isinstance(reply.get(key), kind):
                raise EnvironmentFault(f"{op}: {key} must be {kind.__name__}, found {str(reply)[:60]!r}")
        if "max_steps" in fields and not 0 <= reply["max_steps"] <= MAX_STEPS:
            raise EnvironmentFault(f"max_steps must be at most {MAX_STEPS}, found {reply['max_steps']}")
        return dict(reply)

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
    written = sorted(f for f in folder.glob("capability_*_game.py") if f.is_file())  # no folder, pipe or device
    for file in sorted(written, key=lambda f: f.stem != f"{name}_game"):
        if re.search(rf"[\"']{re.escape(name)}[\"']", file.read_text(encoding="utf-8", errors="replace")):
            return sandboxed_spec(file, name=name, isolation=isolation)
    return get_game(name, ROOT / "games")  # only what is shipped: discovery in a folder of files would import them


@atexit.register
def _close_open() -> None:
    for environment in _open:
        environment.close()


_CONTRACT: type[Game] = RemoteGame  # mypy: the proxy is a Game
