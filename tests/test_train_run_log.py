"""Metrics, progress line and warnings; settings from files and flags."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.files import InputError
from train.config import TrainConfig, adapter_name, build_parser, load_config, seed_range
from train.run_log import RunLog, Tracker, lasting_faults

GOOD: dict[str, float] = {
    "reward": 0.5, "success": 0.25, "informative": 0.9, "sampled_tokens": 1000.0, "sample_s": 2.0, "update_s": 1.0,
    "deliver_s": 0.1, "constant_high": 0.0, "constant_low": 0.1, "truncated": 0.0, "errors": 0.0, "entropy": 0.6,
    "mismatch_outside": 0.0, "nonfinite": 0.0,
}  # fmt: skip


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"constant_high": 0.95, "reward": 0.98}, "too easy (reward 0.98); mutate it or stop here"),
        ({"constant_low": 0.9, "reward": 0.01}, "too hard (reward 0.01); make easier seeds or use hints"),
        ({"truncated": 0.25}, "25% of episodes are cut: raise --max-new-tokens or --max-seq-length"),
        ({"errors": 0.06}, "6% of episodes fail outside the policy"),
        ({"mismatch_outside": 0.08}, "8% of sampled tokens have a trainer/sampler ratio outside [0.5, 2]"),
        ({"entropy": 0.01}, "the policy no longer explores"),
    ],
)
def test_lasting_faults_are_told_in_words(change: dict[str, float], says: str) -> None:
    (text,) = lasting_faults([GOOD | change] * 3)
    assert says in text
    assert lasting_faults([GOOD | change, GOOD, GOOD | change]) == []  # once is no trend


def test_a_warning_is_said_once_per_three_iterations(tmp_path: Path) -> None:
    out = io.StringIO()
    log = RunLog(tmp_path, {}, stream=out)
    for iteration in range(1, 8):
        log.iteration("a", iteration, 7, GOOD | {"entropy": 0.001}, {})
    log.close()
    assert [r["iteration"] for r in records(tmp_path) if "warning" in r] == [3, 6]
    assert out.getvalue().count("warning: entropy") == 2


def test_the_progress_line(tmp_path: Path) -> None:
    out = io.StringIO()
    log = RunLog(tmp_path, {}, stream=out)
    log.iteration("lookup", 3, 40, GOOD, {"timeout": 2})
    log.evaluation("lookup", 3, {"reward": 0.75, "n": 32.0})
    line, evaluation = out.getvalue().splitlines()
    assert line.startswith("[lookup 3/40] reward 0.500 success 0.25 informative 0.90 entropy 0.600 | 500 tok/s")
    assert "errors {'timeout': 2}" in line and evaluation == "[lookup 3] held out: reward 0.750 n 32.000"
    assert records(tmp_path)[0]["error_kinds"] == {"timeout": 2} and records(tmp_path)[1]["eval_reward"] == 0.75


def test_what_is_not_finite_stays_out_of_the_json_and_is_told_at_once(tmp_path: Path) -> None:
    out = io.StringIO()
    log = RunLog(tmp_path, {}, stream=out)
    log.iteration("a", 1, 2, GOOD | {"loss": math.nan, "grad_norm": math.inf, "nonfinite": 1.0}, {})
    metrics, warning = records(tmp_path)
    assert "loss" not in metrics and "grad_norm" not in metrics and metrics["nonfinite"] == 1.0
    assert "not finite: this update was skipped" in warning["warning"] and "warning: loss" in out.getvalue()


def test_resume_drops_what_comes_after_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    log = RunLog(tmp_path, {}, stream=io.StringIO())
    for iteration in (1, 2, 3):
        log.iteration("a", iteration, 9, GOOD, {})
        log.iteration("b", iteration, 9, GOOD, {})
        log.evaluation("a", iteration, {"reward": 1.0})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"adapter": "a", "itera')
    RunLog(tmp_path, {"a": 2, "b": 1}, stream=io.StringIO()).close()
    kept = [(r["adapter"], r["iteration"]) for r in records(tmp_path)]
    assert kept == [("a", 1), ("b", 1), ("a", 1), ("a", 2), ("a", 2)]
    RunLog(tmp_path, {}, stream=io.StringIO()).close()
    assert records(tmp_path) == []


def test_a_resumed_run_warns_where_an_uninterrupted_one_would(tmp_path: Path) -> None:
    bad = GOOD | {"truncated": 0.5}
    for resume_at in (1, 2, 4):
        folder = tmp_path / str(resume_at)
        folder.mkdir()
        log = RunLog(folder, {}, stream=io.StringIO())
        for iteration in range(1, 8):
            if iteration == resume_at + 1:
                log.close()
                log = RunLog(folder, {"a": resume_at}, stream=io.StringIO())
            log.iteration("a", iteration, 7, bad, {})
        assert [r["iteration"] for r in records(folder) if "warning" in r] == [3, 6]


def test_trackers(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected tensorboard, trackio or wandb"):
        Tracker(("pigeons",), tmp_path, {})
    seen = []
    tracker = Tracker((), tmp_path, {})
    tracker._writers.append(lambda values, step: seen.append((values, step)))
    RunLog(tmp_path, {}, tracker, io.StringIO()).iteration("a", 4, 9, GOOD, {})
    assert seen[0][0]["a/reward"] == 0.5 and seen[0][1] == 4


# ------------------------------------------------------------------------ settings


def test_published_flags_and_defaults() -> None:
    text = (
        "--game g --model m --group-size 16 --groups-per-batch 4 --lora-rank 8 --lora-alpha 8 --lr 1e-5 --epochs 1 "
        "--mini-batch-size 4 --max-grad-norm 1.0 --use-clipping --clip-eps 0.28 --kl-coef 0 --filter-constant-groups "
        "--temperature 1.0 --normalize-by-len --resume --rollout-log --save-every 5 --dynamic-sampling-max-batches 3 "
        "--dynamic-sampling-min-groups 2 --user-llm-url u --user-llm-model m --user-llm-temperature 0 "
        "--user-llm-max-tokens 9 --root r --max-iters 1 --seed 1 --output-dir o --max-new-tokens 5 --max-seq-length 99 "
        "--target-modules a,b --eval-every 1 --eval-seeds 1:2 --engine local"
    )
    config = load_config(vars(build_parser().parse_args(text.split())), {})
    assert config.capabilities == ("g",) and config.target_modules == ("a", "b") and config.loss_config().clipping
    default = load_config({"capabilities": ("g",), "model": "m"}, {})
    expected = {
        "group_size": 16, "groups_per_batch": 8, "lr": 1e-5, "weight_decay": 0.0, "lora_rank": 32, "lora_alpha": 32,
        "clip_low": 0.2, "clip_eps": 0.28, "kl_coef": 0.0, "epochs": 1, "max_grad_norm": 1.0, "temperature": 1.0,
        "max_seq_length": 16384, "dynamic_sampling_max_batches": 3, "max_iters": 40, "save_every": 5,
    }  # fmt: skip
    assert {k: getattr(default, k) for k in expected} == expected
    assert default.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    flags = "--game g --model m --no-clipping --no-filter-constant-groups"
    off = load_config(vars(build_parser().parse_args(flags.split())), {})
    assert not off.use_clipping and not off.filter_constant_groups and not off.loss_config().clipping


def test_settings_become_losses() -> None:
    def loss(**values: Any) -> Any:
        return load_config({"capabilities": ("g",), "model": "m", **values}, {}).loss_config()

    assert loss(normalize_by_len=False).kind == "dr_grpo" and loss(loss="dapo", normalize_by_len=False).kind == "dapo"
    assert loss(is_cap=0).is_cap is None and loss().is_cap == 2.0 and loss(max_seq_length=64).max_length == 64


def test_the_model_may_come_from_the_environment() -> None:
    assert load_config({"capabilities": ("g",)}, {"VLLM_MODEL": "served"}).model == "served"
    assert load_config({"capabilities": ("g",), "model": "own"}, {"VLLM_MODEL": "served"}).model == "own"
    with pytest.raises(InputError, match="no model: give --model"):
        load_config({"capabilities": ("g",)}, {})


def test_adapters_and_their_games() -> None:
    def games(**values: Any) -> dict[str, str]:
        return TrainConfig(model="m", **values).adapter_games()

    assert games(capabilities=("capability_a", "b")) == {"a": "capability_a", "b": "b"}
    assert games(games="capability_a:2, b:1") == {"a_mix": "capability_a:2, b:1"}
    assert games(games="a,b", name="both") == {"both": "a,b"} and adapter_name("helpdesk") == "helpdesk"


@pytest.mark.parametrize("text", ["5", "a:b", "5:5", "9:3", "-3:4", ""])
def test_seed_ranges_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="--seeds"):
        seed_range(text, "--seeds")
    assert seed_range("3:5", "--seeds") == range(3, 5)


def test_flags_win_over_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("max_iters: 9\nlr: 1e-3\ncapabilities: [capability_digits]\nmodel: m\n")
    config = load_config({"config": str(path), "max_iters": 1}, {})
    assert (config.max_iters, config.lr, config.capabilities) == (1, 1e-3, ("capability_digits",))
