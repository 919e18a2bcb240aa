"""How values cross the pipe between the tests of a scenario and the candidate module.

Plain values cross by value: None, bool, int and str as JSON, everything else as a JSON array with a tag. What has an
identity (an object of the candidate, a function of the tests) crosses as a reference, which each side makes and
resolves in its own way. Nothing is ever unpickled, so reading an answer of the candidate cannot run code. Standard
library only.
"""

from __future__ import annotations

import builtins
import datetime
import decimal
import fractions
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, BinaryIO

Reference = Callable[[Any], Any]

# Types and exceptions only: a name such as `eval` must not arrive as a function.
BUILTINS = {
    name: value for name, value in vars(builtins).items() if isinstance(value, type) and not name.startswith("_")
}
_BUILTIN_NAMES = {value: name for name, value in BUILTINS.items()}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter", defaultdict: "defaultdict"}
_MAKE_SEQUENCE: dict[str, Callable[[Any], Any]] = {name: kind for kind, name in _SEQUENCES.items()}
_MAKE_MAPPING: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "defaultdict": lambda pairs: defaultdict(None, pairs),
}
_SCALARS: dict[str, Callable[[str], Any]] = {
    "float": float.fromhex,
    "complex": complex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "timedelta": lambda text: datetime.timedelta(*map(int, text.split())),
}


def words(text: str) -> list[str]:
    """The words of a table of names."""
    return text.split()


def encode(value: Any, reference: Reference) -> Any:
    """``value`` as JSON data; ``reference`` makes the array for what does not cross by value."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], [encode(v, reference) for v in value]]
    if kind in _MAPPINGS:
        return [_MAPPINGS[kind], [[encode(k, reference), encode(v, reference)] for k, v in value.items()]]
    text = _scalar_text(value, kind)
    if text is not None:
        return [kind.__name__, text]
    if isinstance(value, type) and value in _BUILTIN_NAMES:
        return ["builtin", _BUILTIN_NAMES[value]]
    if value is Ellipsis or value is NotImplemented:
        return ["constant", repr(value)]
    return reference(value)


def _scalar_text(value: Any, kind: type) -> str | None:
    if kind is float:
        return float.hex(value)
    if kind in (bytes, bytearray):
        return str(value.hex())
    if kind in (complex, decimal.Decimal, fractions.Fraction):
        return str(value)
    if kind in (datetime.date, datetime.time, datetime.datetime):
        return str(value.isoformat())
    if kind is datetime.timedelta:
        return f"{value.days} {value.seconds} {value.microseconds}"
    return None


def decode(data: Any, resolve: Reference) -> Any:
    """The value of JSON data made by ``encode``; ``resolve`` reads references.

    Raises:
        ValueError: an unknown tag.
    """
    if not isinstance(data, list):
        if data is None or isinstance(data, bool | int | str):
            return data
        raise ValueError(f"not an encoded value: {data!r:.60}")
    tag = data[0]
    if tag in _MAKE_SEQUENCE:
        return _MAKE_SEQUENCE[tag](decode(v, resolve) for v in data[1])
    if tag in _MAKE_MAPPING:
        return _MAKE_MAPPING[tag]([(decode(k, resolve), decode(v, resolve)) for k, v in data[1]])
    if tag in _SCALARS:
        return _SCALARS[tag](data[1])
    if tag == "builtin":
        return BUILTINS[data[1]]
    if tag == "constant":
        return {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}[data[1]]
    return resolve(data)


class Pipe:
    """JSON lines in both directions."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source, self._sink = source, sink

    def send(self, data: Any) -> None:
        self._sink.write(json.dumps(data).encode() + b"\n")
        self._sink.flush()

    def receive(self) -> Any:
        """The next message.

        Raises:
            ConnectionError: the other side is gone.
        """
        line = self._source.readline()
        if not line:
            raise ConnectionError("the other side ended")
        return json.loads(line)
