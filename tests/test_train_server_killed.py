"""One real server, killed under two commands at once: what they keep, what they say, and how they go on.

It is the only server of the tests that reports log-probs at the sampling temperature, so that is checked on it first.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, start_vllm, stop_group, wait_for_health
from train_runs import Runs, error_line

from train.chat import ChatCodec
from train.engine import Sample, SamplingParams
from train.local_engine import load_model
from train.vllm_engine import VllmEngine

pytestmark = [pytest.mark.server, pytest.mark.slow]

TRAIN = (
    "--game capability_structured_data_reasoning --group-size 4 --groups-per-batch 3 --lora-rank 8 --lr 1e-3 "
    "--dtype bfloat16 --max-seq-length 512 --dynamic-sampling-max-batches 2 --save-every 1"
)
COLLECT = "-m train.collect_rollouts --env capability_tiny --num-seeds 10 --num-samples 4 --max-new-tokens 20"


def collect_command(model: Path, url: str, out: Path) -> list[str]:
    where = ["--model", str(model), "--base-url", f"{url}/v1", "-o", str(out), "--concurrency", "8"]
    return [sys.executable, *COLLECT.split(), *where]


def check_processed_logprobs(url: str, smollm2: Path) -> None:
    """Log-probs at temperature 0.7 are those of the distribution that was sampled from, and a sequence is scored at
    temperature 1, beside turns."""
    codec = ChatCodec.from_model(str(smollm2))
    prompt = codec.prompt_ids([{"role": "user", "content": "Who wrote Hamlet?"}])

    async def ask() -> tuple[Sample, list[float]]:
        engine = VllmEngine(url, str(smollm2), codec.stop_token_ids)
        try:
            sample = await engine.sample(prompt, SamplingParams(24, 0.7, seed=1))
            turns = [asyncio.create_task(engine.sample(prompt, SamplingParams(60))) for _ in range(4)]
            await asyncio.sleep(0.5)
            scores = await engine.score(engine.pool.servers[0], prompt, range(1, len(prompt)))
            await asyncio.gather(*turns)
            return sample, scores
        finally:
            await engine.close()

    sample, scores = asyncio.run(ask())
    with torch.inference_mode():
        logits = load_model(str(smollm2), "bfloat16")(torch.tensor([[*prompt, *sample.token_ids]])).logits
    scaled = torch.log_softmax(logits[0, len(prompt) - 1 : -1].float() / 0.7, dim=-1)
    given = torch.tensor(sample.logprobs)
    assert (scaled.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0] - given).abs().mean() < 0.1
    assert sample.finish_reason in ("stop", "length")
    plain = torch.log_softmax(logits[0, : len(prompt) - 1].float(), dim=-1)
    plain = plain.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert plain.min() < -8.0 and plain.max() > -0.02, "tokens that are surely sampled, and some that never are"
    assert (plain - torch.tensor(scores)).abs().mean() < 0.1


def test_a_server_that_is_killed_under_training_and_collecting(
    vllm_server: str, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both end with exit 2 and one line and keep their work; the same commands go on with another server."""
    runs, name = Runs(smollm2, tmp_path, monkeypatch), "structured_data_reasoning"
    out = tmp_path / "rollouts.json"
    partial = out.with_name(out.name + ".partial.jsonl")
    env = {**os.environ, "TRACE_GAME_MODULES": "tiny_game", "PYTHONPATH": str(ROOT / "tests"), "VLLM_MODEL": ""}
    doomed, url = start_vllm(smollm2, tmp_path / "server.log", "--logprobs-mode", "processed_logprobs")
    try:
        wait_for_health(doomed, url, tmp_path / "server.log")
        check_processed_logprobs(url, smollm2)
        training = runs.start("r", TRAIN, "--max-iters 99", VLLM_BASE_URLS=url, VLLM_TIMEOUT_S="30")
        while training.poll() is None and not runs.checkpoints("r", name):
            time.sleep(0.2)
        command = collect_command(smollm2, url, out)
        collecting = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
        while collecting.poll() is None and (not partial.exists() or partial.read_text().count("\n") < 8):
            time.sleep(0.05)
    finally:
        stop_group(doomed, grace_s=0)
    _, errors = collecting.communicate(timeout=240)
    assert collecting.returncode == 2, errors
    assert "error: no server answers" in errors.splitlines()[-1]
    assert partial.exists() and not out.exists(), f"the server ended before it was killed: {errors}"
    assert partial.read_text().count("\n") - 1 >= 7
    _, errors = training.communicate(timeout=240)
    assert training.returncode == 2 and error_line(errors), errors[-2000:]
    done = len(runs.checkpoints("r", name))
    assert done

    subprocess.run(collect_command(smollm2, vllm_server, out), cwd=ROOT, env=env, check=True, timeout=240)
    entries = json.loads(out.read_text())["simulations"]
    assert len({(e["task_id"], e["sample_idx"]) for e in entries}) == len(entries) == 40
    monkeypatch.setenv("VLLM_BASE_URLS", vllm_server)
    last = runs.iterations("r", name)[-1]["iteration"]
    runs("r", TRAIN, f"--max-iters {last + 1}", "--resume")
    assert [m["iteration"] for m in runs.iterations("r", name)] == list(range(1, last + 2))
