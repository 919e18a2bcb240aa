"""Reading and writing of files, and the habits of every command: atomic writes, one-line errors, exit codes.

Exit codes: 0 = done, 1 = ran and the verdict is "no", 2 = could not run (bad input, missing file, dead server).
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from game_registry import GameError

PathLike = str | os.PathLike[str]
Model = TypeVar("Model", bound=BaseModel)


class InputError(ValueError):
    """Bad input of any kind. The text is one line: what was expected, what was found, what to do."""


class ServerError(RuntimeError):
    """A server is absent, died or answers nonsense, after all retries. One line, as for ``InputError``."""


def read_text(path: PathLike, what: str = "file") -> str:
    """The UTF-8 text of ``path`` (a byte order mark is dropped).

    Raises:
        InputError: missing, a folder, unreadable, empty, or not UTF-8.
    """
    file = Path(path)
    try:
        if file.is_fifo() and file.parts[:2] not in (("/", "dev"), ("/", "proc")):  # there: `<(...)` of the shell
            raise InputError(f"{what} {path}: expected a file, found a named pipe, which may never end; give a file")
        raw = file.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{what} {path}: not found; check the path") from None
    except IsADirectoryError:
        raise InputError(f"{what} {path}: expected a file, found a folder") from None
    except OSError as error:
        raise InputError(f"{what} {path}: cannot be read ({error.strerror})") from None
    if not raw.strip():
        raise InputError(f"{what} {path}: is empty; write it again")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} {path}: not UTF-8 (byte {error.start}); convert it to UTF-8") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; replace it with a number or null")


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text:.40} is too large for a number; replace it with a smaller one or null")
    return number


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r:.80} appears twice in one object; keep one")
    return data


def parse_json(text: str, where: str, *, unique_keys: bool = False) -> Any:
    """Strict JSON: NaN, Infinity and numbers that overflow to them are errors.

    Args:
        unique_keys: a key that appears twice in one object is an error too (else the last one wins).

    Raises:
        InputError: with the line and column of the fault.
    """
    hook = _unique_keys if unique_keys else None
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float, object_pairs_hook=hook)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.colno == 1:
            raise InputError(f"{where}: not valid JSON: more follows after one document (JSON Lines?)") from None
        raise InputError(f"{where}: not valid JSON at line {error.lineno} column {error.colno} ({error.msg})") from None
    except RecursionError:
        raise InputError(f"{where}: JSON is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def read_json(path: PathLike, what: str = "file") -> Any:
    """``parse_json`` of a whole file, with unique keys."""
    return parse_json(read_text(path, what), f"{what} {path}", unique_keys=True)


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a key that appears twice in one mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # SafeLoader refuses it
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} appears twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(
    path: PathLike, what: str = "configuration", loader: type[UniqueKeyLoader] = UniqueKeyLoader
) -> dict[str, Any]:
    """A YAML file that holds a mapping.

    Raises:
        InputError: not YAML, a value that YAML cannot build (the date 2020-99-99), not a mapping, a key twice.
    """
    text = read_text(path, what)
    try:
        data = yaml.load(text, Loader=loader)
    except RecursionError:
        raise InputError(f"{what} {path}: YAML is nested too deeply") from None
    # PyYAML's constructors let the last five through: for impossible dates, long integers, `!!bool x`, `!!int ""`
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise InputError(f"{what} {path}: not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(data, dict):
        raise InputError(f"{what} {path}: expected keys with values, found {type(data).__name__}")
    return {str(k): v for k, v in data.items()}


def resolved(path: PathLike, what: str = "file") -> Path:
    """``path`` made absolute, with its symbolic links followed.

    Raises:
        InputError: its links form a loop, or it is no path at all.
    """
    try:
        return Path(path).resolve()
    except (RuntimeError, OSError, ValueError) as error:
        raise InputError(f"{what} {path}: cannot be followed ({error}); check the path and its links") from None


def check(model: type[Model], data: Any, where: str) -> Model:
    """``data`` as a pydantic ``model``; the first violation becomes a one-line ``InputError``."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InputError(f"{where}: {describe_validation(error)}") from None


class SettingsModel(BaseModel):
    """Settings from YAML or flags: no unknown key, no NaN or infinity, and integers that were written as integers.

    A float may be text, because YAML reads 1e-5 as text.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_as_written(cls, value: Any, info: ValidationInfo) -> Any:
        wanted = cls.model_fields[info.field_name or ""].annotation
        integer, number = wanted in (int, int | None), wanted in (float, float | None)
        if (integer and type(value) not in (int, type(None))) or (number and isinstance(value, bool)):
            raise ValueError("expected an integer" if integer else "expected a number")
        return value


def describe_validation(error: ValidationError) -> str:
    """The first violation in one line: place, what is wrong, what was found."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "top level"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{place}: {first['msg']}, found {str(first.get('input'))[:80]!r}{more}"


def to_json(data: Any, *, indent: int | None = 2) -> str:
    """JSON text with a final newline; NaN is a programming error and raises ValueError."""
    return json.dumps(data, ensure_ascii=False, indent=indent, allow_nan=False) + "\n"


@contextlib.contextmanager
def atomic_path(path: PathLike) -> Iterator[Path]:
    """A temporary name beside ``path`` to write to; on success it is fsynced and renamed over ``path``.

    A reader, also on a network disk, sees the old content or the new one, never a part.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another output path") from None
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); free space or choose another path") from error
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: PathLike) -> None:
    """fsync a folder, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: PathLike, text: str) -> None:
    """Atomic write of UTF-8 text.

    Raises:
        InputError: it cannot be written, or the text holds a lone surrogate.
    """
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{path}: {_surrogate(error)}") from None
    with atomic_path(path) as temporary:
        temporary.write_bytes(raw)


def write_block(path: PathLike, name: str, block: str) -> None:
    """Put ``block`` (whole lines) between the marks ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->`` of a document.

    Raises:
        InputError: the file or a mark is missing.
    """
    before, begin, rest = read_text(path, "document").partition(f"<!-- {name}:begin -->\n")
    _, end, after = rest.partition(f"<!-- {name}:end -->")
    if not begin or not end:
        raise InputError(f"{path}: expected the marks {name}:begin and {name}:end, each on a line; put them back")
    write_text(path, f"{before}{begin}{block.rstrip()}\n{end}{after}")


def _surrogate(error: UnicodeEncodeError) -> str:
    near = error.object[max(0, error.start - 30) : error.end]
    return f"the text to write has a lone surrogate, which is not Unicode, at the end of {near!r}; correct the input"


def write_json(path: PathLike, data: Any, *, indent: int | None = 2) -> None:
    """Atomic write of JSON."""
    write_text(path, to_json(data, indent=indent))


def _lock(handle: int, refusal: str) -> None:
    """An exclusive lock that ends with the process, however it ends.

    Raises:
        InputError: ``refusal``; another process has it.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(refusal) from None
    except OSError:
        pass  # a network disk without locks: nothing to be had there


@contextlib.contextmanager
def sole_writer(folder: PathLike) -> Iterator[None]:
    """Hold ``folder`` for this process inside the block. It is made where it is not there, and goes again if nothing
    was written. The hold ends with the process, however it ends; a network disk without locks has none.

    Raises:
        InputError: another process holds it, or it cannot be made.
    """
    path = Path(folder)
    handle, new = _held(path)
    try:
        yield
    finally:
        if new:
            with contextlib.suppress(OSError):  # something is in it
                path.rmdir()  # while it is held: nobody else can be in it
        os.close(handle)


def _held(path: Path) -> tuple[int, bool]:
    """The locked handle of a folder, and whether it was made here."""
    for _ in range(100):  # its last holder may remove it between any two of these steps
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir()
                new = True
            except FileExistsError:
                new = False
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}); choose another folder") from None
        try:
            _lock(handle, f"{path}: another process is writing into it; wait until it ends, or choose another folder")
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), path.stat()):
                    return handle, new
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    raise InputError(f"{path}: cannot be made or is a link to nothing; choose another folder")


class JsonlLog:
    """Append-only JSONL that survives a kill at any point: whole lines, flushed; a torn last line is dropped on
    reading. One writer at a time: lines of two would mix.

    Raises:
        InputError: it cannot be written, or another process is writing it.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the log
            taken = f"{self.path}: another process is writing it; wait until it ends, or choose another output"
            try:
                _lock(self._file.fileno(), taken)
            except InputError:
                self._file.close()
                raise
            _drop_torn_line(self.path)
        except OSError as error:
            raise self._cannot(error) from None

    def _cannot(self, error: OSError) -> InputError:
        return InputError(f"{self.path}: cannot be written ({error.strerror}); free space or choose another path")

    def append(self, record: Any) -> None:
        """Add one line.

        Raises:
            InputError: the disk is full, the file is gone, or the record holds a lone surrogate.
        """
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{self.path}: {_surrogate(error)}") from None
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # closing would try to write the rest again
                self._file.close()
            raise self._cannot(error) from None

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> JsonlLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        position = size
        while position > 0:  # back to the last newline
            start = max(0, position - 65536)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                file.truncate(start + found + 1)
                return
            position = start
        file.truncate(0)


def read_jsonl(path: PathLike, what: str = "file", *, torn_tail_ok: bool = False) -> Iterator[Any]:
    """The records of a JSONL file, one at a time.

    Args:
        torn_tail_ok: for our own logs: a last line without its newline was being written at a kill and is skipped.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                if torn_tail_ok and not line.endswith("\n"):
                    return
                yield parse_json(line, f"{what} {path} line {number}")
    except FileNotFoundError:
        raise InputError(f"{what} {path}: not found; check the path") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{what} {path}: not UTF-8 (byte {error.start}); convert it to UTF-8") from None
    except OSError as error:
        raise InputError(f"{what} {path}: cannot be read ({error.strerror})") from None


def finite(value: Any, where: str) -> float:
    """``value`` as a finite float.

    Raises:
        InputError: not a number, a bool, NaN or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{where}: expected a finite number, found {value!r:.60}")
    return float(value)


def run_cli(main: Callable[[], int | None]) -> None:
    """Run a command's ``main``: expected faults become one line on stderr and exit 2, a verdict becomes its exit code.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # text from input files may not fit the terminal's encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = main() or 0
        sys.stdout.flush()
    except (InputError, ServerError, GameError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        code = 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; what was finished is kept, run the same command again to go on\n")
        code = 130
    except BrokenPipeError:  # `| head`: not a fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise SystemExit(code)
