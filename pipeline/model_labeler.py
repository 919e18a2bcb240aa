"""Labels by a model behind an OpenAI-compatible endpoint: independent runs, blind, with checked quotes, resumable.

Every (run, trajectory) is one request with a fresh context (more when the trajectory is chunked). A run has its own
seed, order of capabilities and order of trajectories. Answers go to a log as they come; after a kill the same command
goes on where it stopped and asks nothing twice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pipeline.candidates import CandidateFile
from pipeline.chat_client import ChatClient, Usage
from pipeline.chunks import Chunk, chunks
from pipeline.command_line import ProgressLine
from pipeline.cross_check import squeeze
from pipeline.files import InputError, JsonlLog, check, read_jsonl
from pipeline.label_output import Labelled
from pipeline.labels import LABELS
from pipeline.records import Record
from pipeline.templates import render

RUN_SEED = 100_003  # seeds of two runs are never neighbours, so a retry of one is not the first try of another
MAX_QUOTE = 200


@dataclasses.dataclass(frozen=True)
class LabelSettings:
    """``quote_retries``: further tries for a LACKING without a true quote. ``show_outcome``: not blind."""

    n_runs: int = 10
    chunk_chars: int = 24_000
    max_tokens: int = 4096
    temperature: float = 0.7
    seed: int = 0
    concurrency: int = 16
    quote_retries: int = 1
    show_outcome: bool = False


class Doubts(BaseModel):
    """What happened to quotes: found in another message, LACKING made PRESENT for lack of one, PRESENT without one."""

    model_config = ConfigDict(extra="forbid")
    moved: int = 0
    downgraded: int = 0
    unsupported: int = 0

    def add(self, other: Doubts) -> None:
        self.moved += other.moved
        self.downgraded += other.downgraded
        self.unsupported += other.unsupported


Cited = tuple[Literal["NA", "PRESENT", "LACKING"], int | None, str]  # label, message, quote


class LogEntry(BaseModel):
    """One labelled trajectory of one run, as the log keeps it."""

    model_config = ConfigDict(extra="forbid")
    run: int
    id: str
    labels: dict[str, Cited]
    doubts: Doubts
    requests: int
    prompt_tokens: int
    completion_tokens: int


def schema(names: Sequence[str], indices: Sequence[int]) -> dict[str, Any]:
    """One object for each capability; the message can only be one that was shown."""
    one = {
        "type": "object",
        "properties": {
            "label": {"type": "string", "enum": list(LABELS)},
            "message": {"type": "integer", "enum": sorted(indices)},
            "quote": {"type": "string", "maxLength": MAX_QUOTE},
        },
        "required": ["label", "message", "quote"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": dict.fromkeys(names, one),
        "required": list(names),
        "additionalProperties": False,
    }


def verify(answer: dict[str, Any], chunk: Chunk, *, final: bool) -> tuple[dict[str, Cited] | None, Doubts]:
    """Labels whose quotes are true.

    Args:
        final: there will be no further try: a LACKING without a true quote becomes PRESENT (in doubt: PRESENT).

    Returns:
        None in place of the labels when a LACKING has no true quote and another try is left.
    """
    doubts = Doubts()
    found: dict[str, Cited] = {}
    for name, given in answer.items():
        label = given["label"]
        message = _find(given["quote"], given["message"], chunk) if label != "NA" else None
        if label == "NA":
            found[name] = (label, None, "")
        elif message is not None:
            doubts.moved += message != given["message"]
            found[name] = (label, message, given["quote"])
        elif label == "LACKING":
            if not final:
                return None, doubts
            doubts.downgraded += 1
            found[name] = ("PRESENT", None, "")
        else:
            doubts.unsupported += 1
            found[name] = (label, None, "")
    return found, doubts


def _find(quote: str, message: int, chunk: Chunk) -> int | None:
    """The message that holds the quote: the cited one, else the first other one."""
    wanted = squeeze(quote)
    if not wanted:
        return None
    if wanted in chunk.texts.get(message, ""):
        return message
    return next((index for index, text in chunk.texts.items() if wanted in text), None)


def merge(parts: Sequence[dict[str, Cited]]) -> dict[str, Cited]:
    """Labels of a chunked trajectory: LACKING in any part is LACKING, else PRESENT in any, else NA."""
    best = dict(parts[0])
    for part in parts[1:]:
        for name, cited in part.items():
            if LABELS.index(cited[0]) > LABELS.index(best[name][0]):
                best[name] = cited
    return best


class ModelLabeler:
    """Labels ``records`` for ``candidates`` through ``client``; answers are kept in ``log_path``."""

    def __init__(
        self,
        client: ChatClient,
        records: Sequence[Record],
        candidates: CandidateFile,
        settings: LabelSettings,
        log_path: Path,
    ) -> None:
        self.client, self.records, self.settings, self.log_path = client, records, settings, log_path
        self.described = {c.name: c.description for c in candidates.candidates}
        self.system, _ = render("general/partials/api_label_system.md", {})
        self.labels: dict[tuple[int, str], dict[str, Cited]] = {}
        self.doubts = Doubts()
        self.usage = Usage()

    def fingerprint(self) -> str:
        """A hash of all that determines the labels: a log of anything else must not be continued."""
        fixed = dataclasses.asdict(self.settings)
        del fixed["concurrency"], fixed["n_runs"]  # more runs may be added to a log
        parts = [self.client.endpoint.model, fixed, self.described, self.system]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
        for record in self.records:
            digest.update(record.model_dump_json(exclude={"source"}).encode())
        return digest.hexdigest()

    def resume(self) -> int:
        """Read the log of an earlier start; the number of labelled (run, trajectory) pairs in it.

        Raises:
            InputError: the log belongs to other inputs or settings.
        """
        if not self.log_path.exists():
            return 0
        for n, entry in enumerate(read_jsonl(self.log_path, "label log", torn_tail_ok=True)):
            if n == 0:
                if not isinstance(entry, dict) or entry.get("fingerprint") != self.fingerprint():
                    raise InputError(
                        f"label log {self.log_path}: made with another model, input, candidates or settings; "
                        "choose another --output-dir or delete it"
                    )
                continue
            self._keep(check(LogEntry, entry, f"label log {self.log_path} line {n + 1}"))
        return len(self.labels)

    def _keep(self, entry: LogEntry) -> None:
        if (entry.run, entry.id) in self.labels:
            raise InputError(f"label log {self.log_path}: run {entry.run} {entry.id} is there twice; delete the log")
        self.labels[entry.run, entry.id] = entry.labels
        self.doubts.add(entry.doubts)
        self.usage.add(Usage(entry.requests, entry.prompt_tokens, entry.completion_tokens))

    def _todo(self) -> Iterator[tuple[int, Record]]:
        """What is left, run by run, each in its own order."""
        for run in range(1, self.settings.n_runs + 1):
            order = list(self.records)
            random.Random(self.settings.seed * RUN_SEED + run).shuffle(order)
            yield from ((run, r) for r in order if (run, r.id) not in self.labels)

    async def run(self) -> None:
        """Label everything that the log lacks.

        Raises:
            ServerError: the endpoint failed for good; what was labelled is in the log.
        """
        done = self.resume()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        progress = ProgressLine("labelled", self.settings.n_runs * len(self.records))
        progress.advance(done)
        todo = self._todo()
        with JsonlLog(self.log_path) as log:
            if self.log_path.stat().st_size == 0:
                log.append({"kind": "header", "fingerprint": self.fingerprint(), "model": self.client.endpoint.model})
            workers = [self._work(todo, log, progress) for _ in range(self.settings.concurrency)]
            try:
                async with asyncio.TaskGroup() as group:
                    for worker in workers:
                        group.create_task(worker)
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None  # the first cause; the others are its companions
        used = self.usage
        progress.close(f"{used.prompt_tokens} prompt and {used.completion_tokens} completion tokens")

    async def _work(self, todo: Iterator[tuple[int, Record]], log: JsonlLog, progress: ProgressLine) -> None:
        for run, record in todo:  # one iterator shared by all workers of the one thread
            entry = await self._label(run, record)
            log.append(entry.model_dump(mode="json"))
            self._keep(entry)
            progress.advance(note=f"run {run} {record.id}")

    async def _label(self, run: int, record: Record) -> LogEntry:
        names = list(self.described)
        random.Random(self.settings.seed * RUN_SEED + run).shuffle(names)
        doubts, usage = Doubts(), Usage()
        parts = [
            await self._label_chunk(run, record, names, chunk, doubts, usage)
            for chunk in chunks(record, self.settings.chunk_chars)
        ]
        return LogEntry(run=run, id=record.id, labels=merge(parts), doubts=doubts, **dataclasses.asdict(usage))

    async def _label_chunk(
        self, run: int, record: Record, names: Sequence[str], chunk: Chunk, doubts: Doubts, usage: Usage
    ) -> dict[str, Cited]:
        """Labels of one chunk; ``doubts`` and ``usage`` are added to."""
        context: dict[str, Any] = {
            "candidates": [{"name": n, "description": self.described[n]} for n in names],
            "trajectory": chunk.text,
            "number": chunk.number,
            "total": chunk.total,
        }
        if self.settings.show_outcome:
            context["outcome"] = record.outcome
        user, _ = render("general/partials/api_label.md", context)
        for attempt in itertools.count():
            answer = await self.client.ask(
                self.system,
                user,
                schema(names, list(chunk.texts)),
                max_tokens=self.settings.max_tokens,
                temperature=self.settings.temperature,
                seed=(self.settings.seed + run) * RUN_SEED + attempt * 101,
            )
            usage.add(answer.usage)
            labels, found = verify(answer.data, chunk, final=attempt >= self.settings.quote_retries)
            if labels is not None:
                doubts.add(found)
                return labels
        raise AssertionError("unreachable: the last try always gives labels")

    def labelled(self, run: int) -> list[Labelled]:
        """The labels of a run with their outcomes, in the order of the input."""
        return [
            Labelled(r.id, r.outcome == "failed", r.reward, {n: c[0] for n, c in self.labels[run, r.id].items()})
            for r in self.records
        ]

    def evidence(self, run: int) -> dict[str, dict[str, Any]]:
        """capability -> id -> evidence of a run."""
        found: dict[str, dict[str, Any]] = {}
        for record in self.records:
            for name, (_, message, quote) in self.labels[run, record.id].items():
                if message is not None:
                    found.setdefault(name, {})[record.id] = {"message": message, "quote": quote}
        return found
