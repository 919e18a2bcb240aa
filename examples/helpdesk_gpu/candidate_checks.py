"""The checks module of the evidence run: helpdesk's four candidates and the four of ``other_candidates.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from other_candidates import GAMES, NAMES

from game_registry import Message
from games import helpdesk

CANDIDATES = [
    *helpdesk.CANDIDATES,
    *({"name": name, "description": text} for name, text in zip(NAMES, GAMES.values(), strict=True)),
]


def capability_checks(seed: int, messages: Sequence[Message]) -> dict[str, Any]:
    """Labels of one helpdesk episode. Its generator has no task with a comparison, a date, a place in a list, or a
    request in other words than a tool's name, so the four are not needed there, by construction."""
    return {**helpdesk.capability_checks(seed, messages), **dict.fromkeys(NAMES, "NA")}
