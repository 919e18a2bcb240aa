"""The candidate's side of a grading: runs the edited module in a sandbox of its own and does what the tests ask.

Started by ``pipeline.swe_grading``. Nothing that this process writes is a verdict: it answers calls, as any function
would; the tests that judge the answers run in another sandbox. Standard library only.
"""

from __future__ import annotations

import copy
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from pipeline.swe_codec import Pipe, decode, encode, words

OPERATIONS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in words(
        "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift neg pos invert "
        "eq ne lt le gt ge getitem setitem delitem contains"
    )
}
OPERATIONS |= {f"r{name}": lambda b, a, f=f: f(a, b) for name, f in list(OPERATIONS.items())}
OPERATIONS |= {
    "len": len,
    "iter": iter,
    "next": next,
    "bool": bool,
    "hash": hash,
    "repr": repr,
    "str": str,
    "int": int,
    "float": float,
    "index": operator.index,
    "abs": abs,
    "round": round,
    "reversed": reversed,
    "format": format,
    "dir": dir,
    "deepcopy": copy.deepcopy,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager, *error: type(manager).__exit__(manager, *error),
}


class Candidate:
    """The objects of the module that the tests hold references to; the module itself is number 0."""

    def __init__(self, pipe: Pipe, module: types.ModuleType) -> None:
        self.pipe = pipe
        self.objects: list[Any] = [module]
        self.numbers: dict[int, int] = {id(module): 0}
        self.callbacks: dict[int, Callable[..., Any]] = {}

    def serve(self) -> None:
        while True:
            self.pipe.send(self._answer(self.pipe.receive()))

    def _answer(self, request: list[Any]) -> list[Any]:
        try:
            kind, number, *rest = request
            return ["ok", *self._do(kind, self.objects[number], *rest)]
        except Exception as error:  # whatever the module raises is an answer to the test that provoked it
            return ["raise", *self._raised(error)]

    def _do(self, kind: str, target: Any, *rest: Any) -> list[Any]:
        if kind == "get":
            return [self.encode(getattr(target, rest[0]))]
        if kind == "set":
            setattr(target, rest[0], self.decode(rest[1]))
            return [None]
        if kind == "delete":
            delattr(target, rest[0])
            return [None]
        args, kwargs = [self.decode(a) for a in rest[1]], {k: self.decode(v) for k, v in rest[2].items()}
        function = target if kind == "call" else OPERATIONS[rest[0]]
        result = function(*args, **kwargs) if kind == "call" else function(target, *args, **kwargs)
        # a list that was passed in may have been changed in place
        changed = [self.encode(a) if type(a) in (list, dict, set) else None for a in args]
        return [self.encode(result), changed]

    def _raised(self, error: Exception) -> list[Any]:
        try:
            text = str(error)
        except Exception:  # a broken __str__ of the module
            text = ""
        return [self._class(type(error)), [self._safe(a) for a in error.args], text, self._number(error)]

    def _safe(self, value: Any) -> Any:
        try:
            return self.encode(value)
        except Exception:  # too deep, or no reference possible
            return repr(value)[:1000]

    def _number(self, value: Any) -> int:
        number = self.numbers.get(id(value))
        if number is None:
            number = len(self.objects)
            self.objects.append(value)  # kept, so its id stays its own
            self.numbers[id(value)] = number
        return number

    def _class(self, kind: type) -> Any:
        if kind.__module__ == "builtins":
            return ["builtin", kind.__name__]
        bases = [self._class(b) for b in kind.__bases__ if issubclass(b, BaseException)]
        return ["exception", self._number(kind), kind.__name__, bases]

    def encode(self, value: Any) -> Any:
        return encode(value, self._reference)

    def _reference(self, value: Any) -> Any:
        callback = getattr(value, "trace_callback", None) if isinstance(value, types.FunctionType) else None
        if callback is not None:
            return ["yours", callback]
        if isinstance(value, type) and issubclass(value, BaseException):
            return self._class(value)
        base = None
        kinds: tuple[Callable[..., Any], ...] = (str, int, float, tuple, list, dict, set, frozenset, bytes)
        for kind in kinds:
            if isinstance(value, kind):  # type: ignore[arg-type]
                base = encode(kind(value), self._reference)
        return ["object", self._number(value), type(value).__name__, base]

    def decode(self, data: Any) -> Any:
        return decode(data, self._resolve)

    def _resolve(self, data: list[Any]) -> Any:
        if data[0] == "yours":
            return self.objects[data[1]]
        if data[0] == "callback":
            return self._callback(data[1])
        raise ValueError(f"unknown reference {data[0]!r}")

    def _callback(self, number: int) -> Callable[..., Any]:
        """A function of the tests: calling it asks the tests to run it."""
        if number not in self.callbacks:

            def call(*args: Any, **kwargs: Any) -> Any:
                named = {k: self.encode(v) for k, v in kwargs.items()}
                self.pipe.send(["callback", number, [self.encode(a) for a in args], named])
                while True:
                    reply = self.pipe.receive()
                    if reply[0] == "returned":
                        return self.decode(reply[1])
                    if reply[0] == "raised":
                        raise self.decode(reply[1])(*[self.decode(a) for a in reply[2]])
                    self.pipe.send(self._answer(reply))  # the callback calls the module again

            call.trace_callback = number  # type: ignore[attr-defined]
            self.callbacks[number] = call
        return self.callbacks[number]


def main() -> None:
    pipe = Pipe(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    job = pipe.receive()
    module = types.ModuleType(job["name"])
    module.__file__ = f"/tmp/{job['filename']}"
    sys.modules[job["name"]] = module
    candidate = Candidate(pipe, module)
    try:
        exec(compile(job["code"], job["filename"], "exec"), vars(module))
    except BaseException as error:  # the module cannot be imported, for whatever reason
        kind = type(error) if isinstance(error, Exception) else ImportError
        pipe.send(["raise", candidate._class(kind), [str(error)[:500]], str(error)[:500], 0])
        return
    pipe.send(["ok", None])
    candidate.serve()


if __name__ == "__main__":
    main()
