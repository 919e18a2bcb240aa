"""Evaluation statistics, the merge, ``python -m train.evaluate`` and its report."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_game  # noqa: F401 - registers capability_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine, right_answer

from game_registry import AgentError
from pipeline.files import InputError, ServerError, read_json
from train import evaluate
from train.chat import ChatCodec
from train.engine import SamplingParams
from train.engines import OpenEngine
from train.evaluation_stats import (
    Trial,
    bootstrap_mean,
    compare,
    paired_difference,
    pass_hat_k,
    seed_means,
    summarize,
    union_trials,
)


def trial(seed: int, index: int, reward: float | None, **more: Any) -> Trial:
    values = {"truncated": False, "turns": 1, "invalid_calls": 0, "tokens": 10, **more}
    return Trial(seed, index, reward, error_kind=None if reward is not None else "environment", **values)


# ------------------------------------------------------------------ statistics


def test_pass_hat_k_is_the_chance_that_k_of_the_trials_all_succeed() -> None:
    for c, n, k in ((2, 4, 2), (4, 4, 4), (1, 5, 2), (3, 5, 3)):
        outcomes = [i < c for i in range(n)]
        drawn = [all(outcomes[i] for i in chosen) for chosen in itertools.combinations(range(n), k)]
        assert pass_hat_k([c], [n], k) == pytest.approx(sum(drawn) / len(drawn))
    assert pass_hat_k([2, 4], [4, 4], 2) == pytest.approx((1 / 6 + 1) / 2)
    assert pass_hat_k([1], [1], 2) is None


@given(st.lists(st.tuples(st.integers(0, 6), st.just(6)), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_pass_hat_k_falls_with_k(pairs: list[tuple[int, int]]) -> None:
    values = [pass_hat_k([c for c, _ in pairs], [n for _, n in pairs], k) for k in range(1, 7)]
    assert all(a is not None and b is not None and a >= b - 1e-12 for a, b in itertools.pairwise(values))
    assert values[0] == pytest.approx(sum(c for c, _ in pairs) / (6 * len(pairs)))


def test_bootstrap_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for repeat in range(200):
        sample = rng.binomial(1, 0.3, size=64).astype(float)
        interval = bootstrap_mean(sample.tolist(), draws=500, seed=repeat)
        covered += interval.low <= 0.3 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


def test_bootstrap_is_repeatable_and_brackets_the_mean() -> None:
    values = [0.0, 1.0, 0.5, 1.0, 0.0, 0.25]
    first, second = bootstrap_mean(values, 3000, 7), bootstrap_mean(values, 3000, 7)
    assert first == second and first.low < first.value < first.high
    assert bootstrap_mean(values, 3000, 8) != first
    with pytest.raises(ValueError, match="no scored seed"):
        bootstrap_mean([])


def test_pairing_by_seed_removes_the_difficulty_of_seeds() -> None:
    """Hard and easy seeds alike gain 0.1: paired, the interval is a point; unpaired intervals would overlap."""
    base = {s: (s % 10) / 10 for s in range(60)}
    better = {s: value + 0.1 for s, value in base.items()}
    difference = paired_difference(better, base, 2000)
    assert difference.value == pytest.approx(0.1) and difference.high - difference.low < 1e-9
    assert difference.excludes_zero
    a, b = bootstrap_mean(list(base.values()), 2000), bootstrap_mean(list(better.values()), 2000)
    assert a.high > b.low


def test_trials_of_a_seed_are_not_independent_tasks() -> None:
    """Copying each seed's trial 9 times must not narrow the interval."""
    once = [trial(s, 0, float(s % 3 == 0)) for s in range(30)]
    often = [trial(s, t, float(s % 3 == 0)) for s in range(30) for t in range(9)]
    a, b = summarize(once, 2000).reward, summarize(often, 2000).reward
    assert a is not None and a == b


def test_failed_episodes_leave_every_rate() -> None:
    trials = [trial(1, 0, 1.0), trial(1, 1, None), trial(2, 0, None), trial(2, 1, None), trial(3, 0, 0.5)]
    summary = summarize(trials, 500)
    assert seed_means(trials) == {1: 1.0, 3: 0.5}
    assert summary.reward is not None and summary.reward.value == pytest.approx(0.75) and summary.reward.n == 2
    assert summary.error_share == pytest.approx(0.6) and summary.error_kinds == {"environment": 3}
    nothing = summarize([trial(1, 0, None)], 100)
    assert nothing.reward is None and nothing.pass_hat == {}


def test_shares_count_all_episodes() -> None:
    trials = [trial(1, 0, 1.0, truncated=True, turns=2, invalid_calls=1), trial(2, 0, 0.0, turns=2, tokens=30)]
    summary = summarize(trials, 100)
    assert summary.truncation_share == 0.5 and summary.invalid_calls_per_turn == 0.25 and summary.mean_tokens == 20


def test_union_takes_the_best_of_each_seed_and_trial() -> None:
    systems = {"a": [trial(1, 0, 0.2), trial(2, 0, None)], "b": [trial(1, 0, 0.7), trial(2, 0, 0.1)]}
    assert [t.reward for t in union_trials(systems)] == [0.7, 0.1]


def test_comparison_names_the_best_single_and_pairs_with_it() -> None:
    table = {
        "base": [trial(s, 0, 0.0) for s in range(8)],
        "x": [trial(s, 0, 0.5) for s in range(8)],
        "y": [trial(s, 0, float(s < 2)) for s in range(8)],
        "routed": [trial(s, 0, 0.75) for s in range(8)],
    }
    rows = compare(table, "base", ["x", "y"], 500)
    assert {row["best_single"] for row in rows.values()} == {"x"}
    assert rows["routed"]["vs_best_single"]["value"] == 0.25 and rows["routed"]["vs_base"]["value"] == 0.75
    assert rows["x"]["vs_best_single"] is None and rows["base"]["vs_base"] is None
    assert rows["routed"]["success_vs_base"]["value"] == 0.0 and rows["y"]["success_vs_base"]["value"] == 0.25
    alone = compare({"base": table["base"]}, "base", [], 500)
    assert set(alone["base"].values()) == {None}


# ------------------------------------------------------------------ merge


def random_adapter(folder: Path, rank: int, alpha: int, seed: int, modules: tuple[str, ...]) -> Path:
    import torch

    from train.lora import write_peft_folder

    generator = torch.Generator().manual_seed(seed)
    state = {}
    for module in modules:
        state[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, 12, generator=generator)
        state[f"base_model.model.{module}.lora_B.weight"] = torch.randn(10, rank, generator=generator)
    kinds = sorted({m.rsplit(".", 1)[-1] for m in modules})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": kinds, "task_type": "CAUSAL_LM"}
    write_peft_folder(folder, state, config)
    return folder


def deltas(folder: Path) -> dict[str, Any]:
    from moe_gate.adapters import load_adapter

    return {m: f.scaling * (f.B.float() @ f.A.float()) for m, f in load_adapter(folder).factors.items()}


Q, V = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"


def test_merge_is_the_mean_of_the_deltas_also_for_unequal_ranks_scales_and_targets(tmp_path: Path) -> None:
    import torch

    from train.merge import merge_adapters

    a = random_adapter(tmp_path / "a", 3, 6, 0, (Q, V))
    b = random_adapter(tmp_path / "b", 5, 5, 1, (Q,))
    assert merge_adapters({"a": str(a), "b": str(b)}, tmp_path / "m") == 8
    merged, first, second = deltas(tmp_path / "m"), deltas(a), deltas(b)
    torch.testing.assert_close(merged[Q], (first[Q] + second[Q]) / 2)
    torch.testing.assert_close(merged[V], first[V] / 2)


def test_truncated_merge_is_the_best_of_its_rank(tmp_path: Path) -> None:
    import torch

    from train.merge import merge_adapters

    a, b = (random_adapter(tmp_path / n, 4, 4, i, (Q,)) for i, n in enumerate("ab"))
    assert merge_adapters({"a": str(a), "b": str(b)}, tmp_path / "m", max_rank=5) == 5
    exact = (deltas(a)[Q] + deltas(b)[Q]) / 2
    singular = torch.linalg.svdvals(exact)
    error = torch.linalg.norm(deltas(tmp_path / "m")[Q] - exact)
    torch.testing.assert_close(error, torch.linalg.norm(singular[5:]), rtol=1e-4, atol=1e-5)


def test_merge_equals_pefts_weighted_adapter(tmp_path: Path) -> None:
    """Logits of the merged folder and of ``add_weighted_adapter(combination_type="cat")`` on a tiny model."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from train.merge import merge_adapters

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    base = LlamaForCausalLM(config).eval()
    weights = {k: v.clone() for k, v in base.state_dict().items()}
    model: Any = base
    for name, rank in (("one", 4), ("two", 4)):
        lora = LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        if name == "one":
            model = get_peft_model(model, lora, adapter_name=name)
        else:
            model.add_adapter(name, lora)
    model.save_pretrained(tmp_path, selected_adapters=["one", "two"])
    model.add_weighted_adapter(["one", "two"], [0.5, 0.5], "peft_merge", combination_type="cat")
    model.set_adapter("peft_merge")
    ids = torch.arange(20)[None]
    expected = model.eval()(ids).logits
    merge_adapters({n: str(tmp_path / n) for n in ("one", "two")}, tmp_path / "m")
    fresh = LlamaForCausalLM(config).eval()
    fresh.load_state_dict(weights)
    ours = PeftModel.from_pretrained(fresh, str(tmp_path / "m")).eval()(ids).logits
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_merge_of_one_or_with_wrong_weights_is_refused(tmp_path: Path) -> None:
    from train.merge import merge_adapters

    a = random_adapter(tmp_path / "a", 2, 2, 0, (Q,))
    with pytest.raises(InputError, match="two adapters"):
        merge_adapters({"a": str(a)}, tmp_path / "m")
    with pytest.raises(InputError, match="expected 2 weights"):
        merge_adapters({"a": str(a), "b": str(a)}, tmp_path / "m", [1.0])


# ------------------------------------------------------------------ command


@pytest.fixture(scope="module")
def codec(smollm2: Path) -> ChatCodec:
    return ChatCodec.from_model(str(smollm2))


def knows(*numbers: int) -> Callable[[str, SamplingParams], str]:
    """A policy that solves the seeds whose number it knows."""

    def policy(prompt: str, params: SamplingParams) -> str:
        answer = right_answer(prompt, params)
        return answer if any(f": {n}}}" in answer for n in numbers) else "I do not know."

    return policy


@pytest.fixture
def engine(codec: ChatCodec, monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """An engine where base solves number 0, adapter x 0-2, adapter y 3, the merge nothing."""
    scripted = ScriptedEngine(codec, knows(0))
    scripted.by_adapter = {"x@": knows(0, 1, 2), "y@": knows(3), "merge@": knows()}

    async def open_scripted(options: Any) -> OpenEngine:
        return OpenEngine(scripted, codec, "local", "scripted", 4096)

    async def open_routed(*args: Any) -> Any:
        routed = ScriptedEngine(codec, knows(0, 1, 2, 3))
        return OpenEngine(routed, codec, "vllm", "scripted", 4096), None

    monkeypatch.setattr(evaluate, "open_engine", open_scripted)
    monkeypatch.setattr(evaluate, "open_routed", open_routed)
    return scripted


@pytest.fixture
def adapters(tmp_path: Path) -> str:
    return ",".join(str(random_adapter(tmp_path / n, 2, 2, i, (Q,))) for i, n in enumerate("xy"))


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str) -> int:
    argv = [
        "evaluate",
        "--envs",
        "capability_tiny",
        "--model",
        "m",
        "--out-dir",
        str(out),
        "--bootstrap",
        "500",
        *flags,
    ]
    monkeypatch.setattr(sys, "argv", argv)
    return evaluate.main()


def test_all_systems_on_the_same_seeds(
    engine: ScriptedEngine, adapters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    flags = ["--seeds", "10003:10017", "--trials", "3", "--adapters", adapters, "--merge"]
    assert run(monkeypatch, out, *flags, "--routed-base-url", "http://x:1") == 0
    result = read_json(out / "evaluation.json")
    rows = result["results"]["capability_tiny"]["greedy"]
    rewards = {name: row["reward"]["value"] for name, row in rows.items()}
    sevenths = {"base": 1, "x": 3, "y": 1, "merge": 0, "routed": 4, "union": 4}
    assert rewards == pytest.approx({name: n / 7 for name, n in sevenths.items()}, abs=1e-5)
    assert rows["routed"]["vs_best_single"]["value"] == pytest.approx(1 / 7, abs=1e-5)
    assert rows["routed"]["best_single"] == "x" and rows["routed"]["vs_base"]["low"] > 0
    sampled = result["results"]["capability_tiny"]["sampled"]
    assert sampled["x"]["n_episodes"] == 42 and rows["x"]["n_episodes"] == 14
    assert sampled["x"]["pass_hat"].keys() == {"1", "2", "3"}
    assert {(p.temperature) for _, p in engine.asked} == {0.0, 1.0}
    assert engine.adapters == {}, "adapters must not stay on the engine"


def test_trials_of_a_seed_are_asked_together(
    engine: ScriptedEngine, adapters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, tmp_path / "out", "--seeds", "0:6", "--trials", "3", "--adapters", adapters)
    first = [(adapter or "base").split("@")[0] for adapter, _ in engine.asked[:72]]
    assert [name for name, _ in itertools.groupby(first)] == ["base", "x", "y"], "one system after the other"
    prompts = [tuple(p) for p in engine.prompts[:24]]
    assert len(set(prompts)) == 6 and all(len(set(prompts[i : i + 4])) == 1 for i in range(0, 24, 4))


def test_finished_cells_are_not_sampled_again_and_more_trials_are_added(
    engine: ScriptedEngine, adapters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    flags = ["--seeds", "0:7", "--adapters", adapters, "--modes", "sampled"]
    run(monkeypatch, out, *flags, "--trials", "1")
    first, page = len(engine.asked), (out / "evaluation.json").read_text()
    run(monkeypatch, out, *flags, "--trials", "1")
    assert len(engine.asked) == first and (out / "evaluation.json").read_text() == page
    run(monkeypatch, out, *flags, "--trials", "2")
    assert len(engine.asked) == 2 * first


def test_interrupted_evaluation_goes_on(
    engine: ScriptedEngine, adapters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, count = tmp_path / "out", 0
    plain = engine.policy

    def dies(prompt: str, params: SamplingParams) -> str | list[int]:
        nonlocal count
        count += 1
        if count > 20:
            raise AgentError("server", "gone")
        return plain(prompt, params)

    engine.policy = dies
    flags = ["--seeds", "0:14", "--adapters", adapters, "--modes", "greedy", "--concurrency", "1"]
    with pytest.raises(ServerError, match="gone"):
        run(monkeypatch, out, *flags)
    assert not (out / "evaluation.json").exists() and not (out / "report.html").exists()
    kept = sum(p.read_text().count("\n") - 1 for p in (out / "rollouts").glob("*.partial.jsonl"))
    assert kept >= 6
    engine.policy, engine.asked = plain, []
    assert run(monkeypatch, out, *flags) == 0
    uninterrupted = read_json(out / "evaluation.json")
    run(monkeypatch, tmp_path / "other", *flags)
    assert read_json(tmp_path / "other" / "evaluation.json")["results"] == uninterrupted["results"]


def test_retrained_adapter_is_sampled_anew(
    engine: ScriptedEngine, adapters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--seeds", "0:7", "--adapters", adapters, "--modes", "greedy"]
    run(monkeypatch, tmp_path / "out", *flags)
    random_adapter(tmp_path / "x", 2, 2, 99, (Q,))
    engine.asked = []
    run(monkeypatch, tmp_path / "out", *flags)
    assert {(a or "base").split("@")[0] for a, _ in engine.asked} == {"x"}


def test_one_file_adapters_are_taken_too(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_gate.adapters import save_adapter_file

    save_adapter_file(random_adapter(tmp_path / "src", 2, 2, 0, (Q,)), tmp_path / "x.safetensors")
    run(
        monkeypatch,
        tmp_path / "out",
        "--seeds",
        "0:7",
        "--adapters",
        str(tmp_path / "x.safetensors"),
        "--modes",
        "greedy",
    )
    rows = read_json(tmp_path / "out" / "evaluation.json")["results"]["capability_tiny"]["greedy"]
    assert rows["x"]["reward"]["value"] == pytest.approx(3 / 7, abs=1e-5)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_report_is_self_contained_and_escapes_what_models_say(
    engine: ScriptedEngine, adapters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.policy = lambda prompt, params: "<script>alert('x')</script> & so on"
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.parent.mkdir()
    rows = [{"adapter": "x", "iteration": i, "reward": i / 10, "informative": 0.5} for i in range(5)]
    rows += [{"adapter": "x", "iteration": 4, "eval_reward": 0.5}]
    metrics.write_text("".join(json.dumps(r) + "\n" for r in rows))
    stats = tmp_path / "routing.json"
    shares = {"share_of_slot": {"base": 0.25, "x": 0.75}, "layer_shares": [[0.5, 0.5], [0.0, 1.0]], "tokens": 12}
    stats.write_text(json.dumps(shares))
    flags = ["--train-metrics", str(metrics), "--routing-stats", str(stats), "--adapters", adapters]
    run(monkeypatch, tmp_path / "out", "--seeds", "0:7", *flags)
    html = (tmp_path / "out" / "report.html").read_text()
    page = _Page()
    page.feed(html)
    names = [tag for tag, _ in page.tags]
    assert "script" not in names and "link" not in names and "img" not in names
    assert not re.search(r'(src|href)="', html) and "http" not in html
    assert names.count("svg") >= 4 and "alert('x')" in "".join(page.text)
    text = " ".join(page.text)
    assert "Routing" in text and "Training" in text and "seed" in text
    tips = "".join(page.text)
    assert "layer 1, x: 1.000" in tips and "x, iteration 4: 0.400" in tips


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--seeds", "5"], "FIRST:END"),
        (["--seeds", "9:3"], "FIRST:END"),
        (["--trials", "0"], "--trials"),
        (["--modes", "hot"], "--modes"),
        (["--adapters", "no/such"], "not found"),
        (["--adapters", "base=."], "reserved|adapter config"),
        (["--summaries", ""], "--summaries '': expected a file"),
        (["--gate", ""], "--gate '': expected something to evaluate; give it, or leave the flag out"),
        (["--other-adapters", " , "], "--other-adapters ' , ': expected something"),
        (["--merge"], "two adapters"),
        (["--train-metrics", "nowhere.jsonl"], "not found"),
    ],
)
def test_bad_flags(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        run(monkeypatch, tmp_path / "out", *flags)
    assert not (tmp_path / "out" / "evaluation.json").exists() and engine.asked == []


def test_metrics_without_curves_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"iteration": 1}\n')
    with pytest.raises(InputError, match="no line has iteration and reward"):
        evaluate.read_curves(str(tmp_path / "m.jsonl"))
    (tmp_path / "m.jsonl").write_text('{"iteration": 1, "reward": "high"}\n')
    with pytest.raises(InputError, match="finite number"):
        evaluate.read_curves(str(tmp_path / "m.jsonl"))


# ------------------------------------------------------------------ pictures


def test_seeds_that_were_mined_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulations = [
        {"task_id": str(seed), "sample_idx": 0, "outcome": "scored", "reward_info": {"reward": 0.0}, "messages": []}
        for seed in range(12)
    ]
    rollouts, summaries = tmp_path / "rollouts.json", tmp_path / "summaries.json"
    rollouts.write_text(json.dumps({"info": {"env": "capability_tiny"}, "simulations": simulations}))
    command = [sys.executable, "-m", "pipeline._summarize", "--input", str(rollouts), "--output", str(summaries)]
    subprocess.run([*command, "--split", "99:1"], check=True)
    arguments = ["evaluate", "--envs", "capability_tiny", "--seeds", "0:12", "--out-dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--summaries", str(summaries), "--model", "m"])
    with pytest.raises(InputError, match="were mined for capabilities"):
        evaluate.main()
    assert not (tmp_path / "out").exists()
