"""A base sharded over two gloo processes: log-probs and gradients as on one, half of the layers' weights each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from train.lora import attach_adapter, lora_config
from train.packing import Pack, TokenSequence, build_pack
from train.sharding import idle_passes, is_sharded

SCRIPT = """
import sys
import torch
from train.distributed import join_ranks
from train.forward import action_logprobs, make_packs
from train.lora import adapter_parameters, adapter_state, attach_adapter, lora_config
from train.packing import TokenSequence
from train.sharding import is_sharded, shard_base
from tiny_models import tiny_model

torch.set_num_threads(1)
family, shard, checkpoint, out = sys.argv[1], sys.argv[2] == "shard", sys.argv[3], sys.argv[4]
ranks, _ = join_ranks("cpu")
model = attach_adapter(tiny_model(family), "skill", lora_config(4, 8), seed=1)
generator = torch.Generator().manual_seed(2)
for parameter in adapter_parameters(model, "skill").values():
    parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
whole = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "lora_" not in n)
held = whole
if shard:
    held = shard_base(model, "cpu")
    assert is_sharded(model)
episodes = [
    TokenSequence([5, 6, 7, 8, 9, g, 20 + k, 30 + k], [False] * 6 + [True] * 2) for g in range(2) for k in range(3)
]
packs = make_packs(model, episodes, 12)
assert len(packs) == 2
mine = packs[ranks.rank :: ranks.world]
total = 0.0
for _ in range(2):  # twice: the second pass gathers again
    for pack in mine:
        logprobs, _ = action_logprobs(model, pack, 1.0, checkpoint=checkpoint)
        total += float(logprobs.detach().double().sum())
        (logprobs * torch.arange(1, len(logprobs) + 1)).sum().backward()
grads = {n: p.grad.clone() for n, p in adapter_parameters(model, "skill").items()}
for grad in grads.values():
    ranks.sum(grad)
sums = ranks.sum(torch.tensor([total], dtype=torch.float64))
if ranks.driver:
    torch.save({"grads": grads, "sum": sums, "held": held, "whole": whole, "state": adapter_state(model, "skill")}, out)
ranks.close()
"""


def run(family: str, n_ranks: int, shard: bool, checkpoint: str, folder: Path) -> dict[str, object]:
    script, out = folder / "script.py", folder / f"{n_ranks}.pt"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n_ranks}", "--standalone"]
    command = [*(launcher if n_ranks > 1 else [sys.executable]), str(script), family, "shard" if shard else "whole"]
    here = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": f"{here.parent}{os.pathsep}{here}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, checkpoint, str(out)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(out)


@pytest.mark.parametrize(("family", "checkpoint"), [("qwen3", "none"), ("qwen3_moe", "all")])
def test_two_ranks_with_a_sharded_base_equal_one_with_a_whole_one(family: str, checkpoint: str, tmp_path: Path) -> None:
    one, two = run(family, 1, False, "none", tmp_path), run(family, 2, True, checkpoint, tmp_path)
    assert two["whole"] == one["whole"] and two["held"] < 0.85 * one["whole"]  # type: ignore[operator]
    assert torch.allclose(one["sum"], two["sum"], rtol=1e-6)  # type: ignore[arg-type]
    assert set(one["grads"]) == set(two["grads"])  # type: ignore[call-overload]
    for name, expected in one["grads"].items():  # type: ignore[attr-defined]
        assert (two["grads"][name] - expected).norm() <= 1e-5 * expected.norm(), name  # type: ignore[index]
    for name, expected in one["state"].items():  # type: ignore[attr-defined]
        assert torch.equal(two["state"][name], expected), name  # type: ignore[index]


def test_a_whole_base_is_not_sharded() -> None:
    assert not is_sharded(attach_adapter(tiny_model("llama"), "skill", lora_config(4, 8), seed=1))


def test_ranks_with_fewer_packs_fill_up() -> None:
    packs: list[Pack] = [build_pack([TokenSequence([1] * n, [False] * n)], [0]) for n in (9, 4, 3)]
    assert [len(idle_passes(packs, [1, 2], rank)) for rank in range(2)] == [1, 0]
    assert [len(idle_passes(packs, [1, 1, 1, 0], rank)) for rank in range(4)] == [0, 0, 0, 1]
    assert idle_passes(packs, [3], 0) == [] and idle_passes([], [0, 0], 1) == []
    assert idle_passes(packs, [1, 2], 0)[0] is packs[2], "the shortest one costs the least"
