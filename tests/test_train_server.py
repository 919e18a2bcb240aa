"""The training command against servers: a scripted one that runs the tiny model, and a real vLLM."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tiny_server import TinyServer
from train_runs import Runs

from pipeline.files import InputError, ServerError
from train.grpo import Trainer
from train.vllm_pool import PoolTimes

FAST = PoolTimes(request_s=30.0, probe_every_s=0.1, probe_timeout_s=5.0, patience_s=1.0, backoff_s=0.02)
GAME = "--game capability_digits"
ALL_PATHS = ("/v1/completions", "/v1/models", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/health")


@pytest.fixture
def runs(served_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setattr("train.engines.times_from_env", lambda _: FAST)
    return served_runs


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every delivery of the run."""
    seen: list[Any] = []
    original = Trainer.run

    async def run(self: Trainer) -> None:
        try:
            await original(self)
        finally:
            seen.extend(self.delivery.reports)

    monkeypatch.setattr(Trainer, "run", run)
    return seen


# ------------------------------------------------------------------------ delivery


def test_new_weights_reach_the_server_under_new_names(runs: Runs, server: TinyServer, reports: list[Any]) -> None:
    """On-policy through HTTP: each iteration samples the newest version, whose log-probs are the trainer's own."""
    runs("r", GAME, "--max-iters 5 --rollout-log --lr 3e-2")
    metrics = runs.iterations("r", "digits")
    assert len(metrics) == 5 and all(m["mismatch_max_abs"] < 1e-3 for m in metrics)
    assert all(m["deliver_s"] > 0 for m in metrics)
    assert all(m["canary_error_new"] < 0.5 and m["canary_resolved"] in (0.0, 1.0) for m in metrics)
    for iteration in range(1, 6):
        text = (runs.tmp / "r/rollouts" / f"digits_{iteration:06d}.jsonl").read_text()
        used = {json.loads(line)["adapter"] for line in text.splitlines()}
        assert used == {None if iteration == 1 else f"digits@v{iteration - 1}"}
    loads = [body["lora_name"] for body in server.calls("/v1/load_lora_adapter")]
    assert loads == [f"digits@v{k}" for k in range(6)], "the untrained one is a trial before the first turn"
    assert server.adapters == {}, "versions that nobody uses any more are still on the server"
    assert len(list((runs.tmp / "r/adapters").iterdir())) <= 3
    assert [r.name for r in reports] == loads[1:]
    assert all(r.canary.resolved and r.canary.error_new < 1e-3 < r.canary.error_old for r in reports)


def test_old_versions_do_not_pile_up(runs: Runs, server: TinyServer) -> None:
    """Two versions, and for a moment the one that is being unloaded."""
    most = 0

    def completion(prompt: list[int], body: dict[str, Any]) -> list[int]:
        nonlocal most
        most = max(most, len(server.adapters))
        return server._sample(prompt, body)

    server.completion = completion
    runs("r", GAME, "--max-iters 6")
    assert 2 <= most <= 3


def test_two_capabilities_on_one_server(runs: Runs, server: TinyServer) -> None:
    runs("r", "--capabilities capability_printable,capability_digits --max-iters 3")
    for name in ("printable", "digits"):
        metrics = runs.iterations("r", name)
        assert len(metrics) == 3 and all(m["mismatch_max_abs"] < 1e-3 for m in metrics)
    assert {f"{n}@v{k}" for n in ("printable", "digits") for k in (1, 2)} <= set(server.loaded)


def test_a_server_that_never_applies_the_adapter_is_found(runs: Runs, server: TinyServer) -> None:
    """The canary: its log-probs stay those of the old weights. Stopped at the first delivery, with both numbers."""
    server.deaf = True
    with pytest.raises(
        ServerError, match=r"does not run digits@v1: .* new weights by 0\.\d+ and from the old ones by 0\.0"
    ):
        runs("r", GAME, "--max-iters 9 --lr 3e-2")
    assert runs.checkpoints("r", "digits") == ["iter_000001"]
    assert len(runs.iterations("r", "digits")) == 1
    server.deaf = False
    runs("r", GAME, "--max-iters 3 --lr 3e-2 --resume")
    assert [m["iteration"] for m in runs.iterations("r", "digits")] == [1, 2, 3]


def test_a_server_without_run_time_lora_is_refused_with_the_remedy(runs: Runs, server: TinyServer) -> None:
    server.lora_enabled = False
    with pytest.raises(InputError, match="--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
        runs("r", GAME, "--max-iters 2")
    assert not server.calls("/v1/completions"), "it was found before the first turn"
    server.lora_enabled = True
    runs("r", GAME, "--max-iters 1 --resume")
    assert not list((runs.tmp / "r/adapters").glob("*@v0")), "the trial's folder is still there"


def test_no_capability_begins_before_all_are_taken(runs: Runs, server: TinyServer) -> None:
    """One of two adapters is refused late: the other has not sampled, and neither is left on the server."""
    plain = server._load

    async def load(request: Any) -> Any:
        if (await request.json())["lora_name"].startswith("printable"):
            await asyncio.sleep(0.5)
            return web.json_response({"error": {"message": "LoRA rank 32 is greater than max_lora_rank 8"}}, status=400)
        return await plain(request)

    server._load = load  # type: ignore[method-assign]
    server.stop()
    server.start()  # with that route
    with pytest.raises(InputError, match="rank 32 is greater"):
        runs("r", "--capabilities capability_printable,capability_digits --max-iters 2")
    assert not server.calls("/v1/completions") and server.adapters == {}
    assert not list((runs.tmp / "r/adapters").iterdir())


# ------------------------------------------------------------------------ servers that fail


def test_no_server_at_the_start(runs: Runs, server: TinyServer) -> None:
    server.stop()
    with pytest.raises(ServerError, match="no vLLM server answers"):
        runs("r", GAME, "--max-iters 2")
    assert runs.checkpoints("r", "digits") == []


def die_after(server: TinyServer, n: int) -> None:
    """From the n-th completion on every connection breaks."""
    original, count = server.completion, [0]

    def completion(prompt: list[int], body: dict[str, Any]) -> list[int]:
        count[0] += 1
        if count[0] == n:
            server.fail_paths, server.fail = ALL_PATHS, "refuse"
        return original(prompt, body)

    server.completion = completion


def test_a_server_that_dies_midway_stops_the_run_and_resume_goes_on(runs: Runs, server: TinyServer) -> None:
    die_after(server, 12 * 2 + 12)  # after the second iteration
    with pytest.raises(ServerError):
        runs("r", GAME, "--max-iters 6 --save-every 100")
    done = len(runs.iterations("r", "digits"))
    assert 1 <= done <= 4 and runs.checkpoints("r", "digits") == [f"iter_{done:06d}"]
    server.fail = None
    server.completion = server._sample
    server.adapters.clear()  # it was restarted
    runs("r", GAME, "--max-iters 6 --save-every 100 --resume")
    metrics = runs.iterations("r", "digits")
    assert [m["iteration"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(m["mismatch_max_abs"] < 1e-3 for m in metrics)
    names = [b["lora_name"] for b in server.calls("/v1/load_lora_adapter")]
    assert names[-1] == "digits@v6" and sorted(set(names)) == [f"digits@v{k}" for k in range(7)]


def test_a_second_server_takes_the_work_of_a_dead_one(
    runs: Runs, server: TinyServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TinyServer(model_folder) as other:
        monkeypatch.setenv("VLLM_BASE_URLS", f"{server.url},{other.url}")
        die_after(server, 15)
        runs("r", GAME, "--max-iters 4")
        metrics = runs.iterations("r", "digits")
        assert len(metrics) == 4 and all(m["errors"] == 0.0 and m["mismatch_max_abs"] < 1e-3 for m in metrics)
        assert "digits@v3" in other.loaded


def test_nonsense_is_typed(runs: Runs, server: TinyServer) -> None:
    server.fail = "garbage"
    with pytest.raises(ServerError, match="no rollout could be scored"):
        runs("r", GAME, "--max-iters 2")


# ------------------------------------------------------------------------ a real server


REAL = "--group-size 4 --groups-per-batch 3 --lora-rank 8 --lr 1e-3 --dtype bfloat16 --max-seq-length 512"
REAL += " --dynamic-sampling-max-batches 2"


@pytest.mark.server
@pytest.mark.slow
def test_two_iterations_through_a_real_server(
    vllm_server: str, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: list[Any]
) -> None:
    """The published command with VLLM_BASE_URLS: the adapter is delivered, its log-probs follow the trainer's."""
    runs = Runs(smollm2, tmp_path, monkeypatch)
    monkeypatch.setenv("VLLM_BASE_URLS", vllm_server)
    runs("r", "--game capability_structured_data_reasoning", REAL, "--max-iters 2 --rollout-log")
    name = "structured_data_reasoning"
    metrics = runs.iterations("r", name)
    assert [m["iteration"] for m in metrics] == [1, 2]
    assert all(m["mismatch_mean_abs"] < 0.1 and m["mismatch_outside"] < 0.02 for m in metrics if "loss" in m)
    assert [r.name for r in reports] == [f"{name}@v1", f"{name}@v2"][: len(reports)] and reports
    for report in reports:
        assert report.canary is not None and not report.canary.wrong and report.canary.moved > 0
    text = (tmp_path / f"r/rollouts/{name}_000002.jsonl").read_text()
    assert {json.loads(line)["adapter"] for line in text.splitlines()} == {f"{name}@v1"}
