"""Copies of the good environment of the fixtures with something changed in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

GOOD = Path(__file__).resolve().parent / "fixtures" / "environments" / "capability_ledger_game.py"
Change = Callable[..., Path]


def changed_in(folder: Path) -> Change:
    """A function of (old text, new text) pairs, each found exactly once, that writes the changed copy to ``folder``."""

    def change(*replacements: tuple[str, str]) -> Path:
        source = GOOD.read_text()
        for old, new in replacements:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        file = folder / GOOD.name
        file.write_text(source)
        return file

    return change
