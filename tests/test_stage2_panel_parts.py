"""Parts of the panel on their own: what the policies write, what the source says, how checks read the evidence."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from game_registry import Agent, Turn
from pipeline import panel_policies as policies
from pipeline.files import InputError
from pipeline.panel_checks import _schema_faults, _signature
from pipeline.panel_static import NETWORK_MODULES, PROCESS_MODULES, TRAINER_PACKAGES, read_facts
from tool_calls import ToolSchema, parse_turn

TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Book a seat.",
        "parameters": {
            "type": "object",
            "properties": {
                "row": {"type": "integer", "minimum": 1, "maximum": 9},
                "seat": {"enum": ["a", "b"]},
                "name": {"type": "string"},
                "extras": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
                "card": {"type": "object", "properties": {"no": {"type": "number"}}, "required": ["no"]},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["row", "seat", "name", "card"],
        },
    },
}
SECOND: ToolSchema = {
    "type": "function",
    "function": {"name": "leave", "parameters": {"type": "object", "properties": {}}},
}
PARAMETERS = TOOL["function"]["parameters"]


def said(agent: Agent, turn: Turn) -> str:
    async def ask() -> str:
        return (await agent(turn)).text

    return asyncio.run(ask())


def turn(*contents: str, index: int = 0, tools: tuple[ToolSchema, ...] = (TOOL, SECOND), **extra: Any) -> Turn:
    messages: list[dict[str, Any]] = [{"role": "user", "content": c} for c in contents]
    return Turn(index, [*messages, *extra.get("after", [])], [], list(tools))


# --------------------------------------------------------------------------- drawing


@settings(max_examples=200, deadline=None)
@given(st.integers(), st.lists(st.sampled_from(["7", "4821", "Ada", "x-1"]), min_size=1, max_size=4))
def test_random_arguments_are_valid(seed: int, pool: list[str]) -> None:
    arguments = policies.draw_arguments(PARAMETERS, random.Random(seed), pool)
    jsonschema.validate(arguments, PARAMETERS)


SCHEMAS = [
    {"type": "integer"},
    {"type": "integer", "minimum": 5, "maximum": 5},
    {"type": "number", "minimum": -1, "maximum": 1},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"]},
    {"const": 4},
    {"enum": [1, "b"]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1},
    {"oneOf": [{"type": "boolean"}, {"type": "integer"}]},
    {"type": "string"},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_draw_is_valid_for_each_kind(schema: dict[str, Any]) -> None:
    for seed in range(30):
        jsonschema.validate(policies.draw(schema, random.Random(seed), ["7", "x"]), schema)


def test_values_are_copied_from_the_conversation_half_of_the_time() -> None:
    drawn = [policies.draw({"type": "string"}, random.Random(seed), ["only-this"]) for seed in range(200)]
    assert 60 < drawn.count("only-this") < 140
    numbers = [policies.draw({"type": "integer"}, random.Random(seed), ["4821"]) for seed in range(200)]
    assert 60 < numbers.count(4821) < 140


def test_minimal_calls_are_the_plainest() -> None:
    call = policies.minimal_call(TOOL)
    assert call == {"name": "book", "arguments": {"row": 1, "seat": "a", "name": "", "card": {"no": 0}}}
    jsonschema.validate(call["arguments"], PARAMETERS)


# --------------------------------------------------------------------------- policies


def test_random_calls_parse_and_are_reproducible() -> None:
    texts = [said(policies.random_calls(3), turn("Ada 4821")) for _ in range(2)]
    assert texts[0] == texts[1]
    parsed = parse_turn(texts[0], [TOOL, SECOND])
    assert parsed.error is None and parsed.actions[0]["name"] in ("book", "leave")


def test_policies_without_tools_still_speak() -> None:
    assert said(policies.random_calls(0), turn("one two", tools=())) in ("one", "two")
    assert said(policies.spray(0), turn("one two", tools=())) == "one two"


def test_spray_calls_every_tool() -> None:
    parsed = parse_turn(said(policies.spray(1), turn("Ada 4821")), [TOOL, SECOND])
    assert {a["name"] for a in parsed.actions} == {"book", "leave"}


def test_repeat_last_repeats_a_call() -> None:
    call = {"function": {"name": "book", "arguments": '{"row": 2}'}}
    example = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    parsed = parse_turn(said(policies.repeat_last(0), turn("hi", after=example)))
    assert parsed.actions == ({"name": "book", "arguments": {"row": 2}},)
    words = [{"role": "assistant", "content": "Gate 7"}, {"role": "user", "content": "And now?"}]
    assert said(policies.repeat_last(0), turn("hi", after=words)) == "Gate 7"
    assert said(policies.repeat_last(0), turn("hi", "there")) == "there"
    assert said(policies.echo(0), turn("hi", after=words)) == "And now?"


def test_injection_uses_text_method_names_and_arguments() -> None:
    texts = [said(policies.injection(seed), turn("x", index=i)) for seed in range(12) for i in range(4)]
    calls = [a for t in texts for a in parse_turn(t).actions]
    names = {a["name"] for a in calls}
    assert "respond_to_user" in names and "book" in names and names & set(policies.GUESSED_CALLS)
    assert {t for t in texts if t in policies.INJECTIONS} == set(policies.INJECTIONS), "every text is tried"


def test_constant_script_plays_and_falls_silent() -> None:
    actions = [{"name": "leave", "arguments": {}}, {"name": "respond_to_user", "arguments": {"message": "Bye."}}]
    agent = policies.constant_script(actions)(0)
    assert [said(agent, turn("x")) for _ in range(3)] == ['{"name": "leave", "arguments": {}}', "Bye.", ""]


def test_perturbations_are_nearly_right_and_never_right() -> None:
    actions = [{"name": "book", "arguments": {"row": 1, "ok": True}}, {"name": "book", "arguments": {"name": "Ada"}}]
    other = [{"name": "book", "arguments": {"row": 5, "name": "Ada"}}]
    for seed in range(20):
        scripts = policies.perturbations(actions, other, random.Random(seed))
        assert len(scripts) == 4 and actions not in scripts
    assert actions[0]["arguments"] == {"row": 1, "ok": True}, "the oracle's own actions are not changed"
    assert policies.perturbations([], other, random.Random(0)) == []


# --------------------------------------------------------------------------- the source


def facts(tmp_path: Path, source: str) -> Any:
    file = tmp_path / "game.py"
    file.write_text(source)
    return read_facts([file])


@pytest.mark.parametrize(
    "source",
    [
        "import tau2",
        "import tau2.domains.airline as a",
        "from tau2.domains import airline",
        "def f():\n    import tau2",
        "__import__('tau2')",
        "import importlib\nimportlib.import_module('tau2.x')",
        "from importlib import import_module\nimport_module('tau2')",
    ],
)
def test_imports_are_found_in_every_form(tmp_path: Path, source: str) -> None:
    found = facts(tmp_path, source).imports_of(["tau2"])
    assert found and "game.py:" in str(found[0])


@pytest.mark.parametrize("source", ["import tau2x", "from . import tau2", "x = 'import tau2'", "import taut2"])
def test_what_only_looks_like_an_import(tmp_path: Path, source: str) -> None:
    assert facts(tmp_path, source).imports_of(["tau2"]) == []


@pytest.mark.parametrize(
    ("source", "group"),
    [
        ("import socket", NETWORK_MODULES),
        ("from urllib import request", NETWORK_MODULES),
        ("import urllib.request", NETWORK_MODULES),
        ("from http.client import HTTPConnection", NETWORK_MODULES),
        ("import subprocess", PROCESS_MODULES),
        ("import torch.nn", TRAINER_PACKAGES),
        ("from pipeline import files", TRAINER_PACKAGES),
    ],
)
def test_groups_of_modules(tmp_path: Path, source: str, group: Any) -> None:
    assert facts(tmp_path, source).imports_of(sorted(group))


def test_harmless_modules_are_in_no_group(tmp_path: Path) -> None:
    every = sorted({*NETWORK_MODULES, *PROCESS_MODULES, *TRAINER_PACKAGES})
    source = "import json, random, re, urllib.parse, datetime\nfrom urllib.parse import quote\nimport game_registry\n"
    assert facts(tmp_path, source).imports_of(every) == []


@pytest.mark.parametrize(
    "source",
    [
        "open('x')",
        "p.read_text()",
        "p.write_bytes(b'')",
        "os.remove('x')",
        "os.system('ls')",
        "exec('1')",
        "io.open('x')",
    ],
)
def test_file_calls_are_found(tmp_path: Path, source: str) -> None:
    assert len(facts(tmp_path, source).calls) == 1


@pytest.mark.parametrize(
    "source", ["account.open()", "self.fs.mkdir('x')", "text.replace('a', 'b')", "re.compile('x')"]
)
def test_methods_of_the_same_name_are_no_file_calls(tmp_path: Path, source: str) -> None:
    assert facts(tmp_path, source).calls == ()


def test_a_file_that_does_not_parse_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 1"):
        facts(tmp_path, "def f(:\n")


# --------------------------------------------------------------------------- schemas


def test_signatures_ignore_words_and_order() -> None:
    other = json.loads(json.dumps(TOOL))
    other["function"]["description"] = "Anything."
    other["function"]["parameters"]["required"].reverse()
    other["function"]["parameters"]["properties"]["row"]["description"] = "which row"
    assert _signature(other) == _signature(TOOL) == _signature(TOOL["function"])
    for change in ({"type": "number"}, {"type": "integer", "minimum": 2, "maximum": 9}):
        other["function"]["parameters"]["properties"]["row"] = change
        assert _signature(other) != _signature(TOOL)


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "a"),
        ({"type": "object", "required": "a"}, "required"),
        ({"type": "object", "properties": {}, "required": ["b"]}, "names no property: b"),
        (PARAMETERS, ""),
    ],
)
def test_schema_faults(parameters: dict[str, Any], fault: str) -> None:
    faults = _schema_faults(parameters)
    assert fault in faults[0] if fault else faults == []
