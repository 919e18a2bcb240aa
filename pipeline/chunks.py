"""A trajectory as text for a model, in chunks that fit its context: what does not fit goes to the next chunk."""

from __future__ import annotations

import dataclasses

from pipeline.cross_check import squeeze
from pipeline.records import Message, Record


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a trajectory. ``texts``: index of each message in it -> squeezed text that a quote may come from."""

    text: str
    texts: dict[int, str]
    number: int
    total: int


def _pieces(message: Message, limit: int) -> list[str]:
    """The message's text in pieces of at most ``limit`` characters, each under its header."""
    text = message.text()
    parts = [text[i : i + limit] for i in range(0, len(text), limit)] or [""]
    if len(parts) == 1:
        return [f"[{message.index}] {message.role}: {parts[0]}"]
    return [f"[{message.index}] {message.role} (part {n} of {len(parts)}): {p}" for n, p in enumerate(parts, 1)]


def chunks(record: Record, limit: int) -> list[Chunk]:
    """The whole trajectory in chunks of about ``limit`` characters.

    A message longer than half a chunk is split; a message is never split otherwise.
    """
    packed: list[list[tuple[Message, str]]] = [[]]
    size = 0
    for message in record.messages:
        for piece in _pieces(message, max(1, limit // 2)):
            if packed[-1] and size + len(piece) > limit:
                packed.append([])
                size = 0
            packed[-1].append((message, piece))
            size += len(piece) + 1
    return [
        Chunk(
            text="\n".join(piece for _, piece in group),
            texts={m.index: squeeze(m.text()) for m, _ in group},
            number=n,
            total=len(packed),
        )
        for n, group in enumerate(packed, 1)
    ]
