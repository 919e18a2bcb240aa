"""The whole selection against a slow twin that reads the files with nothing but the standard library."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage1_helpers import SHARED, run_main

from pipeline import aggregate_capabilities
from pipeline.labels import run_file

GOLDEN = SHARED / "golden_labels"


def twin(paths: list[Path], rho: str, delta: str, k: int) -> list[dict[str, Any]]:
    """The published rule in about thirty lines: selected entries, best first."""
    runs = [json.loads(p.read_text()) for p in paths]
    names = sorted({c for r in runs for c in r["labels"]})
    found = []
    for name in names:
        coverages, gaps, passed = [], [], 0
        votes: dict[str, int] = {}
        for run in runs:
            if name not in run["labels"]:
                continue
            n = {key: len(ids) for key, ids in run["labels"][name].items()}
            total = n["lacking_failed"] + n["present_failed"] + n["na_failed"]
            coverage = Fraction(n["lacking_failed"], total) if total else Fraction(0)
            needed_failed = n["lacking_failed"] + n["present_failed"]
            needed_passed = n["lacking_passed"] + n["present_passed"]
            gap = Fraction(n["lacking_failed"], needed_failed) if needed_failed else Fraction(0)
            gap -= Fraction(n["lacking_passed"], needed_passed) if needed_passed else Fraction(0)
            passed += coverage >= Fraction(rho) and gap >= Fraction(delta)
            coverages.append(coverage)
            gaps.append(gap)
            for one in run["labels"][name]["lacking_failed"]:
                votes[one] = votes.get(one, 0) + 1
        if passed < k:
            continue
        means = [sum(v, Fraction(0)) / len(v) for v in (coverages, gaps)]
        stds = [math.sqrt(sum((x - m) ** 2 for x in v) / len(v)) for v, m in zip((coverages, gaps), means, strict=True)]
        numbers = {"mean_cov": float(means[0]), "std_cov": stds[0], "mean_delta": float(means[1]), "std_delta": stds[1]}
        counts = {"n_runs_passed": passed, "n_runs_total": len(runs)}
        found.append({"skill": name, "votes": votes, "rank": (-means[1], name)} | numbers | counts)
    return sorted(found, key=lambda e: e["rank"])


def compare(folder: Path, paths: list[Path], rho: str, delta: str, k: int) -> int:
    """Run the command, compare everything with the twin, return how many were selected."""
    export = folder / "selected.json"
    arguments = ["--runs", *map(str, paths), "--rho", rho, "--delta", delta, "--k", str(k), "--resamples", "2"]
    done = run_main(aggregate_capabilities.main, *arguments, "--export", export)
    expected = twin(paths, rho, delta, k)
    assert done.returncode == (0 if expected else 1), done.stderr
    ours = json.loads(export.read_text())
    assert [e["skill"] for e in ours] == [e["skill"] for e in expected]
    for entry, wanted in zip(ours, expected, strict=True):
        for key in ("mean_cov", "std_cov", "mean_delta", "std_delta"):
            assert math.isclose(entry[key], wanted[key], rel_tol=0, abs_tol=1e-12)
        assert (entry["n_runs_passed"], entry["n_runs_total"]) == (wanted["n_runs_passed"], wanted["n_runs_total"])
        check_examples(entry["example_failed_cases"], wanted["votes"])
    return len(ours)


def check_examples(shown: list[str], votes: dict[str, int]) -> None:
    """Right number, all voted for, no domain more than one ahead of another that has more, most votes first in each."""
    assert len(shown) == len(set(shown)) == min(8, len(votes))
    assert set(shown) <= votes.keys()
    by_domain: dict[str, list[str]] = {}
    for one in votes:
        by_domain.setdefault(one.split(":")[0], []).append(one)
    taken = {d: [s for s in shown if s.split(":")[0] == d] for d in by_domain}
    for domain, chosen in taken.items():
        levels = [votes[c] for c in chosen]
        assert levels == sorted(levels, reverse=True)
        left = [votes[m] for m in by_domain[domain] if m not in chosen]
        assert not left or not levels or min(levels) >= max(left)
        if left:
            assert len(chosen) >= max(len(t) for t in taken.values()) - 1


@st.composite
def label_runs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """One to four runs over two domains and up to three capabilities, some of which lack one."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    n = draw(st.integers(1, 14))
    p_failed, p_lacking = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])), draw(st.sampled_from([0.1, 0.5, 0.9]))
    outcome = {f"{rng.choice(['air', 'shop'])}:{i}": rng.random() < p_failed for i in range(n)}
    runs = []
    for attempt in range(1, draw(st.integers(1, 4)) + 1):
        names = [c for c in ("alpha_skill", "beta_skill", "gamma_skill") if rng.random() < 0.8] or ["alpha_skill"]
        labels = {
            c: {
                i: "NA" if rng.random() < 0.2 else "LACKING" if rng.random() < (p_lacking if f else 0.2) else "PRESENT"
                for i, f in outcome.items()
            }
            for c in names
        }
        runs.append(run_file(attempt, outcome, labels))
    return runs


@given(label_runs(), st.sampled_from(["0", "0.1", "1/3", "0.5"]), st.sampled_from(["-1", "0", "0.2", "0.25", "1"]))
@settings(max_examples=60, deadline=None)
def test_random_runs(
    tmp_path_factory: pytest.TempPathFactory, runs: list[dict[str, Any]], rho: str, delta: str
) -> None:
    folder = tmp_path_factory.mktemp("twin")
    paths = [folder / f"run_{run['attempt']:02}.json" for run in runs]
    for path, run in zip(paths, runs, strict=True):
        path.write_text(json.dumps(run))
    for k in (1, len(runs)):
        compare(folder, paths, rho, delta, k)


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"{GOLDEN} is not there")
@pytest.mark.parametrize(
    ("rho", "delta", "k", "n"),
    [
        ("0.10", "0.20", 8, 6),
        ("0.10", "0.20", 7, 7),
        ("0.05", "0.20", 8, 7),
        ("0.10", "0.10", 8, 7),
        ("0", "-1", 10, 9),
        ("0.9", "0.2", 1, 0),
    ],
)
def test_golden_runs(tmp_path: Path, rho: str, delta: str, k: int, n: int) -> None:
    assert compare(tmp_path, sorted(GOLDEN.glob("run_*.json")), rho, delta, k) == n


def test_the_threshold_that_floats_miss(tmp_path: Path) -> None:
    """21/30 - 15/30 is 1/5 exactly, and 0.19999999999999996 in floats."""
    outcome = {f"a:{i}": i < 30 for i in range(60)}
    labels = {i: "LACKING" if (n < 21 or 30 <= n < 45) else "PRESENT" for n, i in enumerate(outcome)}
    path = tmp_path / "run_01.json"
    path.write_text(json.dumps(run_file(1, outcome, {"edge_skill": labels})))
    assert compare(tmp_path, [path], "0.7", "0.2", 1) == 1
    assert compare(tmp_path, [path], "0.7", "0.20000000000000001", 1) == 0
    assert compare(tmp_path, [path], "0.70000000000000001", "0.2", 1) == 0
