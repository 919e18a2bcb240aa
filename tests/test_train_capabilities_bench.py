"""The benchmark of one capability against several: what it computes, and one small run from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

from pipeline.files import InputError, ServerError

sys.path.insert(0, str(ROOT))

from benchmarks import bench_capabilities, shape_model
from benchmarks.bench_capabilities import measure
from benchmarks.shape_model import write_folder, write_weights
from train.__main__ import main as train_main


def rows(adapter: str, ends: list[float], **more: Any) -> list[dict[str, Any]]:
    means = {"sample_s": 1.0, "update_s": 0.5, "deliver_s": 0.1, "idle_share": 0.2, "trainer_idle_share": 0.4}
    common = {"adapter": adapter, "sampled_tokens": 30.0, "loss": 0.1, **means, **more}
    return [common | {"iteration": k, "elapsed_s": end} for k, end in enumerate(ends, 1)]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_wall_time_starts_after_the_warm_up_and_ends_with_the_last(tmp_path: Path) -> None:
    one = measure(write(tmp_path / "one", rows("a", [10.0, 12.0, 14.0])), 1)
    each = one.pop("rows")
    assert [r["elapsed_s"] for r in each] == [10.0, 12.0, 14.0] and each[0]["update_s"] == 0.5
    assert one == {
        "adapters": 1, "wall_s": 4.0, "iterations": 2, "tokens_per_s": 15.0, "sample_s": 1.0, "update_s": 0.5,
        "deliver_s": 0.1, "idle_share": 0.2, "trainer_idle_share": 0.4,
    }  # fmt: skip
    many = rows("a", [10.0, 13.0, 15.0]) + rows("b", [12.0, 14.0, 17.0], idle_share=0.0)
    many.append({"adapter": "b", "iteration": 3, "warning": "entropy"})
    found = measure(write(tmp_path / "two", many), 1)
    assert found["wall_s"] == 17.0 - 11.0 and found["idle_share"] == 0.1 and found["adapters"] == 2


def test_a_run_without_all_its_updates_is_no_measurement(tmp_path: Path) -> None:
    broken = rows("a", [1.0, 2.0, 3.0]) + rows("b", [1.0, 2.0])
    with pytest.raises(ServerError, match="expected 3 updates of each of 2"):
        measure(write(tmp_path / "m", broken), 1)
    constant = rows("a", [1.0, 2.0, 3.0])
    del constant[2]["loss"]
    with pytest.raises(ServerError, match="expected 3 updates"):
        measure(write(tmp_path / "m", constant), 1)


def test_written_weights_are_those_that_are_loaded(tmp_path: Path) -> None:
    """Server and trainer read the same file: tied head, bf16, repeatable."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    for name in ("a", "b"):
        write_folder(tmp_path / name, "tiny", 600)
        write_weights(tmp_path / name, seed=3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    state = load_file(tmp_path / "a/model.safetensors")
    assert "lm_head.weight" not in state and model.config.tie_word_embeddings
    assert all(torch.equal(model.state_dict()[k], v) and v.dtype == torch.bfloat16 for k, v in state.items())
    other = load_file(tmp_path / "b/model.safetensors")
    assert all(torch.equal(state[k], other[k]) for k in state) and state["model.norm.weight"].shape == (64,)
    (tmp_path / "c").mkdir()
    (tmp_path / "c/mine").write_text("x")
    with pytest.raises(InputError, match="holds other files"):
        write_folder(tmp_path / "c", "tiny", 600)


def test_the_command_measures_two_against_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands run in this process, which spares three starts."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        commands.append(command)
        if command[0] == "nvidia-smi":
            raise FileNotFoundError
        with monkeypatch.context() as patch:
            for name in ("BENCH_TURNS", "BENCH_TOKENS", "BENCH_WORDS", "TRACE_GAME_MODULES"):
                patch.setenv(name, options.get("env", {}).get(name, ""))
            trains = command[1] == "-m"
            patch.setattr(sys, "argv", ["command", *command[3 if trains else 2 :]])
            code = train_main() if trains else shape_model.main()
        return subprocess.CompletedProcess(command, code, "", "")

    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(bench_capabilities.subprocess, "run", run)
    out = tmp_path / "r.json"
    flags = ["--preset", "cpu", "--out", str(out), "--capabilities", "2", "--iterations", "2", "--warmup", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_capabilities.py", *flags])
    assert bench_capabilities.main() == 0
    record = json.loads(out.read_text())
    assert [run["adapters"] for run in record["runs"]] == [1, 2]
    one, two = (run["wall_s"] for run in record["runs"])
    assert record["wall_ratio_2_vs_1"] == pytest.approx(two / one, rel=0.02) and one > 0
    assert record["machine"]["torch"] and record["machine"]["gpu"] is None and record["shape"]["shape"] == "tiny"
    assert "capability_bench_a,capability_bench_b" in commands[-1] and '"wall_ratio_2_vs_1"' in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["bench_capabilities.py", *flags[:-1], "9"])
    with pytest.raises(InputError, match="--warmup < --iterations"):
        bench_capabilities.main()
