"""Exported folders: the round trip through transformers, by our class and by remote code, and their contents."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gate_models as gm
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from moe_gate import build_capability_model, force_route, save_gate, trace_routes
from moe_gate import export as export_module
from moe_gate.export import export, self_contained_module
from moe_gate.exported import load_exported, read_spec
from pipeline.files import InputError

ROOT = Path(__file__).parent.parent
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def saved(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    base = gm.FAMILIES[family]().to(dtype)
    base.save_pretrained(folder / "base")
    settings = EXPERTS if family == "qwen3_moe" else {}
    model = build_capability_model(
        str(folder / "base"), gm.two_adapters(base, folder / "adapters", **settings), **options
    )
    gm.random_gates(model)
    save_gate(model, folder / "gate", str(folder / "base"), {"validation_accuracy": 0.875})
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_round_trip_is_exact(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model = saved(tmp_path, family, dtype)
    export(str(tmp_path / "gate"), tmp_path / "out")
    ids = gm.tokens()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        ours = load_exported(tmp_path / "out")
        remote = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True, dtype="auto").eval()
        for loaded in (ours, remote):
            torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=0, atol=0)
            assert loaded.dtype == dtype
            assert loaded.model.layers[0].capability_route.gater.weight.dtype == torch.float32  # gates are never cast
    assert torch.equal(trace_routes(ours, ids[0].tolist()), trace_routes(model, ids[0].tolist()))
    with force_route(ours, "beta"), torch.no_grad():
        assert not torch.equal(ours(input_ids=ids).logits, expected)


@pytest.mark.parametrize("options", [{"routing_scope": "global", "global_layer": 1}, {"routing_mode": "soft"}])
def test_modes_survive(tmp_path: Path, options: dict[str, Any]) -> None:
    model = saved(tmp_path, **options)
    export(str(tmp_path / "gate"), tmp_path / "out")
    with torch.no_grad():
        again = load_exported(tmp_path / "out")(input_ids=gm.tokens()).logits
        torch.testing.assert_close(again, model(input_ids=gm.tokens()).logits, rtol=0, atol=0)


def test_remote_code_does_without_this_package(tmp_path: Path) -> None:
    """In a process where ``moe_gate`` cannot be imported the folder's own module gives the same logits."""
    model = saved(tmp_path)
    export(str(tmp_path / "gate"), tmp_path / "out")
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[5, 9, 33]])).logits[0, -1, :4]
    script = (
        "import sys; sys.modules['moe_gate'] = None; sys.modules['pipeline'] = None\n"
        "import torch; from transformers import AutoModelForCausalLM\n"
        f"m = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r}, trust_remote_code=True)\n"
        "print(m(input_ids=torch.tensor([[5, 9, 33]])).logits[0, -1, :4].tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout.splitlines()[-1])), expected)


def test_the_folder_holds_everything(tmp_path: Path) -> None:
    saved(tmp_path)
    export(str(tmp_path / "gate"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama" and config["architectures"] == ["TraceRoutedLlamaForCausalLM"]
    spec = read_spec(tmp_path / "out")
    assert spec.table["model.layers.2.mlp.down_proj"] == [(4, 2.0), (6, 1.5)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    for name in set(index.values()):
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            assert {key for key, where in index.items() if where == name} == set(file.keys())
    assert not (tmp_path / "out" / "model.safetensors").exists()  # transformers would read it and no index
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| 1 | alpha | 4 | 8 |" in card and "0.875" in card
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    PeftModel.from_pretrained(
        base, str(tmp_path / "out" / "adapters" / "beta")
    )  # stock multi-adapter serving reads these


def test_reference_export_names_its_base(tmp_path: Path) -> None:
    saved(tmp_path)
    export(str(tmp_path / "gate"), tmp_path / "out", include_base=False)
    assert [p.name for p in (tmp_path / "out").glob("*.safetensors")] == ["model-routing.safetensors"]
    with pytest.raises(InputError, match="does not hold it"):
        load_exported(tmp_path / "out")


def test_an_export_replaces_an_export_and_nothing_else(tmp_path: Path) -> None:
    saved(tmp_path)
    export(str(tmp_path / "gate"), tmp_path / "out")
    export(str(tmp_path / "gate"), tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose")
    with pytest.raises(InputError, match="holds other files"):
        export(str(tmp_path / "gate"), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    with pytest.raises(InputError, match="has no trace_gate"):
        load_exported(tmp_path / "base")


def test_the_command(tmp_path: Path) -> None:
    saved(tmp_path)
    command = [sys.executable, "-m", "moe_gate.export", "--gate", str(tmp_path / "gate"), "--out"]
    done = subprocess.run([*command, str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "MiB of it routing" in done.stdout
    wrong = [
        sys.executable,
        "-m",
        "moe_gate.export",
        "--gate",
        str(tmp_path / "nothing"),
        "--out",
        str(tmp_path / "o2"),
    ]
    done = subprocess.run(wrong, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "o2").exists()


def test_the_module_is_python_and_imports_only_torch_and_transformers() -> None:
    source = self_contained_module("LlamaForCausalLM")
    compile(source, "modeling", "exec")
    imports = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert imports <= {
        "__future__",
        "contextlib",
        "dataclasses",
        "re",
        "collections",
        "typing",
        "torch",
        "transformers",
    }


def test_what_vllm_cannot_serve_is_said_at_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, routing_granularity="trajectory")
    monkeypatch.setattr(sys, "argv", ["export", "--gate", str(tmp_path / "gate"), "--out", str(tmp_path / "out")])
    assert export_module.main() == 0
    assert "notice: vLLM serves token granularity only" in capsys.readouterr().err
