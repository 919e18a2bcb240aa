"""What a learner knows of its own progress survives an interruption: solved, iterations without signal, bad losses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_train_run import poison
from train_runs import Runs

from pipeline.files import InputError, ServerError


def counters(runs: Runs, run: str, name: str, iteration: int) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(runs.state(run, name, iteration)["state.json"])
    return state["counters"]


SOLVED = "--game capability_solved --dynamic-sampling-max-batches 1"
CONSTANT = "--game capability_constant --dynamic-sampling-max-batches 1"


def test_a_resumed_run_is_solved_when_an_uninterrupted_one_is(runs: Runs) -> None:
    """The five iterations alike count over the interruption, and a solved learner stays so."""
    runs("whole", SOLVED, "--max-iters 50")
    runs("parts", SOLVED, "--max-iters 3")
    assert counters(runs, "parts", "solved", 3)["empty_iterations"] == 3
    runs("parts", SOLVED, "--max-iters 50 --resume")
    assert runs.state("parts", "solved", 5) == runs.state("whole", "solved", 5)
    assert runs.timeless("parts") == runs.timeless("whole") and len(runs.iterations("parts", "solved")) == 5
    assert counters(runs, "parts", "solved", 5)["solved"] is True
    runs("parts", SOLVED, "--max-iters 50 --resume")
    assert len(runs.iterations("parts", "solved")) == 5, "it was solved already"


def test_iterations_without_signal_count_over_an_interruption(runs: Runs) -> None:
    runs("r", CONSTANT, "--max-iters 3")
    with pytest.raises(ServerError, match="no informative group in 5 iterations"):
        runs("r", CONSTANT, "--max-iters 50 --resume")
    assert len(runs.iterations("r", "constant")) == 5
    assert counters(runs, "r", "constant", 5)["empty_iterations"] == 0  # told; whoever resumes gets all five again
    with pytest.raises(ServerError, match="no informative group in 5 iterations"):
        runs("r", CONSTANT, "--max-iters 50 --resume")
    assert len(runs.iterations("r", "constant")) == 10


def test_losses_that_are_not_finite_count_over_an_interruption(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--game capability_printable", "--save-every 1")
    poison(monkeypatch, range(1, 99))
    runs("r", *flags, "--max-iters 3")  # the second and the third update
    assert counters(runs, "r", "printable", 3)["nonfinite_iterations"] == 2
    with pytest.raises(ServerError, match="loss not finite in 3 iterations in a row"):
        runs("r", *flags, "--max-iters 50 --resume")
    assert len(runs.iterations("r", "printable")) == 4


def test_a_signal_starts_the_count_anew(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    import train_games

    constant = train_games.ConstantGame.get_summary
    runs("r", CONSTANT, "--max-iters 4")
    monkeypatch.setattr(train_games.ConstantGame, "get_summary", train_games.PrintableGame.get_summary)
    runs("r", CONSTANT, "--max-iters 5 --resume")
    assert counters(runs, "r", "constant", 5)["empty_iterations"] == 0
    monkeypatch.setattr(train_games.ConstantGame, "get_summary", constant)
    runs("r", CONSTANT, "--max-iters 9 --resume")
    assert counters(runs, "r", "constant", 9)["empty_iterations"] == 4


def test_a_checkpoint_of_an_earlier_version_is_told(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """It goes on with counters that start anew; a damaged counter is refused."""
    runs("r", SOLVED, "--max-iters 3")
    path = runs.tmp / "r/checkpoints/solved/iter_000003/state.json"
    state = json.loads(path.read_text())
    for name in ("solved", "empty_iterations", "nonfinite_iterations"):
        del state["counters"][name]
    path.write_text(json.dumps(state))
    capsys.readouterr()
    runs("r", SOLVED, "--max-iters 4 --resume")
    notice = [line for line in capsys.readouterr().err.splitlines() if line.startswith("notice: ")]
    assert len(notice) == 1 and "of an earlier version, without solved, empty_iterations, nonfinite" in notice[0]
    assert counters(runs, "r", "solved", 4)["empty_iterations"] == 1
    path = runs.tmp / "r/checkpoints/solved/iter_000004/state.json"
    state = json.loads(path.read_text())
    state["counters"]["empty_iterations"] = -1
    path.write_text(json.dumps(state))
    with pytest.raises(InputError, match="empty_iterations"):
        runs("r", SOLVED, "--max-iters 5 --resume")


def test_only_the_given_tasks_are_trained_on(runs: Runs) -> None:
    flags = "--max-iters 5 --rollout-log --train-seeds 40:50 --dynamic-sampling-max-batches 1"
    runs("r", "--game capability_digits", flags)
    files = sorted((runs.tmp / "r/rollouts").iterdir())
    seeds = [[int(e["task_id"]) for e in map(json.loads, path.open())] for path in files]
    assert [len(set(s)) for s in seeds] == [3] * 5 and {s for part in seeds for s in part} == set(range(40, 50))
