"""The evidence run's table: what was measured, what the paper claims beside it, and what was not run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import findings
import machine
import other_candidates
import pytest
import run as evidence_run
import scores
import table
from helpdesk_runs import FOLDER, NAMES, ROOT, select
from scheduler import record_of
from sizes import SIZES

from pipeline.files import InputError, read_json, write_json

N_SEEDS = 40
SIZE = dataclasses.replace(SIZES["tiny"], score_seeds=f"100:{100 + N_SEEDS}", trials=2)
RATES = {
    "base": 0.2, "direct": 0.45, "joint": 0.5, NAMES[0]: 0.55, NAMES[1]: 0.5, NAMES[2]: 0.3, NAMES[3]: 0.25,
    "merge": 0.4, "ties": 0.45, "dare_ties": 0.3, "chosen": 0.5, "soft": 0.6, "routed": 0.8, "routed_grpo": 0.85,
    "first_1": 0.55, "first_2": 0.6, "first_3": 0.7, "rejected": 0.35, "random_1": 0.5, "routed_2": 0.5,
    "direct_2": 0.3, "joint_2": 0.35,
}  # fmt: skip


def entries(rate: float, seeds: range, trials: int) -> list[dict[str, Any]]:
    """Episodes of which a share ``rate`` succeeds, on the lowest seeds."""
    done = []
    for seed in seeds:
        reward = float((seed - seeds.start) < rate * len(seeds))
        for trial in range(trials):
            done.append(
                {"task_id": str(seed), "sample_idx": trial, "outcome": "scored", "reward_info": {"reward": reward},
                 "truncated_turns": 0, "finish_reason": "done", "turns": 1, "invalid_calls": 0, "n_action_tokens": 9}
            )  # fmt: skip
    return done


def write_episodes(folder: Path, rates: dict[str, float], env: str = "helpdesk", model: str = "served") -> None:
    setup = scores.evaluation_plan(SIZE)
    for name, rate in rates.items():
        for mode in setup.modes:
            found = entries(rate, setup.seeds, 1 if mode == "greedy" else SIZE.trials)
            info = {"settings": {"model": model}}
            write_json(folder / "rollouts" / f"{name}.{env}.{mode}.json", {"simulations": found, "info": info})


def write_transfer(run: Path) -> None:
    def row(rate: float) -> dict[str, Any]:
        return {"success": {"value": rate, "low": rate, "high": rate}}

    results = {
        f"capability_{a}": {"sampled": {"base": row(0.1), **{b: row(0.9 if a == b else 0.3) for b in NAMES}}}
        for a in NAMES
    }
    write_json(run / "transfer" / "evaluation.json", {"results": results})


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """What a tiny run leaves, with rates as in ``RATES``."""
    run = tmp_path / "run"
    select(run)
    select(run, "b", (0.5, 0.55, 0.05, 0.04))
    write_episodes(run / "score", RATES)
    write_episodes(run / "score_vllm", {"base": 0.2, "routed": 0.8})
    write_transfer(run)
    picks = {str(i): {"option": NAMES[0] if i % 4 else None, "valid": i % 8 > 0} for i in range(40)}
    write_json(run / "score" / "rollouts" / "chosen.helpdesk.picks.json", {"picks": picks})
    report = {"slot_names": ["base", *NAMES], "train_episodes": {"base": 0, NAMES[0]: 12}, "validation_accuracy": 0.9}
    write_json(run / "gates" / "routed" / "report.json", report | {"confusion": {}})
    for name in NAMES:
        for kind, stage_name in (("validation", "05_validate"), ("calibration", "06_calibrate")):
            write_json(run / "environments" / f"{name}.{kind}.json", {"accepted": True})
            code = {"exit_code": 1} if name == NAMES[1] and kind == "calibration" else {}
            write_json(record_of(run, f"{stage_name}_{name}"), {"seconds": 3.0, "peak_bytes": 2**30, **code})
    machine.begin(run)
    for seconds, code in ((60.0, 75), (120.0, 0)):
        machine.end(run, seconds, code)
    base = {"seconds": 2.0, "peak_bytes": 2**20, "command": ["-m", "train.evaluate", "--model", "models/m"]}
    write_json(record_of(run, "10_score_base"), base)
    for name in ("train", "direct", "joint"):
        last = 3 if name == "train" else 12
        lines = [{"adapter": name, "iteration": i + 1, "episodes": 12.0, "sampled_tokens": 100.0} for i in range(last)]
        folder = run / "training" / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def claim(data: dict[str, Any], text: str) -> dict[str, Any]:
    (found,) = [c for c in data["claims"] if text in c["claim"]]
    return dict(found)


def test_the_table_says_what_was_measured(finished: Path) -> None:
    data = table.collect(finished, SIZE)
    order = [row["system"] for row in data["rows"]]
    assert order[:7] == ["base", "direct", "joint", *NAMES] and order[-1] == "union"
    rates = {row["system"]: row["modes"]["sampled"]["success"]["value"] for row in data["rows"]}
    assert rates["routed"] == pytest.approx(0.8) and "first_1" not in rates
    beats = claim(data, "routed beats the best single adapter (structured_data_reasoning)")
    assert beats["verdict"] == "yes" and beats["interval"]["value"] == pytest.approx(0.25)
    assert claim(data, "linear merge does not beat")["verdict"] == "yes"
    assert claim(data, "GRPO on the target")["interval"]["value"] == pytest.approx(0.35)
    assert claim(data, "GRPO of the gate")["verdict"].startswith("yes")
    assert claim(data, "own environment")["measured"] == "4 of 4"
    assert claim(data, "number of capabilities")["measured"] == "55.0 -> 60.0 -> 70.0 -> 80.0 %"
    assert [row["capabilities"] for row in data["count"]] == [1, 2, 3, 4]
    curve = {(p["system"], p["budget"]): (p["rollouts"], round(p["success"]["value"], 3)) for p in data["curve"]}
    assert curve["routed", 2] == (24, 0.5) and curve["routed", 3] == (36, 0.8)
    assert curve["direct", 2] == (96, 0.3) and curve["direct", 3] == (144, 0.45)  # four times the iterations
    shown = {e["name"]: (e["validation_passed"], e["calibration_passed"]) for e in data["environments"]}
    assert shown[NAMES[1]] == (True, False) and shown[other_candidates.NAMES[0]] == (None, None)
    assert data["costs"]["training"]["direct"] == {
        "rollouts": 144, "sampled_tokens": 1200, "finished": False,
    }  # fmt: skip
    assert data["costs"]["pieces_s"] == [60.0, 120.0] and data["info"]["machine"]["torch"]
    assert "; 3 minutes in 2 pieces" in table.markdown(data)
    assert data["choice"]["picks"] == {NAMES[0]: 30, "base": 10} and data["choice"]["invalid_share"] == 0.125
    assert data["gates"]["routed"]["validation_accuracy"] == 0.9
    assert not [c for c in data["claims"] if c["verdict"] == "open"]


@pytest.mark.parametrize("stop", [False, True])
def test_every_piece_counts_also_one_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: bool
) -> None:
    def execute(_: object) -> int:
        if stop:
            raise KeyboardInterrupt
        return 75

    monkeypatch.setattr(evidence_run.Scheduler, "execute", execute)
    monkeypatch.setattr(evidence_run.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["run", "--size", "tiny", "--run", str(tmp_path), "--model", "m"])
    with pytest.raises(KeyboardInterrupt) if stop else contextlib.nullcontext():
        evidence_run.main()
    (piece,) = [json.loads(line) for line in (tmp_path / "pieces.jsonl").read_text().splitlines()]
    assert piece["exit"] == (130 if stop else 75) and len(machine.wall_seconds(tmp_path)) == 1


def test_sentences_say_what_was_accepted_trained_and_sampled_where(finished: Path) -> None:
    text = table.markdown(table.collect(finished, SIZE))
    assert f"Trained: {', '.join(NAMES)}, the candidates of the highest Delta" in text
    assert f"the filter accepts {NAMES[0]}, {NAMES[1]}.\nAfter a second mining run" in text  # two of the four
    write_json(record_of(finished, "07_train_train"), {"seconds": 3.0, "peak_bytes": 1, "command": []})
    text = table.markdown(table.collect(finished, SIZE))
    assert "Model m, base and adapters sampled by a vLLM server, gates by transformers" in text  # not the server's name
    assert "the capabilities' adapters together 36 (300), GRPO on the mined tasks 144 (1200; goes on)" in text
    assert "Not among them: mining, calibration" in text
    write_episodes(finished / "score", {"base": 0.2}, model="models/m")
    select(finished, "a", (0.1, 0.1, 0.0, 0.0))
    data = table.collect(finished, SIZE)
    assert "Model m, sampled by transformers" in table.markdown(data) and "accepts none." in table.markdown(data)
    page = table.page(data, {})
    assert "the filter accepts none" in page and "same number of rollouts" not in page


def test_claims_that_do_not_hold_are_said(finished: Path) -> None:
    worse = {"routed": 0.5, "merge": 0.7, "routed_grpo": 0.45, "first_1": 0.55, "rejected": 0.6}
    write_episodes(finished / "score", worse)
    write_episodes(finished / "score_vllm", {"base": 0.4, "routed": 0.9})
    data = table.collect(finished, SIZE)
    lost = ["best single adapter (", "linear merge does not", "GRPO of the gate", "number of cap", "beat the other 4"]
    differ = ["routed, sampled: vLLM", "routed, greedy: vLLM", "the vLLM server agree"]
    for text in lost + differ:
        assert claim(data, text)["verdict"].startswith("no"), text
    assert claim(data, "routed beats the prompt-chosen")["verdict"] == "no (unsure)"  # equal rates are no win


def test_where_all_are_equal_nothing_grows_and_none_is_best(finished: Path) -> None:
    write_episodes(finished / "score", dict.fromkeys(("first_1", "first_2", "first_3", "routed"), 0.0))
    same = {"success": {"value": 0.0, "low": 0.0, "high": 0.0}}
    results = {f"capability_{a}": {"sampled": dict.fromkeys(("base", *NAMES), same)} for a in NAMES}
    write_json(finished / "transfer" / "evaluation.json", {"results": results})
    data = table.collect(finished, SIZE)
    assert claim(data, "number of capabilities")["verdict"] == "no"
    assert (claim(data, "own environment")["measured"], claim(data, "own environment")["verdict"]) == ("0 of 4", "no")


def test_what_was_not_run_is_open_and_what_is_half_run_does_not_count(finished: Path) -> None:
    rollouts = finished / "score" / "rollouts"
    for name in ("routed_grpo", "merge", "random_1", "first_2"):
        (rollouts / f"{name}.helpdesk.sampled.json").unlink()
    half = read_json(rollouts / "soft.helpdesk.sampled.json")
    write_json(rollouts / "soft.helpdesk.sampled.json", half | {"simulations": half["simulations"][:-1]})
    (finished / "transfer" / "evaluation.json").unlink()
    (finished / "mine_b" / "selected_capabilities.report.json").unlink()
    data = table.collect(finished, SIZE)
    for text in ("GRPO of the gate", "linear merge does not", "random candidates", "number of cap", "own environment"):
        assert claim(data, text)["verdict"] == "open" and claim(data, text)["measured"] == "not run", text
    shown = [row["system"] for row in data["rows"]]
    assert "soft" not in shown and "merge" not in shown and "routed" in shown
    assert data["transfer"] == [] and data["selection"] is None
    assert table.page(data, table.figures(data)) and "not run" in table.markdown(data)


def test_a_table_before_anything_is_scored_is_not_an_error(finished: Path) -> None:
    for file in (finished / "score" / "rollouts").iterdir():
        file.unlink()
    data = table.collect(finished, SIZE)
    assert data["rows"] == [] and {c["verdict"] for c in data["claims"] if "routed beats" in c["claim"]} == {"open"}
    assert table.page(data, table.figures(data)) and table.markdown(data)
    text = table.markdown(data)
    assert text.startswith("| claim |") and "Nothing is scored yet" in text and "None" not in text
    assert "best single adapter |" in text  # no name before one is known
    assert "Nothing is scored yet, seeds" in table.page(data, table.figures(data))


def test_the_filter_is_compared_with_the_rejected_and_the_mean_of_the_draws(finished: Path) -> None:
    size = dataclasses.replace(SIZE, draws=2)
    write_episodes(finished / "score", {"random_2": 0.3})
    rejected, random = findings._filter(finished, NAMES, size)
    assert rejected["interval"]["value"] == pytest.approx(0.8 - 0.35)
    assert random["interval"]["value"] == pytest.approx(0.8 - (0.5 + 0.3) / 2)
    data = table.collect(finished, size)
    assert data["filter"][0]["gate"] == "routed" and len(data["filter"]) == 4


def test_the_base_is_compared_with_a_server_only_when_there_was_one(finished: Path) -> None:
    text = "transformers and the vLLM server"
    assert [c for c in table.collect(finished, SIZE)["claims"] if text in c["claim"]]
    write_episodes(finished / "score", {"base": 0.2}, model="models/m")
    assert not [c for c in table.collect(finished, SIZE)["claims"] if text in c["claim"]]


def test_agreement_of_two_minings_by_hand() -> None:
    first = [{"skill": s, "selected": d > 0.2, "mean_delta": d} for s, d in (("a", 0.5), ("b", 0.3), ("c", 0.1))]
    second = [{"skill": s, "selected": d > 0.2, "mean_delta": d} for s, d in (("a", 0.5), ("b", 0.1), ("c", 0.3))]
    found = findings.selection_agreement(first, second)
    assert found["jaccard"] == pytest.approx(1 / 3) and found["spearman"] == pytest.approx(0.5)
    assert findings.selection_agreement(first, first)["jaccard"] == 1.0


def test_candidates_of_equal_delta_share_their_rank() -> None:
    def entries_of(deltas: tuple[float, ...]) -> list[dict[str, Any]]:
        return [{"skill": s, "selected": False, "mean_delta": d} for s, d in zip("abcd", deltas, strict=True)]

    found = findings.selection_agreement(entries_of((0.5, 0.4, 0.0, 0.0)), entries_of((0.4, 0.5, 0.0, 0.0)))
    assert found["spearman"] == pytest.approx(1 - 1 / 4.5)  # ranks 4 3 1.5 1.5 against 3 4 1.5 1.5
    assert findings.selection_agreement(entries_of((0.0,) * 4), entries_of((0.0,) * 4))["spearman"] is None


def test_the_command_writes_json_figures_page_and_readme(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- helpdesk_gpu:begin -->\nold\n<!-- helpdesk_gpu:end -->\nafter\n")
    flags = ["--run", str(finished), "--size", "tiny", "--out", str(tmp_path / "out"), "--readme", str(readme)]
    monkeypatch.setattr(sys, "argv", ["table", *flags])
    monkeypatch.setitem(table.SIZES, "tiny", SIZE)
    assert table.main() == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "\nold\n" not in text
    assert "| token top-1 gate (SFT) | 80.0" in text and "| claim | measured | holds |" in text
    assert f"| {NAMES[0]} | 90.0 [90, 90] |" in text and "Jaccard index 1.00" in text
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page and 'href="' not in page and "Transfer" in page and "rank correlation" in page
    for name in ("systems", "curve", "count", "filter"):
        assert (tmp_path / "out" / f"{name}.svg").read_text().startswith("<svg xmlns=")
    assert read_json(tmp_path / "out" / "helpdesk.json")["capabilities"] == NAMES


def test_missing_stages_are_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="selection report"):
        table.collect(tmp_path, SIZE)
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), "--size", "tiny", "--limit-s", "-1"],
        cwd=ROOT, capture_output=True, text=True, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_what_noise_explains_is_unsure(finished: Path) -> None:
    """A step that grows by less than its interval, and an adapter whose lead another one's interval reaches."""
    rates = {"value": 0.5, "low": 0.46, "high": 0.54}, {"value": 0.48, "low": 0.44, "high": 0.52}
    results = {}
    for own in NAMES:
        results[f"capability_{own}"] = {"sampled": {a: {"success": rates[a != own]} for a in ("base", *NAMES)}}
    write_json(finished / "transfer" / "evaluation.json", {"results": results})
    found = claim(table.collect(finished, SIZE), "own environment")
    assert (found["measured"], found["verdict"]) == ("4 of 4, 0 beyond the intervals", "yes (unsure)")
