"""Composition baselines of ``python -m train.evaluate``: TIES and DARE, the prompt-chosen adapter, the soft gate."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_game  # noqa: F401 - registers capability_tiny
import torch
from scripted_engine import ScriptedEngine, right_answer
from scripted_server import ScriptedServer

from game_registry import AgentError, get_game
from pipeline.files import InputError, ServerError, read_json, write_json
from train import evaluate, evaluation_choice
from train.chat import ChatCodec
from train.engine import SamplingParams
from train.engines import EngineOptions, OpenEngine
from train.evaluation_choice import (
    Option,
    choice_messages,
    options_from,
    read_choice,
    read_descriptions,
    task_text,
)
from train.merge import merge_adapters, split
from train.systems import System, open_routed

# ------------------------------------------------------------------ merges


def peft_pair(folder: Path, ranks: tuple[int, int], targets: list[str]) -> Any:
    """Two random adapters of given ranks on a tiny Llama, saved to ``folder``; the peft model that has both."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    base = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)).eval()
    model: Any = None
    for name, rank in zip(("one", "two"), ranks, strict=True):
        lora = LoraConfig(r=rank, lora_alpha=8, target_modules=targets, init_lora_weights=False)
        if model is None:
            model = get_peft_model(base, lora, adapter_name=name)
        else:
            model.add_adapter(name, lora)
    model.save_pretrained(folder, selected_adapters=["one", "two"])
    return model


def deltas(folder: Path) -> dict[str, torch.Tensor]:
    from moe_gate.adapters import load_adapter

    return {m: f.scaling * (f.B.float() @ f.A.float()) for m, f in load_adapter(folder).factors.items()}


@pytest.mark.parametrize(
    ("method", "weights", "targets"),
    [
        ("ties", [1.0, 1.0], ["q_proj", "down_proj"]),
        ("ties", [0.7, 0.2], ["q_proj", "down_proj"]),
        ("dare_linear", [0.5, 0.5], ["q_proj"]),  # one module: both sides draw in one order
        ("dare_ties", [1.0, 1.0], ["q_proj"]),
    ],
)
def test_ties_and_dare_equal_pefts_weighted_adapter_also_for_unequal_ranks(
    tmp_path: Path, method: Any, weights: list[float], targets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = peft_pair(tmp_path, (4, 6), targets)
    folders = {name: str(tmp_path / name) for name in ("one", "two")}
    drawn: list[torch.Generator] = []

    def same_draws(input: torch.Tensor) -> torch.Tensor:
        """peft initialises its new adapter before it draws; the draws themselves must be equal on both sides."""
        return (torch.rand(input.shape, generator=drawn[-1]) < input).to(input.dtype)

    monkeypatch.setattr(torch, "bernoulli", same_draws)
    drawn.append(torch.Generator().manual_seed(7))
    rank = merge_adapters(folders, tmp_path / "m", weights, method=method, density=0.4)
    assert rank == 10
    drawn.append(torch.Generator().manual_seed(7))
    model.add_weighted_adapter(
        ["one", "two"], weights, "oracle", combination_type=f"{method}_svd", svd_rank=10, density=0.4
    )
    ours = deltas(tmp_path / "m")
    assert {m.rsplit(".", 1)[-1] for m in ours} == set(targets)
    for module, delta in ours.items():
        expected = model.base_model.model.get_submodule(module).get_delta_weight("oracle")
        torch.testing.assert_close(delta, expected, rtol=1e-4, atol=1e-5)


def test_linear_merge_of_unequal_ranks_equals_pefts_svd_form(tmp_path: Path) -> None:
    model = peft_pair(tmp_path, (4, 6), ["q_proj", "down_proj"])
    merge_adapters({n: str(tmp_path / n) for n in ("one", "two")}, tmp_path / "m")
    model.add_weighted_adapter(["one", "two"], [0.5, 0.5], "oracle", combination_type="svd", svd_rank=10)
    for module, delta in deltas(tmp_path / "m").items():
        expected = model.base_model.model.get_submodule(module).get_delta_weight("oracle")
        torch.testing.assert_close(delta, expected, rtol=1e-4, atol=1e-5)


def test_dare_is_repeatable_by_seed_and_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    peft_pair(tmp_path, (4, 6), ["q_proj", "down_proj"])
    folders = {name: str(tmp_path / name) for name in ("one", "two")}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        merge_adapters(folders, tmp_path / name, method="dare_linear", seed=seed)
    torch.testing.assert_close(torch.rand(3), expected)
    first, again, other = (deltas(tmp_path / name) for name in "abc")
    for module in first:
        torch.testing.assert_close(first[module], again[module])
    assert any(not torch.allclose(first[m], other[m]) for m in first)


def test_a_merge_respects_the_rank_limit_with_the_least_error(tmp_path: Path) -> None:
    peft_pair(tmp_path, (4, 6), ["q_proj"])
    folders = {name: str(tmp_path / name) for name in ("one", "two")}
    assert merge_adapters(folders, tmp_path / "m", max_rank=3, method="ties", density=0.5) == 3
    merge_adapters(folders, tmp_path / "full", max_rank=32, method="ties", density=0.5)
    a, b = split(torch.randn(9, 5, generator=torch.Generator().manual_seed(0)), 2)
    assert a.shape == (2, 5) and b.shape == (9, 2)
    (module,) = deltas(tmp_path / "full")
    whole, cut = deltas(tmp_path / "full")[module], deltas(tmp_path / "m")[module]
    best = torch.linalg.svdvals(whole)[3:].norm()
    torch.testing.assert_close((whole - cut).norm(), best, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5])
def test_a_density_that_cannot_be_is_refused(tmp_path: Path, density: float) -> None:
    peft_pair(tmp_path, (4, 4), ["q_proj"])
    folders = {name: str(tmp_path / name) for name in ("one", "two")}
    with pytest.raises(InputError, match="density"):
        merge_adapters(folders, tmp_path / "m", method="ties", density=density)
    assert not (tmp_path / "m").exists()


# ------------------------------------------------------------------ the question and its answer

NAMES = ("tool_calling_precision", "tool_calling", "structured_data")


@pytest.mark.parametrize(
    ("said", "option", "valid"),
    [
        ("structured_data", "structured_data", True),
        ("Structured data.", "structured_data", True),
        ("The specialist is **structured-data**", "structured_data", True),
        ("tool_calling_precision", "tool_calling_precision", True),  # not the shorter name inside it
        ("base", None, True),
        ("basement", None, False),
        ("", None, False),
        ("I would cancel the order", None, False),
        ("structured_data or base", None, False),
        ("structured_data_reasoning", "structured_data", True),
    ],
)
def test_the_reply_is_read_by_name(said: str, option: str | None, valid: bool) -> None:
    assert read_choice(said, NAMES) == (option, valid)


def test_the_question_holds_every_option_the_base_and_the_task() -> None:
    options = [Option(name, "", f"about {name}") for name in NAMES]
    task = [{"role": "system", "content": "Policy."}, {"role": "user", "content": "Cancel order 7."}]
    system, user = choice_messages(task, options, "env/1")
    assert all(f"- {o.name}: {o.description}" in system["content"] for o in options) and "- base:" in system["content"]
    assert "[system] Policy." in user["content"] and "[user] Cancel order 7." in user["content"]
    orders = {choice_messages(task, options, f"env/{seed}")[0]["content"] for seed in range(20)}
    assert len(orders) > 5, "the order of the options must vary"
    assert choice_messages(task, options, "env/1") == [system, user]


def test_calls_and_long_tasks_in_the_question() -> None:
    call = {"function": {"name": "find", "arguments": '{"id": 7}'}}
    parts = [{"type": "text", "text": "parts"}]
    text = task_text([{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": parts}])
    assert text == '[assistant] find({"id": 7})\n[user] parts'
    long = task_text([{"role": "user", "content": "a" * 50_000 + "END"}])
    assert len(long) < evaluation_choice.MAX_TASK_CHARS + 20 and long.endswith("END") and "[...]" in long


def test_descriptions_of_both_files(tmp_path: Path) -> None:
    selection, candidates = tmp_path / "s.json", tmp_path / "c.json"
    write_json(selection, [{"skill": "x", "description": "about\n x", "mean_cov": 0.2}])
    write_json(candidates, {"candidates": [{"name": "y", "description": "about y", "example_trajectories": []}]})
    assert read_descriptions(str(selection)) == {"x": "about x"}
    assert read_descriptions(str(candidates)) == {"y": "about y"}
    assert options_from({"capability_x": "f"}, str(selection)) == (Option("capability_x", "f", "about x"),)
    with pytest.raises(InputError, match="no description of adapter z; there is: x"):
        options_from({"z": "f"}, str(selection))
    for bad, expected in (([{"description": "d"}], "neither"), ("text", "expected a selection"), ([{}], "description")):
        selection.write_text(json.dumps(bad))
        with pytest.raises(InputError, match=expected):
            read_descriptions(str(selection))


# ------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def codec(smollm2: Path) -> ChatCodec:
    return ChatCodec.from_model(str(smollm2))


def knows(*numbers: int) -> Callable[[str, SamplingParams], str]:
    def policy(prompt: str, params: SamplingParams) -> str:
        answer = right_answer(prompt, params)
        return answer if any(f": {n}}}" in answer for n in numbers) else "I do not know."

    return policy


def base_policy(prompt: str, params: SamplingParams) -> str:
    """Plays number 0; as a chooser sends 1 and 2 to x, 3 to y, says nonsense on 4, and takes the base otherwise."""
    if "You decide which specialist" not in prompt:
        return knows(0)(prompt, params)
    assert params.temperature == 0 and "about x" in prompt and "about y" in prompt
    number = int(prompt.rpartition("The number is ")[2].partition(".")[0])
    return {1: "x", 2: "X.", 3: "y", 4: "who knows"}.get(number, "base")


@pytest.fixture
def engine(codec: ChatCodec, monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """Base solves 0, adapter x 0-2, adapter y 3."""
    scripted = ScriptedEngine(codec, base_policy)
    scripted.by_adapter = {"x@": knows(0, 1, 2), "y@": knows(3), "ties@": knows(1), "joint@": knows(5)}

    async def open_scripted(options: Any) -> OpenEngine:
        return OpenEngine(scripted, codec, "local", "scripted", 4096)

    monkeypatch.setattr(evaluate, "open_engine", open_scripted)
    return scripted


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    from test_sampling_evaluation import Q, random_adapter

    folders = [str(random_adapter(tmp_path / n, 2 + i, 2, i, (Q,))) for i, n in enumerate("xy")]
    write_json(tmp_path / "s.json", [{"skill": n, "description": f"about {n}"} for n in "xy"])
    joint = random_adapter(tmp_path / "joint", 2, 2, 5, (Q,))
    return ["--adapters", ",".join(folders), "--choose", str(tmp_path / "s.json"), "--other-adapters", str(joint)]


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> dict[str, Any]:
    argv = ["evaluate", "--envs", "capability_tiny", "--model", "m", "--out-dir", str(out), "--bootstrap", "300", *more]
    monkeypatch.setattr(sys, "argv", argv)
    assert evaluate.main() == 0
    return dict(read_json(out / "evaluation.json"))


def test_every_baseline_in_one_table(
    engine: ScriptedEngine, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    flags = [*flags, "--seeds", "0:14", "--trials", "2", "--merge", "linear,ties,dare_ties"]
    result = run(monkeypatch, tmp_path / "out", *flags)
    rows = result["results"]["capability_tiny"]["greedy"]
    assert list(rows) == ["base", "x", "y", "joint", "merge", "ties", "dare_ties", "chosen", "union"]
    rewards = {name: round(7 * row["reward"]["value"]) for name, row in rows.items()}
    # chosen: 0 by the base, 1 and 2 by x, 3 by y; the joint adapter is in no union and no best single
    expected = {"base": 1, "x": 3, "y": 1, "joint": 1, "merge": 1, "ties": 1, "dare_ties": 1, "chosen": 4, "union": 4}
    assert rewards == expected
    assert rows["chosen"]["best_single"] == "x" and rows["chosen"]["vs_best_single"]["value"] > 0
    choice = result["choice"]["capability_tiny"]
    assert choice["picks"] == {"base": 8, "x": 4, "y": 2} and choice["tasks"] == 14
    assert choice["invalid_share"] == pytest.approx(1 / 7) and choice["invalid_examples"][0] == "who knows"
    entries = read_json(tmp_path / "out" / "rollouts" / "chosen.capability_tiny.greedy.json")["simulations"]
    assert {e["adapter"] for e in entries} == {"chosen"} and {e["picked"] for e in entries} == {None, "x", "y"}
    asked = sum("You decide" in engine.codec.tokenizer.decode(p) for p in engine.prompts)
    assert asked == 14, "one question per task, also with several modes and trials"
    assert engine.adapters == {}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Prompt-chosen adapters" in page and "who knows" in page and "14.3%" in page
    assert "chosen on capability_tiny: base 8, x 4, y 2; invalid replies 14.3 %" in capsys.readouterr().out


def test_picks_are_kept_and_asked_anew_when_they_may_differ(
    engine: ScriptedEngine, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def questions() -> int:
        count = sum("You decide" in engine.codec.tokenizer.decode(p) for p in engine.prompts)
        engine.prompts.clear()
        return count

    more = [*flags, "--modes", "greedy"]
    first = run(monkeypatch, tmp_path / "out", *more, "--seeds", "0:7")
    assert questions() == 7
    assert run(monkeypatch, tmp_path / "out", *more, "--seeds", "0:7")["results"] == first["results"]
    assert engine.prompts == []
    run(monkeypatch, tmp_path / "out", *more, "--seeds", "0:10")
    assert questions() == 3
    write_json(tmp_path / "s.json", [{"skill": n, "description": f"about {n}, now"} for n in "xy"])
    run(monkeypatch, tmp_path / "out", *more, "--seeds", "0:7")
    assert questions() == 7


def test_a_dead_server_while_choosing_ends_the_command(
    engine: ScriptedEngine, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(prompt: str, params: SamplingParams) -> str:
        if "You decide" in prompt:
            raise AgentError("server", "gone")
        return base_policy(prompt, params)

    engine.policy = dies
    with pytest.raises(ServerError, match="gone"):
        run(monkeypatch, tmp_path / "out", *flags, "--seeds", "0:7")
    assert not (tmp_path / "out" / "evaluation.json").exists() and engine.adapters == {}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--merge", "ties,tis"], "--merge 'tis'"),
        (["--merge", "ties", "--merge-density", "0"], "density"),
        (["--gate", "runs/no_gate"], "gate runs/no_gate: not found; train one"),
        (["--gate", "no_gate.yaml"], "no_gate.yaml"),
        (["--soft-gate", "z=runs/no_gate"], "gate runs/no_gate: not found; train one"),
        (["--gate", "a=runs/a,a=runs/b"], "'a' appears twice"),
        (["--gate", "merge=runs/a"], "a name of its own"),
        (["--gate", "runs/a,runs/b"], "'routed' appears twice"),
        (["--gate", "x=runs/a"], "'x' appears twice"),
        (["--choose", "nowhere.json"], "not found"),
    ],
)
def test_bad_flags(
    engine: ScriptedEngine, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str],
    expected: str,
) -> None:  # fmt: skip
    with pytest.raises(InputError, match=expected):
        run(monkeypatch, tmp_path / "out", *flags, *more)
    assert not (tmp_path / "out" / "evaluation.json").exists() and engine.asked == []


def test_choosing_needs_adapters(engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "s.json", [{"skill": "x", "description": "about x"}])
    with pytest.raises(InputError, match="found none"):
        run(monkeypatch, tmp_path / "out", "--choose", str(tmp_path / "s.json"))


# ------------------------------------------------------------------ gates


def test_the_soft_gate_is_the_same_gate_with_softmax_weights(tmp_path: Path) -> None:
    import asyncio

    from gate_models import random_gates, two_adapters, write_base

    from moe_gate import build_capability_model, routing_state, save_gate

    base = write_base(tmp_path / "base")
    model = build_capability_model(base, two_adapters(base, tmp_path))
    random_gates(model)
    save_gate(model, tmp_path / "gate", str(tmp_path / "base"))
    options = EngineOptions(model=str(tmp_path / "base"), dtype="float32")
    ids = torch.arange(7, 20)[None]
    logits = {}
    for mode in (None, "top1", "soft"):
        system = System("s", "routed", gate=str(tmp_path / "gate"), routing_mode=mode)  # type: ignore[arg-type]
        opened, routed = asyncio.run(open_routed(options, system))
        assert opened.kind == "local"
        with torch.no_grad():
            logits[mode] = routed(input_ids=ids).logits
        routing_state(routed).mode = "soft"
        with torch.no_grad():
            torch.testing.assert_close(
                routed(input_ids=ids).logits, logits["soft"] if mode == "soft" else routed(input_ids=ids).logits
            )
    torch.testing.assert_close(logits[None], logits["top1"])
    assert not torch.allclose(logits["top1"], logits["soft"], atol=1e-3)
    prints = {System("s", "routed", gate=str(tmp_path / "gate"), routing_mode=m).fingerprint() for m in (None, "soft")}
    assert len(prints) == 2, "soft and hard episodes must not be taken for one another"


async def test_the_only_model_of_a_routed_server_needs_no_name(
    scripted_server: ScriptedServer, smollm2: Path
) -> None:
    options = EngineOptions(model=str(smollm2))
    opened, model = await open_routed(options, System("routed", "routed", base_url=scripted_server.url))
    assert (opened.model, opened.kind, model) == (scripted_server.model, "vllm", None)
    await opened.engine.close()
    with pytest.raises(InputError, match="'other' is not served"):
        await open_routed(
            options, System("routed", "routed", base_url=scripted_server.url, served_model="other")
        )  # fmt: skip


def test_a_routed_system_without_a_place_is_refused() -> None:
    import asyncio

    with pytest.raises(InputError, match="--gate"):
        asyncio.run(open_routed(EngineOptions(model="m"), System("routed", "routed")))


def test_the_environment_of_these_tests_is_there() -> None:
    assert get_game("capability_tiny").name == "capability_tiny"
