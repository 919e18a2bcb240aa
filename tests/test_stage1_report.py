"""The selection report: self-contained, complete, escaped, linked to the trajectories, of files that match."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from stage1_helpers import SHARED, Done, run_main

from pipeline import _summarize, aggregate_capabilities, report
from pipeline.labels import run_file
from pipeline.svg_plots import Point, bars, coverage_gap, heat_map, shade

GOLDEN = SHARED / "golden_labels"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"{GOLDEN} is not there")
EVIL = '<script>alert("x")</script>'


class Page(HTMLParser):
    """Ids, links, outside references and the nesting of a page."""

    VOID = frozenset({"meta", "br", "rect", "line", "circle", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.outside: list[str] = []
        self.scripts = 0
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {k: v or "" for k, v in attrs}
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if tag == "a" else []
        self.outside += [v for k, v in values.items() if k in ("src", "href") and not v.startswith("#")]
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag, tag


@pytest.fixture
def golden_report(tmp_path: Path) -> tuple[str, dict[str, Any]]:
    export = tmp_path / "s.json"
    arguments = ["--runs", f"{GOLDEN}/run_*.json", "--export", export, "--resamples", "100"]
    assert run_main(aggregate_capabilities.main, *arguments).returncode == 0
    done = run_main(report.main, "--selection", export, "--output", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    return (tmp_path / "r.html").read_text(), json.loads((tmp_path / "r.json").read_text())


@needs_golden
def test_the_golden_report_says_what_the_method_says(golden_report: tuple[str, dict[str, Any]]) -> None:
    text, data = golden_report
    assert "6 of 4860 labels on passed trajectories are LACKING" in text
    assert "110 failed and 54 passed" in text
    assert text.count('class="selected"') == 6
    for candidate in data["candidates"]:
        assert candidate["skill"] in text
    assert len(data["candidates"]) == 9 and len(data["votes"]["ids"]) == 110
    assert "conditional_instruction_following" in text  # what neighbouring thresholds would add


@needs_golden
def test_the_page_is_self_contained_and_well_formed(golden_report: tuple[str, dict[str, Any]]) -> None:
    page = Page(golden_report[0])
    assert not page.outside and page.scripts == 1 and not page.open
    plots = re.findall(r"<svg.*?</svg>", golden_report[0], re.DOTALL)
    assert len(plots) == 5
    for plot in plots:
        ElementTree.fromstring(plot)
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", " ".join(plots).lower())


@pytest.fixture
def cited(tmp_path: Path) -> Path:
    """A selection with quotes, some of them hostile, in ``tmp_path``."""
    entries, outcome = [], {}
    for task in range(12):
        failed = task < 6
        text = f"{EVIL} task {task}" if task == 0 else f"answer {task}"
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        reward = {"reward": 0.0 if failed else 1.0}
        entries.append({"task_id": str(task), "sample_idx": 0, "reward_info": reward, "messages": messages})
        outcome[f"desk:{task}"] = failed
    (tmp_path / "rollouts.json").write_text(json.dumps({"info": {"env": "desk"}, "simulations": entries}))
    arguments = ["--input", tmp_path / "rollouts.json", "--output", tmp_path / "summaries.json"]
    assert run_main(_summarize.main, *arguments).returncode == 0
    labels = {"a_skill": {i: "LACKING" if f else "PRESENT" for i, f in outcome.items()}}
    quotes = {i: EVIL if i == "desk:0" else f"answer {i[5:]}" for i in outcome}
    evidence = {"a_skill": {i: {"message": 1, "quote": quote} for i, quote in quotes.items()}}
    (tmp_path / "run_01.json").write_text(json.dumps(run_file(1, outcome, labels, evidence=evidence)))
    return tmp_path


def select(folder: Path) -> None:
    arguments = ["--runs", folder / "run_01.json", "--k", "1", "--export", folder / "s.json", "--resamples", "50"]
    done = run_main(aggregate_capabilities.main, *arguments, "--summaries", folder / "summaries.json")
    assert done.returncode == 0, done.stderr


def write_report(folder: Path, *more: str | Path) -> Done:
    return run_main(report.main, "--selection", folder / "s.json", "--output", folder / "r.html", *more)


def test_quotes_link_to_messages_of_embedded_trajectories(cited: Path) -> None:
    select(cited)
    assert write_report(cited).returncode == 0
    page = Page((cited / "r.html").read_text())
    assert len(page.links) == 8 and set(page.links) <= {f"#{i}" for i in page.ids}
    assert len(page.ids) == len(set(page.ids))
    data = json.loads((cited / "r.json").read_text())
    assert [q["outcome"] for q in data["quotes"]["a_skill"]] == ["failed"] * 4 + ["passed"] * 4
    assert set(data["trajectories"]) == {q["id"] for q in data["quotes"]["a_skill"]}


def test_foreign_text_is_escaped(cited: Path) -> None:
    select(cited)
    assert write_report(cited).returncode == 0
    text = (cited / "r.html").read_text()
    assert EVIL not in text and "&lt;script&gt;" in text
    assert Page(text).scripts == 1


def test_files_that_do_not_match_are_refused(cited: Path) -> None:
    select(cited)
    run = json.loads((cited / "run_01.json").read_text())
    (cited / "s.json").write_text("[]")
    assert "do not belong together" in write_report(cited).stderr
    select(cited)
    other = {i: True for i in ("desk:0", "desk:1")}
    (cited / "other.json").write_text(json.dumps(run_file(1, other, {"a_skill": dict.fromkeys(other, "NA")})))
    done = write_report(cited, "--runs", cited / "other.json")
    assert done.returncode == 2 and "are not those of" in done.stderr
    (cited / "run_01.json").unlink()
    assert write_report(cited).returncode == 2
    (cited / "moved.json").write_text(json.dumps(run))
    assert write_report(cited, "--runs", cited / "moved.json").returncode == 0


def test_a_missing_selection_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
    done = run_main(report.main, "--selection", tmp_path / "no.json", "--output", tmp_path / "r.html")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------- plots


def test_points_lie_where_they_should() -> None:
    points = [
        Point("left_low", 0.1, 0.1, (0.1, 0.1), (0.1, 0.1), False),
        Point("right_high", 0.4, 0.9, (0.3, 0.5), (0.8, 1.0), True),
    ]
    circles = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', coverage_gap(points, 0.1, 0.2))
    (x0, y0), (x1, y1) = [(float(x), float(y)) for x, y in circles]
    assert x1 > x0 and y1 < y0  # SVG's y grows downwards
    ElementTree.fromstring(coverage_gap([], 0.1, 0.2))
    ElementTree.fromstring(coverage_gap([Point("below", 0.0, -0.4, (0.0, 0.0), (-0.6, 0.0), False)], 0.1, 0.2))


def test_bars_and_heat_maps_hold_their_values() -> None:
    widths = re.findall(r'width="([\d.]+)" height="15"', bars([("a", 0.5, True), ("b", None, False)], label="x"))
    assert widths == ["210.0"]
    assert shade(0) == "#ffffff" and shade(1) == shade(2) == "#0b4e6e"
    plot = heat_map(["r"], ["c1", "c2"], [[0.0, 1.0]], "x")
    assert "r / c2: 1.00" in plot and plot.count("<title>") == 2
    ElementTree.fromstring(heat_map([], [], [], "x"))
