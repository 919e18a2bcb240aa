"""Scenario files and model output: the schema, strict parsing, and what can be seen without running anything."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from stage2_helpers import FIELDS, MODULE, TESTS, scenario

from pipeline.files import InputError
from pipeline.scenarios import (
    EditError,
    apply_edit,
    edits_in,
    leaks,
    load_scenarios,
    parse_scenario,
    save_scenarios,
    scenario_path,
    static_problems,
)
from tool_calls import parse_turn

CAPABILITIES = ("deep_call_graph_traversal", "semantic_logic_precision")


def test_the_helper_scenario_has_no_static_problem() -> None:
    assert static_problems(scenario()) == []


def test_target_test_with_and_without_file() -> None:
    assert scenario().target_test == scenario(target_test="test_target").target_test == "test_target"
    assert scenario().is_target("test_target") and scenario().is_target("test_target[3]")
    assert not scenario().is_target("test_target_of_another")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"module_code": "def f(:\n"}, "module_code does not parse"),
        ({"test_code": "def f(:\n"}, "test_code does not parse"),
        ({"module_code": "import numpy\n" + MODULE}, "imports numpy"),
        ({"test_code": TESTS + "\nimport requests\n"}, "imports requests"),
        ({"test_code": "\n\n".join(TESTS.split("\n\n")[:8])}, "expected at least 10"),
        ({"target_test": "test_absent"}, "no test of test_code"),
        ({"test_code": TESTS.replace("test_zero", "test_guard_1")}, "defines a test twice"),
        ({"test_code": TESTS.replace("from fees import", "from math import")}, "does not import fees"),
        ({"oracle_search": "    rate = 7"}, "occurs 0 times"),
        ({"oracle_search": "return"}, "occurs 3 times"),
        ({"oracle_replace": "    rate = 2"}, "are equal"),
        ({"oracle_replace": "    rate = ("}, "does not parse"),
        ({"naive_search": "nowhere"}, "naive_search: the search text"),
        ({"naive_search": "    rate = 2", "naive_replace": "    rate = 3"}, "the naive edit is the oracle's"),
        (
            {"oracle_replace": "    rate = 1 + 1 + 1", "pr_description": "Use `rate = 1 + 1 + 1`."},
            "contains the answer",
        ),
        ({"oracle_replace": "    rate = 1 + 1 + 1", "hint_body": "try rate=1+1+1"}, "hint_body contains the answer"),
        ({"pr_description": "test_target fails"}, "names the target test"),
        ({"module_code": MODULE.replace("rate = 2", "rate = 2  # BUG: should be 3")}, "points at the fault"),
    ],
)
def test_static_problems(changes: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in static_problems(scenario(**changes))), static_problems(
        scenario(**changes)
    )


def test_short_lines_are_no_leak() -> None:
    assert leaks(scenario(oracle_replace="    rate = 3", pr_description="rate = 3 is meant")) == []


def test_apply_edit_wants_exactly_one_place() -> None:
    assert apply_edit("a b", "a", "c") == "c b"
    for code, search in (("a a", "a"), ("b", "a"), ("a", "")):
        with pytest.raises(EditError, match="exactly once"):
            apply_edit(code, search, "c")


def test_search_replace_blocks() -> None:
    text = (
        "First\n<<<<<<< SEARCH\na\n  b\n=======\nc\n>>>>>>> REPLACE\nthen\n<<<<<<< SEARCH\nd\n=======\n>>>>>>> REPLACE"
    )
    assert edits_in(text) == [("a\n  b", "c"), ("d", "")]
    assert edits_in("<<<<<<< SEARCH\na\n=======\nb") == []
    assert edits_in("<<<<<<< SEARCH\n=======\nb\n>>>>>>> REPLACE") == [("", "b")]
    assert edits_in("so: <<<<<<< SEARCH\na\n<<<<<<< SEARCH\nc\n=======\n\nb\n>>>>>>> REPLACE") == [("c", "\nb")]
    assert edits_in("x = 1  # =======\n=======\n>>>>>>> REPLACE") == []


@pytest.mark.parametrize(
    "text",
    [
        "<<<<<<< SEARCH\n=======\n",
        "<<<<<<< SEARCH\n",
        "=======\n",
        "<tool_call>\n",
        "<tool_call>",
        "<think>",
        "\n",
        "```json\n",
    ],
    ids=repr,
)
def test_answers_that_repeat_themselves_cost_no_time(text: str) -> None:
    """Degenerate models fill an answer with one mark; nested lazy patterns took minutes on that, in the event loop."""
    long = "<tool_call>" + text * 1500
    began = time.monotonic()
    assert edits_in(long) == [] and len(parse_turn(long).actions) == 0
    with pytest.raises(InputError):
        parse_scenario(long)
    assert leaks(scenario(module_code="x = 1  #" + "#" * 30_000)) == []
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = " + "-" * 30_000 + "1", "nested too deeply"),
        ("x = " + "+1" * 30_000, "nested too deeply"),
        ("x = 1\0", "null byte"),
        ("x = " + "9" * 5000, "does not parse"),
    ],
    ids=["minus", "plus", "null", "digits"],
)
@pytest.mark.parametrize("field", ["module_code", "test_code", "oracle_replace"])
def test_code_that_breaks_the_parser_is_a_problem_of_the_scenario(field: str, code: str, said: str) -> None:
    problems = static_problems(scenario(**{field: code}))
    assert any(said in p or (field == "oracle_replace" and "does not parse" in p) for p in problems), problems


def test_warnings_about_foreign_code_are_not_printed(recwarn: pytest.WarningsRecorder) -> None:
    assert static_problems(scenario(module_code=FIELDS["module_code"] + 'PATTERN = "\\d"\n')) == []
    assert len(recwarn) == 0


# --------------------------------------------------------------------------- parsing


def answer(**changes: Any) -> str:
    return json.dumps({**FIELDS, **changes})


@pytest.mark.parametrize(
    "wrap", ["{}", "```json\n{}\n```", "Here it is:\n```\n{}\n```\nDone.", "<think>a ``` b</think>\n{}"]
)
def test_parses_one_object(wrap: str) -> None:
    assert parse_scenario(wrap.replace("{}", answer())) == scenario()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON object"),
        ("I cannot do that.", "no JSON object"),
        ("[]", "no JSON object"),
        ('{"name": "x"', "not valid JSON"),
        ("```json\n{}\n```\n```json\n{}\n```", "2 fenced blocks"),
        ('{"name": "x_y_z"}', "Field required"),
        (answer(surplus=1), "surplus: Extra inputs are not permitted"),
        (answer(name="Not Snake"), "name"),
        (answer(module_filename="../fees.py"), "module_filename"),
        (answer(module_filename="/etc/fees.py"), "module_filename"),
        (answer(test_filename="fees_test.py"), "test_filename"),
        (answer(module_code=""), "module_code"),
        (answer(module_code=7), "module_code"),
        (answer(naive_replace=None), "belong together"),
        (answer(pass_rate=1.5), "pass_rate"),
        (answer().replace('"fee_rate"', "NaN"), "NaN"),
    ],
)
def test_refuses_everything_else(text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_scenario(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


# --------------------------------------------------------------------------- files


def test_files_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "c" / "scenarios_parsed.json"
    save_scenarios(path, [scenario(), scenario(name="other_name", pass_rate=0.3, n_rollouts=10, sampling={"t": 1.0})])
    assert load_scenarios(path)[1].pass_rate == 0.3 and load_scenarios(path)[0] == scenario()
    assert "hint_body" not in json.loads(path.read_text())[0]


@pytest.mark.parametrize("content", ["[]", "{}", '"x"', "[1]", json.dumps([FIELDS, FIELDS])])
def test_bad_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(content)
    with pytest.raises(InputError, match="scenario file"):
        load_scenarios(path)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_shipped_scenarios_are_well_formed(capability: str) -> None:
    scenarios = load_scenarios(scenario_path(capability))
    assert len(scenarios) == 5
    for one in scenarios:
        assert static_problems(one) == [] and one.naive_search is not None and one.hint_body and one.domain
