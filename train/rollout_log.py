"""The rollouts of a command while they are made: an append-only log that a kill at any point leaves usable.

``F.partial.jsonl`` beside the output ``F``: first a header that says what is being collected, then one entry per
episode. A second start with the same settings goes on where the first one stopped; other settings are refused.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from game_registry import GameSpec
from pipeline.files import InputError, JsonlLog, PathLike, parse_json, read_jsonl, read_text, write_json
from pipeline.remote_game import SandboxedEnvironment

SCHEMA_VERSION = 1
OUTCOMES = ("scored", "error")
Key = tuple[str, bool, int]  # task id, hinted, sample index


def entry_key(entry: Mapping[str, Any]) -> Key:
    return str(entry["task_id"]), bool(entry.get("hinted", False)), int(entry["sample_idx"])


def entry_order(entry: Mapping[str, Any]) -> tuple[int, str, bool, int]:
    """Numeric ids by value, then hinted, then sample index: the final file does not depend on timing."""
    task = str(entry["task_id"])
    number = int(task) if task.lstrip("-").isdigit() else 0
    return number, task, bool(entry.get("hinted", False)), int(entry["sample_idx"])


def game_fingerprint(spec: GameSpec) -> str:
    """Hash of the environment's source files; rollouts of another version of it must not be mixed in.

    A sandboxed environment knows its own files; for an imported one they are the module of ``make_env`` and the modules
    beside it that it uses. Where there is no source the value is new every time, so nothing is ever taken for equal.
    """
    owner = getattr(spec.make_env, "__self__", None)
    files = owner.files() if isinstance(owner, SandboxedEnvironment) else _source_files(spec)
    if not files or not all(file.is_file() for file in files):
        return f"unknown-{uuid.uuid4().hex[:12]}"
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _source_files(spec: GameSpec) -> list[Path]:
    module = inspect.getmodule(inspect.unwrap(spec.make_env))
    todo, found = [module], dict[str, Path]()
    while todo:
        module = todo.pop()
        file = getattr(module, "__file__", None)
        if module is None or file is None or file in found:
            continue
        if found and Path(file).parent not in {path.parent for path in found.values()}:
            continue  # the contract, the standard library: not the environment's own
        found[file] = Path(file)
        values = vars(module).values()
        names = {getattr(value, "__module__", None) or getattr(value, "__name__", None) for value in values}
        todo += [sys.modules.get(name) for name in names if isinstance(name, str)]
    return list(found.values())


class RolloutLog:
    """Entries of one output file.

    Args:
        output: the final file.
        settings: everything that an entry depends on; JSON.
        resume: go on from what is there; False starts anew.
        discard_other: an unfinished log of other settings is dropped without asking (for caches that a command owns).

    Raises:
        InputError: the log was written with other settings.
    """

    def __init__(
        self, output: PathLike, settings: Mapping[str, Any], *, resume: bool = True, discard_other: bool = False
    ) -> None:
        self.output = Path(output)
        self.partial = self.output.with_name(self.output.name + ".partial.jsonl")
        self.settings = dict(settings)
        self.entries: dict[Key, dict[str, Any]] = {}
        self._discard_other = discard_other
        if resume:
            self._read_output()
            self._read_partial()
        else:
            self.partial.unlink(missing_ok=True)
        self._log: JsonlLog | None = None

    def _read_output(self) -> None:
        """A finished file with the same settings is a start for more seeds or samples; any other is replaced."""
        if not self.output.is_file():
            return
        try:
            data = parse_json(read_text(self.output, "rollouts file"), str(self.output))
        except InputError:
            return
        info = data.get("info") if isinstance(data, dict) else None
        if isinstance(info, dict) and info.get("settings") == self.settings:
            entries = data.get("simulations")
            if not isinstance(entries, list):
                raise InputError(f"{self.output}: has no simulations; move it away or use --no-resume to start anew")
            for number, entry in enumerate(entries):
                self._take(entry, f"{self.output} simulations[{number}]")

    def _read_partial(self) -> None:
        if not self.partial.is_file() or not self.partial.read_bytes()[:1]:
            return
        records = read_jsonl(self.partial, "unfinished rollouts", torn_tail_ok=True)
        header = next(records, None)
        if header is None:  # killed while the header was being written
            return
        found = header.get("header") if isinstance(header, dict) else None
        if found != self.settings:
            nothing = isinstance(found, dict) and next(records, None) is None
            if nothing or self._discard_other:
                self.partial.unlink()
                return
            raise InputError(f"{self.partial}: {_difference(found, self.settings)}; use --no-resume to start anew")
        for number, entry in enumerate(records, 2):
            self._take(entry, f"{self.partial} line {number}")

    def _take(self, entry: Any, where: str) -> None:
        """Keep an entry of an earlier start.

        Raises:
            InputError: it is none that this program wrote.
        """
        fine = isinstance(entry, dict) and isinstance(entry.get("task_id"), str) and entry.get("outcome") in OUTCOMES
        if not fine or type(entry.get("sample_idx")) is not int:
            raise InputError(f"{where}: damaged entry; move the file away or use --no-resume to start anew")
        self.entries[entry_key(entry)] = entry

    def add(self, entry: dict[str, Any]) -> None:
        """Keep one episode, on disk at once.

        Raises:
            InputError: the disk is full or gone.
        """
        try:
            if self._log is None:  # not before there is something to keep
                self._log = JsonlLog(self.partial)
                if self.partial.stat().st_size == 0:
                    self._log.append({"header": self.settings})
            self._log.append(entry)
        except OSError as error:
            raise InputError(
                f"{self.partial}: cannot be written ({error.strerror}); free space and run again"
            ) from None
        self.entries[entry_key(entry)] = entry

    def finish(self, wanted: Iterable[Key], info: Mapping[str, Any]) -> None:
        """Write the final file atomically with exactly the entries asked for, then drop the log."""
        keys = set(wanted)
        missing = keys - self.entries.keys()
        assert not missing, f"{len(missing)} episodes were not run"
        chosen = sorted((e for k, e in self.entries.items() if k in keys), key=entry_order)
        data = {
            "schema_version": SCHEMA_VERSION,
            "info": {**info, "settings": self.settings},
            "simulations": chosen,
        }
        write_json(self.output, data, indent=None)
        self.close()
        self.partial.unlink(missing_ok=True)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def _difference(found: Any, wanted: Mapping[str, Any]) -> str:
    if not isinstance(found, dict):
        return "not a log of unfinished rollouts"
    for key in sorted(found.keys() | wanted.keys()):
        if found.get(key) != wanted.get(key):
            return f"was begun with {key} = {found.get(key)!r}, now it is {wanted.get(key)!r}"
    return "was begun with other settings"
