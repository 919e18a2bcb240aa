"""The document that says which test holds which promise names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT

NAMED = re.compile(r"(test_\w+\.py)::(test_\w+)")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/*/README.md"))]


@cache
def functions_in(file: Path) -> frozenset[str]:
    if not file.exists():
        return frozenset()
    tree = ast.parse(file.read_text())
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_are_named_exist(page: Path) -> None:
    named = NAMED.findall(page.read_text())
    missing = [f"{file}::{name}" for file, name in named if name not in functions_in(ROOT / "tests" / file)]
    assert missing == []


def test_every_promise_has_a_test() -> None:
    rows = [line for line in (ROOT / "docs/guarantees.md").read_text().splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith("| fault ")]
    assert len(promises) > 30
    assert [row for row in promises if len(row.split(" | ")) != 3 or not NAMED.search(row.split(" | ")[2])] == []
