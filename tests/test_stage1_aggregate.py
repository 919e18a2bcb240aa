"""The aggregator: golden runs, exact thresholds, strict schema, status, exit codes, nothing stale."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage1_helpers import ROOT, SHARED, Done, run_main

from pipeline import aggregate_capabilities
from pipeline.candidates import load_candidates
from pipeline.command_line import natural_key, rational
from pipeline.files import InputError
from pipeline.labels import LabelSet, find_runs, load_runs, run_file
from pipeline.selection import Counts, Thresholds, candidates, domain_of

GOLDEN = SHARED / "golden_labels"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"{GOLDEN} is not there")

FAILED = [f"shop:{i}" for i in range(10)]
PASSED = [f"shop:{i}" for i in range(10, 16)]
OUTCOME = dict.fromkeys(FAILED, True) | dict.fromkeys(PASSED, False)


def aggregate(*arguments: str | Path) -> Done:
    return run_main(aggregate_capabilities.main, *arguments)


def make_run(attempt: int = 1, lacking: int = 5, capability: str = "careful_reading") -> dict[str, Any]:
    labels = {i: "LACKING" if n < lacking else "PRESENT" for n, i in enumerate(OUTCOME)}
    labels |= dict.fromkeys(PASSED, "PRESENT")
    return run_file(attempt, OUTCOME, {capability: labels})


def write_runs(folder: Path, runs: list[dict[str, Any]]) -> str:
    for n, run in enumerate(runs, 1):
        (folder / f"run_{n:02}.json").write_text(json.dumps(run), encoding="utf-8")
    return str(folder / "run_*.json")


def thresholds(rho: str = "0.10", delta: str = "0.20", k: int = 1) -> Thresholds:
    return Thresholds(rational(rho), rational(delta), k)


# --------------------------------------------------------------------------- golden runs


@needs_golden
def test_golden_runs_reproduce_the_published_selection(tmp_path: Path) -> None:
    export = tmp_path / "selected.json"
    done = aggregate(
        "--runs", f"{GOLDEN}/run_*.json", "--rho", "0.10", "--delta", "0.20", "--k", "8", "--export", export
    )
    assert done.returncode == 0, done.stderr
    published = json.loads((GOLDEN / "selected_published.json").read_text())
    ours = json.loads(export.read_text())
    assert [e["skill"] for e in ours] == [e["skill"] for e in published]
    assert len(ours) == 6
    for entry, expected in zip(ours, published, strict=True):
        for key in ("mean_cov", "std_cov", "mean_delta", "std_delta"):
            assert abs(entry[key] - expected[key]) <= 1e-12, (entry["skill"], key)
        assert entry["n_runs_passed"] == expected["n_runs_passed"]
        assert entry["n_runs_total"] == expected["n_runs_total"]
        assert entry["status"] == "PENDING"
        assert entry["passes_consistency"] is True
        assert len(entry["example_failed_cases"]) == 8


@needs_golden
@pytest.mark.parametrize(("rho", "delta", "k"), [("0.10", "0.20", 7), ("0.05", "0.20", 8), ("0.10", "0.10", 8)])
def test_golden_neighbouring_thresholds_each_add_a_seventh(rho: str, delta: str, k: int) -> None:
    found = candidates(load_runs(find_runs([f"{GOLDEN}/run_*.json"])))
    base = {c.name for c in found if c.selected(thresholds(k=8))}
    loose = {c.name for c in found if c.selected(thresholds(rho, delta, k))}
    assert base < loose
    assert loose - base == {"conditional_instruction_following"}


@needs_golden
def test_golden_examples_are_balanced_over_domains() -> None:
    for candidate in candidates(load_runs(find_runs([f"{GOLDEN}/run_*.json"]))):
        domains = [domain_of(i) for i in candidate.example_failed]
        assert domains.count("airline") == domains.count("retail") == 4


# --------------------------------------------------------------------------- the rule


def test_thresholds_are_inclusive_and_exact_where_floats_fail() -> None:
    counts = Counts(21, 9, 0, 15, 15, 0)
    assert 21 / 30 - 15 / 30 < 0.2  # what binary floats make of it
    assert counts.gap == Fraction(1, 5)
    assert counts.passes(thresholds("0.70", "0.20"))
    assert not counts.passes(thresholds("0.70", "0.2000000001"))
    assert not counts.passes(thresholds("0.7000000001", "0.20"))


def test_zero_denominators_give_zero() -> None:
    assert Counts(0, 0, 0, 0, 0, 0).coverage == 0
    assert Counts(0, 0, 7, 0, 0, 3).gap == 0
    assert Counts(2, 0, 7, 0, 0, 3).gap == 1


def test_coverage_counts_na_and_rates_do_not() -> None:
    counts = Counts(2, 2, 6, 1, 3, 96)
    assert counts.coverage == Fraction(2, 10)
    assert counts.error_rate_failed == Fraction(1, 2)
    assert counts.error_rate_passed == Fraction(1, 4)


def test_a_run_without_the_capability_does_not_pass_but_leaves_the_mean(tmp_path: Path) -> None:
    runs = [make_run(1), make_run(2), make_run(3, capability="another_skill")]
    found = {c.name: c for c in candidates(load_runs(find_runs([write_runs(tmp_path, runs)])))}
    skill = found["careful_reading"]
    assert skill.n_passed(thresholds()) == 2
    assert len(skill.counts) == 3 and len(skill.present) == 2
    assert skill.mean_coverage == Fraction(1, 2)
    assert not skill.selected(thresholds(k=3))


counts_strategy = st.builds(Counts, *[st.integers(0, 40)] * 6)


@given(counts_strategy)
@settings(max_examples=300, deadline=None)
def test_rates_equal_a_slow_twin(counts: Counts) -> None:
    labels = ["L"] * counts.lacking_failed + ["P"] * counts.present_failed + ["N"] * counts.na_failed
    needed = [x for x in labels if x != "N"]
    assert counts.coverage == (Fraction(labels.count("L"), len(labels)) if labels else 0)
    assert counts.error_rate_failed == (Fraction(needed.count("L"), len(needed)) if needed else 0)
    assert -1 <= counts.gap <= 1


@given(st.permutations(range(4)), st.lists(st.integers(0, 10), min_size=4, max_size=4))
@settings(max_examples=50, deadline=None)
def test_selection_ignores_the_order_of_runs(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], n: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    runs = [make_run(a + 1, lacking) for a, lacking in enumerate(n)]
    straight = candidates(load_runs(find_runs([write_runs(folder, runs)])))
    shuffled = candidates(load_runs(find_runs([write_runs(folder, [runs[i] for i in order])])))
    assert straight == shuffled


def test_population_std_and_ties_by_name(tmp_path: Path) -> None:
    runs = [make_run(1, 2), make_run(2, 6)]
    for run in runs:
        run["labels"]["a_twin"] = run["labels"]["careful_reading"]
    found = candidates(load_runs(find_runs([write_runs(tmp_path, runs)])))
    assert [c.name for c in found] == ["a_twin", "careful_reading"]
    assert math.isclose(found[0].std_coverage, 0.2)


def test_examples_have_most_votes_first_in_natural_order(tmp_path: Path) -> None:
    runs = [make_run(1, 10), make_run(2, 3)]
    (found,) = candidates(load_runs(find_runs([write_runs(tmp_path, runs)])))
    assert found.example_failed == ("shop:0", "shop:1", "shop:2", "shop:3", "shop:4", "shop:5", "shop:6", "shop:7")
    assert sorted(["a:10", "a:9", "b:1"], key=natural_key) == ["a:9", "a:10", "b:1"]


# --------------------------------------------------------------------------- strict schema


def _overlap(run: dict[str, Any]) -> None:
    run["labels"]["careful_reading"]["na_failed"].append("shop:0")


def _across_sides(run: dict[str, Any]) -> None:
    run["labels"]["careful_reading"]["na_passed"].append("shop:0")


def _wrong_total(run: dict[str, Any]) -> None:
    run["totals"]["total_failed"] = 11


def _unknown_id(run: dict[str, Any]) -> None:
    run["labels"]["careful_reading"]["lacking_failed"][0] = "shop:99"


def _missing_key(run: dict[str, Any]) -> None:
    del run["labels"]["careful_reading"]["na_failed"]


def _unknown_key(run: dict[str, Any]) -> None:
    run["lables"] = {}


def _number_as_id(run: dict[str, Any]) -> None:
    run["labels"]["careful_reading"]["lacking_failed"][0] = 0


def _text_as_attempt(run: dict[str, Any]) -> None:
    run["attempt"] = "2"


def _same_attempt(run: dict[str, Any]) -> None:
    run["attempt"] = 1


def _swapped_outcome(run: dict[str, Any]) -> None:
    lists = run["labels"]["careful_reading"]
    lists["present_failed"].remove("shop:9")
    lists["present_passed"].remove("shop:15")
    lists["present_failed"].append("shop:15")
    lists["present_passed"].append("shop:9")


def _bad_name(run: dict[str, Any]) -> None:
    run["labels"]["../evil"] = run["labels"].pop("careful_reading")


def _foreign_evidence(run: dict[str, Any]) -> None:
    run["evidence"] = {"careful_reading": {"shop:99": {"message": 1, "quote": "x"}}}


def _surrogate(run: dict[str, Any]) -> None:
    run["labels"]["careful_reading"]["lacking_failed"][0] = "shop:\ud800"


def _no_labels(run: dict[str, Any]) -> None:
    run["labels"] = {}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_overlap, ["run_02.json", "careful_reading", "shop:0", "both lacking_failed and na_failed"]),
        (_across_sides, ["run_02.json", "careful_reading", "shop:0", "na_passed"]),
        (_wrong_total, ["run_02.json", "careful_reading", "total_failed is 11", "10"]),
        (_unknown_id, ["run_02.json", "careful_reading", "shop:0", "missing"]),
        (_missing_key, ["run_02.json", "na_failed"]),
        (_unknown_key, ["run_02.json", "lables"]),
        (_number_as_id, ["run_02.json", "lacking_failed"]),
        (_text_as_attempt, ["run_02.json", "attempt"]),
        (_same_attempt, ["run_02.json", "attempt 1", "run_01.json"]),
        (_swapped_outcome, ["run_02.json", "careful_reading", "shop:9"]),
        (_bad_name, ["run_02.json", "../evil"]),
        (_foreign_evidence, ["run_02.json", "careful_reading", "shop:99"]),
        (_no_labels, ["run_02.json", "labels"]),
        (_surrogate, ["run_02.json", "careful_reading", "ud800"]),
    ],
)
def test_a_bad_run_is_one_line_exit_2_and_retires_the_old_export(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None], words: list[str]
) -> None:
    runs = [make_run(1), make_run(2)]
    pattern = write_runs(tmp_path, runs)
    export = tmp_path / "selected.json"
    assert aggregate("--runs", pattern, "--k", "2", "--export", export).returncode == 0
    spoil(runs[1])
    write_runs(tmp_path, runs)
    done = aggregate("--runs", pattern, "--k", "2", "--export", export)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: "), done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert not export.exists()


@pytest.mark.parametrize(
    "content", [b"", b"  \n", b"{", b'{"attempt": NaN}', b"\xff\xfe\x00", b"[]", b"null", b"[" * 100000]
)
def test_a_broken_file_is_one_line_and_exit_2(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run_01.json").write_bytes(content)
    done = aggregate("--runs", tmp_path / "run_01.json", "--k", "1", "--export", tmp_path / "out.json")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "run_01.json" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run_01.json"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--rho", "lots"], "--rho"),
        (["--rho", "1.5"], "rho"),
        (["--delta", "nan"], "--delta"),
        (["--k", "0"], "k"),
        (["--k", "3"], "only 2 label runs"),
        (["--k", "1.5"], "--k"),
        (["--frobnicate"], "--frobnicate"),
        (["--candidates", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_options(tmp_path: Path, arguments: list[str], word: str) -> None:
    pattern = write_runs(tmp_path, [make_run(1), make_run(2)])
    done = aggregate("--runs", pattern, "--k", "2", "--export", tmp_path / "out.json", *arguments)
    assert done.returncode == 2 and word in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_no_matching_run_is_exit_2_and_the_old_export_is_retired(tmp_path: Path) -> None:
    export = tmp_path / "selected.json"
    pattern = write_runs(tmp_path, [make_run(1)])
    assert aggregate("--runs", pattern, "--k", "1", "--export", export).returncode == 0
    done = aggregate("--runs", tmp_path / "nothing_*.json", "--k", "1", "--export", export)
    assert done.returncode == 2 and "matches no file" in done.stderr
    assert not export.exists() and (tmp_path / "selected.json.stale").exists()


def test_nothing_selected_is_exit_1_and_an_empty_array(tmp_path: Path) -> None:
    export = tmp_path / "selected.json"
    done = aggregate("--runs", write_runs(tmp_path, [make_run(1, 0)]), "--k", "1", "--export", export)
    assert done.returncode == 1
    assert json.loads(export.read_text()) == []
    report = json.loads((tmp_path / "selected.report.json").read_text())
    assert [c["skill"] for c in report["candidates"]] == ["careful_reading"]


def test_check_writes_nothing(tmp_path: Path) -> None:
    pattern = write_runs(tmp_path, [make_run(1)])
    assert aggregate("--runs", pattern, "--k", "1", "--export", tmp_path / "s.json", "--check").returncode == 0
    assert [p.name for p in tmp_path.iterdir()] == ["run_01.json"]


# --------------------------------------------------------------------------- status


def _mark_done(export: Path) -> None:
    entries = json.loads(export.read_text())
    entries[0] |= {"status": "DONE", "environment_path": "capability_careful_reading_game.py"}
    export.write_text(json.dumps(entries))


def _status(export: Path) -> tuple[str, str | None]:
    (entry,) = json.loads(export.read_text())
    return entry["status"], entry.get("environment_path")


DONE = ("DONE", "capability_careful_reading_game.py")


def test_done_and_its_path_survive_reruns_failures_and_deselection(tmp_path: Path) -> None:
    export = tmp_path / "selected.json"
    good = ["--runs", write_runs(tmp_path, [make_run(1)]), "--k", "1", "--export", export]
    assert aggregate(*good).returncode == 0
    assert _status(export) == ("PENDING", None)
    _mark_done(export)
    assert aggregate(*good).returncode == 0
    assert _status(export) == DONE
    assert aggregate("--runs", "nothing", "--export", export).returncode == 2
    assert aggregate(*good).returncode == 0
    assert _status(export) == DONE and not (tmp_path / "selected.json.stale").exists()
    strict = aggregate(*good, "--rho", "0.9")
    assert strict.returncode == 1 and "careful_reading" in strict.stdout
    assert aggregate(*good).returncode == 0
    assert _status(export) == DONE


def test_an_export_that_is_no_selection_is_left_alone(tmp_path: Path) -> None:
    export = tmp_path / "precious.json"
    export.write_text('{"mine": 1}')
    done = aggregate("--runs", write_runs(tmp_path, [make_run(1)]), "--k", "1", "--export", export)
    assert done.returncode == 2 and export.read_text() == '{"mine": 1}'
    run = tmp_path / "run_01.json"
    before = run.read_text()
    assert aggregate("--runs", run, "--k", "1", "--export", run).returncode == 2
    assert run.read_text() == before


# --------------------------------------------------------------------------- candidates


def _candidates(path: Path, *names: str) -> Path:
    path.write_text(json.dumps({"candidates": [{"name": n, "description": f"About {n}."} for n in names]}))
    return path


def test_candidates_describe_and_unlabelled_ones_are_reported(tmp_path: Path) -> None:
    names = _candidates(tmp_path / "c.json", "careful_reading", "never_labelled")
    export = tmp_path / "s.json"
    pattern = write_runs(tmp_path, [make_run(1)])
    assert aggregate("--runs", pattern, "--k", "1", "--export", export, "--candidates", names).returncode == 0
    assert json.loads(export.read_text())[0]["description"] == "About careful_reading."
    report = json.loads((tmp_path / "s.report.json").read_text())
    skills = {c["skill"]: c for c in report["candidates"]}
    assert skills["never_labelled"]["n_runs_labelled"] == 0 and not skills["never_labelled"]["selected"]
    assert skills["careful_reading"]["runs"][0]["lacking_failed"] == 5


def test_a_label_for_no_candidate_names_the_nearest(tmp_path: Path) -> None:
    names = _candidates(tmp_path / "c.json", "careful_readings")
    pattern = write_runs(tmp_path, [make_run(1)])
    done = aggregate("--runs", pattern, "--k", "1", "--export", tmp_path / "s.json", "--candidates", names)
    assert done.returncode == 2 and "careful_readings" in done.stderr


@pytest.mark.parametrize(
    "data",
    [
        {"candidates": []},
        {"candidates": [{"name": "Bad Name", "description": "x"}]},
        {"candidates": [{"name": "a_b", "description": ""}]},
        {"candidates": [{"name": "a_b", "description": "x"}, {"name": "a_b", "description": "y"}]},
        {"candidates": [{"name": "a_b", "description": "x", "example_trajectories": [{"task": "1"}]}]},
    ],
)
def test_bad_candidates(tmp_path: Path, data: dict[str, Any]) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"c\.json"):
        load_candidates(path)


def test_label_set_is_ordered(tmp_path: Path) -> None:
    labels: LabelSet = load_runs(find_runs([write_runs(tmp_path, [make_run(2), make_run(1)])]))
    assert labels.attempts == (1, 2)
    assert labels.ids == tuple(FAILED + PASSED)
    assert (labels.n_failed, labels.n_passed) == (10, 6)


@pytest.mark.parametrize("how", [["pipeline/aggregate_capabilities.py"], ["-m", "pipeline.aggregate_capabilities"]])
def test_runs_as_script_and_as_module(tmp_path: Path, how: list[str]) -> None:
    pattern = write_runs(tmp_path, [make_run(1)])
    command = [sys.executable, *how, "--runs", pattern, "--k", "1", "--export", str(tmp_path / "s.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "s.json").exists()


def test_importing_pipeline_is_quick_and_free_of_torch() -> None:
    """Processor time, the best of three: what other processes do meanwhile is not ours."""
    code = (
        "import sys, time; start = time.process_time(); import pipeline, pipeline.aggregate_capabilities; "
        "assert 'torch' not in sys.modules and 'scipy' not in sys.modules; print(time.process_time() - start)"
    )
    times = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        times.append(float(done.stdout))
    assert min(times) < 1.0
