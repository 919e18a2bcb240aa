"""The tests' side of a grading: runs pytest on a pristine copy of the tests, with the candidate behind a pipe.

Started by ``pipeline.swe_grading`` in a sandbox of its own. The module under test is a stand-in whose every access is a
request to the candidate's sandbox, so code of the candidate shares no process with pytest, its report or its exit code.
Comparisons of an answer with a plain value are made here: an object that claims to equal everything equals nothing.
Standard library, and pytest from the path that the job names.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.swe_codec import Pipe, decode, encode, words

STARTED = b"started\n"


class Remote:
    """An object of the candidate. Attribute access, calls and operators are requests."""

    _client: Client
    _number: int
    _base: Any
    _kind: str

    def __init__(self, client: Client, number: int, kind: str, base: Any = None) -> None:
        for name, value in (("_client", client), ("_number", number), ("_kind", kind), ("_base", base)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return self._client.request("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._client.request("set", self._number, name, self._client.encode(value))

    def __delattr__(self, name: str) -> None:
        self._client.request("delete", self._number, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._client.call("call", self._number, "", args, kwargs)

    def _operate(self, name: str, *args: Any) -> Any:
        return self._client.call("op", self._number, name, args, {})

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, Remote):
            return bool(self._operate("eq", other))
        return self._base is not None and bool(self._base == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._base) if self._base is not None else int(self._operate("hash"))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._operate("iter")
        while True:
            try:
                yield self._client.call("op", iterator._number, "next", (), {})
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._operate("next")

    def __contains__(self, item: Any) -> bool:
        return bool(self._operate("contains", item))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return self._operate("exit", *(None, None, None) if kind is None else (kind, None, None))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and bool(instance._operate("isinstance", self))

    def __subclasscheck__(self, kind: Any) -> bool:
        return isinstance(kind, Remote) and bool(kind._operate("issubclass", self))

    def __deepcopy__(self, memo: Any) -> Any:
        return self._operate("deepcopy")


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._operate(name, *args)


for _name in words(
    "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift neg pos invert lt le gt ge getitem setitem "
    "delitem radd rsub rmul rtruediv rfloordiv rmod rpow rand_ ror_ rxor len bool repr str int float index abs round "
    "reversed format dir enter"
):
    setattr(Remote, f"__{_name.rstrip('_')}__", _operator(_name))


class RemoteError:
    """Mixed into exceptions of the candidate: its text, and attributes asked for when they are read."""

    _client: Client
    _number: int
    _text: str

    def __str__(self) -> str:
        return self._text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_client" not in vars(self):
            raise AttributeError(name)
        return self._client.request("get", self._number, name)


class Client:
    """Requests to the candidate, one at a time, and the callbacks that it makes meanwhile."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.remotes: dict[int, Remote] = {}
        self.errors: dict[int, type[BaseException]] = {}
        self.callbacks: list[Callable[..., Any]] = []

    def request(self, *message: Any) -> Any:
        return self._value(self._exchange(list(message)))

    def call(self, kind: str, number: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        encoded = [self.encode(a) for a in args], {k: self.encode(v) for k, v in kwargs.items()}
        reply = self._exchange([kind, number, name, *encoded])
        value = self._value(reply)
        for original, changed in zip(args, reply[2], strict=True):
            if changed is not None:
                _write_back(original, self.decode(changed))
        return value

    def _exchange(self, message: list[Any]) -> list[Any]:
        self.pipe.send(message)
        while True:
            reply: list[Any] = self.pipe.receive()
            if reply[0] != "callback":
                return reply
            self.pipe.send(self._run_callback(*reply[1:]))

    def _run_callback(self, number: int, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        try:
            result = self.callbacks[number](
                *(self.decode(a) for a in args), **{k: self.decode(v) for k, v in kwargs.items()}
            )
            return ["returned", self.encode(result)]
        except Exception as error:  # the test's own function raised: the candidate sees it
            kind = type(error) if type(error).__module__ == "builtins" else RuntimeError
            return ["raised", ["builtin", kind.__name__], [str(error)]]

    def _value(self, reply: list[Any]) -> Any:
        if reply[0] == "ok":
            return self.decode(reply[1])
        _, kind, args, text, number = reply
        raise self._exception(kind, args, text, number)

    def _exception(self, kind: Any, args: list[Any], text: str, number: int) -> BaseException:
        cls = self.decode(kind)
        try:
            error: BaseException = cls(*(self.decode(a) for a in args))
        except TypeError:  # UnicodeDecodeError and the like want arguments of their own
            error = RuntimeError(text)
        if isinstance(error, RemoteError):
            error._client, error._number, error._text = self, number, text
        return error

    def encode(self, value: Any) -> Any:
        return encode(value, self._reference)

    def _reference(self, value: Any) -> Any:
        if isinstance(value, Remote | RemoteError):
            return ["yours", value._number]
        if isinstance(value, type) and issubclass(value, RemoteError):
            return ["yours", next(n for n, cls in self.errors.items() if cls is value)]
        if callable(value):
            self.callbacks.append(value)
            return ["callback", len(self.callbacks) - 1]
        raise TypeError(
            f"a {type(value).__name__} cannot be passed to the module under test; pass plain values or functions"
        )

    def decode(self, data: Any) -> Any:
        return decode(data, self._resolve)

    def _resolve(self, data: list[Any]) -> Any:
        if data[0] == "yours":
            return self.callbacks[data[1]]
        if data[0] == "exception":
            return self._error_class(*data[1:])
        if data[0] != "object":
            raise ValueError(f"unknown reference {data[0]!r}")
        _, number, kind, base = data
        if number not in self.remotes or base is not None:
            self.remotes[number] = Remote(self, number, str(kind), self.decode(base) if base is not None else None)
        return self.remotes[number]

    def _error_class(self, number: int, name: str, bases: list[Any]) -> type[BaseException]:
        """A local twin of an exception class of the module, so that ``pytest.raises`` knows it."""
        if number not in self.errors:
            parents = [self.decode(b) for b in bases] or [Exception]
            if not any(issubclass(p, RemoteError) for p in parents):
                parents = [RemoteError, *parents]
            self.errors[number] = type(str(name), tuple(parents), {})
        return self.errors[number]


def _write_back(original: Any, changed: Any) -> None:
    if original == changed:
        return
    if isinstance(original, list):
        original[:] = changed
    else:
        original.clear()
        original.update(changed)


class ModuleUnderTest(types.ModuleType):
    """Stands for the module in ``sys.modules``."""

    def __init__(self, name: str, filename: str, remote: Remote) -> None:
        super().__init__(name)
        vars(self)["__file__"] = filename
        vars(self)["_remote"] = remote

    def __getattr__(self, name: str) -> Any:
        if name in ("__path__", "__spec__", "__loader__", "__package__", "__wrapped__"):
            raise AttributeError(name)
        return getattr(vars(self)["_remote"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_remote"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_remote"], name)


class Recorder:
    """A pytest plugin: a test passes when set-up, call and tear-down all pass."""

    def __init__(self) -> None:
        self.nodes: dict[str, str] = {}
        self.details: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        node = report.nodeid.partition("::")[2]
        if report.failed:
            self.nodes[node] = "failed"
            self.details[node] = str(report.longrepr)[-1500:]
        elif report.skipped:
            self.nodes[node] = "skipped"
        elif report.when == "call":
            self.nodes.setdefault(node, "passed")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.details["collection"] = str(report.longrepr)[-1500:]


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    verdict = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    source, sink = int(sys.argv[1]), int(sys.argv[2])
    pipe = Pipe(os.fdopen(source, "rb"), os.fdopen(sink, "wb"))
    pipe.send({"name": job["module"], "filename": job["module_filename"], "code": job["module_code"]})
    client = Client(pipe)
    recorder = Recorder()
    try:
        client._value(pipe.receive())
    except Exception as error:  # the candidate does not import: no test can pass
        recorder.details["import"] = f"{type(error).__name__}: {error}"[:1500]
    else:
        sys.path.append(job["packages"])
        import pytest

        os.makedirs("/tmp/tests", exist_ok=True) if job["shared_tmp"] is None else None
        folder = job["shared_tmp"] or "/tmp/tests"
        os.chdir(folder)
        with open(job["test_filename"], "w", encoding="utf-8") as file:
            file.write(job["test_code"])
        sys.modules[job["module"]] = ModuleUnderTest(job["module"], job["module_filename"], Remote(client, 0, "module"))
        os.write(verdict, STARTED)  # from here on, an end without a report is the doing of the tests
        # -s: no capture, since nothing is read from it; plain asserts would do, but rewriting explains failures
        options = ["-q", "-s", "-p", "no:cacheprovider", "--rootdir", folder, "-c", os.devnull]
        pytest.main([*options, job["test_filename"]], plugins=[recorder])
    with os.fdopen(verdict, "w", encoding="utf-8") as out:
        json.dump({"nodes": recorder.nodes, "details": recorder.details}, out)


if __name__ == "__main__":
    main()
