"""The recorded split: a task that was mined for capabilities is never scored on.

The part of a task comes from a hash of its domain and id, so it does not depend on the order or on the other tasks,
and all trials of a task are in one part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Literal

from pipeline.command_line import natural_key, rational
from pipeline.files import InputError
from pipeline.records import read_summaries

Part = Literal["mine", "score"]


def parse_shares(text: str) -> Fraction:
    """``60:40`` -> the share of ``mine``, 3/5.

    Raises:
        InputError: not two positive numbers with a colon between.
    """
    parts = text.split(":")
    if len(parts) != 2:
        raise InputError(f"--split: expected MINE:SCORE such as 60:40, found {text!r}")
    mine, score = (rational(p) for p in parts)
    if mine <= 0 or score <= 0:
        raise InputError(f"--split: both parts must be > 0, found {text!r}")
    return mine / (mine + score)


def part_of(domain: str, task_id: str, mine: Fraction) -> Part:
    """``mine`` or ``score``: the first 8 bytes of SHA-256 of ``domain:task`` as a number in [0, 1)."""
    digest = hashlib.sha256(f"{domain}:{task_id}".encode()).digest()
    return "mine" if Fraction(int.from_bytes(digest[:8], "big"), 2**64) < mine else "score"


def refuse_mined(tasks: Iterable[tuple[str, str]], summaries: str | Path, *, allow: bool = False) -> None:
    """Stop a later stage from scoring on tasks that capabilities were mined from.

    Args:
        tasks: (domain, task id) pairs that are about to be scored.
        summaries: the summaries file of stage 1.
        allow: the user said so; then this does nothing.

    Raises:
        InputError: a task is in the ``mine`` part, or the summaries file has no split.
    """
    if allow:
        return
    parts = {(r.domain, r.task_id): r.split for r in read_summaries(summaries)}
    if None in parts.values():
        raise InputError(f"summaries {summaries}: has no split; write it with --split MINE:SCORE")
    mined = sorted((f"{d}:{t}" for d, t in tasks if parts.get((d, t)) == "mine"), key=natural_key)
    if mined:
        raise InputError(
            f"{len(mined)} tasks to score were mined for capabilities (first: {mined[0]}); "
            "score on the other part, or allow it explicitly"
        )
