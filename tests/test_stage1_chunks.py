"""What happens to an answer before it is a label: chunks, quotes, merging; and what discovery is shown."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.chunks import Chunk, chunks
from pipeline.discovery import NAME_PATTERN, DiscoverySettings, batches, schema
from pipeline.files import InputError
from pipeline.labels import NAME
from pipeline.model_labeler import Cited, Doubts, merge, verify
from pipeline.model_labeler import schema as label_schema
from pipeline.records import Message, Record


def record(*texts: str) -> Record:
    messages = tuple(Message(index=i, role="assistant", content=t) for i, t in enumerate(texts))
    return Record(id="x", benchmark="b", domain="d", task_id="1", trial=0, outcome="failed", messages=messages)


def test_quotes_are_verified_moved_or_make_the_label_present() -> None:
    (chunk,) = chunks(record("alpha beta", "gamma\n delta"), 1000)
    given = {
        "right_one": {"label": "LACKING", "message": 1, "quote": "gamma  delta"},
        "moved_one": {"label": "LACKING", "message": 0, "quote": "gamma delta"},
        "unasked_one": {"label": "NA", "message": 0, "quote": "nonsense"},
        "weak_one": {"label": "PRESENT", "message": 0, "quote": "invented"},
    }
    found, doubts = verify(given, chunk, final=False)
    assert found == {
        "right_one": ("LACKING", 1, "gamma  delta"),
        "moved_one": ("LACKING", 1, "gamma delta"),
        "unasked_one": ("NA", None, ""),
        "weak_one": ("PRESENT", None, ""),
    }
    assert (doubts.moved, doubts.downgraded, doubts.unsupported) == (1, 0, 1)
    lie = {"lie_one": {"label": "LACKING", "message": 0, "quote": "invented"}}
    assert verify(lie, chunk, final=False)[0] is None
    found, doubts = verify(lie, chunk, final=True)
    assert found == {"lie_one": ("PRESENT", None, "")} and doubts.downgraded == 1
    empty = {"lie_one": {"label": "LACKING", "message": 0, "quote": "  "}}
    assert verify(empty, chunk, final=True)[0] == {"lie_one": ("PRESENT", None, "")}


@given(
    st.lists(
        st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\n"), max_size=60), min_size=1, max_size=8
    ),
    st.integers(10, 80),
)
@settings(max_examples=150, deadline=None)
def test_chunks_lose_nothing_and_fit(texts: list[str], limit: int) -> None:
    found = chunks(record(*texts), limit)
    assert [c.number for c in found] == list(range(1, len(found) + 1)) and {c.total for c in found} == {len(found)}
    header = re.compile(r"^\[(\d+)\] assistant(?: \(part \d+ of \d+\))?: ", re.MULTILINE)
    pieces: dict[int, str] = {}
    for chunk in found:
        places = list(header.finditer(chunk.text))
        ends = [p.start() - 1 for p in places[1:]] + [len(chunk.text)]
        for place, end in zip(places, ends, strict=True):
            index = int(place.group(1))
            pieces[index] = pieces.get(index, "") + chunk.text[place.end() : end]
            assert index in chunk.texts
        assert len(chunk.text) <= limit + 40 * len(places)
    if not any(header.search(t) for t in texts):
        assert pieces == dict(enumerate(texts))


def test_merge_keeps_the_strongest_label_with_its_evidence() -> None:
    merged = merge(
        [
            {"a_b": ("NA", None, ""), "c_d": ("PRESENT", 1, "x")},
            {"a_b": ("PRESENT", 5, "y"), "c_d": ("LACKING", 6, "z")},
            {"a_b": ("NA", None, ""), "c_d": ("PRESENT", 9, "w")},
        ]
    )
    assert merged == {"a_b": ("PRESENT", 5, "y"), "c_d": ("LACKING", 6, "z")}


def test_discovery_alternates_outcomes_and_needs_both() -> None:
    records = [
        record("text " * 5).model_copy(update={"id": f"t:{n}", "outcome": "failed" if n < 6 else "passed"})
        for n in range(9)
    ]
    packed = batches(records, DiscoverySettings(batches=3, chunk_chars=120))
    assert 1 < len(packed) <= 3
    assert [s.outcome for s in packed[0]][:2] == ["failed", "passed"]
    with pytest.raises(InputError, match="no passed"):
        batches(records[:6], DiscoverySettings())


def test_one_message_longer_than_a_chunk_is_split_and_still_quotable() -> None:
    text = " ".join(f"word{i}" for i in range(200))
    found = chunks(record("short", text, "end"), 300)
    assert len(found) > 3
    assert all(c.texts[1] == text for c in found if 1 in c.texts)  # the whole message may be quoted from any part
    assert sum("(part " in c.text for c in found) == len([c for c in found if 1 in c.texts])


def test_calls_are_shown_and_quotable() -> None:
    message = {"index": 4, "role": "assistant", "content": "", "calls": [{"name": "ship", "arguments": '{"id": 3}'}]}
    one = record("x").model_copy(update={"messages": (Message.model_validate(message),)})
    (chunk,) = chunks(one, 1000)
    assert chunk.text == '[4] assistant: call ship({"id": 3})'
    answer = {"a_skill": {"label": "PRESENT", "message": 4, "quote": 'ship({"id": 3})'}}
    assert verify(answer, chunk, final=False)[0] == {"a_skill": ("PRESENT", 4, 'ship({"id": 3})')}


LABELS = st.sampled_from(["NA", "PRESENT", "LACKING"])


@given(LABELS, st.integers(0, 2), st.text(alphabet="ab \n", max_size=4), st.booleans())
@settings(max_examples=200, deadline=None)
def test_no_lacking_without_a_true_quote_survives(label: Any, message: int, quote: str, final: bool) -> None:
    chunk = Chunk("", {0: "aa bb", 1: "ab", 2: ""}, 1, 1)
    found, doubts = verify({"a_skill": {"label": label, "message": message, "quote": quote}}, chunk, final=final)
    if found is None:
        assert label == "LACKING" and not final
        return
    kept, index, words = found["a_skill"]
    if kept == "LACKING":
        assert index is not None and " ".join(words.split()) in chunk.texts[index] and words.strip()
    if index is None:
        assert words == ""
    assert doubts.downgraded == (label == "LACKING" and kept == "PRESENT")


CITED = st.tuples(LABELS, st.one_of(st.none(), st.integers(0, 9)), st.text(max_size=3))


@given(st.lists(CITED, min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_merge_is_the_maximum_and_the_first_of_equals(parts: list[Cited]) -> None:
    order = ["NA", "PRESENT", "LACKING"]
    (merged,) = merge([{"a_skill": p} for p in parts]).values()
    best = max(order.index(p[0]) for p in parts)
    assert merged == next(p for p in parts if order.index(p[0]) == best)


def test_doubts_add_up() -> None:
    total = Doubts(moved=1)
    total.add(Doubts(moved=2, downgraded=3, unsupported=4))
    assert (total.moved, total.downgraded, total.unsupported) == (3, 3, 4)


def test_schemas_allow_only_what_was_shown() -> None:
    labels = label_schema(["a_skill"], [5, 2])
    assert labels["properties"]["a_skill"]["properties"]["message"]["enum"] == [2, 5]
    assert labels["required"] == ["a_skill"] and labels["additionalProperties"] is False
    proposed = schema(["t:2", "t:1", "t:1"], 10)["properties"]["candidates"]
    assert (proposed["minItems"], proposed["maxItems"]) == (5, 10)
    assert proposed["items"]["properties"]["examples"]["items"]["properties"]["task_id"]["enum"] == ["t:1", "t:2"]
    assert schema(["t:1"], 2)["properties"]["candidates"]["minItems"] == 2


@given(st.from_regex(re.compile(NAME_PATTERN), fullmatch=True))
@settings(max_examples=50, deadline=None)
def test_names_that_the_model_may_give_are_names_that_files_may_have(name: str) -> None:
    if not name.endswith("\n"):  # `$` of regular expressions
        assert NAME.fullmatch(name)


def test_discovery_shows_long_trajectories_in_parts_and_is_reproducible() -> None:
    records = [
        record("text " * 100).model_copy(update={"id": f"t:{n}", "outcome": "failed" if n % 2 else "passed"})
        for n in range(4)
    ]
    options = DiscoverySettings(batches=50, chunk_chars=200, seed=3)
    packed = batches(records, options)
    assert packed == batches(records, options)
    assert packed != batches(records, DiscoverySettings(batches=50, chunk_chars=200, seed=4))
    parts = [s for batch in packed for s in batch]
    assert {s.id for s in parts} == {r.id for r in records}  # with enough batches all are shown, whole
    for one in records:
        own = [s for s in parts if s.id == one.id]
        assert [s.number for s in own] == list(range(1, own[0].total + 1)) and own[0].total > 1
