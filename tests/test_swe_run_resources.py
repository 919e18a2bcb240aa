"""The table of memory and time: counts against real models, formulas against figures worked out by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import resources
import swe_phase_helpers as helpers
import torch
import yaml
from phase_settings import PlanSettings, Shape
from resources import BF16, GIB, Estimate, Sizes, shape_of_model
from run_settings import RunSettings, load_settings
from swe_phase_helpers import PHASES
from tiny_models import tiny_model

from pipeline.files import InputError
from train.config import ALL_LINEARS
from train.lora import attach_adapter, lora_config

QWEN3_30B = {"hidden_size": 2048, "num_hidden_layers": 48}


def shape_on_disk(tmp: Path, model: Any) -> Shape:
    model.config.save_pretrained(tmp)
    return shape_of_model(tmp / "config.json")


def published() -> tuple[RunSettings, Shape]:
    settings = load_settings()
    assert settings.shape is not None
    return settings, settings.shape


# --------------------------------------------------------------------------- counts


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_parameters_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    assert Sizes(shape_on_disk(tmp_path, model)).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_lora_parameters_are_those_of_an_attached_adapter(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    expected = Sizes(shape_on_disk(tmp_path, model)).lora_parameters(4)
    adapted = attach_adapter(model, "a", lora_config(4, 4, ALL_LINEARS), seed=0)
    assert expected == sum(p.numel() for n, p in adapted.named_parameters() if "lora_" in n)


def test_the_published_model_has_the_parameters_of_its_architecture() -> None:
    """Built without memory from the configuration's shape, by the model's own code."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    _, shape = published()
    fields = shape.model_dump()
    own = {k: v for k, v in fields.items() if k not in ("full_attention_interval", "attn_output_gate", "qk_norm")}
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(shape.num_hidden_layers)]
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**own, layer_types=kinds))
    assert Sizes(shape).parameters == sum(p.numel() for p in model.parameters())
    assert Sizes(shape).parameters / 1e9 == pytest.approx(27, abs=0.5)  # as its name says


def test_gate_parameters_of_the_published_example() -> None:
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    other = dict.fromkeys(names, 1)
    shape = Shape(**QWEN3_30B, **other)
    assert Sizes(shape).gate_parameters(4) == 491_760


def test_cache_of_a_token_by_hand() -> None:
    _, shape = published()
    assert Sizes(shape).kv_bytes == 2 * 4 * 256 * 2 * 16  # keys and values, heads, size, bf16, 16 of 64 layers
    assert Sizes(shape).state_bytes == 48 * 128 * 128 * 4 * 48  # heads, key size, value size, fp32, layers


def test_a_cache_has_the_size_that_was_computed(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    sizes = Sizes(shape_on_disk(tmp_path, model))
    with torch.no_grad():
        cache = model(torch.ones(1, 7, dtype=torch.long), use_cache=True).past_key_values
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert numbers * BF16 == 7 * sizes.kv_bytes


# --------------------------------------------------------------------------- estimates


def estimate(**plan: Any) -> Estimate:
    settings, shape = published()
    return Estimate(settings.model_copy(update={"plan": PlanSettings(**plan)}), shape)


def test_numbers_come_from_the_runs_own_settings() -> None:
    found = estimate()
    assert (found.serving, found.context, found.rank, found.trainers) == (4, 131_072, 32, 4)
    assert found.episodes == 40 * 8 * 16 * 2


def test_decoding_is_limited_by_bytes() -> None:
    found = estimate(batch=1, memory_tb_per_s=1.0, bandwidth_efficiency=1.0)
    step = (found.weights + found.sizes.state_bytes) / (4 * 1e12)
    assert found.decode(100, 0) == pytest.approx(100 * step)
    assert estimate(batch=2, memory_tb_per_s=1.0, bandwidth_efficiency=1.0).decode(100, 0) < 0.51 * 100 * step + 1e-3


def test_an_update_costs_6_p_t() -> None:
    found = estimate(peak_tflops=1000.0, compute_efficiency=1.0, episode_tokens=1.0)
    flops = 6 * found.sizes.parameters * found.episodes
    assert found.compute(flops, found.trainers) == pytest.approx(flops / 4e15)
    assert found.train() >= flops / 4e15


def test_slow_commands_set_the_pace_of_the_agent() -> None:
    slow = estimate(command_s=1000.0, grade_s=0.0)
    assert slow.run_agent(500) == pytest.approx(500 * slow.plan.steps * 1000 / slow.settings.agent.workers)
    assert estimate(command_s=0.0, grade_s=0.0).run_agent(500) < slow.run_agent(500)


def test_a_sharded_base_needs_less() -> None:
    found = estimate()
    assert found.trainer(1) - found.trainer(4) == pytest.approx(found.weights * 3 / 4)
    assert found.trainer(1) / GIB < found.plan.gpu_memory_gib


def test_the_published_run_fits_the_hardware_that_it_names() -> None:
    found = estimate()
    assert found.weights / found.serving + found.cache() < 0.85 * found.plan.gpu_memory_gib * GIB


# --------------------------------------------------------------------------- command


def test_the_readme_shows_what_the_program_computes() -> None:
    settings, shape = published()
    text = (PHASES / "README.md").read_text(encoding="utf-8")
    block = text.partition("<!-- resources:begin -->\n")[2].partition("\n<!-- resources:end -->")[0]
    assert block == resources.markdown(Estimate(settings, shape))


def test_the_table_is_written_between_the_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- resources:begin -->\nold\n<!-- resources:end -->\nafter\n")
    monkeypatch.setattr("sys.argv", ["resources.py", "--readme", str(readme)])
    assert resources.main() == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| 5 training |" in text and "| 5 training |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "said"),
    [({"hidden_size": 8}, "num_attention_heads|intermediate_size"), ([1], "hidden_size"), ({"hidden_size": -1}, "-1")],
)
def test_a_file_that_is_no_model_configuration(tmp_path: Path, config: Any, said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=said):
        shape_of_model(tmp_path / "config.json")


def test_a_server_flag_without_its_number(tmp_path: Path) -> None:
    data = helpers.settings_of("http://x", server={"args": "--max-model-len --port 8000"})
    settings = load_settings(helpers.write_config(tmp_path / "c.yaml", data))
    with pytest.raises(InputError, match="--max-model-len"):
        resources.server_flag(settings, "--max-model-len", 1)


def test_rows_have_every_phase_and_no_empty_cell() -> None:
    rows = estimate().rows()
    assert [row.phase[0] for row in rows] == list("123456")
    for row in rows:
        assert all(str(value) for value in dataclasses.asdict(row).values()) and row.hours > 0


def test_the_shape_section_has_no_number_that_the_server_flags_contradict() -> None:
    settings, _ = published()
    data = yaml.safe_load((PHASES.parents[1] / "configs" / "swebench_qwen36_vllm.yaml").read_text())
    assert "context" not in data["plan"] and "serving_gpus" not in data["plan"]
    assert resources.server_flag(settings, "--tensor-parallel-size", 0) == 4
