"""Shared by the tests of stage 1: run a command in this process, find the real data files."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from pipeline.files import run_cli

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"


@dataclasses.dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def run_main(main: Callable[[], int | None], *arguments: str | Path) -> Done:
    """A command's ``main`` as its script would run it, without the cost of a new interpreter."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    argv = [main.__module__, *map(str, arguments)]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_cli(main)
        except SystemExit as stop:
            code = stop.code
    assert isinstance(code, int)
    return Done(code, out.getvalue(), err.getvalue())
