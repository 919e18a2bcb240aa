"""The statistics beside a selection: against slow twins, against statsmodels, and on the golden runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage1_helpers import SHARED, Done, run_main

from pipeline import _summarize, aggregate_capabilities
from pipeline.agreement import agreement, fleiss_kappa
from pipeline.evidence import build
from pipeline.labels import ABSENT, LACKING, PRESENT, LabelSet, RunFile, find_runs, label_set, load_runs, run_file
from pipeline.resampling import Counter, bootstrap_weights, permuted_outcomes, resample, task_of
from pipeline.selection import Thresholds, candidates
from pipeline.sensitivity import jaccard, leave_one_run_out, marginal_coverage, threshold_table

GOLDEN = SHARED / "golden_labels"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"{GOLDEN} is not there")
DEFAULT = Thresholds(Fraction(1, 10), Fraction(1, 5), 8)


def make(runs: list[dict[str, dict[str, str]]], outcome: dict[str, bool], **labeler: Any) -> LabelSet:
    """A label set from capability -> id -> label, one mapping for each run."""
    files = [run_file(n, outcome, labels, labeler=labeler) for n, labels in enumerate(runs, 1)]
    return label_set([(f"run {f['attempt']}", RunFile.model_validate(f)) for f in files])


def random_labels(seed: int, n: int = 30, n_runs: int = 3, effect: float = 0.0) -> LabelSet:
    rng = np.random.default_rng(seed)
    outcome = {f"t:{i}": bool(i % 2) for i in range(n)}

    def draw(failed: bool) -> str:
        p_lacking = 0.3 + (effect if failed else 0.0)
        return str(rng.choice(["LACKING", "PRESENT", "NA"], p=[p_lacking, 0.9 - p_lacking, 0.1]))

    runs = [{c: {i: draw(f) for i, f in outcome.items()} for c in ("one_skill", "two_skill")} for _ in range(n_runs)]
    return make(runs, outcome)


@pytest.fixture(scope="module")
def golden() -> LabelSet:
    return load_runs(find_runs([f"{GOLDEN}/run_*.json"]))


# --------------------------------------------------------------------------- agreement


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 4), min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_kappa_equals_statsmodels(votes: list[tuple[int, ...]]) -> None:
    inter_rater = pytest.importorskip("statsmodels.stats.inter_rater")
    table = np.array([[row.count(k) for k in range(3)] for row in votes])
    ours = fleiss_kappa(table)
    if ours.kappa is None:
        assert (table.sum(axis=0) > 0).sum() == 1  # one label for everything: 0 / 0
    else:
        assert ours.kappa == pytest.approx(float(inter_rater.fleiss_kappa(table)), abs=1e-12)


def test_kappa_of_the_textbook_example() -> None:
    """Fleiss (1971) as in many textbooks: 10 subjects, 14 raters, 5 categories, kappa 0.210."""
    table = np.array(
        [
            [0, 0, 0, 0, 14],
            [0, 2, 6, 4, 2],
            [0, 0, 3, 5, 6],
            [0, 3, 9, 2, 0],
            [2, 2, 8, 1, 1],
            [7, 7, 0, 0, 0],
            [3, 2, 6, 3, 0],
            [2, 5, 3, 2, 2],
            [6, 5, 2, 1, 0],
            [0, 2, 2, 3, 7],
        ]
    )
    assert fleiss_kappa(table).kappa == pytest.approx(0.210, abs=5e-4)


def test_kappa_of_perfect_of_undefined_and_of_one_rater() -> None:
    assert fleiss_kappa(np.array([[3, 0, 0], [0, 3, 0]])).kappa == pytest.approx(1.0)
    assert fleiss_kappa(np.array([[3, 0, 0], [3, 0, 0]])).kappa is None
    assert fleiss_kappa(np.array([[1, 0, 0]])).kappa is None


@needs_golden
def test_golden_kappa_is_what_the_method_says(golden: LabelSet) -> None:
    kappas = [agreement(golden, c).kappa for c in range(len(golden.capabilities))]
    assert all(k is not None for k in kappas)
    assert round(min(k for k in kappas if k is not None), 2) == 0.26
    assert round(max(k for k in kappas if k is not None), 2) == 0.54


# --------------------------------------------------------------------------- resampling


def slow_rates(labels: LabelSet, capability: int, run: int, copies: npt.NDArray[Any]) -> tuple[float, float]:
    """Coverage and gap of a bootstrap sample, counted one trajectory at a time."""
    codes = labels.codes[run, capability]
    count = {(side, code): 0 for side in (True, False) for code in range(3)}
    for i, copy in enumerate(copies):
        count[bool(labels.failed[i]), int(codes[i])] += int(copy)

    def ratio(a: int, b: int) -> float:
        return a / b if b else 0.0

    er = {s: ratio(count[s, LACKING], count[s, LACKING] + count[s, PRESENT]) for s in (True, False)}
    n_failed = sum(count[True, code] for code in range(3))
    return ratio(count[True, LACKING], n_failed), er[True] - er[False]


@pytest.mark.parametrize("seed", range(5))
def test_rates_of_samples_equal_a_slow_twin(seed: int) -> None:
    labels = random_labels(seed)
    (weights,) = bootstrap_weights(labels, 20, np.random.default_rng(seed))
    fast = Counter(labels).weighted(weights)
    for b in range(20):
        for run, capability in itertools.product(range(3), range(2)):
            slow = slow_rates(labels, capability, run, weights[b])
            assert (fast.coverage[b, run, capability], fast.gap[b, run, capability]) == pytest.approx(slow, abs=1e-6)


def test_rates_of_dealt_outcomes_equal_those_of_a_new_label_set() -> None:
    labels = random_labels(0)
    (dealt,) = permuted_outcomes(labels, 10, np.random.default_rng(0))
    fast = Counter(labels).dealt(dealt)
    for b in range(10):
        other = dataclasses.replace(labels, failed=dealt[b].astype(bool))
        slow = slow_rates(other, 0, 2, np.ones(len(labels.ids)))
        assert (fast.coverage[b, 2, 0], fast.gap[b, 2, 0]) == pytest.approx(slow, abs=1e-6)


def test_bootstrap_draws_tasks_with_all_their_trials() -> None:
    outcome = {"t:1": True, "t:1#1": False, "t:2": True, "t:2#1": True, "t:3": False}
    labels = make([{"a_skill": dict.fromkeys(outcome, "PRESENT")}], outcome)
    (weights,) = bootstrap_weights(labels, 200, np.random.default_rng(0))
    column = {i: weights[:, n] for n, i in enumerate(labels.ids)}
    assert (column["t:1"] == column["t:1#1"]).all() and (column["t:2"] == column["t:2#1"]).all()
    assert not (column["t:1"] == column["t:2"]).all()
    assert (column["t:1"] + column["t:2"] + column["t:3"] == 3).all()
    assert task_of("a:b#12") == "a:b"


def test_permutations_keep_the_number_of_failures() -> None:
    labels = random_labels(0)
    (dealt,) = permuted_outcomes(labels, 50, np.random.default_rng(0))
    assert (dealt.sum(axis=1) == labels.n_failed).all()
    assert len({tuple(row) for row in dealt}) > 40


def test_p_values_are_small_with_an_effect_and_uniform_without() -> None:
    strong = resample(random_labels(1, n=80, effect=0.5), DEFAULT, 400, 0)
    assert all(r.p_value == pytest.approx(1 / 401) for r in strong)
    null = [r.p_value for seed in range(40) for r in resample(random_labels(seed, n=40), DEFAULT, 200, seed)]
    assert 0.35 < float(np.mean(null)) < 0.65
    assert 0.005 < float(np.mean(np.array(null) < 0.1)) < 0.25


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    truth = (0.6 / 0.9) - (0.3 / 0.9)
    hits = [
        r.gap.low <= truth <= r.gap.high
        for seed in range(60)
        for r in resample(random_labels(seed, n=80, n_runs=1, effect=0.3), DEFAULT, 300, seed)
    ]
    assert 0.86 < float(np.mean(hits)) <= 1.0


def test_the_same_seed_gives_the_same_numbers_whatever_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = random_labels(3)
    first = resample(labels, DEFAULT, 100, 7)
    assert resample(labels, DEFAULT, 100, 7) == first
    assert resample(labels, DEFAULT, 100, 8) != first
    monkeypatch.setattr("pipeline.resampling.BLOCK", 30 * 9)  # blocks of nine samples
    blocks = [b.shape[0] for b in bootstrap_weights(labels, 100, np.random.default_rng(0))]
    assert blocks == [9] * 11 + [1]
    (found, _) = resample(labels, DEFAULT, 100, 7)
    assert abs(found.gap.low - first[0].gap.low) < 0.2


def test_a_run_without_the_capability_is_left_out_of_means_and_does_not_pass() -> None:
    outcome = {f"t:{i}": i < 10 for i in range(20)}
    perfect = {i: "LACKING" if f else "PRESENT" for i, f in outcome.items()}
    labels = make([{"a_skill": perfect, "b_skill": perfect}] * 2 + [{"b_skill": perfect}], outcome)
    assert (labels.codes[2, 0] == ABSENT).all()
    lenient, strict = (resample(labels, Thresholds(Fraction(1, 10), Fraction(1, 5), k), 200, 0)[0] for k in (2, 3))
    assert lenient.gap.low == lenient.gap.high == 1.0
    assert lenient.selected_share == 1.0 and strict.selected_share == 0.0


def test_all_on_one_side_gives_numbers_not_nan() -> None:
    outcome = {f"t:{i}": True for i in range(5)}
    labels = make([{"a_skill": dict.fromkeys(outcome, "LACKING")}], outcome)
    (found,) = resample(labels, DEFAULT, 50, 0)
    assert (found.coverage.low, found.gap.high, found.p_value) == (1.0, 1.0, 1.0)
    text = json.dumps(build(labels, candidates(labels), DEFAULT, resamples=50, seed=0), allow_nan=False)
    assert "per_capability" in text


# --------------------------------------------------------------------------- sensitivity


@needs_golden
def test_golden_sensitivity_shows_the_three_neighbours(golden: LabelSet) -> None:
    rows = threshold_table(candidates(golden), DEFAULT, 10)
    found = {(r["rho"], r["delta"], r["k"]): r for r in rows}
    assert found[0.1, 0.2, 8]["n_selected"] == 6 and not found[0.1, 0.2, 8]["added"]
    for key in ((0.1, 0.2, 7), (0.05, 0.2, 8), (0.1, 0.1, 8)):
        assert found[key]["n_selected"] == 7 and found[key]["added"] == ["conditional_instruction_following"]


@needs_golden
def test_golden_selection_does_not_hang_on_one_run(golden: LabelSet) -> None:
    rows = leave_one_run_out(candidates(golden), DEFAULT, golden.attempts)
    assert [r["without"] for r in rows] == list(range(1, 11))
    assert {r["k"] for r in rows} == {8}
    assert all(not r["added"] and not r["lost"] for r in rows)


def test_leave_one_run_out_names_what_hangs_on_one_run() -> None:
    outcome = {f"t:{i}": i < 10 for i in range(20)}
    good = {i: "LACKING" if f else "PRESENT" for i, f in outcome.items()}
    bad = dict.fromkeys(outcome, "PRESENT")
    labels = make([{"a_skill": good}, {"a_skill": good}, {"a_skill": bad}], outcome)
    rows = leave_one_run_out(candidates(labels), Thresholds(Fraction(1, 10), Fraction(1, 5), 2), labels.attempts)
    assert [(r["without"], r["lost"]) for r in rows] == [(1, ["a_skill"]), (2, ["a_skill"]), (3, [])]
    assert leave_one_run_out(candidates(labels), DEFAULT, [1]) == []


def test_jaccard_and_marginal_coverage() -> None:
    outcome = {f"t:{i}": i < 4 for i in range(6)}

    def lacking(*which: int) -> dict[str, str]:
        return {f"t:{i}": "LACKING" if i in which else "PRESENT" for i in range(6)}

    labels = make([{"a_skill": lacking(0, 1), "b_skill": lacking(1, 2), "c_skill": lacking(0, 1, 5)}], outcome)
    names = ["a_skill", "b_skill", "c_skill"]
    matrix = np.array(jaccard(labels, names))
    assert matrix[0, 1] == pytest.approx(1 / 3, abs=1e-6) and matrix[0, 2] == 1.0  # t:5 passed: not a failure
    assert (matrix == matrix.T).all() and (np.diag(matrix) == 1).all()
    marginal = marginal_coverage(labels, names)
    assert [a["share"] for a in marginal["added"]] == [0.5, 0.25, 0.0]
    assert marginal["uncovered"] == 0.25
    assert marginal_coverage(labels, []) == {"added": [], "uncovered": 1.0}


@needs_golden
def test_golden_evidence_says_what_the_method_says(golden: LabelSet) -> None:
    found = build(golden, candidates(golden), DEFAULT, resamples=300, seed=0)
    assert found["labels_on_passed"] == {"lacking": 6, "labels": 4860}
    assert any("6 of 4860 labels on passed" in w and "saw the outcome" in w for w in found["warnings"])
    assert any("low agreement" in w for w in found["warnings"])
    shares = [a["share"] for a in found["marginal_coverage"]["added"]]
    assert len(shares) == 6 and sum(shares) + found["marginal_coverage"]["uncovered"] == pytest.approx(1, abs=1e-5)
    for one in found["per_capability"].values():
        low, high = one["delta_interval"]
        assert low < high and one["q_value"] >= one["p_value"] - 1e-12


def test_blind_runs_are_not_accused_and_deterministic_ones_are_named() -> None:
    outcome = {f"t:{i}": i < 10 for i in range(20)}
    good = {i: "LACKING" if f else "PRESENT" for i, f in outcome.items()}
    thresholds = Thresholds(Fraction(1, 10), Fraction(1, 5), 1)
    blind = make([{"a_skill": good}] * 2, outcome, blind=True, deterministic=True)
    warnings = build(blind, candidates(blind), thresholds, resamples=50, seed=0)["warnings"]
    assert not any("saw the outcome" in w for w in warnings)
    assert any("deterministic" in w for w in warnings)
    seen = make([{"a_skill": good}] * 2, outcome)
    assert any(
        "saw the outcome" in w for w in build(seen, candidates(seen), thresholds, resamples=50, seed=0)["warnings"]
    )


# --------------------------------------------------------------------------- runs against summaries


@pytest.fixture
def labelled(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A summaries file of four rollouts (one infrastructure) and a run that labels the other three, with one quote."""
    entries: list[dict[str, Any]] = []
    for task, reward in (("1", 1.0), ("2", 0.0), ("3", 0.5), ("4", None)):
        messages = [{"role": "user", "content": f"order {task}"}, {"role": "assistant", "content": "It is\n  shipped."}]
        one: dict[str, Any] = {"task_id": task, "sample_idx": 0, "messages": messages}
        one |= (
            {"reward_info": {"reward": reward}} if reward is not None else {"outcome": "error", "error_kind": "server"}
        )
        entries.append(one)
    source = tmp_path / "rollouts.json"
    source.write_text(json.dumps({"info": {"env": "desk"}, "simulations": entries}))
    done = run_main(_summarize.main, "--input", source, "--output", tmp_path / "summaries.json")
    assert done.returncode == 0
    outcome = {"desk:1": False, "desk:2": True, "desk:3": True}
    labels = {"a_skill": {"desk:1": "PRESENT", "desk:2": "LACKING", "desk:3": "LACKING"}}
    quote = {"a_skill": {"desk:2": {"message": 1, "quote": "It is shipped."}}}
    return tmp_path, run_file(1, outcome, labels, evidence=quote)


def check_against(folder: Path, run: dict[str, Any], *more: str) -> Done:
    (folder / "run_01.json").write_text(json.dumps(run))
    base = ["--runs", str(folder / "run_01.json"), "--k", "1", "--summaries", str(folder / "summaries.json")]
    return run_main(aggregate_capabilities.main, *base, "--export", str(folder / "s.json"), "--resamples", "20", *more)


def test_runs_are_checked_against_their_summaries(labelled: tuple[Path, dict[str, Any]]) -> None:
    folder, run = labelled
    assert check_against(folder, run).returncode == 0
    report = json.loads((folder / "s.report.json").read_text())
    assert report["summaries"]["outside"] == {"infrastructure: server": 1}
    assert report["summaries"]["quotes"] == 1


@pytest.mark.parametrize(
    ("quote", "word"),
    [
        ({"message": 1, "quote": "It is lost."}, "does not contain"),
        ({"message": 0, "quote": "It is shipped."}, "does not contain"),
        ({"message": 9, "quote": "It is shipped."}, "no message 9"),
    ],
)
def test_invented_quotes_are_found(labelled: tuple[Path, dict[str, Any]], quote: dict[str, Any], word: str) -> None:
    folder, run = labelled
    run["evidence"]["a_skill"]["desk:2"] = quote
    done = check_against(folder, run)
    assert done.returncode == 2 and word in done.stderr and "desk:2" in done.stderr and "a_skill" in done.stderr


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda o: o.pop("desk:3"), "no labels"),
        (lambda o: o.update({"desk:9": True}), "unknown id"),
        (lambda o: o.update({"desk:3": False}), "is passed there and failed"),
        (lambda o: o.update({"desk:4": True}), "infrastructure in the summaries"),
    ],
)
def test_ids_and_outcomes_must_agree(labelled: tuple[Path, dict[str, Any]], change: Any, word: str) -> None:
    folder, _ = labelled
    outcome = {"desk:1": False, "desk:2": True, "desk:3": True}
    change(outcome)
    done = check_against(folder, run_file(1, outcome, {"a_skill": dict.fromkeys(outcome, "PRESENT")}))
    assert done.returncode == 2 and word in done.stderr, done.stderr


def test_labels_of_the_score_part_are_refused_unless_told(labelled: tuple[Path, dict[str, Any]]) -> None:
    folder, run = labelled
    arguments = ["--input", folder / "rollouts.json", "--output", folder / "summaries.json", "--split", "1:99999"]
    assert run_main(_summarize.main, *arguments).returncode == 0
    done = check_against(folder, run)
    assert done.returncode == 2 and "score part" in done.stderr
    assert check_against(folder, run, "--allow-score-ids").returncode == 0
