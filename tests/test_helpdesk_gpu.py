"""The evidence run: its plan (every command must parse, budgets must be fair), its runner, and its table."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.files import InputError, read_json, write_json

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "helpdesk_gpu"))

import findings
import plan
import run as runner
import table

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "helpdesk_gpu"
NAMES = [
    "structured_data_reasoning",
    "tool_calling_precision",
    "precondition_verification",
    "multi_step_task_completion",
]


def every_stage(run: Path, size: str = "gpu") -> list[plan.Stage]:
    wanted = plan.SIZES[size]
    names = NAMES[: wanted.count]
    return [
        *plan.mining_stages(run, "m", wanted),
        *plan.environment_stages(run, "m", wanted, names),
        *plan.training_stages(run, "m", wanted, names),
        *plan.final_stages(run, "m", wanted, names),
        plan.vllm_stage(run, "m", wanted),
    ]


# ------------------------------------------------------------------ plan


def parsers() -> dict[str, Callable[[list[str]], Any]]:
    from pipeline import _summarize, aggregate_capabilities, calibrate_environment, label_capabilities
    from pipeline import validate_environment as validate
    from train import collect_rollouts, config, evaluate

    return {
        "train.evaluate": evaluate.build_parser().parse_args,
        "train.collect_rollouts": collect_rollouts.build_parser().parse_args,
        "train": config.build_parser().parse_args,
        "pipeline/_summarize.py": _summarize.parse_arguments,
        "pipeline/aggregate_capabilities.py": aggregate_capabilities.parse_arguments,
        "pipeline/label_capabilities.py": label_capabilities.parse_arguments,
        "pipeline/validate_environment.py": validate._parser().parse_args,
        "pipeline/calibrate_environment.py": calibrate_environment._parser().parse_args,
    }


@pytest.mark.parametrize("size", plan.SIZES)
def test_every_command_parses_and_no_stage_appears_twice(tmp_path: Path, size: str) -> None:
    known, parsed = parsers(), set()
    stages = every_stage(tmp_path, size)
    assert len({s.name for s in stages}) == len(stages)
    for stage in stages:
        command = list(stage.command[1:])
        name = command[1] if command[0] == "-m" else command[0]
        arguments = command[2:] if command[0] == "-m" else command[1:]
        if name in known:
            known[name](arguments)
            parsed.add(name)
        else:
            others = ("train.train_router_sft", "train.grpo_gater", "moe_gate.export", str(FOLDER.parent))
            assert name.startswith(others)
    assert parsed == set(known)


def flag(stage: plan.Stage, name: str) -> str:
    return stage.command[stage.command.index(name) + 1]


def test_every_method_gets_the_same_number_of_rollouts(tmp_path: Path) -> None:
    stages = {s.name: s for s in every_stage(tmp_path)}
    for budget in plan.SIZES["gpu"].budgets:
        four = stages[f"08_train_{budget}"]
        assert len(flag(four, "--capabilities").split(",")) * int(flag(four, "--max-iters")) == 4 * budget
        for rival in ("09_direct", "10_joint"):
            one = stages[f"{rival}_{budget}"]
            assert int(flag(one, "--max-iters")) == 4 * budget
            for name in ("--group-size", "--groups-per-batch", "--lr", "--adapter-dir"):
                assert flag(one, name) == flag(four, name)


def test_the_training_settings_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from train.config import build_parser, load_config

    monkeypatch.chdir(ROOT)
    adapters = set()
    for found in every_stage(tmp_path):
        if found.command[1:3] == ("-m", "train"):
            config = load_config(vars(build_parser().parse_args(list(found.command[3:]))), {})
            adapters |= config.adapter_games().keys()
            assert config.resume and config.rollout_log == (len(config.adapter_games()) > 1)
    assert adapters == {*NAMES, "direct", "joint"}


def test_the_gate_after_grpo_is_scored_when_there_is_one(tmp_path: Path) -> None:
    def gates() -> str:
        (found,) = [s for s in plan.final_stages(tmp_path, "m", plan.SIZES["gpu"], NAMES) if s.name == "14_score"]
        return flag(found, "--gate")

    assert "routed=" in gates() and "routed_grpo" not in gates() and gates().count("=") == 1 + len(plan.subsets(NAMES))
    (tmp_path / "gate_grpo").mkdir()
    (tmp_path / "gate_grpo" / "gate.safetensors").touch()
    assert f"routed_grpo={tmp_path / 'gate_grpo'}" in gates()


def test_scored_seeds_are_never_mined_or_trained_on(tmp_path: Path) -> None:
    from train.learner import FIRST_TRAIN_SEED

    for size in plan.SIZES.values():
        first, end = map(int, size.score_seeds.split(":"))
        mined = [(start, start + size.mine_seeds) for start in (0, 20_000)]
        assert all(stop <= first or start >= end for start, stop in mined) and end <= FIRST_TRAIN_SEED
        assert size.calibrate_seeds <= first


def test_every_budget_leaves_the_gate_rollouts_of_the_adapters() -> None:
    """The first iteration samples from the base, so one iteration is too few for the gate."""
    for size in plan.SIZES.values():
        assert min(size.budgets) >= 2
        for budgets in [(1,), (), (1, 4)]:
            with pytest.raises(InputError, match="at least 2 iterations"):
                dataclasses.replace(size, budgets=budgets)


def test_ablations_cover_every_size_and_pair_once() -> None:
    found = plan.subsets(["a", "b", "c", "d"])
    assert [found[f"first_{k}"] for k in (1, 2, 3)] == [("a",), ("a", "b"), ("a", "b", "c")]
    pairs = [members for members in found.values() if len(members) == 2]
    assert len(pairs) == len(set(pairs)) == 6
    assert plan.subsets(["a", "b"]) == {"first_1": ("a",)}


# ------------------------------------------------------------------ runner


def stage(name: str, code: str, also_done: tuple[int, ...] = ()) -> plan.Stage:
    return plan.Stage(name, (sys.executable, "-c", code), also_done)


def test_a_stage_runs_once_and_leaves_its_record(tmp_path: Path) -> None:
    file = tmp_path / "count"
    once = stage("one", f"open({str(file)!r}, 'a').write('x')")
    for _ in range(2):
        assert runner.execute(once, tmp_path, time.monotonic() + 60) == 0
    assert file.read_text() == "x"
    assert read_json(tmp_path / "done" / "one.json")["command"][-1] == once.command[-1]


def test_a_verdict_of_no_is_a_result_and_a_failure_is_not(tmp_path: Path) -> None:
    far = time.monotonic() + 60
    assert runner.execute(stage("no", "raise SystemExit(1)", plan.VERDICT), tmp_path, far) == 0
    assert read_json(tmp_path / "done" / "no.json")["exit_code"] == 1
    assert runner.execute(stage("broken", "raise SystemExit(2)", plan.VERDICT), tmp_path, far) == 2
    assert runner.execute(stage("bad", "raise SystemExit(1)"), tmp_path, far) == 1
    assert not (tmp_path / "done" / "broken.json").exists() and not (tmp_path / "done" / "bad.json").exists()


def test_time_up_stops_the_stage_with_its_children_and_the_next_start_adds_up(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child = f"p = subprocess.Popen(['sleep', '60']); open({str(pid)!r}, 'w').write(str(p.pid)); p.wait()"
    sleep = f"import subprocess; {child}"
    begin = time.monotonic()
    runner.SMALLEST_S, before = 0.5, runner.SMALLEST_S
    try:
        assert runner.execute(stage("long", sleep), tmp_path, begin + 2.0) == runner.UNFINISHED
    finally:
        runner.SMALLEST_S = before
    assert time.monotonic() - begin < 20 and not (tmp_path / "done" / "long.json").exists()
    time.sleep(0.2)
    assert not Path(f"/proc/{pid.read_text()}").exists() or "Z" in Path(f"/proc/{pid.read_text()}/stat").read_text()
    spent = read_json(tmp_path / "done" / "long.json.unfinished")["seconds"]
    assert spent > 1.0
    assert runner.execute(stage("long", "pass"), tmp_path, time.monotonic() + 60) == 0
    assert read_json(tmp_path / "done" / "long.json")["seconds"] > spent
    assert not (tmp_path / "done" / "long.json.unfinished").exists()


def test_no_stage_is_started_at_the_last_moment(tmp_path: Path) -> None:
    assert runner.execute(stage("late", "pass"), tmp_path, time.monotonic() + 1.0) == runner.UNFINISHED
    assert not (tmp_path / "done").exists()


# ------------------------------------------------------------------ table

RATES = {
    "base": 0.2, "direct": 0.45, "joint": 0.5, NAMES[0]: 0.55, NAMES[1]: 0.5, "merge": 0.4, "ties": 0.45,
    "dare_ties": 0.3, "chosen": 0.5, "soft": 0.6, "routed": 0.8, "routed_grpo": 0.85, "first_1": 0.55,
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


def write_evaluation(folder: Path, env_rates: dict[str, dict[str, float]], singles: list[str]) -> None:
    from train.evaluate import evaluate_entries
    from train.systems import Plan, System

    plan_ = Plan(range(100, 140), 2, ("greedy", "sampled"), None, 64, 1.0, 0, 1)
    names = list(next(iter(env_rates.values())))
    systems = [System(n, "adapter" if n in singles else "base" if n == "base" else "other") for n in names]
    cells = {
        (name, env, mode): entries(rate, plan_.seeds, 1 if mode == "greedy" else 2)
        for env, rates in env_rates.items()
        for name, rate in rates.items()
        for mode in plan_.modes
    }
    for (name, env, mode), found in cells.items():
        write_json(folder / "rollouts" / f"{name}.{env}.{mode}.json", {"simulations": found})
    result = evaluate_entries(cells, systems, plan_, 200, 0)
    result |= {"routing": {"helpdesk, routed": {"share_of_slot": {"base": 0.25, NAMES[0]: 0.75}}}}
    result |= {"choice": {"helpdesk": {"picks": {NAMES[0]: 30, "base": 10}, "invalid_share": 0.1}}}
    result |= {"info": {"model": "m", "seeds": "100:140", "trials": 2}}
    write_json(folder / "evaluation.json", result)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """What a tiny run leaves, with rates as in ``RATES``."""
    run, names = tmp_path / "run", NAMES[:2]
    write_evaluation(run / "score", {"helpdesk": RATES}, names)
    write_evaluation(
        run / "transfer",
        {f"capability_{a}": {"base": 0.1, **{b: 0.9 if a == b else 0.3 for b in names}} for a in names},
        names,
    )
    for part, deltas in (("a", (0.6, 0.4, 0.1)), ("b", (0.5, 0.55, 0.05))):
        found = [
            {"skill": n, "selected": d > 0.2, "mean_delta": d} for n, d in zip(NAMES[:3], deltas, strict=True)
        ]  # fmt: skip
        write_json(run / f"mine_{part}" / "selected_capabilities.report.json", {"candidates": found})
    for name in names:
        for kind, stage_name in (("validation", "05_validate"), ("calibration", "07_calibrate")):
            write_json(run / "environments" / f"{name}.{kind}.json", {"accepted": True})
            code = {"exit_code": 1} if name == names[1] and kind == "calibration" else {}
            write_json(run / "done" / f"{stage_name}_{name}.json", {"seconds": 3.0, "peak_bytes": 2**30, **code})
    for name in ("train", "train_direct", "train_joint"):
        lines = [{"adapter": name, "iteration": i, "episodes": 12.0, "sampled_tokens": 100.0} for i in (1, 2, 3, 4)]
        (run / name).mkdir()
        (run / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def claim(data: dict[str, Any], text: str) -> dict[str, Any]:
    (found,) = [c for c in data["claims"] if text in c["claim"]]
    return dict(found)


def test_the_table_says_what_was_measured(finished: Path) -> None:
    data = table.collect(finished, plan.SIZES["tiny"])
    order = [row["system"] for row in data["rows"]]
    assert order[:5] == ["base", "direct", "joint", *NAMES[:2]] and order[-1] == "union"
    rates = {row["system"]: row["modes"]["sampled"]["success"]["value"] for row in data["rows"]}
    assert rates["routed"] == pytest.approx(0.8) and "first_1" not in rates
    beats = claim(data, "routed beats the best single adapter (structured_data_reasoning)")
    assert beats["verdict"] == "yes" and beats["interval"]["value"] == pytest.approx(0.25)
    assert claim(data, "linear merge does not beat")["verdict"] == "yes"
    assert claim(data, "GRPO on the target")["interval"]["value"] == pytest.approx(0.35)
    assert claim(data, "GRPO of the gate")["verdict"].startswith("yes")
    assert claim(data, "own environment")["measured"] == "2 of 2"
    assert claim(data, "number of capabilities")["measured"] == "55.0 -> 80.0 %"
    assert data["count"][0]["capabilities"] == 1 and data["count"][-1]["capabilities"] == 2
    assert [p["rollouts"] for p in data["curve"]] == [24, 48, 48]  # up to iteration 2 of each, or 4 of the rivals
    assert [e["calibrated"] for e in data["environments"]] == [True, False]
    assert data["costs"]["total_s"] == 12.0 and data["costs"]["training"]["train"]["rollouts"] == 48
    assert not any("vLLM" in c["claim"] for c in data["claims"])


def test_claims_that_do_not_hold_are_said(finished: Path) -> None:
    worse = RATES | {"routed": 0.5, "merge": 0.7, "routed_grpo": 0.45, "first_1": 0.55}
    write_evaluation(finished / "score", {"helpdesk": worse}, NAMES[:2])
    write_evaluation(finished / "score_vllm", {"helpdesk": {"base": 0.2, "routed": 0.9}}, [])
    data = table.collect(finished, plan.SIZES["tiny"])
    for text in ("best single adapter (", "linear merge does not", "GRPO of the gate", "number of cap", "vLLM plugin"):
        assert claim(data, text)["verdict"].startswith("no"), text
    assert claim(data, "routed beats the prompt-chosen")["verdict"] == "no (unsure)"  # equal rates are no win


def test_the_filter_is_compared_with_the_other_pairs(finished: Path) -> None:
    gates = {"first_1": 0.3, "first_2": 0.6, "first_3": 0.7, "pair_1_3": 0.5, "pair_1_4": 0.3, "pair_2_3": 0.4,
             "pair_2_4": 0.3, "pair_3_4": 0.25}  # fmt: skip
    write_evaluation(finished / "score", {"helpdesk": RATES | gates}, NAMES[:2])
    results = read_json(finished / "score" / "evaluation.json")["results"]["helpdesk"]["sampled"]
    (found,) = findings._filter(finished, NAMES, 200, results)
    assert found["interval"]["value"] == pytest.approx(0.6 - (0.5 + 0.3 + 0.4 + 0.3 + 0.25) / 5)
    assert found["verdict"] == "yes"


def test_agreement_of_two_minings_by_hand() -> None:
    first = [{"skill": s, "selected": d > 0.2, "mean_delta": d} for s, d in (("a", 0.5), ("b", 0.3), ("c", 0.1))]
    second = [{"skill": s, "selected": d > 0.2, "mean_delta": d} for s, d in (("a", 0.5), ("b", 0.1), ("c", 0.3))]
    found = findings.selection_agreement(first, second)
    assert found["jaccard"] == pytest.approx(1 / 3) and found["spearman"] == pytest.approx(0.5)
    assert findings.selection_agreement(first, first)["jaccard"] == 1.0


def test_the_command_writes_json_figures_page_and_readme(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- helpdesk_gpu:begin -->\nold\n<!-- helpdesk_gpu:end -->\nafter\n")
    flags = ["--run", str(finished), "--size", "tiny", "--out", str(tmp_path / "out"), "--readme", str(readme)]
    monkeypatch.setattr(sys, "argv", ["table", *flags])
    assert table.main() == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "\nold\n" not in text
    assert "| token top-1 gate (SFT) | 80.0" in text and "| claim | measured | holds |" in text
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page and 'href="' not in page and "Transfer" in page and "rank correlation" in page
    for name in ("systems", "curve", "count"):
        assert (tmp_path / "out" / f"{name}.svg").read_text().startswith("<svg xmlns=")
    assert read_json(tmp_path / "out" / "helpdesk.json")["capabilities"] == NAMES[:2]


def test_missing_stages_are_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="selection report"):
        table.collect(tmp_path, plan.SIZES["tiny"])
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), "--size", "tiny", "--limit-s", "-1"],
        cwd=ROOT, capture_output=True, text=True, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
