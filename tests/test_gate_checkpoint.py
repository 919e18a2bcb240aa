"""Gates on disk, the configuration file, and the recorder's statistics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gate_models as gm
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_gate import RoutingRecorder, build_capability_model, force_route, load_gate, load_routed, save_gate
from moe_gate.checkpoint import METADATA_KEY, read_gate
from moe_gate.config import load_gate_config
from pipeline.files import InputError


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Path]:
    """A routed model with random gates, saved with its base in ``tmp_path``."""
    base = gm.llama()
    base.save_pretrained(tmp_path / "base")
    adapters = gm.two_adapters(base, tmp_path / "adapters")
    model = build_capability_model(str(tmp_path / "base"), adapters).eval()
    gm.random_gates(model)
    save_gate(model, tmp_path / "gate", str(tmp_path / "base"), {"validation_accuracy": 0.9})
    return model, tmp_path


def test_load_routed_gives_the_same_model(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    again = load_routed(folder / "gate")
    assert not again.training and type(again).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        assert torch.equal(again(input_ids=gm.tokens()).logits, model(input_ids=gm.tokens()).logits)


def test_load_routed_from_the_configuration(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    config = folder / "gate.yaml"
    config.write_text(
        f"output_dir: {folder}/gate\nbase_model: {folder}/base\nadapter_dir: {folder}/adapters\n"
        "adapter_names: [alpha]\n"
    )
    with torch.no_grad():
        assert torch.equal(load_routed(config)(input_ids=gm.tokens()).logits, model(input_ids=gm.tokens()).logits)


def test_metadata_tells_everything(saved: tuple[Any, Path]) -> None:
    _, folder = saved
    with safe_open(folder / "gate" / "gate.safetensors", framework="pt") as file:
        metadata = json.loads(file.metadata()[METADATA_KEY])
        assert all(file.get_tensor(key).dtype == torch.float32 for key in file.keys())  # noqa: SIM118
    assert metadata["slot_names"] == ["base", "alpha", "beta"]
    assert [record["r"] for record in metadata["adapters"]] == [4, 6]
    assert all(len(record["sha256"]) == 64 for record in metadata["adapters"])
    assert metadata["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    assert metadata["dtype"] == "float32" and metadata["training"] == {"validation_accuracy": 0.9}


def test_moved_adapters_and_a_given_base(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    (folder / "adapters").rename(folder / "moved")
    with pytest.raises(InputError, match="not found"):
        load_routed(folder / "gate")
    again = load_routed(folder / "gate", base=gm.llama(), adapter_dir=folder / "moved")
    with torch.no_grad():
        assert torch.equal(again(input_ids=gm.tokens()).logits, model(input_ids=gm.tokens()).logits)


def test_other_weights_under_the_adapters_name_are_refused(saved: tuple[Any, Path]) -> None:
    _, folder = saved
    gm.write_adapter(gm.llama(), folder / "adapters" / "alpha", seed=7)
    with pytest.raises(InputError, match="not the weights that gate"):
        load_routed(folder / "gate")


def rewrite(path: Path, change: Any = None, metadata: dict[str, Any] | None = None) -> None:
    with safe_open(path, framework="pt") as file:
        stored = json.loads(file.metadata()[METADATA_KEY])
    tensors = load_file(path)
    if change:
        change(tensors)
    save_file(tensors, path, metadata={METADATA_KEY: json.dumps(stored | (metadata or {}))})


NAME = "model.layers.1.capability_route.gater.weight"
BROKEN: dict[str, tuple[Any, str]] = {
    "missing": (lambda p: p.unlink(), "not found; train one"),
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-5]), "not a whole safetensors file"),
    "no_metadata": (lambda p: save_file(load_file(p), p), "no trace_gate metadata"),
    "unknown_key": (lambda p: rewrite(p, metadata={"temperature": 1}), "temperature"),
    "nan": (lambda p: rewrite(p, lambda t: t[NAME].fill_(math.nan)), "NaN or infinity"),
    "lost_tensor": (lambda p: rewrite(p, lambda t: t.pop(NAME)), f"{NAME} is on one side only"),
    "shape": (lambda p: rewrite(p, lambda t: t.update({NAME: torch.zeros(3, 31)})), "expected (3, 32)"),
    "slots": (
        lambda p: rewrite(p, metadata={"slot_names": ["base", "beta", "alpha"]}),
        "build it with the same adapters",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_gates_are_refused(saved: tuple[Any, Path], name: str) -> None:
    model, folder = saved
    damage, message = BROKEN[name]
    damage(folder / "gate" / "gate.safetensors")
    with pytest.raises(InputError) as caught:
        load_gate(model, folder / "gate")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_saving_is_atomic(saved: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = saved
    before = (folder / "gate" / "gate.safetensors").read_bytes()

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_gate.checkpoint.save_file", dies)
    with pytest.raises(KeyboardInterrupt):
        save_gate(model, folder / "gate", "base")
    assert (folder / "gate" / "gate.safetensors").read_bytes() == before
    assert len(list((folder / "gate").iterdir())) == 1


GOOD = "output_dir: o\nbase_model: b\nadapter_dir: a\nadapter_names: [x]\n"
BAD_CONFIGS = {
    "": "is empty",
    "- 1\n": "expected keys with values, found list",
    "a: [1": "not valid YAML",
    GOOD + "routing_scop: global\n": "unknown key routing_scop; did you mean routing_scope?",
    GOOD + "routing_mode: top2\n": "routing_mode",
    GOOD + "lr: .nan\n": "lr",
    GOOD + "vllm: {gpu: 1}\n": "vllm.gpu",
    GOOD.replace("[x]", "[x, x]"): "distinct",
    GOOD.replace("[x]", "[base]"): "none may be 'base'",
    GOOD.replace("base_model: b\n", ""): "base_model: Field required",
}


@pytest.mark.parametrize("text", BAD_CONFIGS, ids=[str(i) for i in range(len(BAD_CONFIGS))])
def test_bad_configurations(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_gate_config(path)
    assert BAD_CONFIGS[text] in str(caught.value) and "\n" not in str(caught.value)


def test_shipped_configuration_is_valid() -> None:
    config = load_gate_config(Path(__file__).parent.parent / "configs" / "moe_gate.yaml")
    assert config.base_bias == 5.0 and config.load_balance_coef == 0.001 and config.lr == 5e-4


def test_statistics_by_hand(saved: tuple[Any, Path]) -> None:
    model, _ = saved
    ids = gm.tokens(2, 4)
    route = torch.tensor([[0, 1, 1, 2], [2, 2, 2, 2]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    with RoutingRecorder(model) as recorder, force_route(model, route), torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    found = recorder.statistics()
    assert found.tokens == 6
    assert found.share_of_slot == pytest.approx({"base": 1 / 6, "alpha": 2 / 6, "beta": 3 / 6})
    assert found.entropy_bits == pytest.approx(math.log2(6) / 6 + math.log2(3) / 3 + 0.5)
    assert found.switches_per_100_tokens == pytest.approx(100 * 2 / 4)  # 0-1 and 1-2, of four neighbouring pairs
    assert found.layers == [0, 1, 2] and found.layer_shares[1] == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_switches_are_counted_across_decode_steps(saved: tuple[Any, Path]) -> None:
    model, _ = saved
    ids = gm.tokens(1, 5)
    with RoutingRecorder(model) as recorder:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
    with RoutingRecorder(model) as whole, torch.no_grad():
        model(input_ids=out[:, :-1])
    live, again = recorder.statistics(), whole.statistics()
    assert live.switches_per_100_tokens == pytest.approx(again.switches_per_100_tokens) and live.tokens == 12
    assert live.share_of_slot == pytest.approx(again.share_of_slot)


def test_empty_recorder(saved: tuple[Any, Path]) -> None:
    with pytest.raises(ValueError, match="nothing was recorded"):
        RoutingRecorder(saved[0]).statistics()
    with pytest.raises(TypeError, match="not a routed model"):
        RoutingRecorder(gm.llama())
    assert read_gate(saved[1] / "gate")[0].schema_version == 1
