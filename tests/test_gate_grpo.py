"""GRPO of the gates: only gates move, lr 0 moves nothing, a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gate_models as gm
import pytest
import torch
from safetensors.torch import load_file

import game_registry
from game_registry import GameSpec, register_game
from moe_gate import build_capability_model, force_route, gater_parameters, load_routed, save_gate
from pipeline.files import InputError
from train import grpo_gater
from train.forward import action_logprobs
from train.grpo_gater import GateLearner
from train.learner import TrainItem, UpdateConfig
from train.losses import LossConfig
from train.packing import TokenSequence, build_pack


class WordGame:
    """One turn; the reward is the share of the answer's words with a number of 35 or more."""

    def __init__(self) -> None:
        self.done, self.max_steps = False, 1

    def reset(self, seed: int) -> None:
        self.done, self.reward = False, 0.0
        self.messages = [{"role": "user", "content": f"w{7 + seed % 50} w{7 + seed % 31}"}]

    def get_system_prompt(self) -> str:
        return "w9 w10"

    def get_tool_schemas(self) -> list[dict[str, Any]]:
        return []

    def get_messages(self) -> list[dict[str, Any]]:
        return self.messages

    def step(self, action_json: str) -> None:
        text = str(json.loads(action_json)["arguments"])
        words = [int(part[1:]) for part in text.replace("'", " ").replace("}", " ").split() if part[1:].isdigit()]
        self.reward = sum(number >= 35 for number in words) / max(1, len(words))
        self.done = True

    def get_summary(self) -> dict[str, Any]:
        return {"reward": self.reward, "steps": 1, "reason": "done", "domain": "words"}


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A base, two adapters, random gates to start from, and the game ``gate_words``."""
    name = "gate_words"
    register_game(GameSpec(name=name, make_env=WordGame, max_gen_tokens=6))
    base = gm.write_base(tmp_path / "base")
    adapters = gm.two_adapters(base, tmp_path / "adapters")
    model = build_capability_model(str(tmp_path / "base"), adapters)
    gm.random_gates(model)
    save_gate(model, tmp_path / "sft", str(tmp_path / "base"))
    config = {
        "output_dir": str(tmp_path / "sft"), "base_model": str(tmp_path / "base"),
        "adapter_dir": str(tmp_path / "adapters"), "adapter_names": ["alpha", "beta"], "dtype": "float32",
        "grpo": {"games": f"{name}:1", "group_size": 4, "groups_per_batch": 2, "max_iters": 4, "lr": 0.01,
                 "save_every": 2},
    }  # fmt: skip
    (tmp_path / "gate.yaml").write_text(json.dumps(config))
    yield tmp_path
    game_registry._REGISTRY.pop(name, None)


def run(project: Path, out: str, *more: str) -> dict[str, torch.Tensor]:
    arguments = ["--config", str(project / "gate.yaml"), "--output-dir", str(project / out), *more]
    assert grpo_gater.main(arguments) == 0
    return load_file(project / out / "gate.safetensors")


def test_a_run_moves_the_gates_and_records(project: Path) -> None:
    start, end = load_file(project / "sft" / "gate.safetensors"), run(project, "out")
    assert start.keys() == end.keys() and all(not torch.equal(start[key], end[key]) for key in start)
    lines = [json.loads(x) for x in (project / "out" / "metrics.jsonl").read_text().splitlines() if x.strip()]
    rounds = [line for line in lines if "reward" in line]
    assert [line["iteration"] for line in rounds] == [1, 2, 3, 4]
    assert all(line["episodes"] >= 8 for line in rounds) and any(line.get("grad_norm", 0) > 0 for line in rounds)
    assert load_routed(project / "out").capability_routing.slot_names == ("base", "alpha", "beta")


def test_a_resumed_run_is_the_same_run(project: Path) -> None:
    whole = run(project, "whole")
    run(project, "parts", "--max-iters", "2")
    with pytest.raises(InputError, match="holds a run; add --resume"):
        run(project, "parts")
    parts = run(project, "parts", "--resume")
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_nothing_moves_at_learning_rate_0(project: Path) -> None:
    start, end = load_file(project / "sft" / "gate.safetensors"), run(project, "out", "--lr", "0", "--max-iters", "1")
    assert all(torch.equal(start[key], end[key]) for key in start)


def test_bad_input(project: Path) -> None:
    config = json.loads((project / "gate.yaml").read_text())
    for change, message in [
        ({"games": ""}, "grpo.games is empty"),
        ({"init_gate": str(project / "nothing")}, "run train.train_router_sft"),
        ({"group_size": 1}, "group_size"),
        ({"grup_size": 4}, "grup_size"),
    ]:
        (project / "gate.yaml").write_text(json.dumps(config | {"grpo": config["grpo"] | change}))
        with pytest.raises(InputError, match=message):
            run(project, "out")
    assert not (project / "out").exists()


def learner_and_items(project: Path) -> tuple[GateLearner, list[TrainItem]]:
    model = load_routed(project / "sft")
    learner = GateLearner(model, game_registry.GameMix.parse("gate_words:1"), lr=0.05, seed=0)
    items = []
    for index, advantage in enumerate([1.0, -1.0]):
        ids = [1, 5, 9, 9, *gm.tokens(1, 5, seed=index)[0].tolist()]
        sequence = TokenSequence(ids, [False] * 4 + [True] * 5)
        with torch.no_grad():
            logprobs, _ = action_logprobs(model, build_pack([sequence], [0]), 1.0)
        items.append(TrainItem(sequence, advantage, tuple(logprobs.tolist()), 0))
    return learner, items


def test_training_sees_the_policy_that_sampled(project: Path) -> None:
    """Straight-through leaves the forward alone: ratio 1 and no gap at the first step, two turns or one."""
    learner, items = learner_and_items(project)
    before = {name: p.clone() for name, p in learner.model.named_parameters()}
    metrics = learner.update(items, UpdateConfig(LossConfig(), 1.0))
    assert not learner.model.training
    assert abs(metrics["mismatch_k1"]) < 1e-6 and abs(metrics["loss"]) < 1e-6  # ratio 1, advantages +1 and -1
    changed = {name for name, p in learner.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(learner.parameters)


def test_the_gradient_favours_the_slot_that_makes_good_tokens_likely(project: Path) -> None:
    """What beta writes gets a positive advantage: by the gates alone the routed policy comes to write it."""
    learner, _ = learner_and_items(project)
    model = learner.model
    for parameter in gater_parameters(model):
        parameter.data.zero_()
    prompt = [1, 5, 9, 9]
    with torch.no_grad(), force_route(model, "beta"):
        ids = torch.tensor([prompt])
        for _ in range(6):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    good = TokenSequence(ids[0].tolist(), [False] * 4 + [True] * 6)
    item = TrainItem(good, 1.0, (float("nan"),) * 6, 0)
    config = UpdateConfig(LossConfig(), 1.0)
    pack = build_pack([good], [0])
    with torch.no_grad():
        first = float(action_logprobs(model, pack, 1.0)[0].sum())
    for _ in range(30):
        learner.update([item], config)
    with torch.no_grad():
        last = float(action_logprobs(model, pack, 1.0)[0].sum())
    assert last > first + 0.1
