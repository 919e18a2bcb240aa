"""Reading adapters: both forms, every peft setting that changes the numbers, and everything that must be refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import gate_models as gm
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_gate import build_capability_model, find_adapter, force_route, load_adapter, save_adapter_file
from moe_gate.adapters import LoraAdapter, PeftSettings
from moe_gate.expert_factors import fuse_expert_factors
from moe_gate.factors import LoraFactors
from pipeline.files import InputError


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, change: Any) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True, "r": 5, "lora_alpha": 7},
    "rank_pattern": {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 7}, "r": 4},
    "alpha_pattern": {"alpha_pattern": {"o_proj": 3, r"model\.layers\.0\.self_attn\.k_proj": 32}},
    "rslora_patterns": {"use_rslora": True, "rank_pattern": {"v_proj": 9}, "alpha_pattern": {"v_proj": 2}},
    "attention_only": {"target_modules": ["q_proj", "v_proj"]},
    "some_layers": {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    "dropout_is_for_training": {"lora_dropout": 0.3},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_peft_settings_are_honoured(tmp_path: Path, name: str) -> None:
    base = gm.llama()
    reference = gm.write_adapter(base, tmp_path / "alpha", seed=1, **VARIANTS[name])
    gm.write_adapter(base, tmp_path / "beta", seed=2)
    model = build_capability_model(copy.deepcopy(base), {n: str(tmp_path / n) for n in ("alpha", "beta")}).eval()
    ids = gm.tokens()
    with torch.no_grad(), force_route(model, "alpha"):
        torch.testing.assert_close(model(input_ids=ids).logits, reference(input_ids=ids).logits, rtol=1e-5, atol=2e-6)


def test_single_file_equals_the_folder(tmp_path: Path) -> None:
    gm.write_adapter(gm.llama(), tmp_path / "alpha")
    save_adapter_file(tmp_path / "alpha", tmp_path / "files" / "alpha.safetensors")
    folder, single = load_adapter(tmp_path / "alpha"), load_adapter(tmp_path / "files" / "alpha.safetensors")
    assert single.name == folder.name == "alpha"
    assert set(single.factors) == set(folder.factors)
    for module, pair in folder.factors.items():
        other = single.factors[module]
        assert torch.equal(pair.A, other.A) and torch.equal(pair.B, other.B) and pair.scaling == other.scaling
    assert find_adapter(tmp_path, "alpha") == tmp_path / "alpha"
    assert find_adapter(tmp_path / "files", "alpha").suffix == ".safetensors"
    with pytest.raises(InputError, match=r"not found in .*; there is: alpha"):
        find_adapter(tmp_path / "files", "beta")


REFUSED: dict[str, tuple[Any, str]] = {
    "missing_config": (lambda d: (d / "adapter_config.json").unlink(), "adapter_config.json: not found"),
    "missing_weights": (lambda d: (d / "adapter_model.safetensors").unlink(), "not found"),
    "truncated": (
        lambda d: (d / "adapter_model.safetensors").write_bytes((d / "adapter_model.safetensors").read_bytes()[:-9]),
        "not a whole safetensors file",
    ),
    "not_utf8": (lambda d: (d / "adapter_config.json").write_bytes(b"\xff\xfe{"), "not UTF-8"),
    "other_method": (lambda d: edit_config(d, peft_type="LOHA"), "expected peft_type LORA"),
    "dora": (lambda d: edit_config(d, use_dora=True), "use_dora"),
    "bias": (lambda d: edit_config(d, bias="all"), "bias"),
    "lora_bias": (lambda d: edit_config(d, lora_bias=True), "lora_bias"),
    "saved_modules": (lambda d: edit_config(d, modules_to_save=["lm_head"]), "modules_to_save"),
    "replicated_layers": (lambda d: edit_config(d, layer_replication=[[0, 2]]), "layer_replication"),
    "transposed": (lambda d: edit_config(d, fan_in_fan_out=True), "fan_in_fan_out"),
    "unknown_setting": (lambda d: edit_config(d, use_future_trick=1), "use_future_trick"),
    "rank_lie": (lambda d: edit_config(d, r=8), "has rank 4, its configuration says 8"),
    "rank_type": (lambda d: edit_config(d, r="many"), "r: Input should be a valid integer"),
    "extra_tensor": (
        lambda d: edit_tensors(d, lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(2, 2)})),
        "lm_head.weight is not a LoRA factor",
    ),
    "half_a_pair": (
        lambda d: edit_tensors(d, lambda t: t.pop("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight")),
        "layers.0.mlp.up_proj has lora_A only",
    ),
    "not_finite": (
        lambda d: edit_tensors(d, lambda t: t[min(t)].view(-1)[:1].fill_(float("nan"))),
        "NaN or infinity",
    ),
    "empty": (lambda d: save_file({}, d / "adapter_model.safetensors"), "holds no tensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_adapters_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    gm.write_adapter(gm.llama(), tmp_path / "alpha")
    damage, message = REFUSED[name]
    damage(tmp_path / "alpha")
    with pytest.raises(InputError) as caught:
        load_adapter(tmp_path / "alpha")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_pickles_are_refused(tmp_path: Path) -> None:
    gm.write_adapter(gm.llama(), tmp_path / "alpha")
    (tmp_path / "alpha" / "adapter_model.safetensors").rename(tmp_path / "alpha" / "adapter_model.bin")
    with pytest.raises(InputError, match="pickle"):
        load_adapter(tmp_path / "alpha")


def test_single_file_without_configuration_is_refused(tmp_path: Path) -> None:
    gm.write_adapter(gm.llama(), tmp_path / "alpha")
    with pytest.raises(InputError, match="no PEFT configuration in the metadata"):
        load_adapter(tmp_path / "alpha" / "adapter_model.safetensors")


def test_embedding_adapters_are_refused(tmp_path: Path) -> None:
    base = gm.llama()
    gm.write_adapter(base, tmp_path / "alpha", target_modules=["q_proj", "lm_head"])
    with pytest.raises(InputError, match=r"lm_head\S* is (outside the decoder layers|not a LoRA factor)"):
        build_capability_model(base, {"alpha": str(tmp_path / "alpha")})


def per_expert_factors(model: Any, parts: tuple[str, ...], rank: int = 3) -> dict[str, LoraFactors]:
    """An adapter in the form of transformers v4 and vLLM: one pair per expert and projection."""
    torch.manual_seed(5)
    sizes = {"gate_proj": (32, 16), "up_proj": (32, 16), "down_proj": (16, 32)}
    return {
        f"model.layers.{layer}.mlp.experts.{e}.{part}": LoraFactors(
            torch.randn(rank, sizes[part][0]), torch.randn(sizes[part][1], rank), 0.5
        )
        for layer in range(3)
        for e in range(4)
        for part in parts
    }


@pytest.mark.parametrize("parts", [("gate_proj", "up_proj", "down_proj"), ("gate_proj",), ("up_proj", "down_proj")])
def test_per_expert_adapters_equal_merged_weights(parts: tuple[str, ...]) -> None:
    base = gm.qwen3_moe()
    factors = per_expert_factors(base, parts)
    merged = copy.deepcopy(base)
    with torch.no_grad():
        for path, pair in factors.items():
            layer, e, part = int(path.split(".")[2]), int(path.split(".")[5]), path.rsplit(".", 1)[1]
            experts = merged.model.layers[layer].mlp.experts
            delta = pair.scaling * pair.B @ pair.A
            if part == "down_proj":
                experts.down_proj[e] += delta
            else:
                experts.gate_up_proj[e][slice(0, 16) if part == "gate_proj" else slice(16, 32)] += delta
    settings = PeftSettings(peft_type="LORA", r=3, lora_alpha=1.5)
    model = build_capability_model(copy.deepcopy(base), [LoraAdapter("alpha", factors, settings)]).eval()
    ids = gm.tokens()
    with torch.no_grad(), force_route(model, torch.ones_like(ids)):
        torch.testing.assert_close(model(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def test_a_missing_expert_is_an_error() -> None:
    base = gm.qwen3_moe()
    factors = per_expert_factors(base, ("down_proj",))
    del factors["model.layers.1.mlp.experts.2.down_proj"]
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.experts\.2\.down_proj is missing"):
        fuse_expert_factors(factors, base, "alpha")
