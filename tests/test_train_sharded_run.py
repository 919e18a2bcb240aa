"""``torchrun -m train --shard-base`` through a server: the run of one process, half of the layers on each rank."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scripted_server import STOP
from tiny_models import tiny_model_folder
from tiny_server import TinyServer
from train_runs import Runs

from pipeline.files import InputError
from train.config import load_config
from train.distributed import Ranks
from train.run import _check_sharding
from train.sharding import shard_base

BOTH = "--capabilities capability_printable,capability_digits"
# every kind of pass: old log-probs of hinted rollouts, a reference, several steps, packs that do not divide evenly
FLAGS = (BOTH, "--hint-ratio 0.5 --epochs 2 --kl-coef 0.1 --pack-tokens 160 --save-every 1")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")


class SeededServer(TinyServer):
    """Samples by each request's own seed, so that two runs get the same rollouts."""

    def _sample(self, prompt: list[int], body: dict[str, Any]) -> list[int]:
        generator = torch.Generator().manual_seed((body.get("seed") or 0) % 2**63)  # a canary has none
        ids = list(prompt)
        while len(ids) - len(prompt) < body["max_tokens"] and (ids[-1] != STOP or len(ids) == len(prompt)):
            ids.append(int(torch.multinomial(self._rows(body["model"], ids)[-1].exp(), 1, generator=generator)))
        return ids[len(prompt) :]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny", "qwen3")


@pytest.fixture
def server(model_folder: Path) -> Iterator[TinyServer]:
    with SeededServer(model_folder) as running:
        yield running


@pytest.mark.slow
def test_two_ranks_with_a_sharded_base_make_the_run_of_one_process(
    server: TinyServer, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and adapters to 1e-5, over an interruption, with the canary of every delivery."""
    import train_games  # noqa: F401 - registers the environments

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_BASE_URLS", server.url)
    monkeypatch.delenv("VLLM_MODEL", raising=False)
    torch.set_num_threads(1)
    runs = Runs(model_folder, tmp_path, monkeypatch)
    runs("one", *FLAGS, "--max-iters 3")
    server.adapters.clear()
    for last, more in ((2, ""), (3, "--resume")):
        process = runs.start(
            "two", *FLAGS, f"--max-iters {last} --shard-base {more}", launch=TORCHRUN, VLLM_BASE_URLS=server.url
        )
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err[-3000:]
        held = re.search(r"sharded base: ([\d.]+) of ([\d.]+) MiB on each of 2 ranks", err)
        assert held and float(held[1]) < 0.85 * float(held[2]), "embeddings and head stay whole"
    events = [json.loads(line) for line in (tmp_path / "two/events.jsonl").read_text().splitlines()]
    checked = [e["adapter"] for e in events if e["event"] == "check"]
    assert sorted(checked) == [f"{name}@v{k}" for name in ("digits", "printable") for k in (1, 2, 3)]
    packs = set()
    for name in ("printable", "digits"):
        one, two = (load_file(tmp_path / f"{run}_adapters/{name}.safetensors") for run in ("one", "two"))
        assert max(float((one[k] - two[k]).abs().max()) for k in one) < 1e-5
        assert max(float(t.abs().max()) for k, t in one.items() if "lora_B" in k) > 1e-3, "nothing was trained"
        for here, there in zip(runs.iterations("one", name), runs.iterations("two", name), strict=True):
            packs.add(here["packs"])
            for key in ("reward", "loss", "grad_norm", "entropy", "action_tokens", "mismatch_max_abs"):
                assert here[key] == pytest.approx(there[key], rel=1e-4, abs=1e-5), key
    assert 1.0 in packs and max(packs) > 2, "one step leaves a rank without a pack, another with fewer"


def test_what_cannot_be_sharded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_BASE_URLS", "VLLM_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    flags: dict[str, Any] = {"model": "m", "game": "capability_digits", "shard_base": True}
    config = load_config(flags, {})
    with pytest.raises(InputError, match=r"--shard-base on one process: .* torchrun"):
        _check_sharding(config, Ranks())
    with pytest.raises(InputError, match="sampling in this process needs the whole base; set VLLM_BASE_URLS"):
        _check_sharding(config, Ranks(0, 2))
    monkeypatch.setenv("VLLM_BASE_URLS", "http://a:1")
    _check_sharding(config, Ranks(1, 2))
    local = load_config(flags | {"engine": "local"}, dict(os.environ))
    with pytest.raises(InputError, match="needs the whole base"):
        _check_sharding(local, Ranks(0, 2))


def test_a_model_without_decoder_layers_is_refused() -> None:
    class Encoder(torch.nn.Module):
        config = type("Config", (), {"model_type": "odd"})()

        def get_decoder(self) -> Any:
            return self

    mesh: Any = object()
    with pytest.raises(InputError, match="model type odd has no decoder layers to shard"):
        shard_base(Encoder(), "cpu", mesh)
