"""Reading JSON of any size without holding it: ijson with our errors."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ijson

from pipeline.files import InputError, parse_json

BOM = b"\xef\xbb\xbf"


@contextlib.contextmanager
def open_json(path: str | Path) -> Iterator[BinaryIO]:
    """The file after its byte order mark, if any; faults of the file and of ijson become ``InputError``."""
    try:
        with open(path, "rb") as file:
            start = file.read(4096)
            if not start.strip():
                raise InputError(f"{path}: is empty; expected JSON")
            file.seek(len(BOM) if start.startswith(BOM) else 0)
            yield file
    except FileNotFoundError:
        raise InputError(f"{path}: not found; check the path") from None
    except IsADirectoryError:
        raise InputError(f"{path}: expected a file, found a folder") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 (byte {error.start}); convert it to UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ijson.JSONError as error:
        text = error.args[0] if error.args else error
        detail = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
        if "trailing garbage" in detail:
            raise InputError(f"{path}: not valid JSON: more follows after one document (JSON Lines?)") from None
        raise InputError(f"{path}: not valid JSON ({' '.join(detail.split())[:120]})") from None


def items(path: str | Path, prefix: str) -> Iterator[Any]:
    """Every value at an ijson ``prefix`` (``simulations.item``, ``item``, or the empty string for the whole)."""
    with open_json(path) as file:
        yield from ijson.items(file, prefix, use_float=True)


def single(path: str | Path, prefix: str) -> Any:
    """The first value at ``prefix``, None when there is none."""
    return next(items(path, prefix), None)


def members(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Key and value of each member of a top-level object."""
    with open_json(path) as file:
        yield from ijson.kvitems(file, "", use_float=True)


def json_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """(line number, value) of each non-empty line."""
    with open_json(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, parse_json(line.decode("utf-8"), f"{path} line {number}")


def describe(value: Any) -> str:
    """What was found, for an error: the type, and the first keys of an object."""
    if isinstance(value, dict):
        return f"an object with keys {', '.join(map(repr, itertools.islice(value, 6)))}"
    return f"{type(value).__name__} {json.dumps(value, default=str)[:60]}"
