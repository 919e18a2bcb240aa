"""Calibration: statistics against slow twins and known values, the verdict, and every way a file can be bad."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

from pipeline import calibrate_environment as cli
from pipeline.calibration_stats import bootstrap_ratio, group_stats, pass_at_k, wilson
from pipeline.files import InputError
from pipeline.rollout_schema import load_rollouts

ROOT = Path(__file__).resolve().parents[1]


def entry(task: int, sample: int, reward: float | None, **extra: Any) -> dict[str, Any]:
    out: dict[str, Any] = {"task_id": str(task), "sample_idx": sample, "messages": [], "finish_reason": "done", **extra}
    if reward is None:
        return {**out, "outcome": "error", "error_kind": extra.get("error_kind", "server")}
    return {**out, "outcome": "scored", "reward_info": {"reward": reward}}


def write(path: Path, entries: list[dict[str, Any]], info: dict[str, Any] | None = None) -> Path:
    path.write_text(json.dumps({"info": info or {}, "simulations": entries}))
    return path


def good_groups(groups: int = 20, size: int = 16) -> list[dict[str, Any]]:
    """Success rate near 0.4 in every group, rewards 0, 0.5 and 1."""
    rewards = itertools.cycle([1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 1.0, 0.0])
    return [entry(g, s, next(rewards)) for g in range(groups) for s in range(size)]


# --------------------------------------------------------------------------- statistics


def test_pass_at_k_equals_the_share_over_all_subsets() -> None:
    for n, c, k in [(6, 2, 3), (7, 0, 2), (5, 5, 1), (8, 3, 8), (6, 4, 3)]:
        wins = [True] * c + [False] * (n - c)
        subsets = list(itertools.combinations(wins, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_is_unbiased_where_the_plug_in_is_not() -> None:
    rng, p, n, k = random.Random(0), 0.3, 6, 4
    truth = 1 - (1 - p) ** k
    counts = [sum(rng.random() < p for _ in range(n)) for _ in range(20000)]
    assert np.mean([pass_at_k(n, c, k) for c in counts]) == pytest.approx(truth, abs=0.01)
    assert abs(np.mean([1 - (1 - c / n) ** k for c in counts]) - truth) > 0.03


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, 1, 0), (3, 1, 4), (3, -1, 1)])
def test_pass_at_k_refuses_the_impossible(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(("c", "n"), [(0, 10), (10, 10), (3, 16), (640, 1600)])
def test_wilson_equals_scipy(c: int, n: int) -> None:
    mine = wilson(c, n)
    theirs = scipy_stats.binomtest(c, n).proportion_ci(method="wilson")
    assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_wilson_of_nothing_knows_nothing() -> None:
    nothing = wilson(0, 0)
    assert math.isnan(nothing.value) and (nothing.low, nothing.high) == (0.0, 1.0)


def test_bootstrap_resamples_groups_not_rollouts() -> None:
    """Ten groups that are constant inside: 160 rollouts carry only ten observations."""
    sums, counts = [16.0] * 5 + [0.0] * 5, [16] * 10
    grouped = bootstrap_ratio(sums, counts, draws=2000, seed=0)
    single = bootstrap_ratio([1.0] * 80 + [0.0] * 80, [1] * 160, draws=2000, seed=0)
    assert grouped.value == single.value == 0.5
    assert grouped.high - grouped.low > 3 * (single.high - single.low)


def test_bootstrap_is_reproducible_and_covers() -> None:
    assert bootstrap_ratio([1, 0, 1], [1, 1, 1], draws=500, seed=3) == bootstrap_ratio(
        [1, 0, 1], [1, 1, 1], draws=500, seed=3
    )
    rng, hits = np.random.default_rng(1), 0
    for trial in range(200):
        sample = rng.random(40)
        estimate = bootstrap_ratio(sample.tolist(), [1] * 40, draws=400, seed=trial)
        hits += estimate.low <= 0.5 <= estimate.high
    assert hits >= 178  # 95 % nominal; 178 of 200 is 3.5 standard errors below


def test_group_shares_and_levels() -> None:
    stats = group_stats(
        {"a": [1.0, 1.0], "b": [0.0, 0.0], "c": [0.5, 0.5], "d": [0.0, 1.0], "e": [1.0]}, success_at=1.0, ks=(1, 2)
    )
    assert stats.all_success.value == 0.25 and stats.all_success.n == 4  # the group of one says nothing about spread
    assert stats.all_zero.value == 0.25
    assert stats.constant.value == 0.75
    assert stats.reward_levels == 3
    assert stats.mean_reward.value == pytest.approx(5 / 9)
    assert stats.success_rate.value == pytest.approx(4 / 9)
    assert [(p.k, p.groups_used) for p in stats.pass_at_k] == [(1, 5), (2, 4)]
    assert stats.pass_at_k[1].estimate.value == pytest.approx(0.5)


def test_success_threshold_and_float_noise() -> None:
    groups = {"a": [0.1 + 0.2 + 0.7, 0.3]}  # 0.9999999999999999
    assert group_stats(groups, success_at=1.0, ks=(1,)).success_rate.value == 0.5
    assert group_stats(groups, success_at=0.3, ks=(1,)).success_rate.value == 1.0


# --------------------------------------------------------------------------- verdict


def run(path: Path, *flags: str) -> int:
    return cli.main([str(path), *flags])


def test_accepts_what_lies_in_the_bands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert run(write(tmp_path / "r.json", good_groups()), "--json-output", str(report)) == 0
    data = json.loads(report.read_text())
    assert data["verdict"] == "accept" and data["schema_version"] == 1
    assert data["unhinted"]["mean_reward"]["value"] == pytest.approx(3.5 / 8)
    assert data["unhinted"]["success_rate"]["value"] == pytest.approx(3 / 8)
    assert set(data["unhinted"]["pass_at_k"]) == {"1", "4", "8", "16"}
    assert data["unhinted"]["pass_at_k"]["1"]["value"] == pytest.approx(3 / 8)
    low, high = data["unhinted"]["success_rate"]["ci95"]
    assert low < 3 / 8 < high
    assert "verdict: accept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rewards", "failing"),
    [
        ([0.0, 0.0, 0.0, 0.3], {"mean reward", "success rate"}),
        ([1.0, 1.0, 1.0, 0.0], {"mean reward", "success rate"}),
        ([0.5, 0.5, 0.4, 0.5], {"success rate"}),
        ([1.0, 0.9, 0.7, 0.6], {"mean reward"}),
    ],
)
def test_rejects_by_each_band(tmp_path: Path, rewards: list[float], failing: set[str]) -> None:
    entries = [entry(g, s, rewards[s]) for g in range(10) for s in range(4)]
    report = tmp_path / "report.json"
    assert run(write(tmp_path / "r.json", entries), "--group-size", "4", "--json-output", str(report)) == 1
    data = json.loads(report.read_text())
    assert data["verdict"] == "reject"
    assert {c["name"] for c in data["criteria"] if not c["passed"]} == failing


@pytest.mark.parametrize(
    ("special", "failing"),
    [
        ([[1.0, 1.0]] * 3, {"all-success groups"}),
        ([[0.0, 0.0]] * 3, {"all-zero groups"}),
        ([[0.4, 0.4]] * 6, {"constant groups"}),
    ],
)
def test_rejects_by_group_shares(tmp_path: Path, special: list[list[float]], failing: set[str]) -> None:
    filler = [[0.0, 1.0]] * (10 - len(special))
    entries = [entry(g, s, r) for g, group in enumerate(special + filler) for s, r in enumerate(group)]
    report = tmp_path / "report.json"
    flags = ["--group-size", "2", "--mean-max", "0.7", "--success-max", "0.7", "--json-output", str(report)]
    assert run(write(tmp_path / "r.json", entries), *flags) == 1
    assert {c["name"] for c in json.loads(report.read_text())["criteria"] if not c["passed"]} == failing


def test_bands_are_inclusive(tmp_path: Path) -> None:
    entries = [entry(g, s, float(s < 6)) for g in range(10) for s in range(10)]  # exactly 0.6
    assert run(write(tmp_path / "r.json", entries), "--group-size", "10") == 0
    entries = [entry(g, s, float(s < 2)) for g in range(10) for s in range(10)]  # exactly 0.2
    assert run(write(tmp_path / "r.json", entries), "--group-size", "10") == 0


def test_one_rollout_per_seed_cannot_be_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write(tmp_path / "r.json", [entry(g, 0, float(g % 5 < 2)) for g in range(40)])) == 1
    assert "--num-samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("groups", "size", "flags", "verdict"),
    [
        (2, 2, [], "inconclusive"),
        (7, 16, [], "inconclusive"),
        (8, 16, [], "accept"),
        (40, 3, [], "inconclusive"),  # many seeds, but the spread inside a group is unknown
        (7, 16, ["--min-groups", "7"], "accept"),
        (2, 16, ["--min-groups", "0"], "accept"),
        (2, 16, ["--mean-max", "0.3"], "inconclusive"),  # too few to reject, too
        (8, 16, ["--mean-max", "0.3"], "reject"),
    ],
)
def test_no_verdict_on_almost_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], groups: int, size: int, flags: list[str], verdict: str
) -> None:
    report = tmp_path / "report.json"
    path = write(tmp_path / "r.json", good_groups(groups, size))
    assert run(path, *flags, "--json-output", str(report)) == (0 if verdict == "accept" else 1)
    found = json.loads(report.read_text())
    assert found["verdict"] == verdict
    assert found["groups_large_enough"]["found"] == (groups if size >= 4 else 0)
    out = capsys.readouterr().out
    assert f"verdict: {verdict}" in out
    assert ("--min-groups" in out and "--num-seeds" in out) == (verdict == "inconclusive")


def test_failed_and_hinted_rollouts_do_not_make_a_group_large(tmp_path: Path) -> None:
    entries = good_groups(8, 4)
    entries[3] = entry(0, 3, None)
    entries += [entry(0, s, 1.0, hinted=True) for s in range(4)]
    assert run(write(tmp_path / "r.json", entries), "--max-error-rate", "0.1", "--success-min", "0") == 1
    assert run(write(tmp_path / "r.json", entries), "--max-error-rate", "0.1", "--min-groups", "7") == 0


def test_failed_episodes_enter_no_rate(tmp_path: Path) -> None:
    entries = good_groups()
    with_errors = entries + [entry(100 + i, 0, None, error_kind="server") for i in range(10)]
    paths = [write(tmp_path / f"{i}.json", e) for i, e in enumerate([entries, with_errors])]
    reports = []
    for path in paths:
        assert run(path, "--json-output", str(path) + ".report") == 0
        reports.append(json.loads(Path(str(path) + ".report").read_text()))
    assert reports[0]["unhinted"] == reports[1]["unhinted"]
    assert reports[1]["errors"]["kinds"] == {"server": 10}


def test_refuses_above_five_percent_errors(tmp_path: Path) -> None:
    """A dead server made half of the episodes; that is not a hard environment."""
    entries = good_groups(10) + [entry(50 + i, 0, None) for i in range(9)]
    report = tmp_path / "report.json"
    with pytest.raises(InputError, match=r"5\.3%.*server 9"):
        run(write(tmp_path / "r.json", entries), "--json-output", str(report))
    assert not report.exists()
    assert run(write(tmp_path / "r.json", entries), "--max-error-rate", "0.06") == 0


def test_hinted_and_unhinted_apart(tmp_path: Path) -> None:
    hinted = [entry(g, s, 1.0, hinted=True) for g in range(20) for s in range(4)]
    report = tmp_path / "report.json"
    assert run(write(tmp_path / "r.json", good_groups() + hinted), "--json-output", str(report)) == 0
    data = json.loads(report.read_text())
    assert data["hinted"]["success_rate"]["value"] == 1.0
    assert data["unhinted"]["success_rate"]["value"] == pytest.approx(3 / 8)
    with pytest.raises(InputError, match="without a hint"):
        run(write(tmp_path / "r.json", hinted))


def test_truncation_share_is_printed_beside_the_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = good_groups()
    for i in range(32):
        entries[i]["finish_reason"] = "context"
    for i in range(32, 64):
        entries[i]["truncated_turns"] = 2
    entries[70]["finish_reason"] = "max_steps"
    report = tmp_path / "report.json"
    run(write(tmp_path / "r.json", entries), "--json-output", str(report))
    data = json.loads(report.read_text())
    assert data["truncation"]["value"] == pytest.approx(64 / 320)
    assert data["out_of_turns"]["value"] == pytest.approx(1 / 320)
    assert "truncated" in capsys.readouterr().out


def test_reads_the_published_keys_alone(tmp_path: Path) -> None:
    entries = [{k: e[k] for k in ("task_id", "sample_idx", "reward_info", "messages")} for e in good_groups()]
    assert run(write(tmp_path / "r.json", entries)) == 0


# --------------------------------------------------------------------------- bad input


def bad_files() -> dict[str, tuple[bytes, str]]:
    one = entry(0, 0, 0.5)
    text = lambda *entries: json.dumps({"info": {}, "simulations": list(entries)}).encode()  # noqa: E731
    return {
        "empty": (b"", "is empty"),
        "not_json": (b"{oops", "not valid JSON"),
        "truncated": (text(one)[:-9], "not valid JSON"),
        "latin1": (b'{"info": "\xe9"}', "not UTF-8"),
        "a_list": (b"[]", "expected an object"),
        "other_object": (b'{"runs": []}', "simulations"),
        "no_entries": (text(), "simulations is empty"),
        "nan": (text(one).replace(b"0.5", b"NaN"), "NaN"),
        "above_one": (text(entry(0, 0, 1.5)), "less than or equal to 1"),
        "negative": (text(entry(0, 0, -0.5)), "greater than or equal to 0"),
        "text_reward": (text(one).replace(b"0.5", b'"0.5"'), "valid number"),
        "bool_reward": (text(one).replace(b"0.5", b"true"), "valid number"),
        "null_reward": (text(one).replace(b"0.5", b"null"), "needs reward_info.reward"),
        "no_reward": (text({"task_id": "1", "sample_idx": 0}), "needs reward_info.reward"),
        "unknown_outcome": (text({**one, "outcome": "maybe"}), "outcome"),
        "error_without_kind": (text({"task_id": "1", "outcome": "error"}), "error_kind"),
        "twice": (text(one, one), "appears twice"),
        "no_task": (text({"reward_info": {"reward": 1.0}}), "task_id"),
        "entry_is_text": (text("x"), "simulations[0]"),
        "info_is_list": (b'{"info": [], "simulations": [{}]}', "info"),
    }


@pytest.mark.parametrize("name", sorted(bad_files()))
def test_bad_files_are_one_line(tmp_path: Path, name: str) -> None:
    content, expected = bad_files()[name]
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_rollouts(path)
    assert expected in str(caught.value) and "bad.json" in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--mean-min", "nan"], "--mean-min"),
        (["--success-max", "60"], "--success-max"),
        (["--pass-at-k", "1,x"], "--pass-at-k"),
        (["--pass-at-k", "0"], "--pass-at-k"),
        (["--group-size", "8"], "--group-size"),
        (["--group-size", "0"], "--group-size"),
    ],
)
def test_bad_flags(tmp_path: Path, flags: list[str], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        run(write(tmp_path / "r.json", good_groups()), *flags)


def test_as_a_script_and_as_a_module(tmp_path: Path) -> None:
    good = write(tmp_path / "good.json", good_groups())
    script = [sys.executable, "pipeline/calibrate_environment.py"]
    module = [sys.executable, "-m", "pipeline.calibrate_environment"]
    outputs = [subprocess.run([*c, str(good)], cwd=ROOT, capture_output=True, text=True) for c in (script, module)]
    assert [o.returncode for o in outputs] == [0, 0] and outputs[0].stdout == outputs[1].stdout
    missing = subprocess.run([*script, str(tmp_path / "no.json")], cwd=ROOT, capture_output=True, text=True)
    assert missing.returncode == 2 and missing.stdout == ""
    assert missing.stderr.count("\n") == 1 and "not found" in missing.stderr
