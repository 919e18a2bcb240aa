"""Training of the gates: data, features, the fit, resuming, and the command."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gate_models as gm
import pytest
import torch
from safetensors.torch import load_file

from moe_gate import RoutingRecorder, build_capability_model, force_route, load_routed
from moe_gate.config import load_gate_config
from pipeline.files import InputError
from train import train_router_sft
from train.chat import ChatCodec
from train.gate_data import LabelledEpisode, adapter_name, load_gate_data, mark_undecided, prompt_tokens
from train.gate_features import FeatureSet, collect_features, common_prefix, token_labels
from train.gate_fit import FitSettings, GateFit, balance, batch_of, feature_scale, rows_by_episode, score_gates

ROOT = Path(__file__).parent.parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A base, two adapters and forty prompts; each capability has its own half of the words."""
    base = gm.write_base(tmp_path / "base")
    gm.two_adapters(base, tmp_path / "adapters")
    rng = random.Random(0)
    with open(tmp_path / "sft.jsonl", "w") as file:
        for i in range(40):
            low, high = ((7, 34), (35, 63))[i % 2]
            words = [f"w{rng.randint(low, high)}" for _ in range(rng.randint(4, 9))]
            prompt: Any = " ".join(words)
            if i % 4 > 1:
                prompt = [{"role": "user", "content": prompt}, {"role": "assistant", "content": words[0]}]
            file.write(json.dumps({"prompt": prompt, "capability_name": ("alpha", "beta")[i % 2]}) + "\n")
    write_config(tmp_path)
    return tmp_path


def write_config(folder: Path, **changes: Any) -> Path:
    settings = {
        "output_dir": str(folder / "out"), "base_model": str(folder / "base"), "adapter_dir": str(folder / "adapters"),
        "adapter_names": ["alpha", "beta"], "sft_data": str(folder / "sft.jsonl"), "lr": 0.01, "bias_lr": 0.2,
        "total_steps": 60, "batch_size": 8, "patience": 50,
    }  # fmt: skip
    path = folder / "gate.yaml"
    path.write_text(json.dumps(settings | changes))  # JSON is YAML
    return path


def episodes(n: int = 6, prefix: int = 20) -> list[LabelledEpisode]:
    """Episodes that begin alike within each label."""
    rng = random.Random(1)
    out = []
    for i in range(n):
        slot = 1 + i % 2
        common = [7 + slot] * prefix
        own = [rng.randint(7, 63) for _ in range(3 + i)]
        mask = [False] * (prefix + 2) + [True] * (len(own) - 2)
        out.append(LabelledEpisode(tuple(common + own), tuple(mask), slot, "test"))
    return out


def routed(folder: Path, **options: Any) -> Any:
    base = gm.llama()
    return build_capability_model(base, gm.two_adapters(base, folder / "adapters"), **options).eval()


@pytest.mark.parametrize("forced", [True, False])
def test_features_with_a_shared_prefix_equal_plain_forwards(tmp_path: Path, forced: bool) -> None:
    model = routed(tmp_path)
    gm.random_gates(model)
    data = [LabelledEpisode((9,) * 20 + e.token_ids[20:], e.action_mask, e.slot, e.source) for e in episodes()]
    data = mark_undecided(data)
    labels = [token_labels(episode, base=0) for episode in data]
    found = collect_features(model, data, forced=forced, batch_size=2)
    assert int((found.episode < 0).sum()) == 20 and found.hidden.shape[0] == 3
    for index, episode in enumerate(data):
        route = force_route(model, torch.tensor([labels[index]])) if forced else contextlib.nullcontext()
        with route, RoutingRecorder(model, keep_hidden=True) as recorder, torch.no_grad():
            model(input_ids=torch.tensor([episode.token_ids]))
        expected = torch.stack([recorder.calls[0].hidden[layer][0] for layer in range(3)])
        for rows, place in [(found.episode == index, slice(20, None)), (found.episode < 0, slice(0, 20))]:
            torch.testing.assert_close(found.hidden[:, rows], expected[:, place], rtol=1e-4, atol=1e-5)
            assert torch.equal(found.route[:, rows], recorder.calls[0].routes_LBT()[:, 0, place])
            assert found.label[rows].tolist() == labels[index][place]


def test_what_both_labels_share_is_base() -> None:
    """A causal gate cannot know what follows a common past: those tokens are labelled base, or not at all."""
    data = [
        LabelledEpisode((1, 2, 3, 4), (False,) * 4, 1, ""),
        LabelledEpisode((1, 2, 5), (False,) * 3, 2, ""),
        LabelledEpisode((1, 2, 3, 9), (False,) * 4, 1, ""),
        LabelledEpisode((7, 8), (False,) * 2, 2, ""),
    ]
    marked = mark_undecided(data)
    assert [token_labels(e, base=0) for e in marked] == [[0, 0, 1, 1], [0, 0, 2], [0, 0, 1, 1], [2, 2]]
    assert token_labels(marked[0], base=None) == [-1, -1, 1, 1]
    assert token_labels(marked[1], base=0, whole=True) == [2, 2, 2]


def test_labels_weigh_the_same() -> None:
    features = synthetic(50)
    features.label[:40] = 1
    weighed = balance(features, 3)
    totals = [float(weighed.weight[features.label == slot].sum()) for slot in (1, 2)]
    assert totals == pytest.approx([25.0, 25.0]) and float(features.weight.sum()) == 50


def test_action_labels_weigh_only_emitted_tokens(tmp_path: Path) -> None:
    data = episodes()
    found = collect_features(routed(tmp_path), data, forced=True, label_tokens="action")
    assert int((found.weight > 0).sum()) == sum(sum(e.action_mask) for e in data)


def test_trajectory_features_are_prompt_means(tmp_path: Path) -> None:
    model = routed(tmp_path, routing_granularity="trajectory")
    data = episodes(2)
    found = collect_features(model, data, forced=True)
    with RoutingRecorder(model, keep_hidden=True) as recorder, force_route(model, 1), torch.no_grad():
        model(input_ids=torch.tensor([data[0].token_ids]))
    expected = recorder.calls[0].hidden[1][0, : data[0].prompt_length].mean(0)
    torch.testing.assert_close(found.hidden[1, 0], expected, rtol=1e-5, atol=1e-6)
    assert found.label.tolist() == [1, 2]


def test_common_prefix_leaves_a_token() -> None:
    assert common_prefix([(1, 2, 3), (1, 2, 4)]) == 2
    assert common_prefix([(1, 2), (1, 2, 4)]) == 1
    assert common_prefix([(5,), (5, 6)]) == 0
    assert common_prefix([(1, 2), (1, 2)]) == 1


def synthetic(n: int = 200, layers: int = 2, size: int = 8, seed: int = 0) -> FeatureSet:
    """Features whose first coordinate tells the label, one coordinate a thousand times larger than the rest."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(layers, n, size, generator=generator)
    label = torch.arange(n) % 2 + 1
    hidden[:, :, 0] += 3.0 * (label * 2 - 3)
    hidden[:, :, 5] = 1000.0 + hidden[:, :, 5]
    episode = torch.arange(n) // 2
    return FeatureSet(hidden, label, torch.ones(n), episode, torch.zeros(layers, n, dtype=torch.uint8))


def settings(**changes: Any) -> FitSettings:
    values: dict[str, Any] = {
        "steps": 100, "batch_episodes": 16, "lr": 0.02, "bias_lr": 0.2, "weight_decay": 0.0, "warmup_steps": 0,
        "load_balance_coef": 0.001, "eval_every": 10, "patience": 5, "seed": 0,
    }  # fmt: skip
    return FitSettings(**values | changes)


def fitted(features: FeatureSet, **changes: Any) -> GateFit:
    bias = torch.zeros(2, 3)
    bias[:, 0] = 5.0
    fit = GateFit(torch.zeros(2, 3, 8), bias, feature_scale(features), settings(**changes))
    rows = rows_by_episode(features, 100)
    while fit.step < fit.settings.steps:
        fit.train_step(features, rows, batch_of(fit.step, 100, 16, 0), 0.16)
    return fit


def test_fit_overcomes_the_base_bias_and_unequal_features() -> None:
    features = synthetic()
    before = score_gates(torch.zeros(2, 3, 8), torch.tensor([[5.0, 0, 0]] * 2), features)
    after = score_gates(*fitted(features).weights(), synthetic(seed=1))
    assert before.accuracy == 0.0 and after.accuracy > 0.98
    assert after.confusion[1][0] == after.confusion[2][0] == 0.0
    assert sum(map(sum, after.confusion)) == 2 * 200 and len(after.accuracy_of_layer) == 2


def test_label_loss_has_a_gradient_without_load_balance() -> None:
    """Elsewhere the default settings trained nothing but the load balance."""
    fit = fitted(synthetic(), steps=1, load_balance_coef=0.0)
    assert float(fit.weights()[0].abs().sum()) > 0


def test_scale_folds_into_the_weights() -> None:
    features = synthetic()
    fit = fitted(features, steps=5)
    weight, bias = fit.weights()
    by_weights = torch.einsum("lnh,lsh->lns", features.hidden, weight) + bias[:, None]
    torch.testing.assert_close(by_weights, fit._logits(features.hidden).detach(), rtol=1e-4, atol=1e-4)


def test_loss_equals_a_plain_computation() -> None:
    features = synthetic(20)
    features.weight[:4] = 3.0
    weight = 0.001 * torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(2))
    fit = GateFit(weight, torch.zeros(2, 3), feature_scale(features), settings(load_balance_coef=0.5))
    rows = torch.arange(20)
    total = torch.zeros(())
    for layer in range(2):
        logits = features.hidden[layer] @ fit.weights()[0][layer].T + fit.weights()[1][layer]
        probs, w = logits.softmax(-1), features.weight / features.weight.sum()
        total += -(w * probs[rows, features.label].log()).sum() / 2
        share = (torch.nn.functional.one_hot(logits.argmax(-1), 3) * w[:, None]).sum(0)
        total += 0.5 * 3 * (share * (probs * w[:, None]).sum(0)).sum() / 2
    torch.testing.assert_close(fit._loss(features, rows, features.weight).detach(), total, rtol=1e-4, atol=1e-4)


def test_batches_pass_over_everything() -> None:
    seen = [e for step in range(5) for e in batch_of(step, 10, 4, seed=3)]
    assert sorted(seen[:10]) == list(range(10)) == sorted(seen[10:])
    assert batch_of(2, 10, 4, 3) == batch_of(2, 10, 4, 3) and len(batch_of(0, 3, 8, 0)) == 3


def test_the_command_trains_a_gate(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_router_sft.main(["--config", str(project / "gate.yaml")]) == 0
    report = json.loads((project / "out" / "report.json").read_text())
    assert report["validation_accuracy"] > 0.75 and report["train_episodes"] == {"base": 0, "alpha": 16, "beta": 16}
    assert "label / route" in capsys.readouterr().out
    model = load_routed(project / "out")
    with RoutingRecorder(model) as recorder, torch.no_grad():
        model(input_ids=torch.tensor([[1, 5, 40, 50, 60, 41, 44, 39]]))
    assert recorder.statistics().share_of_slot["beta"] > 0.5
    events = [json.loads(line) for line in (project / "out" / "metrics.jsonl").read_text().splitlines()]
    assert events[0]["validation_loss"] > events[-2]["validation_loss"] and events[-1]["event"] == "final"


def test_training_changes_nothing_but_the_gates(project: Path) -> None:
    config = load_gate_config(write_config(project, total_steps=5, on_policy_rounds=0))
    data = load_gate_data(config, ChatCodec.from_model(config.base_model))
    model = train_router_sft.build_model(config)
    before = {name: p.clone() for name, p in model.named_parameters()}
    train_router_sft.RouterTrainer(config, data, model, train_router_sft.Ranks(0, 1), resume=False).run()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".gater." in name}


def test_resume_is_exact(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(project, total_steps=20, eval_every=5)
    train_router_sft.main(["--config", str(project / "gate.yaml"), "--output-dir", str(project / "whole")])
    real, calls = train_router_sft.save_state, []

    def stops(*args: Any) -> None:
        real(*args)
        calls.append(args)
        if len(calls) == 6:  # in the second round
            raise KeyboardInterrupt

    monkeypatch.setattr(train_router_sft, "save_state", stops)
    with pytest.raises(KeyboardInterrupt):
        train_router_sft.main(["--config", str(project / "gate.yaml"), "--output-dir", str(project / "parts")])
    monkeypatch.setattr(train_router_sft, "save_state", real)
    train_router_sft.main(["--config", str(project / "gate.yaml"), "--output-dir", str(project / "parts"), "--resume"])
    whole, parts = (load_file(project / d / "gate.safetensors") for d in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)


def test_resume_refuses_another_run(project: Path) -> None:
    write_config(project, total_steps=5, eval_every=5, on_policy_rounds=0)
    train_router_sft.main(["--config", str(project / "gate.yaml")])
    write_config(project, total_steps=5, eval_every=5, on_policy_rounds=0, lr=0.5)
    with pytest.raises(InputError, match="other settings or data"):
        train_router_sft.main(["--config", str(project / "gate.yaml"), "--resume"])
    (project / "out" / "state.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match="damaged"):
        train_router_sft.main(["--config", str(project / "gate.yaml"), "--resume"])


@pytest.mark.slow
def test_two_processes_equal_one(project: Path) -> None:
    write_config(project, total_steps=10, eval_every=5, on_policy_rounds=0)
    command = ["-m", "train.train_router_sft", "--config", str(project / "gate.yaml"), "--output-dir"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    one = [sys.executable, *command, str(project / "one")]
    two = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        *command,
        str(project / "two"),
    ]
    for arguments in (one, two):
        done = subprocess.run(arguments, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    first, second = (load_file(project / d / "gate.safetensors") for d in ("one", "two"))
    for key in first:
        torch.testing.assert_close(first[key], second[key], rtol=1e-3, atol=1e-5)


def simulation(**changes: Any) -> dict[str, Any]:
    entry = {
        "task_id": "1", "sample_idx": 0, "adapter": "alpha", "outcome": "scored", "reward_info": {"reward": 1.0},
        "messages": [{"role": "user", "content": "w7 w8"}, {"role": "assistant", "content": "w9"},
                     {"role": "user", "content": "w10"}, {"role": "assistant", "content": "w11 w12"}],
    }  # fmt: skip
    return entry | changes


def rollout_data(folder: Path, simulations: list[dict[str, Any]], **changes: Any) -> Any:
    (folder / "r.json").write_text(json.dumps({"info": {}, "simulations": simulations}))
    path = write_config(folder, sft_data=None, grpo_data_glob=str(folder / "r*.json"), **changes)
    config = load_gate_config(path)
    return load_gate_data(config, ChatCodec.from_model(config.base_model))


def test_rollouts_are_labelled_and_filtered(project: Path) -> None:
    good = [
        simulation(),
        simulation(adapter="runs/x/alpha.safetensors"),
        simulation(adapter="beta@v12"),
        simulation(adapter="beta"),
    ]
    verbatim = simulation(adapter="beta", token_ids=[9, 8, 7], action_mask=[0, 1, 1])
    base = simulation(adapter="base")
    left_out = [
        simulation(adapter=None), simulation(hinted=True), simulation(adapter="gamma"),
        simulation(reward_info={"reward": 0.5}), simulation(outcome="error", reward_info=None),
    ]  # fmt: skip
    data = rollout_data(project, [*good, verbatim, base, *left_out])
    kept = [*data.train, *data.validation]
    assert sorted(e.slot for e in kept) == [0, 1, 1, 2, 2, 2]
    assert set(data.skipped) == {
        "sampled from the base", "hinted", "adapter gamma has no slot", "reward below min_reward", "failed by error"
    }  # fmt: skip
    assert "lower min_reward" in error_of(lambda: rollout_data(project, [*good[:2], *left_out[3:]]))
    assert any(e.token_ids == (9, 8, 7) and e.action_mask == (False, True, True) for e in kept)
    two_turns = next(e for e in kept if e.slot == 1)
    assert two_turns.token_ids == (1, 5, 7, 8, 2, 1, 6, 9, 2, 1, 5, 10, 2, 1, 6, 11, 12, 2)  # of the chat template
    emitted = [t for t, m in zip(two_turns.token_ids, two_turns.action_mask, strict=True) if m]
    assert emitted == [9, 2, 11, 12, 2] and two_turns.prompt_length == 7


def test_rollouts_of_the_base_alone_name_the_remedy(project: Path) -> None:
    """A training run of one iteration has no rollout of its adapter; more rollouts of that kind would not help."""
    message = error_of(lambda: rollout_data(project, [simulation(adapter=None)] * 3))
    assert "left out: 3 sampled from the base" in message and "at least two iterations" in message
    assert "min_reward" not in message


def test_a_prompt_is_whole_also_behind_example_turns(project: Path) -> None:
    """The request comes last; without it all prompts with the same examples would be one."""
    codec = ChatCodec.from_model(str(project / "base"))
    examples = [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]
    request = {"role": "user", "content": "w9 w10"}
    ids, mask = prompt_tokens([*examples, request], None, codec, "here")
    assert ids == codec.prompt_ids([*examples, request]) and 10 in ids and not any(mask)
    ids, mask = prompt_tokens(examples, None, codec, "here")
    assert [t for t, m in zip(ids, mask, strict=True) if m] == [8, codec.end_of_turn]
    with pytest.raises(InputError, match="roles"):
        prompt_tokens([{"content": "w7"}], None, codec, "here")
    with pytest.raises(InputError, match="roles"):
        prompt_tokens([], None, codec, "here")


def test_token_budget_takes_turns_between_labels(project: Path) -> None:
    names = ["alpha"] * 30 + ["beta"] * 4
    many = [simulation(adapter=a, token_ids=[7 + i] + [9] * 49, action_mask=[1] * 50) for i, a in enumerate(names)]
    data = rollout_data(project, many, max_tokens_in_memory=500)
    slots = [e.slot for e in (*data.train, *data.validation)]
    assert slots.count(2) == 4 and slots.count(1) == 6 and data.skipped == {"beyond max_tokens_in_memory": 24}


def test_a_prefix_that_all_episodes_share_counts_once(project: Path) -> None:
    many = [
        simulation(adapter=a, token_ids=[9] * 40 + [7 + i] + [8] * 9, action_mask=[1] * 50)
        for i, a in enumerate(["alpha", "beta"] * 15)
    ]
    data = rollout_data(project, many, max_tokens_in_memory=340)  # 40 once, and 30 x 10
    assert len(data.train) + len(data.validation) == 30 and data.skipped == {}
    data = rollout_data(project, many, max_tokens_in_memory=240)
    assert len(data.train) + len(data.validation) == 20


def test_adapter_names() -> None:
    assert adapter_name("pipeline/adapters/look.up.safetensors") == "look.up"
    assert adapter_name("runs/x/lookup/") == adapter_name("lookup@v12") == adapter_name("lookup") == "lookup"


def error_of(run: Any) -> str:
    with pytest.raises(InputError) as caught:
        run()
    assert "\n" not in str(caught.value)
    return str(caught.value)


BAD_LINES = {
    '{"prompt": "w7", "capability_name": "gamma"}': "unknown capability 'gamma'; known: alpha, beta, base",
    '{"prompt": "w7"}': "capability_name: Field required",
    '{"prompt": "", "capability_name": "alpha"}': "prompt",
    '{"prompt": "w7", "capability_name": "alpha", "wieght": 1}': "wieght",
    '{"prompt": "w7", "capability_name": "alpha", "token_ids": [1, 2], "action_mask": [1]}': "one length",
    '{"prompt": "w7", "capability_name": "alpha", "token_ids": [-1], "action_mask": [1]}': "token_ids",
    '{"prompt": [{"content": "w7"}], "capability_name": "alpha"}': "expected chat messages with roles",
    '{"prompt": NaN, "capability_name": "alpha"}': "not JSON",
    '{"prompt": "w7", ': "not valid JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=[str(i) for i in range(len(BAD_LINES))])
def test_bad_prompt_files(project: Path, line: str) -> None:
    (project / "sft.jsonl").write_text(line + "\n")
    message = error_of(lambda: train_router_sft.main(["--config", str(project / "gate.yaml")]))
    assert BAD_LINES[line] in message and "sft.jsonl" in message
    assert not (project / "out").exists()


def test_bad_sources(project: Path) -> None:
    (project / "sft.jsonl").write_text('{"prompt": "w7", "capability_name": "alpha"}\n' * 3)
    assert "capability beta: 0 usable episodes" in error_of(
        lambda: train_router_sft.main(["--config", str(project / "gate.yaml")])
    )
    write_config(project, sft_data=None)
    assert "no data" in error_of(lambda: train_router_sft.main(["--config", str(project / "gate.yaml")]))
    write_config(project, sft_data=None, grpo_data_glob=str(project / "none*.json"))
    assert "matches no file" in error_of(lambda: train_router_sft.main(["--config", str(project / "gate.yaml")]))
    assert "without reward_info.reward" in error_of(lambda: rollout_data(project, [simulation(reward_info=None)]))
    assert "reward" in error_of(lambda: rollout_data(project, [simulation(reward_info={"reward": "high"})]))
    write_config(project, adapter_names=["alpha", "gamma"])
    assert "gamma" in error_of(lambda: train_router_sft.main(["--config", str(project / "gate.yaml")]))


def test_the_command_exits_with_2_and_one_line(project: Path) -> None:
    (project / "gate.yaml").write_text("adapter_names: [alpha\n")
    done = subprocess.run(
        [sys.executable, "-m", "train.train_router_sft", "--config", str(project / "gate.yaml")],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("error: configuration") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("routed", [0, 1])
def test_a_gate_that_composes_nothing_is_told(capsys: pytest.CaptureFixture[str], routed: int) -> None:
    names = ["base", "a", "b"]
    rows = {"base": [0, 0, 0], "a": [3, routed, 0], "b": [2, 0, 0]}
    confusion = {label: dict(zip(names, row, strict=True)) for label, row in rows.items()}
    train_router_sft.print_report({"slot_names": names, "validation_accuracy": 0.5, "confusion": confusion})
    assert ("warning: every token goes to base" in capsys.readouterr().out) is (routed == 0)
