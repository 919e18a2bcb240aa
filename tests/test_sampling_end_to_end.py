"""collect and evaluate with real engines on a tiny random model: local engine, peft adapters, merge, a real gate."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_game  # noqa: F401 - registers capability_tiny

from pipeline.files import read_json
from train import collect_rollouts, evaluate, replay


@pytest.fixture(scope="module")
def tiny_folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random Llama layers with SmolLM2's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=2, bos_token_id=1, pad_token_id=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(smollm2 / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two random adapters in both forms, and a random gate over them."""
    import torch

    from moe_gate import build_capability_model, named_gater_parameters, save_gate
    from train.local_engine import load_model
    from train.lora import attach_adapter, lora_config, save_adapter

    root = tmp_path_factory.mktemp("trained")
    model: Any = load_model(str(tiny_folder), "float32")
    for seed, name in enumerate(("first", "second")):
        model = attach_adapter(model, name, lora_config(4, 8), seed)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if f".{name}." in key and "lora_B" in key:
                    parameter.normal_(0.0, 0.3)
        save_adapter(model, name, root / name)
    paths = {name: root / name for name in ("first", "second")}
    routed = build_capability_model(load_model(str(tiny_folder), "float32"), paths, base_bias=0.0)
    with torch.no_grad():
        for _, parameter in named_gater_parameters(routed):
            parameter.normal_(0.0, 3.0 * (parameter.ndim == 2))  # no bias: several slots must win
    save_gate(routed, root / "gate", str(tiny_folder))
    return {**paths, "gate": root / "gate"}


def run(monkeypatch: pytest.MonkeyPatch, command: Any, *flags: str | Path) -> int:
    for name in ("VLLM_BASE_URLS", "VLLM_BASE_URL", "VLLM_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["command", *map(str, flags)])
    return int(command.main())


def collect(monkeypatch: pytest.MonkeyPatch, model: Path, out: Path, *flags: str | Path) -> list[dict[str, Any]]:
    common = ["--env", "capability_tiny", "--model", model, "--dtype", "float32", "--max-new-tokens", "8", "-o", out]
    assert run(monkeypatch, collect_rollouts, *common, *flags) == 0
    return list(read_json(out)["simulations"])


def test_collect_repeats_bit_for_bit_with_a_seed(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--num-seeds", "3", "--num-samples", "4", "--tokens", "--seed", "5"]
    first = collect(monkeypatch, tiny_folder, tmp_path / "a.json", *flags)
    assert first == collect(monkeypatch, tiny_folder, tmp_path / "b.json", *flags)
    other = collect(monkeypatch, tiny_folder, tmp_path / "c.json", *flags[:-1], "6")
    assert [e["token_ids"] for e in first] != [e["token_ids"] for e in other]
    by_task = {e["task_id"]: e["token_ids"][: e["n_prompt_tokens"]] for e in first}
    assert all(e["token_ids"][: e["n_prompt_tokens"]] == by_task[e["task_id"]] for e in first)
    assert len({tuple(e["token_ids"]) for e in first}) == 12, "samples of a group must differ"


def test_collect_with_either_form_of_an_adapter_is_the_same_and_differs_from_the_base(
    tiny_folder: Path, trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--num-seeds", "2", "--num-samples", "2", "--temperature", "0", "--tokens"]
    base = collect(monkeypatch, tiny_folder, tmp_path / "base.json", *flags)
    folder = collect(monkeypatch, tiny_folder, tmp_path / "a.json", *flags, "--adapter", trained["first"])
    file = f"{trained['first']}.safetensors"
    single = collect(monkeypatch, tiny_folder, tmp_path / "b.json", *flags, "--adapter", file)
    assert [e["token_ids"] for e in folder] == [e["token_ids"] for e in single]
    assert [e["token_ids"] for e in folder] != [e["token_ids"] for e in base]
    assert {e["adapter"] for e in folder} == {"first"} and {e["adapter"] for e in base} == {None}


def test_logprobs_are_those_at_the_sampling_temperature(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from train.local_engine import load_model

    model = load_model(str(tiny_folder), "float32")
    flags = ["--num-seeds", "1", "--num-samples", "3", "--tokens", "--seed", "1"]
    for temperature in (1.0, 0.6):
        out = tmp_path / f"{temperature}.json"
        for entry in collect(monkeypatch, tiny_folder, out, *flags, "--temperature", str(temperature)):
            with torch.inference_mode():
                logits = model(torch.tensor([entry["token_ids"]])).logits[0, :-1].float()
            rows = torch.log_softmax(logits / temperature, dim=-1)
            for i, (token, sampled) in enumerate(zip(entry["token_ids"], entry["action_mask"], strict=True)):
                if sampled:
                    assert entry["logprobs"][i] == pytest.approx(rows[i - 1, token].item(), abs=1e-4)


def test_evaluation_of_every_kind_of_system(
    tiny_folder: Path, trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "evaluation"
    flags = ["--model", tiny_folder, "--dtype", "float32", "--envs", "capability_tiny", "--seeds", "10000:10003"]
    flags += ["--trials", "2", "--max-new-tokens", "8", "--bootstrap", "200", "--out-dir", out, "--merge"]
    flags += ["--adapters", f"{trained['first']},{trained['second']}.safetensors", "--gate", trained["gate"]]
    assert run(monkeypatch, evaluate, *flags) == 0
    result = read_json(out / "evaluation.json")
    rows = result["results"]["capability_tiny"]["sampled"]
    assert list(rows) == ["base", "first", "second", "merge", "routed", "union"]
    assert all(row["n_episodes"] == 6 and row["error_share"] == 0 for row in rows.values())
    routing = result["routing"]["capability_tiny"]
    assert routing["slots"] == ["base", "first", "second"] and len(routing["layer_shares"]) == 2
    assert all(sum(row) == pytest.approx(1.0, abs=1e-5) for row in routing["layer_shares"])
    assert sum(s > 0.02 for s in routing["share_of_slot"].values()) >= 2, "a random gate uses several slots"
    greedy = {
        name: [
            e["messages"] for e in read_json(out / "rollouts" / f"{name}.capability_tiny.greedy.json")["simulations"]
        ]
        for name in ("base", "first", "merge", "routed")
    }
    assert len({str(m) for m in greedy.values()}) == 4, "four different policies must not say the same"
    entries = read_json(out / "rollouts" / "routed.capability_tiny.greedy.json")["simulations"]
    assert routing["tokens"] == sum(sum(e["action_mask"]) for e in entries)
    assert "<svg" in (out / "report.html").read_text()
    before = (out / "evaluation.json").read_bytes()
    monkeypatch.setattr(evaluate, "open_engine", None)
    monkeypatch.setattr(evaluate, "open_routed", None)
    assert run(monkeypatch, evaluate, *flags) == 0, "a complete evaluation needs no model"
    assert (out / "evaluation.json").read_bytes() == before
    assert run(monkeypatch, replay, *sorted((out / "rollouts").glob("*.json"))) == 0
