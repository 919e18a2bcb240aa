"""SWE scenarios: a module with a fault, its tests, and the edit that repairs it.

A scenario file is a JSON array of ``Scenario`` (``pipeline/swebench/<capability>/scenarios_parsed.json``). What a file
or a model says is checked here without running anything; ``pipeline.swe_grading`` runs it.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pipeline.files import InputError, PathLike, check, parse_json, read_json, write_json

MIN_TESTS = 10
MIN_GUARDS = 8
LEAK_CHARS = 12  # a line of the answer shorter than this is no leak: `return x`, `else:`

Text = Annotated[str, Field(min_length=1)]


class Scenario(BaseModel):
    """One scenario. The names are the published ones; those with a default were added, or are optional."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{2,80}$")]
    module_filename: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]*\.py$")]
    module_code: Text
    test_filename: Annotated[str, Field(pattern=r"^test_[a-z0-9_]*\.py$")]
    test_code: Text
    target_test: Text
    pr_description: Text
    oracle_search: Text
    oracle_replace: str
    naive_fix_description: Text
    hint_body: str | None = None
    naive_search: str | None = None
    naive_replace: str | None = None
    domain: str = ""
    pass_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    n_rollouts: Annotated[int, Field(ge=0)] | None = None
    sampling: dict[str, Any] | None = None

    @field_validator("target_test")
    @classmethod
    def _without_file(cls, value: str) -> str:
        return value.rpartition(".py::")[2]

    @model_validator(mode="after")
    def _naive_edit_is_whole(self) -> Scenario:
        if (self.naive_search is None) != (self.naive_replace is None):
            raise ValueError("naive_search and naive_replace belong together; give both or none")
        return self

    @property
    def module_name(self) -> str:
        return self.module_filename.removesuffix(".py")

    def is_target(self, node: str) -> bool:
        """Whether a pytest node (``test_x``, ``test_x[3]``, ``TestA::test_x``) is the target or a case of it."""
        return node == self.target_test or node.startswith(f"{self.target_test}[")


class EditError(ValueError):
    """A SEARCH text that does not occur exactly once; the text is what the agent is shown."""


def apply_edit(code: str, search: str, replace: str) -> str:
    """``code`` with ``search`` replaced.

    Raises:
        EditError: ``search`` is empty or does not occur exactly once.
    """
    count = code.count(search) if search else 0
    if count != 1:
        raise EditError(f"the search text must occur exactly once in the file, it occurs {count} times")
    return code.replace(search, replace)


_SEARCH_MARK, _MIDDLE_MARK = re.compile(r"<{5,9} SEARCH$"), re.compile(r"={5,9}$")
_REPLACE_MARK = re.compile(r">{5,9} REPLACE")


def edits_in(text: str) -> list[tuple[str, str]]:
    """The SEARCH/REPLACE blocks of an answer, in order. One pass over its lines: answers that repeat themselves for
    thousands of tokens are common, and a search for the whole form takes minutes on them."""
    edits: list[tuple[str, str]] = []
    search: list[str] | None = None  # lines since the mark SEARCH
    replace: list[str] | None = None  # lines since the mark in the middle
    for line in text.split("\n"):
        bare = line.rstrip()
        if len(bare) < 60 and _SEARCH_MARK.search(bare):
            search, replace = [], None
        elif search is None:
            continue
        elif replace is None:
            if _MIDDLE_MARK.match(bare):
                replace = []
            else:
                search.append(line)
        elif _REPLACE_MARK.match(bare):
            edits.append(("\n".join(search), "\n".join(replace)))
            search = None
        else:
            replace.append(line)
    return edits


# --------------------------------------------------------------------------- checks without running


def static_problems(scenario: Scenario) -> list[str]:
    """Everything wrong with a scenario that can be seen without running it, one sentence each."""
    problems = []
    for what, code in (("module_code", scenario.module_code), ("test_code", scenario.test_code)):
        try:
            tree = parse_code(code)
        except SyntaxError as error:
            problems.append(f"{what} does not parse: line {error.lineno}: {error.msg}")
            continue
        allowed = set(sys.stdlib_module_names) | (
            {"pytest", scenario.module_name} if what == "test_code" else set[str]()
        )
        foreign = sorted(_imports(tree) - allowed)
        if foreign:
            problems.append(f"{what} imports {', '.join(foreign)}; only the standard library is there")
    if not problems:
        problems += _test_problems(scenario)
    problems += _edit_problems(scenario, "oracle", scenario.oracle_search, scenario.oracle_replace)
    if scenario.naive_search is not None and scenario.naive_replace is not None:
        problems += _edit_problems(scenario, "naive", scenario.naive_search, scenario.naive_replace)
        if (scenario.naive_search, scenario.naive_replace) == (scenario.oracle_search, scenario.oracle_replace):
            problems.append("the naive edit is the oracle's")
    return problems + leaks(scenario)


def parse_code(code: str) -> ast.Module:
    """The syntax tree.

    Raises:
        SyntaxError: no Python, or so deeply nested that the parser gives up.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in text; not ours to print
        try:
            return ast.parse(code)
        except (RecursionError, MemoryError):
            raise SyntaxError("it is nested too deeply", ("", 1, 0, "")) from None
        except ValueError as error:  # null bytes, before Python 3.12
            raise SyntaxError(str(error), ("", 1, 0, "")) from None


def _imports(tree: ast.AST) -> set[str]:
    out = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            out |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            out.add((node.module or ".").split(".")[0] if not node.level else ".")
    return out


def _test_problems(scenario: Scenario) -> list[str]:
    tree = parse_code(scenario.test_code)
    names = [n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
    problems = []
    if len(names) < MIN_TESTS:
        problems.append(f"test_code has {len(names)} tests; expected at least {MIN_TESTS}")
    if scenario.target_test.rpartition("::")[2].partition("[")[0] not in names:
        problems.append(f"target_test {scenario.target_test} is no test of test_code")
    if len(set(names)) != len(names) and "class " not in scenario.test_code:
        problems.append("test_code defines a test twice; the first would never run")
    if scenario.module_name not in _imports(tree):
        problems.append(f"test_code does not import {scenario.module_name}")
    return problems


def _edit_problems(scenario: Scenario, which: str, search: str, replace: str) -> list[str]:
    if search == replace:
        return [f"{which}_search and {which}_replace are equal"]
    try:
        parse_code(apply_edit(scenario.module_code, search, replace))
    except EditError as error:
        return [f"{which}_search: {error}"]
    except SyntaxError as error:
        return [f"the module after the {which} edit does not parse: line {error.lineno}: {error.msg}"]
    return []


def leaks(scenario: Scenario) -> list[str]:
    """Where the texts that the agent sees give the answer away."""
    old = {line.strip() for line in scenario.module_code.splitlines()}
    answer = [line.strip() for line in scenario.oracle_replace.splitlines()]
    new_lines = [line for line in answer if len(line) >= LEAK_CHARS and line not in old]
    problems = []
    for field in ("pr_description", "hint_body"):
        shown = _plain(getattr(scenario, field) or "")
        problems += [f"{field} contains the answer's line {line!r}" for line in new_lines if _plain(line) in shown]
        if scenario.target_test in (getattr(scenario, field) or ""):
            problems.append(f"{field} names the target test")
    for number, line in enumerate(scenario.module_code.splitlines(), 1):
        comment = line.partition("#")[2]
        if re.search(r"\b(bug|fixme|wrong|incorrect|broken|should be)\b", comment, re.IGNORECASE):
            problems.append(f"module_code line {number}: a comment points at the fault")
    return problems


def _plain(text: str) -> str:
    return re.sub(r"[\s`]+", "", text)


# --------------------------------------------------------------------------- files and model output


def load_scenarios(path: PathLike) -> list[Scenario]:
    """The scenarios of a file.

    Raises:
        InputError: not an array of scenarios, or two of one name; the first fault is named.
    """
    data = read_json(path, "scenario file")
    if not isinstance(data, list) or not data:
        raise InputError(f"scenario file {path}: expected a non-empty array, found {str(data)[:40]!r}")
    scenarios = [check(Scenario, raw, f"scenario file {path}: [{i}]") for i, raw in enumerate(data)]
    names = [s.name for s in scenarios]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise InputError(f"scenario file {path}: {twice} appears twice; every name must be there once")
    return scenarios


def save_scenarios(path: PathLike, scenarios: Sequence[Scenario]) -> None:
    """Write a scenario file; fields that are None are left out."""
    write_json(path, [s.model_dump(exclude_none=True) for s in scenarios])


def scenario_path(capability: str, root: PathLike | None = None) -> Path:
    """``pipeline/swebench/<capability>/scenarios_parsed.json``."""
    folder = Path(root) if root is not None else Path(__file__).resolve().parent / "swebench"
    return folder / capability / "scenarios_parsed.json"


def parse_scenario(text: str) -> Scenario:
    """The scenario in a model's answer: one JSON object, bare or in one fenced block, after any reasoning.

    Raises:
        InputError: no object, more than one block, not JSON, an unknown or missing key.
    """
    visible = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    blocks = re.findall(r"^```(?:json)?[ \t]*\n(.*?)^```[ \t]*$", visible, flags=re.DOTALL | re.MULTILINE)
    if len(blocks) > 1:
        raise InputError(f"the answer has {len(blocks)} fenced blocks; expected one JSON object")
    raw = (blocks[0] if blocks else visible).strip()
    if not raw.startswith("{"):
        raise InputError(f"the answer holds no JSON object; it starts with {raw[:40]!r}")
    return check(Scenario, parse_json(raw, "the answer"), "the answer")
