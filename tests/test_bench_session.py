"""The one-GPU session: what it chooses, that servers start together, that a fault costs one step only, and that a later
call goes on. Models, servers and steps are small Python programs here."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT

from pipeline.files import InputError, ServerError

sys.path.insert(0, str(ROOT))

from benchmarks import bench_capabilities, bench_gate, bench_rollouts, gate_engine, session
from benchmarks.bench_grpo_step import summary
from benchmarks.gate_sizes import SIZES, check_prompts
from benchmarks.session_plan import START_MORE_S, Plan, Task, choose, needed, session_plan, total_seconds
from benchmarks.session_report import TARGETS, gate_vllm, publish, table

H200_GIB = 139
KV_BYTES_4B, KV_BYTES_SMALL = 36 * 8 * 128 * 2 * 2, 28 * 8 * 128 * 2 * 2  # of one token


def task(name: str, seconds: int = 10, **more: Any) -> Task:
    return Task(name, seconds, ("true",), **more)


PLAN = Plan(
    {"base": task("base", 30), "gate": task("gate", 50, models=("base",)), "small": task("small", 5)},
    {
        "one": task("one", 100, models=("base",)),
        "two": task("two", 110, models=("gate",)),
        "three": task("three", 60, models=("small",)),
    },
    (),
)


def test_models_are_made_beside_steps_that_need_none() -> None:
    grpo, forward = task("grpo", 140), task("forward", 70, models=("base", "gate"))
    assert total_seconds(PLAN, [grpo], (), ()) == 140
    assert total_seconds(PLAN, [forward], (), ()) == 30 + 50 + 70
    assert total_seconds(PLAN, [grpo, forward], (), ()) == 140 + 70
    assert total_seconds(PLAN, [forward], ("base", "gate"), ()) == 70
    assert needed(PLAN, [forward], ("base",)) == ([], ["gate"])


def test_servers_start_together_and_their_start_is_counted_once() -> None:
    a, b = task("a", 20, services=("one",)), task("b", 30, services=("two",))
    assert total_seconds(PLAN, [a], (), ()) == 30 + 100 + 20
    both = total_seconds(PLAN, [a, b], (), ())
    assert both == 30 + 50 + 110 + START_MORE_S + 20 + 30, "the later start decides"
    check = task("check", 60, idle=True)
    assert total_seconds(PLAN, [a, b, check], (), ()) == both, "no timing: beside the start"
    assert total_seconds(PLAN, [check], (), ()) == 60
    assert total_seconds(PLAN, [a, b], ("base", "gate"), ("one", "two")) == 50
    assert total_seconds(PLAN, [task("grpo", 140), b], (), ()) == 140 + 110 + 30, "its models are made by then"


def test_what_does_not_fit_is_left_out_and_cheaper_steps_still_run() -> None:
    steps = [task("dear", 50, services=("two",)), task("cheap", 20), task("late", 15, services=("three",))]
    chosen, left_out = choose(PLAN, steps, 105)
    assert [s.name for s in chosen] == ["cheap", "late"]
    assert left_out == {"dear": "needs about 240 s with its models and servers, 105 s are left"}
    chosen, left_out = choose(PLAN, steps, 10)
    assert chosen == [] and len(left_out) == 3
    assert "15 s are left" in choose(PLAN, steps[1:], 35)[1]["late"]


@pytest.mark.parametrize("size", ["gpu", "tiny"])
def test_the_plan_is_sound(size: str) -> None:
    plan = session_plan(size, "/tmp/w", "models/smollm2")
    names = [s.name for s in plan.steps]
    assert len(set(names)) == len(names)
    for one in [*plan.steps, *plan.services.values(), *plan.models.values()]:
        assert set(one.models) <= set(plan.models) and set(one.services) <= set(plan.services)
        if one.command[1].startswith("benchmarks/"):
            assert (ROOT / one.command[1]).is_file()
    measured = {s.name.removesuffix("_lora").removesuffix("_routed").removesuffix("_base") for s in plan.steps}
    assert {t.step for t in TARGETS} <= measured
    first = [plan.services[n].gib for n in needed(plan, [s for s in plan.steps if not s.optional], ())[0]]
    assert sum(first) < H200_GIB - 8, "all start together, while the trainer's check runs"
    alone = [plan.services[n].gib for n in needed(plan, [s for s in plan.steps if s.optional], ())[0]]
    assert sum(alone) < H200_GIB


def cache_bytes(service: str) -> int:
    command = session_plan("gpu", "w", "m").services[service].command
    return int(command[command.index("--kv-cache-memory-bytes") + 1])


def test_no_server_runs_out_of_cache() -> None:
    """Requests that wait for cache would be measured as a slow client."""
    size = bench_rollouts.SIZES["gpu"]
    between = 110  # tokens of a tool's answer and the template, byte-level tokenizer
    own = size.turns * size.tokens + (size.turns - 1) * between
    prompts = -(-size.concurrency // size.group) * size.prompt
    assert (size.concurrency * own + prompts) * KV_BYTES_4B < cache_bytes("server_base")
    preset = bench_capabilities.PRESETS["h200"]
    episodes = 4 * preset.groups * preset.group_size
    own = preset.turns * (preset.tokens + 40)
    prompts = 4 * preset.groups * (preset.words * 5 + 100)
    assert (episodes * own + prompts) * KV_BYTES_SMALL < cache_bytes("server_small")


def test_two_commands_of_ten_minutes_hold_everything() -> None:
    """What ``gpu_jobs.md`` promises for 15 minutes of one H200."""
    plan = session_plan("gpu", "/tmp/w", "m")
    asked = {part: session.select(plan, [part], [], ()) for part in ("torch", "serve")}
    torch_s = total_seconds(plan, [s for s in asked["torch"] if not s.optional], (), ())
    serve = [s for s in asked["serve"] if not s.optional]
    serve_s = total_seconds(plan, serve, ("base", "gate"), ())
    assert torch_s + serve_s + 4 * session.RESERVE_S < 900
    assert choose(plan, serve, 560 - session.RESERVE_S)[1] == {}, "on a new machine too"
    assert [s.name for s in asked["torch"]] == ["bench_grpo_step", "gate_hf", "grpo_small"]


@pytest.mark.parametrize("size", ["gpu", "tiny"])
def test_flags_of_the_steps_are_flags_of_their_scripts(size: str) -> None:
    plan, texts = session_plan(size, "/tmp/w", "m"), dict[str, str]()
    for one in [*plan.steps, *plan.models.values()]:
        script = one.command[1]
        texts.setdefault(script, (ROOT / script).read_text())
        for flag in (part for part in one.command[2:] if part.startswith("--")):
            generated = script.endswith("bench_rollouts.py") and f"{flag[2:]}: int" in texts[script]
            assert f'"{flag}"' in texts[script] or generated, f"{one.name}: {flag}"


# ---------------------------------------------------------------------- running it

SERVER = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
ENGINE = """
import os, sys, time, pathlib
go, out = map(pathlib.Path, sys.argv[1:])
go.with_name(go.name + ".ready").write_text('{"pid": %d}' % os.getpid())
while not go.exists(): time.sleep(0.02)
out.write_text('{"tokens_per_s": {"routed": 90.0}}')
"""


def code(text: str, *arguments: str) -> tuple[str, ...]:
    return ("{python}", "-c", text, *arguments)


def result(work: Path, name: str, text: str, begin: str = "") -> tuple[str, ...]:
    """A step that writes ``text`` as its result."""
    return code(f"{begin}\nimport sys; open(sys.argv[1], 'w').write(sys.argv[2])", f"{work}/results/{name}.json", text)


def small_plan(work: Path) -> Plan:
    fire = ("{python}", str(ROOT / "benchmarks/gate_engine.py"), "--fire", "--go", f"{work}/routed.go", "--out")
    ask = "import urllib.request, sys; urllib.request.urlopen(sys.argv[3], timeout=5)"
    return Plan(
        {"base": Task("base", 1, code("pass")), "broken": Task("broken", 1, code("raise SystemExit(3)"))},
        {
            "server": Task("server", 1, code(SERVER, "{port}"), ("base",)),
            "engine_routed": Task("engine_routed", 1, code(ENGINE, f"{work}/routed.go", f"{work}/results/e.json")),
            "dies": Task("dies", 1, code("raise SystemExit(5)")),
            "never": Task("never", 1, code("pass"), ("broken",)),
        },
        [
            Task("bad", 1, code("print('its last words'); raise SystemExit(7)")),
            Task("good", 1, result(work, "good", '{"value": 1}'), out="good.json"),
            Task("bench_rollouts", 1, (*result(work, "r", '{"share_of_saturated": 0.5}', ask), "{url:server}/health"),
                 services=("server",), out="r.json"),
            Task("gate_vllm_routed", 2, (*fire, f"{work}/results/e.json"), services=("engine_routed",), out="e.json"),
            Task("lost", 1, code("pass"), services=("dies",)),
            Task("unmade", 1, code("pass"), services=("never",)),
            Task("check", 1, result(work, "check", "{}"), idle=True, out="check.json"),
            Task("long", 10_000, code("pass")),
        ],
    )  # fmt: skip


def call(work: Path, out: Path, limit_s: float = 60.0, plan: Plan | None = None, **done: Any) -> dict[str, Any]:
    plan = plan or small_plan(work)
    record: dict[str, Any] = {"size": "gpu", "steps": dict(done), "models": {}, "services": {}, "left_out": {}}
    record["machine"] = {}
    running = session.Session(plan, work, out, limit_s, record)
    session.run_all(running, session.select(plan, ["torch", "serve"], [], done))
    running.save()
    assert all(child.poll() is not None for child in running.children), "nothing may be left behind"
    return json.loads((out / "session.json").read_text())


def test_a_fault_costs_one_step_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    found = call(work, out)
    codes = {name: entry["exit"] for name, entry in found["steps"].items()}
    assert codes == {"bad": 7, "good": 0, "bench_rollouts": 0, "gate_vllm_routed": 0, "check": 0}
    assert found["steps"]["good"]["result"] == {"value": 1}
    assert found["steps"]["gate_vllm_routed"]["result"] == {"tokens_per_s": {"routed": 90.0}}
    assert found["steps"]["check"]["beside"] == "server starts"
    assert found["left_out"]["lost"].startswith("dies did not start") and "never" in found["left_out"]["unmade"]
    assert "needs about 10000 s" in found["left_out"]["long"]
    assert found["services"]["dies"]["error"].startswith("exit 5") and found["models"]["broken"]["exit"] == 3
    assert found["results"]["values"] == {"share_of_saturated": 0.5}
    assert found["results"]["missed"] == ["share_of_saturated"]
    said = capfd.readouterr().out
    assert "its last words" in said and "good: exit 0" in said and "long: left out" in said
    with tarfile.open(out / "session_logs.tar.gz") as tar:
        assert {"logs/bad.log", "logs/service_server.log", "logs/model_base.log"} <= set(tar.getnames())


def test_the_next_call_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    plan = small_plan(work)
    some = dataclasses.replace(plan, steps=[s for s in plan.steps if s.name in ("bad", "good")])
    first = call(work, out, plan=some)
    done = session.earlier((work / "session.json", None, tmp_path / "absent.json"), "gpu")
    assert list(done) == ["good"] and first["steps"]["bad"]["exit"] == 7
    with pytest.raises(InputError, match="size gpu, not tiny; give another --work"):
        session.earlier((work / "session.json",), "tiny")
    (work / "results/good.json").unlink()
    mended = [dataclasses.replace(plan.steps[0], command=code("pass")), plan.steps[1]]
    second = call(work, out, plan=dataclasses.replace(plan, steps=mended), **done)
    assert {n: e["exit"] for n, e in second["steps"].items()} == {"good": 0, "bad": 0}
    assert second["steps"]["good"]["result"] == {"value": 1}, "not run again"


def test_a_step_over_its_time_is_ended_and_what_it_wrote_counts(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    hang = result(work, "hang", '{"part": 1}')
    hang = (*hang[:2], hang[2] + "; import time; sys.stdout.flush(); time.sleep(600)", *hang[3:])
    plan = Plan({}, {}, [Task("hang", 1, hang, out="hang.json"), task("after", 1)])
    begin = time.monotonic()
    found = call(work, out, limit_s=session.RESERVE_S + 4, plan=plan)
    assert time.monotonic() - begin < 12
    assert found["steps"]["hang"]["exit"] == 124 and found["steps"]["hang"]["result"] == {"part": 1}
    assert "0 s are left" in found["left_out"]["after"]


def test_unknown_parts_and_steps_are_named() -> None:
    plan = session_plan("tiny", "/tmp/w", "m")
    with pytest.raises(InputError, match="--parts 'vllm': expected torch, serve"):
        session.select(plan, ["vllm"], [], ())
    with pytest.raises(InputError, match="--steps 'gate'"):
        session.select(plan, ["torch"], ["gate"], ())
    assert [s.name for s in session.select(plan, ["torch"], ["gate_hf"], ())] == ["gate_hf"]


def test_the_script_hands_its_settings_on(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    gpus = tmp_path / "nvidia-smi"
    gpus.write_text("#!/bin/sh\necho GPU 0\n")
    gpus.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(fake), "OUT": str(tmp_path / "out"), "LIMIT_S": "300"}
    env |= {"PARTS": "torch", "MODEL": "m", "WORK": str(tmp_path / "work"), "DONE": "d.json", "STEPS": "gate_hf"}
    said = subprocess.run([str(ROOT / "benchmarks/gpu/session.sh")], env=env, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    for words in ("--size gpu", "--limit-s 300", "--parts torch", "--model m", "--continue-from d.json"):
        assert words in said.stdout
    assert f"--work {tmp_path / 'work'}" in said.stdout and "--steps gate_hf" in said.stdout
    gpus.write_text("#!/bin/sh\nexit 9\n")  # a driver without a GPU
    said = subprocess.run([str(ROOT / "benchmarks/gpu/session.sh")], env=env, capture_output=True, text=True)
    assert said.returncode == 2 and said.stderr.startswith("error: no GPU here") and said.stdout == ""


# ---------------------------------------------------------------------- results


def test_the_base_is_a_stock_engine_where_one_ran() -> None:
    steps: dict[str, Any] = {
        "gate_vllm_lora": {"result": {"tokens_per_s": {"one_lora": 80.0, "base_on_lora_engine": 100.0}}},
        "gate_vllm_routed": {"result": {"tokens_per_s": {"routed": 90.0}}},
    }
    found = gate_vllm(steps)
    assert found["routed_over_one_lora_vllm"] == 90 / 80 and found["base_over_routed_vllm"] == 100 / 90
    assert found["base_engine"] == "LoRA enabled, no adapter"
    steps["gate_vllm_base"] = {"result": {"tokens_per_s": {"base": 110.0}}}
    assert gate_vllm(steps)["base_over_routed_vllm"] == 110 / 90 and gate_vllm(steps)["base_engine"] == "stock"
    assert gate_vllm({}) == {}


def test_results_against_targets_and_as_files(tmp_path: Path) -> None:
    grpo = {"speedup_vs_trl": 13.0, "peak_gib": 70.0, "variants": {"tree": {}}}
    steps = {
        "bench_grpo_step": {"exit": 0, "seconds": 1, "result": grpo},
        "grpo_check": {"exit": 0, "seconds": 1, "result": {"variants": {"check": {"x": 1}}}},
        "gate_sft": {"exit": 0, "seconds": 1, "result": {"gate_sft_s": 20.0, "device": "other"}},
        "gate_hf": {"exit": 0, "seconds": 1, "result": {"routed_over_one_lora_hf": 1.1, "device": "H200"}},
        "delivery_8b": {"exit": 1, "seconds": 1},
    }
    found = table(steps)
    assert found["missed"] == ["peak_gib"] and found["values"]["gate_sft_s"] == 20.0
    assert any("delivery_s" in line and "not measured" in line for line in found["text"])
    written = publish({"steps": steps, "machine": {"gpu": ["H200"]}, "size": "gpu"}, tmp_path)
    assert sorted(Path(w).name for w in written) == ["bench_gate.json", "bench_grpo_step.json"]
    gate = json.loads((tmp_path / "bench_gate.json").read_text())
    assert gate["gate_sft_s"] == 20.0 and gate["device"] == "H200"
    assert set(json.loads((tmp_path / "bench_grpo_step.json").read_text())["variants"]) == {"tree", "check"}


def test_the_update_is_compared_with_both_micro_batches_of_trl() -> None:
    results: dict[str, Any] = {
        "tree": {"step_s": 0.5},
        "trl": {"step_s": 6.0, "by_batch": {"1": {"step_s": 7.0}, "4": {"step_s": 6.0}}},
    }
    found = summary(results, "a CPU")
    assert found["speedup_vs_trl"] == 12 and found["speedup_vs_trl_per_episode"] == 14


# ---------------------------------------------------------------------- the engine


def test_an_engine_that_ends_without_a_result_is_told(tmp_path: Path) -> None:
    go = tmp_path / "routed.go"
    with pytest.raises(ServerError, match="no engine waits"):
        gate_engine.fire(go, tmp_path / "out.json")
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    gate_engine.ready_file(go).write_text(json.dumps({"pid": dead.pid}))
    with pytest.raises(ServerError, match="ended without a result"):  # a zombie counts as ended
        gate_engine.fire(go, tmp_path / "out.json")
    dead.wait()


def test_vllm_finds_the_plugin_of_a_project_that_is_not_installed(tmp_path: Path) -> None:
    """On a bare machine the project is on PYTHONPATH only; vLLM's own processes look for entry points there."""
    look = (
        "import sys, os, subprocess; from pathlib import Path; from importlib import metadata\n"
        "metadata.distributions  # the paths are read anew at every call\n"
        "from benchmarks.gate_engine import ensure_plugin\n"
        "sys.path = [p for p in sys.path if not Path(p, 'trace_agents.egg-info').exists() and 'site-packages' not in p]"
        f"\nensure_plugin(Path({str(tmp_path)!r}))\n"
        "say = 'from importlib.metadata import entry_points as e; print([x.value for x in e(group=sys.argv[1])])'\n"
        "subprocess.run([sys.executable, '-S', '-c', 'import sys; ' + say, 'vllm.general_plugins'], check=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['moe_gate.vllm_plugin:register']"
    assert (tmp_path / "trace_agents-0.dist-info/entry_points.txt").is_file()


def test_parts_of_the_gate_benchmark() -> None:
    assert bench_gate.parts_of("prepare,hf,vllm") == ["prepare", "hf", "vllm_base", "vllm_one_lora", "vllm_routed"]
    with pytest.raises(InputError, match="--parts 'x'"):
        bench_gate.parts_of("hf,x")
    gpu = SIZES["gpu"]
    needs = gpu.requests * (gpu.prompt_tokens + gpu.output_tokens) * KV_BYTES_4B
    options = json.loads(session_plan("gpu", "w", "m").services["engine_routed"].command[-5])
    assert needs < options["kv_cache_memory_bytes"], "all requests run at the same time"


class OneShot:
    """An engine that gives every prompt token the log-prob in ``rows``."""

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows = rows

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(vocab_size=1000)

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert params.prompt_logprobs == 0 and params.max_tokens == 1
        answers = []
        for prompt, row in zip(prompts, self.rows, strict=True):
            ids = prompt["prompt_token_ids"]
            known = [{t: SimpleNamespace(logprob=x)} for t, x in zip(ids[1:], row, strict=True)]
            answers.append(SimpleNamespace(prompt_logprobs=[None, *known]))
        return answers


def test_the_routed_engine_is_compared_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """rms over all tokens: its error, and what routing changes, which the error must be small beside."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    n = len(check_prompts(1000)[0]) - 1
    expected = {"base": [[-1.0] * n] * 4, "routed": [[-2.0] * n] * 4}
    found = gate_engine.compared(OneShot([[-2.1] * n] * 4), expected)
    assert found == {"routed_vllm_logprob_error": pytest.approx(0.1), "routing_logprob_effect": pytest.approx(1.0)}
    report = gate_vllm({"gate_vllm_routed": {"result": {"tokens_per_s": {"routed": 5.0}, **found}}})
    assert report["routed_vllm_logprob_error"] == found["routed_vllm_logprob_error"]
