"""``python -m train`` from end to end on a random model of a few kilobytes and trivial environments, on a CPU."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import train_games
from tiny_models import tiny_model_folder
from train_helpers import update_config
from train_runs import Runs, error_line

from game_registry import GameError
from pipeline.files import InputError, ServerError, read_jsonl, run_cli, sole_writer
from pipeline.ports import free_port
from train.__main__ import main
from train.config import load_config
from train.distributed import PeerLost, Ranks
from train.grpo import Worker
from train.learner import Learner
from train.rollout import WatchedGame

PRINTABLE, DIGITS = "--game capability_printable", "--game capability_digits"
BOTH = "--capabilities capability_printable,capability_digits"


# ------------------------------------------------------------------------ what a run leaves


def test_two_capabilities_at_once_and_their_files(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """One adapter each on one base, in both published forms; both load back with peft and give equal logits."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from train.adapter_folder import as_folders

    assert runs("r", BOTH, "--max-iters 3 --save-every 2 --rollout-log") == 0
    err = capsys.readouterr().err
    assert '"max_iters": 3' in err.splitlines()[0] and "clip_low" not in err.splitlines()[0], "only what was chosen"
    assert "settings: {" in err and "[printable 3/3] reward" in err and "tok/s" in err
    config = json.loads((runs.tmp / "r/config.json").read_text())
    assert config["schema_version"] == 1 and config["group_size"] == 4
    ids = torch.arange(3, 40)[None]
    logits = {}
    for name in ("printable", "digits"):
        assert [m["iteration"] for m in runs.iterations("r", name)] == [1, 2, 3]
        assert runs.checkpoints("r", name) == ["iter_000002", "iter_000003"]
        folder = runs.tmp / "r_adapters" / name
        with as_folders({"a": str(folder), "b": str(folder) + ".safetensors"}) as forms:
            both = [
                PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(runs.model), forms[k])(ids).logits
                for k in ("a", "b")
            ]
        assert torch.equal(both[0], both[1])
        logits[name] = both[0]
        tensors = load_file(folder / "adapter_model.safetensors")
        assert len(tensors) == 12 and {t.dtype for t in tensors.values()} == {torch.float32}
    base = AutoModelForCausalLM.from_pretrained(runs.model)(ids).logits
    assert not torch.allclose(logits["printable"], base, atol=1e-4)
    assert not torch.allclose(logits["printable"], logits["digits"], atol=1e-4)


def test_rollouts_come_from_the_newest_weights(runs: Runs) -> None:
    """Strictly on-policy, each capability by itself: iteration k samples from version k - 1, ratio 1 on every token."""
    runs("r", BOTH, "--max-iters 4 --rollout-log")
    for name in ("printable", "digits"):
        for iteration in range(1, 5):
            path = runs.tmp / "r/rollouts" / f"{name}_{iteration:06d}.jsonl"
            entries = [json.loads(line) for line in path.read_text().splitlines()]
            expected = None if iteration == 1 else f"{name}@v{iteration - 1}"
            assert {e["adapter"] for e in entries} == {expected} and len(entries) >= 12
            assert {e["game"] for e in entries} == {f"capability_{name}"}
            assert all(len(e["token_ids"]) == len(e["action_mask"]) == len(e["logprobs"]) for e in entries)
        for metrics in runs.iterations("r", name):
            assert metrics["mismatch_max_abs"] < 1e-5 and metrics["mismatch_outside"] == 0.0
    seeds = [e["task_id"] for p in (runs.tmp / "r/rollouts").iterdir() for e in map(json.loads, p.open())]
    assert len(set(seeds)) * 4 <= len(seeds) and min(map(int, seeds)) >= 1_000_000


def test_training_raises_the_reward(runs: Runs) -> None:
    """All that rank-4 adapters under a frozen random head can do in 20 steps is about + 0.1, ten standard errors."""
    runs("r", PRINTABLE, "--max-iters 20 --lr 5e-2 --groups-per-batch 4 --group-size 8")
    rewards = [m["reward"] for m in runs.iterations("r", "printable")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.06, rewards


def test_one_adapter_on_a_mix_starves_no_game(runs: Runs) -> None:
    mix = "--games capability_printable:3,capability_digits:1 --name mixed"
    runs("r", mix, "--max-iters 4 --groups-per-batch 2 --rollout-log --dynamic-sampling-max-batches 1")
    games = [
        json.loads(line)["game"]
        for p in sorted((runs.tmp / "r/rollouts").iterdir())
        for line in p.read_text().splitlines()
    ]
    assert games.count("capability_printable") == 3 * games.count("capability_digits") > 0
    assert (runs.tmp / "r_adapters/mixed/adapter_config.json").is_file()


def test_best_adapter_by_held_out_reward_is_exported(runs: Runs) -> None:
    flags = (PRINTABLE, "--eval-every 1 --eval-seeds 10000:10004 --save-every 1")
    runs("r", *flags, "--max-iters 5")
    evaluated = [m for m in runs.metrics("r") if "eval_reward" in m]
    assert [m["iteration"] for m in evaluated] == [1, 2, 3, 4, 5] and evaluated[0]["eval_n"] == 4.0
    best = (runs.tmp / "r/best/printable/adapter_model.safetensors").read_bytes()
    assert (runs.tmp / "r_adapters/printable/adapter_model.safetensors").read_bytes() == best
    counters = json.loads(runs.state("r", "printable", 5)["state.json"])["counters"]
    assert counters["best_reward"] == max(m["eval_reward"] for m in evaluated)
    shutil.rmtree(runs.tmp / "r_adapters")  # a finished run that is resumed exports the same adapter again
    runs("r", *flags, "--max-iters 5 --resume")
    assert (runs.tmp / "r_adapters/printable/adapter_model.safetensors").read_bytes() == best


def test_hints_and_several_steps_run(runs: Runs) -> None:
    runs("r", PRINTABLE, "--max-iters 2 --hint-ratio 0.5 --epochs 2 --mini-batch-size 2 --kl-coef 0.1 --loss gspo")
    metrics = runs.iterations("r", "printable")
    assert [m["optimizer_steps"] for m in metrics] == [4.0, 4.0] and all(m["nonfinite"] == 0.0 for m in metrics)


# ------------------------------------------------------------------------ resume

LONG = (BOTH, "--save-every 1 --eval-every 2 --eval-seeds 10000:10002 --hint-ratio 0.25")


def assert_same_run(runs: Runs, one: str, other: str, last: int) -> None:
    for name in ("printable", "digits"):
        assert runs.state(one, name, last) == runs.state(other, name, last)
        path = Path(name) / "adapter_model.safetensors"
        here, there = ((runs.tmp / f"{run}_adapters" / path).read_bytes() for run in (one, other))
        assert here == there
    assert runs.timeless(one) == runs.timeless(other)


def test_2k_steps_equal_k_resume_k_bit_for_bit(runs: Runs) -> None:
    """Adapter, optimiser, counters, curriculum, seeds and metrics."""
    runs("whole", *LONG, "--max-iters 6")
    runs("parts", *LONG, "--max-iters 3")
    assert len(runs.iterations("parts", "digits")) == 3
    runs("parts", *LONG, "--max-iters 6 --resume")
    assert_same_run(runs, "whole", "parts", 6)


def test_kill_9_at_any_moment_and_resume(runs: Runs) -> None:
    """The run ends as if nothing had happened; nothing torn is left that stops it.

    All as commands: within the tests' own process the same products differ in their last bit now and then.
    """
    flags = (*LONG, "--max-iters 8")
    assert runs.command("whole", *flags)[0] == 0
    process = runs.start("killed", *flags)
    log = runs.tmp / "killed/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("reward") >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(random.random() * 0.3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert runs.command("killed", *flags, "--resume")[0] == 0
    assert_same_run(runs, "whole", "killed", 8)


def test_resume_is_refused_when_settings_differ(runs: Runs) -> None:
    runs("r", DIGITS, "--max-iters 1")
    before = (runs.tmp / "r/config.json").read_bytes(), (runs.tmp / "r/metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="made with lora_rank=4, now 8"):
        runs("r", DIGITS, "--max-iters 2 --resume --lora-rank 8")
    with pytest.raises(InputError, match="made with train_seeds=None, now '0:50'"):
        runs("r", DIGITS, "--max-iters 2 --resume --train-seeds 0:50")
    with pytest.raises(InputError, match="made with seed=0, now 5"):
        runs("r", DIGITS, "--max-iters 2 --resume --seed 5")
    assert before == ((runs.tmp / "r/config.json").read_bytes(), (runs.tmp / "r/metrics.jsonl").read_bytes())
    assert runs("r", DIGITS, "--max-iters 2 --resume --lr 1e-3") == 0  # what may change may change


def test_a_run_is_never_overwritten(runs: Runs) -> None:
    runs("r", DIGITS, "--max-iters 1")
    before = (runs.tmp / "r/metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="add --resume"):
        runs("r", DIGITS, "--max-iters 1")
    shutil.rmtree(runs.tmp / "r/checkpoints")  # killed before its first checkpoint: the metrics are still a run's
    with pytest.raises(InputError, match="add --resume"):
        runs("r", DIGITS, "--max-iters 1")
    assert (runs.tmp / "r/metrics.jsonl").read_bytes() == before
    assert runs("r", DIGITS, "--max-iters 1 --resume") == 0  # from the start, since there is no checkpoint
    assert len(runs.iterations("r", "digits")) == 1


# ------------------------------------------------------------------------ environments that misbehave


def test_groups_close_with_k_of_n_and_failures_are_no_rewards(runs: Runs) -> None:
    """Every fourth episode raises: counted as errors by kind, out of the reward, and the others are trained on."""
    train_games.FlakyGame.n_episodes = 0
    runs("r", "--game capability_flaky --max-iters 2 --rollout-log")
    for metrics in runs.iterations("r", "flaky"):
        assert metrics["errors"] == 0.25 and metrics["error_kinds"] == {"environment": metrics["episodes"] / 4}
        assert metrics["action_tokens"] > 0
    entries = [json.loads(x) for x in (runs.tmp / "r/rollouts/flaky_000001.jsonl").read_text().splitlines()]
    scored = [e["reward_info"]["reward"] for e in entries if e["outcome"] == "scored"]
    failed = [e for e in entries if e["outcome"] == "error"]
    assert len(failed) * 3 == len(scored) and all(e["reward_info"] is None for e in failed)
    assert runs.iterations("r", "flaky")[0]["reward"] == pytest.approx(sum(scored) / len(scored))


def test_a_stuck_environment_fails_its_episode_and_the_run_goes_on(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WatchedGame.__init__, "__defaults__", (0.05,))
    train_games.StuckGame.n_steps = 0
    runs("r", "--game capability_stuck --max-iters 2 --rollout-log")
    metrics = runs.iterations("r", "stuck")
    assert len(metrics) == 2 and metrics[0]["errors"] == 0.25 and metrics[0]["action_tokens"] > 0
    text = (runs.tmp / "r/rollouts/stuck_000001.jsonl").read_text()
    assert "did not return within 0.05 s" in text


def test_a_late_episode_times_out(runs: Runs) -> None:
    """Nothing answers within the deadline: typed, counted, and the run stops instead of spinning."""
    with pytest.raises(ServerError, match=r"no rollout could be scored \(\{'timeout': \d+\}"):
        runs("r", PRINTABLE, "--max-iters 2 --episode-deadline-s 1e-6")
    assert runs.checkpoints("r", "printable") == ["iter_000000"]


def test_an_environment_that_always_raises_stops_the_run(runs: Runs) -> None:
    with pytest.raises(ServerError, match=r"no rollout could be scored .*KeyError: 'scripted fault'"):
        runs("r", "--game capability_raising --max-iters 2")


def test_an_environment_that_cannot_be_made_is_named(runs: Runs) -> None:
    """The cause comes out as it is, not as a group of exceptions."""
    with pytest.raises(GameError, match="capability_unmakeable: make_env raised OSError: no licence"):
        runs("r", "--game capability_unmakeable --max-iters 2")


def test_an_adapter_that_learned_nothing_is_told(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs("r", "--capabilities capability_constant,capability_digits --max-iters 1")
    told = [line for line in capsys.readouterr().err.splitlines() if "untrained" in line]
    assert len(told) == 1 and "[constant] warning: no group had a signal" in told[0]


def test_constant_groups_are_replaced(runs: Runs) -> None:
    """Half of the seeds carry no signal: more are drawn until the batch is full; without the filter, none are."""
    runs("on", "--game capability_sometimes --max-iters 2 --groups-per-batch 4")
    for metrics in runs.iterations("on", "sometimes"):
        assert metrics["batches"] in (2.0, 3.0) and metrics["constant_high"] == pytest.approx(0.5, abs=0.1)
        assert metrics["informative"] * metrics["groups"] >= 4
    runs("off", "--game capability_sometimes --max-iters 1 --groups-per-batch 4 --no-filter-constant-groups")
    (metrics,) = runs.iterations("off", "sometimes")
    assert metrics["batches"] == 1.0 and metrics["groups"] == 4.0


def test_an_environment_without_signal_stops_the_run_and_saves_the_others(runs: Runs) -> None:
    """Three batches an iteration, five iterations, then a typed stop; the other capability loses nothing."""
    flags = ("--capabilities capability_printable,capability_constant", "--max-iters 50 --save-every 100")
    with pytest.raises(ServerError, match=r"constant: no informative group in 5 iterations \(reward 0.25\)"):
        runs("r", *flags)
    metrics = runs.iterations("r", "constant")
    assert len(metrics) == 5 and all(m["batches"] == 3.0 and m["groups"] == 9.0 for m in metrics)
    assert all("loss" not in m for m in metrics)  # nothing was trained
    warnings = [m["warning"] for m in runs.metrics("r") if "warning" in m and m["adapter"] == "constant"]
    assert any(w.startswith("at least 90 % of groups all fail alike for 3 iterations") for w in warnings)
    done = len(runs.iterations("r", "printable"))
    assert done >= 1 and runs.checkpoints("r", "printable") == [f"iter_{done:06d}"]
    assert runs.checkpoints("r", "constant") == ["iter_000005"]


def test_a_solved_environment_ends_its_learner_early(runs: Runs) -> None:
    runs("s", "--game capability_solved --max-iters 50 --dynamic-sampling-max-batches 1")
    metrics = runs.iterations("s", "solved")
    assert len(metrics) == 5 and metrics[-1]["constant_high"] == 1.0
    assert runs.checkpoints("s", "solved") == ["iter_000005"]


def test_a_run_may_take_an_environment_without_signal_as_done(runs: Runs) -> None:
    """The other capability goes on to its end, and both adapters are written."""
    flags = "--max-iters 7 --dynamic-sampling-max-batches 1 --solved-reward 0"
    runs("r", "--capabilities capability_printable,capability_constant", flags)
    assert len(runs.iterations("r", "constant")) == 5 and len(runs.iterations("r", "printable")) == 7
    assert runs.checkpoints("r", "constant") == ["iter_000005"]


# ------------------------------------------------------------------------ losses that are not finite


def poison(monkeypatch: pytest.MonkeyPatch, steps: range) -> None:
    """The optimiser steps ``steps`` (counted over the run) get a loss of NaN."""
    original, count = Learner._step, [0]

    def step(self: Learner, items: Any, *args: Any) -> Any:
        count[0] += 1
        if count[0] - 1 in steps:
            items = [i.__class__(i.sequence, float("nan"), i.sampler_logprobs, i.group) for i in items]
        return original(self, items, *args)

    monkeypatch.setattr(Learner, "_step", step)


def test_a_nan_loss_skips_its_update_and_is_told(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, range(1, 2))
    runs("r", PRINTABLE, "--max-iters 3 --save-every 1 --keep-checkpoints 9")
    metrics = runs.iterations("r", "printable")
    assert [m["nonfinite"] for m in metrics] == [0.0, 1.0, 0.0] and "loss" not in metrics[1]
    assert any("not finite" in m.get("warning", "") for m in runs.metrics("r"))
    states = [runs.state("r", "printable", i) for i in (1, 2, 3)]
    for part in ("adapter.safetensors", "optimizer.safetensors"):
        assert states[0][part] == states[1][part] != states[2][part]


def test_nan_losses_in_a_row_stop_the_run(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, range(1, 99))
    with pytest.raises(ServerError, match="loss not finite in 3 iterations in a row; lower --lr, then --resume"):
        runs("r", PRINTABLE, "--max-iters 20")
    assert runs.checkpoints("r", "printable") == ["iter_000004"]


# ------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--game capability_prntable", "unknown game 'capability_prntable'; expected one of capability_printable"),
        ("", "give either --game/--capabilities or --games"),
        ("--game capability_digits --lr nan", "lr"),
        ("--game capability_digits --group-size 1", "group_size"),
        ("--game capability_digits --temperature 0", "temperature"),
        ("--game capability_digits --model /nowhere", "model /nowhere: cannot be loaded"),
        ("--game capability_digits --dtype float8", "--dtype float8: expected auto"),
        ("--game capability_digits --target-modules x_proj", "--target-modules"),
        ("--game capability_digits --eval-seeds 5", "--eval-seeds '5': expected FIRST:END"),
        ("--game capability_digits --eval-seeds 10:2000000", "seeds from 1000000 on are trained on"),
        ("--game capability_digits --train-seeds 5:4", "--train-seeds '5:4': expected 0 <= FIRST < END"),
        ("--game capability_digits --train-seeds 0:8", "may need 9 different tasks"),
        ("--game capability_digits --eval-every 1 --train-seeds 0:10001", "overlaps --eval-seeds 10000:10032"),
        ("--game capability_digits --engine vllm", "set VLLM_BASE_URLS"),
        ("--game capability_digits --report-to pigeons", "expected tensorboard, trackio or wandb"),
        ("--game capability_digits --capabilities capability_printable", "not both"),
        ("--capabilities digits,capability_digits", "adapter name"),
        ("--games capability_digits:0", "must be a positive number"),
        ("--games capability_digits --name a.b", "expected letters, digits, _ and -"),
        ("--game capability_unmakeable", "no licence"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    flags: str, says: str, runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train", *runs.arguments("r", "--max-iters 1", flags)])
    with pytest.raises(SystemExit) as exit_:
        run_cli(main)
    assert exit_.value.code == 2
    assert says in error_line(capsys.readouterr().err)
    assert not (runs.tmp / "r_adapters").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("grup_size: 8", "unknown key 'grup_size'; did you mean 'group_size'?"),
        ("- a", "expected keys with values, found list"),
        ("a: [", "not valid YAML"),
        ("save_every: many", "save_every"),
        ("", "is empty"),
    ],
)
def test_bad_config_files(text: str, says: str, runs: Runs) -> None:
    path = runs.tmp / "train.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=says.replace("?", r"\?").replace("[", r"\[")):
        runs("r", DIGITS, f"--config {path}")
    with pytest.raises(InputError, match="not found"):
        runs("r", DIGITS, "--config /nowhere.yaml")


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may grow beyond 12,000 bytes: enough for an adapter, not for its optimiser state."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_typed_and_leaves_nothing_half_written(runs: Runs, small_disk: None) -> None:
    with pytest.raises(InputError, match=r"optimizer\.safetensors: cannot be written .*; free space"):
        runs("r", DIGITS, "--max-iters 3 --save-every 1")
    assert runs.checkpoints("r", "digits") == [] and not (runs.tmp / "r_adapters").exists()


def test_metrics_on_a_full_disk_are_a_typed_fault(runs: Runs, small_disk: None) -> None:
    with pytest.raises(InputError, match=r"metrics\.jsonl: cannot be written"):
        runs("r", PRINTABLE, "--max-iters 99 --save-every 100")
    kept = list(read_jsonl(runs.tmp / "r/metrics.jsonl", torn_tail_ok=True))
    assert 1 <= len([m for m in kept if "reward" in m]) < 99


# ------------------------------------------------------------------------ ranks


def test_torchrun_with_two_ranks_equals_one_process(runs: Runs) -> None:
    flags = (PRINTABLE, "--max-iters 3 --pack-tokens 64")
    runs("one", *flags)
    launch = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    process = runs.start("two", *flags, launch=launch)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    from safetensors.torch import load_file

    one, two = (load_file(runs.tmp / f"{n}_adapters/printable.safetensors") for n in ("one", "two"))
    assert max(float((one[k] - two[k]).abs().max()) for k in one) < 1e-6
    for here, there in zip(runs.iterations("one", "printable"), runs.iterations("two", "printable"), strict=True):
        for key in ("reward", "loss", "grad_norm", "entropy", "action_tokens"):
            assert here[key] == pytest.approx(there[key], rel=1e-3, abs=1e-5), key


def two_ranks(runs: Runs, *flags: str, modules: str = "train_games") -> list[tuple[int, str]]:
    """Exit code and stderr of both ranks, started without a launcher, so that each can be looked at."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    shared |= {"TRACE_GAME_MODULES": modules}
    ranks = [runs.start("r", *flags, RANK=str(r), LOCAL_RANK=str(r), **shared) for r in range(2)]
    errors = [p.communicate(timeout=240)[1] for p in ranks]
    return [(p.returncode, err) for p, err in zip(ranks, errors, strict=True)]


@pytest.mark.slow
def test_a_fault_of_the_driver_ends_all_ranks_and_is_told_once(runs: Runs) -> None:
    (code, err), (other_code, other_err) = two_ranks(runs, "--game capability_unmakeable")
    assert code == other_code == 2
    assert "no licence" in error_line(err) and "no licence" not in other_err and "error" not in other_err.lower()


@pytest.mark.slow
def test_a_fault_of_another_rank_ends_all_ranks_and_is_told_once(runs: Runs) -> None:
    (runs.tmp / "bad_rank.py").write_text(
        "import os, train_games\nfrom train.learner import Learner\n"
        "def update(self, *args):\n    raise RuntimeError('scripted ' + 'fault')\n"
        "if os.environ['RANK'] == '1':\n    Learner.update = update\n"
    )
    # The environment is only known through the module, so both ranks import it.
    (code, err), (other_code, other_err) = two_ranks(runs, PRINTABLE, modules="bad_rank")
    assert code == 2 and "lost another rank" in error_line(err) and "scripted fault" not in err, err[-3000:]
    assert other_code == 1 and other_err.count("scripted fault") == 1


def test_bad_input_is_told_by_the_first_rank_of_a_host(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, says in (("0", "unknown game"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setattr(sys, "argv", ["train", *runs.arguments("r", "--game capability_unheard_of")])
        with pytest.raises(SystemExit) as exit_:
            run_cli(main)
        assert exit_.value.code == 2
        err = capsys.readouterr().err
        assert says in error_line(err) if says else err == ""


@pytest.mark.parametrize("done", [True, False])
def test_other_ranks_end_as_the_driver_ended(done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends rank 0, the others hear of it, and exit non-zero when it failed."""
    heard: list[Any] = []
    monkeypatch.setattr(Ranks, "broadcast", lambda self, message=None: heard.append(message) or heard[-1])
    Worker({}, update_config(), Ranks(0, 2)).stop(done)
    assert heard == [("stop", done)]
    monkeypatch.setattr(Ranks, "broadcast", lambda self, message=None: heard[0])
    assert Worker({}, update_config(), Ranks(1, 2)).serve() is done


def test_a_lost_peer_is_a_typed_fault_and_does_not_hide_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer\nsecond line")

    monkeypatch.setattr("torch.distributed.all_reduce", gone)
    monkeypatch.setattr("torch.distributed.broadcast_object_list", gone)
    with pytest.raises(PeerLost, match=r"lost another rank, whose message says why \(Connection closed by peer\)"):
        Ranks(0, 2).sum(torch.ones(1))
    Worker({}, update_config(), Ranks(0, 2)).stop(False)  # says nothing of its own


def test_the_models_context_ends_an_episode_and_does_not_fail_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--max-seq-length is larger than what the model can hold: its context is the limit."""
    small = tiny_model_folder(tmp_path / "small", max_position_embeddings=70)
    small_runs = Runs(small, tmp_path, monkeypatch)
    small_runs("r", PRINTABLE, "--max-iters 1 --rollout-log")
    text = (tmp_path / "r/rollouts/printable_000001.jsonl").read_text()
    entries = [json.loads(line) for line in text.splitlines()]
    assert {e["outcome"] for e in entries} == {"scored"} and "context" in {e["finish_reason"] for e in entries}
    assert all(sum(e["action_mask"][:70]) == sum(e["action_mask"]) > 0 for e in entries)


def test_no_token_is_computed_twice(runs: Runs) -> None:
    """One sequence per episode, the prompt of a group once: far fewer tokens in the update than in the rollouts."""
    runs("r", PRINTABLE, "--max-iters 1 --group-size 8 --pack-tokens 4096")
    (metrics,) = runs.iterations("r", "printable")
    assert metrics["packed_tokens"] < 0.6 * metrics["plain_tokens"]
    assert metrics["action_tokens"] == metrics["sampled_tokens"] * metrics["informative"]


def test_a_folder_has_one_run_at_a_time(runs: Runs) -> None:
    """A second run, resumed or not, changes nothing in the folder of one that is going on."""
    assert runs("r", PRINTABLE, "--max-iters 1 --save-every 1") == 0
    before = {path: path.read_bytes() for path in (runs.tmp / "r").rglob("*") if path.is_file()}
    with sole_writer(runs.tmp / "r"):
        for more in ("", " --resume"):
            with pytest.raises(InputError, match="another process is writing into it"):
                runs("r", PRINTABLE, "--max-iters 2 --seed 5" + more)
    assert {path: path.read_bytes() for path in (runs.tmp / "r").rglob("*") if path.is_file()} == before
    assert runs("r", PRINTABLE, "--max-iters 2 --resume") == 0
    with pytest.raises(InputError, match="--dtype"):
        runs("new", PRINTABLE, "--max-iters 2 --dtype nothing")
    assert not (runs.tmp / "new").exists()


@pytest.mark.parametrize("key", ["output_dir", "adapter_dir"])
def test_an_empty_folder_is_not_the_current_one(key: str) -> None:
    with pytest.raises(InputError, match=f"settings: {key}: "):
        load_config({"model": "m", "game": "capability_printable", key: ""}, {})
