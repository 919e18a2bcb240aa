"""The rollout benchmark against the scripted server, and the weightless model folders it uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from scripted_server import ScriptedServer

from pipeline.files import InputError

sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from shape_model import write_folder

    folder = tmp_path_factory.mktemp("shape") / "model"
    write_folder(folder, "qwen3-0.6b", vocabulary=4096)  # the whole one takes 15 s
    return folder


@pytest.mark.slow
def test_benchmark_counts_tokens_and_compares(smollm2: Path, tmp_path: Path) -> None:
    def speak(ids: list[int], body: dict[str, Any]) -> list[int]:
        return [100 + (len(ids) + i) % 50 for i in range(body["max_tokens"])]

    with ScriptedServer(completion=speak, max_model_len=100_000, delay_s=0.02) as server:
        out = tmp_path / "r.json"
        flags = f"--model {smollm2} --served-model scripted --base-url {server.url} --rounds 2 --json-output {out}"
        flags += " --episodes 12 --concurrency 6 --group 3 --turns 3 --tokens 5 --prompt 80"
        command = [sys.executable, str(ROOT / "benchmarks" / "bench_rollouts.py"), *flags.split()]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        data = json.loads(out.read_text())
        assert 0.1 < data["share_of_saturated"] < 3 and data["retries"] == 0
        seconds = sorted(data["seconds_episodes"])
        assert data["tokens_per_s"] == pytest.approx(12 * 3 * 5 / (sum(seconds) / 2), rel=0.02)
        bodies = server.calls("/v1/completions")
    assert len(bodies) == 6 * 3 + 2 * 36 + 2 * 2 * 36, (
        "warm-up, two rounds of episodes, two passes of the bare client each"
    )
    first_turns = [len(b["prompt"]) for b in bodies[:6]]
    assert all(60 <= n <= 140 for n in first_turns)
    salts = [b["cache_salt"] for b in bodies]
    assert len(set(salts)) == 1 + 2 + 2, "no round may find the prefixes of another in the cache"


def test_benchmark_needs_one_server() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_rollouts.py"), "--model", "m"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "either --base-url or --start-server" in done.stderr


def test_random_adapter_covers_every_linear(shape: Path, tmp_path: Path) -> None:
    from bench_rollouts import random_adapter

    from moe_gate.adapters import load_adapter

    size = random_adapter(str(shape), tmp_path / "a", 4)
    adapter = load_adapter(tmp_path / "a")
    assert len(adapter.factors) == 28 * 7 and size == 2 * sum(
        f.A.numel() + f.B.numel() for f in adapter.factors.values()
    )


def test_shape_folder_is_a_usable_model(shape: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from train.chat import ChatCodec

    codec = ChatCodec.from_model(str(shape))
    assert len(codec.tokenizer) == 4096 and codec.stop_token_ids == (4095,)
    assert codec.decode(codec._encode("Grüße, {x}\n")) == "Grüße, {x}\n"
    assert all(codec.tokenizer.decode([i]) for i in range(256, 4096))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape))
    counted = sum(p.numel() for n, p in model.named_parameters() if n != "lm_head.weight")  # tied
    published = counted + (151936 - 4096) * 1024
    assert 0.59e9 < published < 0.60e9


def test_shape_folder_does_not_overwrite(tmp_path: Path) -> None:
    from shape_model import write_folder

    (tmp_path / "x").write_text("mine")
    with pytest.raises(InputError, match="holds other files"):
        write_folder(tmp_path, "qwen3-4b")
    with pytest.raises(InputError, match="expected one of"):
        write_folder(tmp_path / "new", "gpt-5")
    assert not (tmp_path / "new").exists()
