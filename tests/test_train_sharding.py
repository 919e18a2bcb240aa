"""A base sharded over two gloo processes: log-probs and gradients as on one, half of the layers' weights each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sharding_case import CASES, run_case
from tiny_models import tiny_model

from pipeline.files import InputError
from pipeline.ports import free_port
from train.distributed import Ranks
from train.learner import idle_passes
from train.local_engine import load_model
from train.lora import attach_adapter, lora_config
from train.packing import Pack, TokenSequence, build_pack
from train.sharding import is_sharded, skeleton

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def heavy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of 190 MiB in fp32, nearly all of it in its layers; embeddings and head are tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
    config = LlamaConfig(**shape, num_key_value_heads=8, vocab_size=64, tie_word_embeddings=True)
    folder = tmp_path_factory.mktemp("heavy")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, heavy_folder: Path) -> list[dict[str, Any]]:
    """Every case on two ranks, started as torchrun starts them."""
    out = tmp_path_factory.mktemp("sharding") / "results.pt"
    shared = {
        "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "MALLOC_MMAP_THRESHOLD_": "65536",  # freed tensors go back to the system, whatever ran before
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "sharding_case.py"), str(out), str(heavy_folder)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        messages = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], messages
    results: list[dict[str, Any]] = torch.load(out)
    return results


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{f}-{c}" for f, c in CASES])
def test_two_ranks_with_a_sharded_base_equal_one_with_a_whole_one(index: int, two_ranks: list[dict[str, Any]]) -> None:
    family, _ = CASES[index]
    one, two = run_case(family, "none", Ranks(), shard=False), two_ranks[index]
    assert two["whole"] == one["whole"] and two["held"] < 0.85 * one["whole"], "embeddings and head stay whole"
    assert torch.allclose(one["sum"], two["sum"], rtol=1e-6)
    assert set(one["grads"]) == set(two["grads"])
    for name, expected in one["grads"].items():
        assert (two["grads"][name] - expected).norm() <= 1e-5 * expected.norm(), name
    assert set(one["state"]) == set(two["state"])
    for name, expected in one["state"].items():
        assert torch.equal(two["state"][name], expected), name


def test_only_one_rank_reads_the_whole_base(two_ranks: list[dict[str, Any]], heavy_folder: Path) -> None:
    """The other gets its part of each layer, and both have the model of the folder."""
    loaded = two_ranks[-1]
    first, second = loaded["peak_bytes"]
    assert second < 0.8 * loaded["whole"] < first, "half of the layers, one whole layer and what allocators keep"
    assert loaded["tied"] and not loaded["buffers_meta"]
    assert max(loaded["differences"]) == 0.0
    model = attach_adapter(load_model(str(heavy_folder), "float32", "cpu"), "skill", lora_config(4, 8), seed=1)
    with torch.no_grad():
        expected = model(input_ids=torch.arange(2, 9)[None]).logits
    assert torch.allclose(loaded["logits"], expected, atol=1e-5)


def test_a_folder_without_configuration_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be loaded"):
        skeleton(str(tmp_path))


def test_a_whole_base_is_not_sharded() -> None:
    assert not is_sharded(attach_adapter(tiny_model("llama"), "skill", lora_config(4, 8), seed=1))


def test_ranks_with_fewer_packs_fill_up() -> None:
    packs: list[Pack] = [build_pack([TokenSequence([1] * n, [False] * n)], [0]) for n in (9, 4, 3)]
    assert [len(idle_passes(packs, [1, 2], rank)) for rank in range(2)] == [1, 0]
    assert [len(idle_passes(packs, [1, 1, 1, 0], rank)) for rank in range(4)] == [0, 0, 0, 1]
    assert idle_passes(packs, [3], 0) == [] and idle_passes([], [0, 0], 1) == []
    assert idle_passes(packs, [1, 2], 0)[0] is packs[2], "the shortest one costs the least"
