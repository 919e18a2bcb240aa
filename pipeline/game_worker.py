"""The inside of a sandboxed environment worker: loads environments and plays many episodes for the process outside.

Started by ``pipeline.remote_game``; never by hand. One JSON object per line, a request and its reply in turn:

    {"op": "load", "file": P | "name": N | "modules": [..], ...} -> {"ok": {spec metadata}}
    {"op": "new"}                       -> {"ok": {"env": 3, "max_steps": 8}}
    {"op": "reset", "env": 3, "seed": 7}-> {"ok": {"system", "tools", "messages", "done", "max_steps", "us"}}
    {"op": "step", "env": 3, "action"}  -> {"ok": {"messages": only the new ones, "done", "max_steps", "us"}}
    {"op": "summary", "env": 3}         -> {"ok": {...}}
    {"op": "oracle" | "extract" | "state" | "audit" ...}

Any request may carry "drop": [environments that are no longer needed]. What environment code raises comes back as
{"fault": "ValueError: ..."}. While a step runs, the environment may ask the user simulator outside: {"user_llm":
[messages]} goes out and {"text": ...} comes in. Only the standard library and floor 0 are imported here.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

SPEC_FIELDS = (
    "name",
    "action_space",
    "stop_sequences",
    "system_prompt",
    "max_gen_tokens",
    "needs_user_llm",
    "hint_prompt",
    "base_prompt",
    "tools_in",
    "description",
)


class Audit:
    """What the environment does to the world, from the interpreter's audit events (PEP 578)."""

    NETWORK = ("socket.", "urllib.", "http.", "ftplib.", "smtplib.")
    FILES = (
        "os.remove",
        "os.rename",
        "os.mkdir",
        "os.rmdir",
        "os.link",
        "os.symlink",
        "os.truncate",
        "shutil.",
        "tempfile.",
    )
    PROCESSES = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pty.")

    def __init__(self) -> None:
        self.network: set[str] = set()
        self.files: set[str] = set()
        self.processes: set[str] = set()
        self.imports: set[str] = set()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "import":
            self.imports.add(str(args[0]))
        elif event == "open":
            self._opened(args)
        elif event.startswith(self.NETWORK):
            self.network.add(event)
        elif event.startswith(self.FILES):
            self.files.add(event)
        elif event.startswith(self.PROCESSES):
            self.processes.add(event)

    def _opened(self, args: tuple[Any, ...]) -> None:
        path = args[0]
        if isinstance(path, int):
            return
        name = os.fsdecode(path) if isinstance(path, str | bytes) else str(path)
        flags = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
        reads_code = name.endswith((".py", ".pyc", ".so", ".pth", ".egg-link")) and not flags & (
            os.O_WRONLY | os.O_RDWR
        )
        if not reads_code and not name.endswith(".pyc") and not name.startswith("/proc/self/fd"):
            self.files.add(f"open {name}")

    def report(self) -> dict[str, list[str]]:
        return {k: sorted(getattr(self, k)) for k in ("network", "files", "processes", "imports")}


class Worker:
    """The state of one worker: its spec, its environments, its pipe."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self.source, self.sink = source, sink
        self.audit: Audit | None = None
        self.spec: Any = None
        self.envs: dict[int, Any] = {}
        self.sent: dict[int, int] = {}  # messages of an environment that the outside has seen
        self.finalized: set[int] = set()
        self.next_env = 0

    # ---- the pipe

    def serve(self) -> None:
        while line := self.source.readline():
            request = json.loads(line)
            for env in request.pop("drop", ()):
                self.envs.pop(env, None)
                self.sent.pop(env, None)
            handler: Callable[..., Any] = getattr(self, f"op_{request.pop('op')}")
            try:
                reply = {"ok": handler(**request)}
                text = json.dumps(reply, ensure_ascii=False)
            except Exception as error:  # foreign code: whatever it raises is reported as its fault
                text = json.dumps({"fault": f"{type(error).__name__}: {error}"[:2000], "kind": type(error).__name__})
            self._send(text)

    def _send(self, text: str) -> None:
        self.sink.write(text.encode("utf-8", "surrogatepass") + b"\n")
        self.sink.flush()

    def _user_llm(self, messages: Any, *_: Any, **__: Any) -> str:
        self._send(json.dumps({"user_llm": messages}, ensure_ascii=False))
        answer = json.loads(self.source.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return str(answer["text"])

    # ---- operations

    def op_load(
        self, file: str | None, name: str | None, modules: list[str], folders: list[str], audit: bool
    ) -> dict[str, Any]:
        for folder in folders:
            sys.path.append(folder)
        import game_registry

        self.audit = Audit() if audit else None
        before = set(sys.modules)
        if file is not None:
            names = game_registry.load_game_file(file)
            if name is None and len(names) != 1:
                raise game_registry.GameError(f"the file registers {', '.join(names)}; name the one that is meant")
            name = name or names[0]
        else:
            os.environ["TRACE_GAME_MODULES"] = ",".join(modules)
        assert name is not None
        self.spec = game_registry.get_game(name)
        self.sources = self._sources_of(before)
        fields = {field: getattr(self.spec, field) for field in SPEC_FIELDS}
        return {
            **fields,
            "has_oracle": self.spec.oracle is not None,
            "has_extractor": self.spec.extract_action is not None,
            "sources": self.sources,
            "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        }

    def _sources_of(self, before: set[str]) -> list[str]:
        """Files of the environment: its own, and the modules beside it that it imported."""
        import game_registry

        registered_by = game_registry._ORIGIN[self.spec.name]  # a file, or a module of TRACE_GAME_MODULES
        module = sys.modules.get(registered_by)
        origin = Path(module.__file__ or "") if module is not None else Path(registered_by)
        files = {str(origin)}
        for key in set(sys.modules) - before:
            file = getattr(sys.modules[key], "__file__", None)
            if file and Path(file).parent == origin.parent and Path(file).stem.startswith("_"):
                files.add(file)
        return sorted(files)

    def op_new(self) -> dict[str, Any]:
        env = self.spec.make_env(user_llm=self._user_llm) if self.spec.needs_user_llm else self.spec.make_env()
        self.envs[self.next_env] = env
        self.next_env += 1
        return {"env": self.next_env - 1}

    def op_reset(self, env: int, seed: int) -> dict[str, Any]:
        game = self.envs[env]
        self.finalized.discard(env)
        began = time.perf_counter_ns()
        game.reset(seed)
        elapsed = (time.perf_counter_ns() - began) // 1000
        self.sent[env] = 0
        state = self._state(env, elapsed)
        return {**state, "system": game.get_system_prompt(), "tools": list(game.get_tool_schemas())}

    def op_step(self, env: int, action: str) -> dict[str, Any]:
        game = self.envs[env]
        began = time.perf_counter_ns()
        game.step(action)
        return self._state(env, (time.perf_counter_ns() - began) // 1000)

    def _state(self, env: int, elapsed_us: int) -> dict[str, Any]:
        game = self.envs[env]
        messages = list(game.get_messages())
        new = messages[self.sent[env] :]
        self.sent[env] = len(messages)
        return {
            "messages": new,
            "n": len(messages),
            "done": bool(game.done),
            "max_steps": game.max_steps,
            "us": elapsed_us,
        }

    def op_summary(self, env: int) -> Any:
        game = self.envs[env]
        finalize = getattr(game, "_finalize_with_verification", None)
        if finalize is not None and env not in self.finalized:
            finalize()
            self.finalized.add(env)
        return game.get_summary()

    def op_oracle(self, seed: int) -> list[Any]:
        return list(self.spec.oracle(seed))

    def op_extract(self, text: str) -> Any:
        return self.spec.extract_action(text)

    def op_audit(self) -> dict[str, list[str]]:
        assert self.audit is not None
        return self.audit.report()

    def op_state(self) -> dict[str, str]:
        """Digests of everything global that an environment could leave behind."""
        modules = [m for m in sys.modules.values() if getattr(m, "__file__", None) in self.sources]
        state = {
            "random module": random.getstate(),
            "os.environ": sorted(os.environ.items()),
            "working directory": os.getcwd(),
            "sys.path": list(sys.path),
        }
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            state["numpy.random"] = numpy_random.get_state()
        for module in modules:
            for name, value in vars(module).items():
                if not name.startswith("__"):
                    state[f"{name}"] = value
                if isinstance(value, type) and value.__module__ == module.__name__:
                    state |= {f"{name}.{k}": v for k, v in vars(value).items() if not k.startswith("__")}
        return {name: _digest(value) for name, value in state.items()}


def _digest(value: Any) -> str:
    if isinstance(value, type) or callable(value) or isinstance(value, property | staticmethod | classmethod):
        return "code"
    try:
        data = pickle.dumps(value)
    except Exception:  # foreign objects; their repr is the next best witness
        data = repr(value).encode("utf-8", "replace")
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    """Take the pipe away from fd 0 and 1, so that an environment that prints cannot break the protocol."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    sys.dont_write_bytecode = True
    Worker(source, sink).serve()


if __name__ == "__main__":
    main()
