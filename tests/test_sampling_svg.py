"""Charts of the reports: numbers land where they belong, and no name leaves the picture."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.svg import heat_map, interval_chart, line_chart, nice_ticks

LONG = "a_capability_with_a_rather_long_name"


def test_charts_place_values_where_they_belong() -> None:
    chart = interval_chart([("a", [("m", {"value": 0.0, "low": 0.0, "high": 0.5})])], "t")
    right = interval_chart([("a", [("m", {"value": 1.0, "low": 0.5, "high": 1.0})])], "t")
    x = [
        float(re.findall(r'<circle cx="([\d.]+)" cy="[\d.]+" r="4.5" fill="[^"]+"><title>', c)[0])
        for c in (chart, right)
    ]
    assert x[1] - x[0] == pytest.approx(440.0)
    lines = line_chart({"a": [(0, 0.0), (10, 1.0)]}, "t", "y")
    (x0, y0), (x1, y1) = [tuple(map(float, p.split(","))) for p in re.findall(r'points="([^"]+)"', lines)[0].split()]
    assert x1 - x0 == pytest.approx(560.0) and y0 - y1 == pytest.approx(220.0)
    shades = [float(v) for v in re.findall(r'fill-opacity="([\d.]+)"', heat_map([[0.0, 1.0]], ["a", "b"], ["0"], "t"))]
    assert shades == [0.03, 1.0] and not math.isnan(sum(shades))


@given(st.floats(-50, 50), st.floats(0.01, 100))
@settings(max_examples=60, deadline=None)
def test_ticks_are_round_and_inside(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span)
    assert 1 <= len(ticks) <= 12 and all(low - 1e-6 <= t <= low + span + 1e-6 for t in ticks)


def right_end(element: ElementTree.Element) -> float:
    """Where a text ends, at 6.6 px a letter (the page's font at its size)."""
    width = 6.6 * len(element.text or "")
    part = {"start": 1.0, "middle": 0.5, "end": 0.0}[element.attrib["text-anchor"]]
    return float(element.attrib["x"]) + part * width


@pytest.mark.parametrize(
    "picture",
    [
        line_chart({LONG: [(0, 0.0), (9, 1.0)], LONG + "_b": [(0, 0.5)]}, "t", "mean reward of the sampled groups"),
        heat_map([[0.2, 0.3, 0.5]], ["base", LONG, LONG + "_b"], ["0"], "t"),
    ],
)
def test_long_names_stay_whole_and_inside(picture: str) -> None:
    root = ElementTree.fromstring(picture)
    texts = [e for e in root.iter("text") if e.text]
    assert {LONG, LONG + "_b"} <= {e.text for e in texts}
    assert max(map(right_end, texts)) <= float(root.attrib["width"])
    centres = [float(e.attrib["x"]) for e in texts if e.attrib["text-anchor"] == "middle" and "capability" in e.text]
    assert all(b - a > 6.6 * len(LONG) for a, b in itertools.pairwise(centres)), "two names overlap"
