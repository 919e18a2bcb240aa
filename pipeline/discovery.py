"""Discovery by a model: failed and passed trajectories side by side, several batches, then one merge."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from typing import Any

from pipeline.chat_client import ChatClient
from pipeline.chunks import chunks
from pipeline.files import InputError
from pipeline.records import Record
from pipeline.templates import render

LOWEST = 5  # candidates, as the method has it
MAX_EXAMPLES = 4
NAME_PATTERN = "^[a-z]{2,14}(_[a-z]{2,14}){1,4}$"


@dataclasses.dataclass(frozen=True)
class DiscoverySettings:
    """``chunk_chars``: characters of trajectories in one request; ``batches``: requests before the merge."""

    n_candidates: int = 10
    batches: int = 4
    chunk_chars: int = 24_000
    max_tokens: int = 4096
    temperature: float = 0.7
    seed: int = 0
    benchmark: str = "general"


@dataclasses.dataclass(frozen=True)
class Shown:
    """A part of a trajectory as discovery shows it."""

    id: str
    outcome: str
    reason: str
    text: str
    number: int
    total: int


def schema(ids: Sequence[str], high: int) -> dict[str, Any]:
    """Candidates whose examples can only be ``ids``."""
    example = {
        "type": "object",
        "properties": {
            "task_id": {"type": "string", "enum": sorted(set(ids))},
            "note": {"type": "string", "minLength": 1, "maxLength": 160},
        },
        "required": ["task_id", "note"],
        "additionalProperties": False,
    }
    candidate = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": NAME_PATTERN},
            "description": {"type": "string", "minLength": 20, "maxLength": 600},
            "examples": {"type": "array", "items": example, "minItems": 1, "maxItems": MAX_EXAMPLES},
        },
        "required": ["name", "description", "examples"],
        "additionalProperties": False,
    }
    listed = {"type": "array", "items": candidate, "minItems": min(LOWEST, high), "maxItems": high}
    return {
        "type": "object",
        "properties": {"candidates": listed},
        "required": ["candidates"],
        "additionalProperties": False,
    }


def batches(records: Iterable[Record], settings: DiscoverySettings) -> list[list[Shown]]:
    """Failed and passed trajectories in turn, in random order, packed into requests; whole, in parts where they are
    long.

    Raises:
        InputError: one side is empty: there is nothing to contrast.
    """
    rng = random.Random(settings.seed)
    sides: dict[str, list[Record]] = {"failed": [], "passed": []}
    for record in records:
        sides[str(record.outcome)].append(record)
    for side, members in sides.items():
        if not members:
            raise InputError(f"discovery: there is no {side} trajectory to contrast with; add results")
        rng.shuffle(members)
    longest = max(map(len, sides.values()))
    turns = [members[n] for n in range(longest) for members in sides.values() if n < len(members)]
    packed: list[list[Shown]] = [[]]
    size = 0
    for record in turns:
        for chunk in chunks(record, settings.chunk_chars):
            if packed[-1] and size + len(chunk.text) > settings.chunk_chars:
                if len(packed) == settings.batches:
                    return packed
                packed.append([])
                size = 0
            packed[-1].append(
                Shown(record.id, str(record.outcome), record.reason, chunk.text, chunk.number, chunk.total)
            )
            size += len(chunk.text)
    return packed


async def discover(
    client: ChatClient, records: Sequence[Record], settings: DiscoverySettings
) -> tuple[dict[str, Any], int]:
    """Candidates in the published form, and how many trajectories were shown.

    Raises:
        ServerError: the endpoint failed.
    """
    system, _ = render("general/partials/api_discover_system.md", {"benchmark": settings.benchmark})
    high = settings.n_candidates
    limits = {"low": min(LOWEST, high), "high": high}
    proposals: list[dict[str, Any]] = []
    packed = batches(records, settings)
    for n, batch in enumerate(packed):
        user, _ = render("general/partials/api_discover.md", {"trajectories": batch} | limits)
        answer = await _ask(client, system, user, [s.id for s in batch], settings, n)
        proposals += answer["candidates"]
    if len(packed) > 1:
        user, _ = render("general/partials/api_merge.md", {"proposals": proposals} | limits)
        ids = [e["task_id"] for p in proposals for e in p["examples"]]
        proposals = (await _ask(client, system, user, ids, settings, len(packed)))["candidates"]
    rewards = {r.id: r.reward for r in records}
    return _published(proposals, rewards), len({s.id for batch in packed for s in batch})


async def _ask(
    client: ChatClient, system: str, user: str, ids: Sequence[str], settings: DiscoverySettings, n: int
) -> Any:
    answer = await client.ask(
        system,
        user,
        schema(ids, settings.n_candidates),
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        seed=settings.seed + 1000 * n,
    )
    return answer.data


def _published(proposals: Sequence[dict[str, Any]], rewards: dict[str, float | None]) -> dict[str, Any]:
    """The first of each name, with rewards beside the examples."""
    found: dict[str, dict[str, Any]] = {}
    for proposal in proposals:
        examples = [
            {"task_id": e["task_id"], "reward": rewards[e["task_id"]], "note": e["note"]} for e in proposal["examples"]
        ]
        described = {"name": proposal["name"], "description": proposal["description"]}
        found.setdefault(proposal["name"], described | {"example_trajectories": examples})
    return {"schema_version": 1, "candidates": list(found.values())}
