"""Warm start: soft targets from rewards, which tasks teach, and the whole command."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import gate_models as gm
import pytest
import torch

from moe_gate import RoutingRecorder, load_routed
from pipeline.files import InputError
from train import warmstart_gater
from train.gate_data import LabelledEpisode
from train.gate_features import FeatureSet
from train.gate_fit import FitSettings, GateFit, feature_scale
from train.warmstart_gater import Attempt, soft_target, split_by_task, warm_episodes


def attempt(reward: float, first: int = 7) -> Attempt:
    return Attempt(reward, (first, 8, 9), (False, False, True), "test")


def test_soft_target_by_hand() -> None:
    target = soft_target({0: 0.5, 2: 1.0}, 3, tau=0.5)
    e = 2.718281828459045
    assert target == pytest.approx((1 / (1 + e), 0.0, e / (1 + e)))
    assert soft_target({1: 0.0, 2: 1.0}, 3, tau=1e-3) == pytest.approx((0.0, 0.0, 1.0))  # no overflow


def test_tasks_that_do_not_tell_slots_apart_are_left_out() -> None:
    attempts: Any = {
        ("g", "1"): {0: [attempt(0.0), attempt(0.5)], 1: [attempt(0.5), attempt(1.0, first=30)]},
        ("g", "2"): {0: [attempt(1.0)], 1: [attempt(1.0)]},
        ("g", "3"): {1: [attempt(1.0)]},
    }
    chosen, left_out = warm_episodes(attempts, 3, tau=0.5)
    assert left_out == {"all slots equal": 1, "measured for one slot only": 1}
    [(task, episode)] = chosen
    assert task == ("g", "1") and episode.slot == 1 and episode.token_ids[0] == 30  # its best episode
    assert episode.target == pytest.approx(soft_target({0: 0.25, 1: 0.75}, 3, 0.5))
    with pytest.raises(InputError, match="1 tasks on which the slots differ"):
        split_by_task(chosen, 0.2, left_out)


def test_split_keeps_a_task_on_one_side() -> None:
    chosen = [
        (("g", str(i)), LabelledEpisode((i, 50), (False, True), 1 + i % 2, str(i), target=(0.0, 0.5, 0.5)))
        for i in range(20)
    ]
    data = split_by_task(chosen, 0.25, Counter())
    train, validation = {e.source for e in data.train}, {e.source for e in data.validation}
    assert not train & validation and len(train | validation) == 20 and len(validation) == 4


def test_the_fit_reaches_the_soft_target() -> None:
    """With one constant feature the optimum is the target distribution itself."""
    n = 40
    target = torch.tensor([0.2, 0.5, 0.3]).repeat(n, 1)
    hidden = torch.ones(1, n, 4)
    features = FeatureSet(
        hidden, torch.ones(n, dtype=torch.long), torch.ones(n), torch.arange(n), torch.zeros(1, n), target
    )
    settings = FitSettings(300, n, 0.02, 0.02, 0.0, 0, 0.0, 10, 5, 0)
    fit = GateFit(torch.zeros(1, 3, 4), torch.tensor([[5.0, 0.0, 0.0]]), feature_scale(features), settings)
    rows = list(torch.arange(n).split(1))
    for _ in range(300):
        fit.train_step(features, rows, list(range(n)), 1.0)
    weight, bias = fit.weights()
    probs = (hidden[0, 0] @ weight[0].T + bias[0]).softmax(-1)
    torch.testing.assert_close(probs, target[0], rtol=0.02, atol=0.02)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Two environments; in each another adapter is the one that succeeds, the base sometimes does."""
    gm.two_adapters(gm.write_base(tmp_path / "base"), tmp_path / "adapters")
    rng = random.Random(0)
    for slot, adapter in enumerate([None, "alpha", "beta@v3"]):
        entries = []
        for seed in range(24):
            low, high = ((7, 34), (35, 63))[seed % 2]
            ids = [1, 5, *(rng.randint(low, high) for _ in range(6)), 2]
            reward = 1.0 if slot == 1 + seed % 2 else 0.25 * (slot == 0)
            entries.append(
                {"game": f"g{seed % 2}", "task_id": str(seed), "sample_idx": 0, "adapter": adapter, "outcome": "scored",
                 "reward_info": {"reward": reward}, "token_ids": ids, "action_mask": [0] * 5 + [1] * (len(ids) - 5)}
            )  # fmt: skip
        (tmp_path / f"r{slot}.json").write_text(json.dumps({"info": {}, "simulations": entries}))
    settings = {
        "output_dir": str(tmp_path / "out"), "base_model": str(tmp_path / "base"),
        "adapter_dir": str(tmp_path / "adapters"),
        "adapter_names": ["alpha", "beta"], "grpo_data_glob": str(tmp_path / "r*.json"), "lr": 0.01, "bias_lr": 0.2,
        "total_steps": 60, "batch_size": 8, "patience": 50,
    }  # fmt: skip
    (tmp_path / "gate.yaml").write_text(json.dumps(settings))
    return tmp_path


def test_the_command(project: Path) -> None:
    assert warmstart_gater.main(["--config", str(project / "gate.yaml")]) == 0
    report = json.loads((project / "out" / "report.json").read_text())
    assert report["validation_accuracy"] > 0.7 and report["tau"] == 0.2
    model = load_routed(project / "out")
    shares = []
    for ids in ([1, 5, 10, 20, 9, 30], [1, 5, 40, 60, 50, 44]):
        with RoutingRecorder(model) as recorder, torch.no_grad():
            model(input_ids=torch.tensor([ids]))
        shares.append(recorder.statistics().share_of_slot)
    assert shares[0]["alpha"] > shares[0]["beta"] and shares[1]["beta"] > shares[1]["alpha"]


def test_bad_input(project: Path) -> None:
    config = str(project / "gate.yaml")
    for arguments, message in [
        (["--rollouts", str(project / "none*.json")], "no file"),
        (["--tau", "0"], "--tau"),
        (["--rollouts", str(project / "gate.yaml")], "simulations"),
    ]:
        with pytest.raises(InputError, match=message):
            warmstart_gater.main(["--config", config, *arguments])
    data = json.loads((project / "r1.json").read_text())
    data["simulations"][0]["adapter"] = "gamma"
    (project / "r1.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match="gamma has no slot"):
        warmstart_gater.main(["--config", config])
    assert not (project / "out").exists()
