"""Whatever the file holds, a reader ends with records or with an ``InputError``: never with another exception.

``python benchmarks/bench_stage1.py`` runs the same property on more than 10,000 cases.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stage1_fuzzing import FORMATS, documents, mutated_bytes, read_anything

from pipeline.readers.sniff import FAMILIES

RELAXED = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(tempfile.mkdtemp())


@pytest.mark.parametrize("name", FORMATS)
@RELAXED
@given(data=st.data())
def test_documents_of_each_shape_with_anything_inside(folder: Path, name: str, data: st.DataObject) -> None:
    document = data.draw(documents(name))
    read_anything(folder, name, document)


@pytest.mark.parametrize("name", FORMATS)
@RELAXED
@given(data=st.data())
def test_damaged_bytes_of_each_format(folder: Path, name: str, data: st.DataObject) -> None:
    read_anything(folder, name, data.draw(mutated_bytes(name)))


def test_every_family_is_fuzzed() -> None:
    assert {f for family in FAMILIES.values() for f in family} <= set(FORMATS)


def test_the_fuzzer_reaches_records_too(folder: Path) -> None:
    from stage1_fuzzing import valid_document

    for name in FORMATS:
        assert read_anything(folder, name, valid_document(name)) > 0, name
