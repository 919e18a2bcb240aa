"""What ``session.py`` runs: models, servers and steps with the seconds each is expected to take, and what fits.

Seconds are expectations on one H200; ``benchmarks/gpu_jobs.md`` says where each comes from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

START_MORE_S = 12  # what each further server that starts at the same time adds to the start of all
ROOM_GIB = 4  # activations, CUDA graphs and context of a server


@dataclasses.dataclass(frozen=True)
class Task:
    """A command with the name of its log.

    Args:
        seconds: expected; for a service until it answers. models: made before. services: running meanwhile.
        gib: GPU memory of a service.
        idle: runs while services start: no timing, or one that other work can only lengthen. out: its result,
            ``WORK/results/<out>``. optional: when everything else has had its turn, on servers of its own.
    """

    name: str
    seconds: int
    command: tuple[str, ...]
    models: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    gib: int = 0
    idle: bool = False
    out: str = ""
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tasks of a session; ``steps`` in order of value."""

    models: Mapping[str, Task]
    services: Mapping[str, Task]
    steps: Sequence[Task]


def needed(plan: Plan, chosen: Iterable[Task], made: Collection[str]) -> tuple[list[str], list[str]]:
    """Names of the services that ``chosen`` need, and of the models that are not made yet, in the plan's order."""
    services = {name for step in chosen for name in step.services}
    wanted = [name for task in [*chosen, *(plan.services[s] for s in services)] for name in task.models]
    models: set[str] = set()
    while wanted:
        name = wanted.pop()
        models.add(name)
        wanted += plan.models[name].models
    return [n for n in plan.services if n in services], [n for n in plan.models if n in models - set(made)]


def chain_seconds(plan: Plan, names: Iterable[str], made: Collection[str]) -> int:
    """Until all models of ``names`` are made; those that do not build on each other are made side by side."""
    return max(
        (plan.models[n].seconds + chain_seconds(plan, plan.models[n].models, made) for n in names if n not in made),
        default=0,
    )


def total_seconds(plan: Plan, chosen: Sequence[Task], made: Collection[str], running: Collection[str]) -> int:
    """Expected seconds of ``chosen``: the timed steps without servers, beside which the models are made; one common
    start of the servers, beside which steps run that are no timings; the timed steps with servers."""
    alone = [step for step in chosen if not step.services and not step.idle]
    free = sum(step.seconds for step in alone if not step.models)
    begin = max([free, *(chain_seconds(plan, step.models, made) for step in alone)])
    begin += sum(step.seconds for step in alone if step.models)
    starting = [plan.services[n] for n in needed(plan, chosen, made)[0] if n not in running]
    start = max((max(0, chain_seconds(plan, s.models, made) - begin) + s.seconds for s in starting), default=0)
    start += START_MORE_S * max(0, len(starting) - 1)
    beside = sum(step.seconds for step in chosen if step.idle)
    return begin + max(start, beside) + sum(step.seconds for step in chosen if step.services)


def choose(
    plan: Plan, steps: Iterable[Task], remaining_s: float, made: Collection[str] = (), running: Collection[str] = ()
) -> tuple[list[Task], dict[str, str]]:
    """Those of ``steps`` that fit into ``remaining_s``, by value, and for every other one why it is left out."""
    chosen: list[Task] = []
    left_out: dict[str, str] = {}
    for step in steps:
        before = total_seconds(plan, chosen, made, running)
        after = total_seconds(plan, [*chosen, step], made, running)
        if after <= remaining_s:
            chosen.append(step)
        else:
            left = max(0, round(remaining_s - before))
            left_out[step.name] = f"needs about {after - before} s with its models and servers, {left} s are left"
    return chosen, left_out


def session_plan(size: str, work: str, model: str) -> Plan:
    """Everything that one GPU must show. ``size``: gpu or tiny. ``model``: a small real model's folder."""
    tiny = size == "tiny"
    python, here = "{python}", "benchmarks/"
    base, small, large, gate = f"{work}/base", f"{work}/small", f"{work}/large", f"{work}/gate"
    vocabulary = ("--vocabulary", "1024") if tiny else ()
    options = '{"enforce_eager": true}' if tiny else (
        '{"attention_backend": "FLASH_ATTN", "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 11811160064}'
    )  # fmt: skip
    gate_set: tuple[str, ...] = ("--work", gate, "--model", base, "--size", size, "--rank", "8" if tiny else "32")
    gate_set += ("--vllm-options", options)

    def shape(name: str, folder: str, seconds: int, *more: str) -> Task:
        kind = "tiny" if tiny else name
        command = (python, here + "shape_model.py", "--shape", kind, "--out", folder, *vocabulary, *more)
        return Task(folder.rsplit("/", 1)[1], 6 if tiny else seconds, command)

    models = {
        "large": shape("qwen3-8b", large, 10),
        "small": shape("qwen3-0.6b", small, 15, "--weights"),
        "base": shape("qwen3-4b", base, 35, "--weights"),
        "gate": Task("gate", 15 if tiny else 50, (python, here + "bench_gate.py", "--parts", "prepare", *gate_set,
                                                  "--out", f"{work}/results/gate_prepare.json"), ("base",)),
    }  # fmt: skip

    def server(name: str, folder: str, weights_gib: int, kv_gib: int, limits: str, dummy: bool = False) -> Task:
        flags = ["--enable-lora", "--enable-prefix-caching", "--dtype", "bfloat16", *limits.split()]
        flags += ["--load-format", "dummy"] if dummy else []
        if tiny:
            flags += ["--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "16", "--max-lora-rank", "8"]
            flags += ["--max-num-batched-tokens", "16384"]
        else:
            flags += ["--attention-backend", "FLASH_ATTN", "--gpu-memory-utilization", "0.05", "--max-lora-rank", "32"]
            flags += ["--kv-cache-memory-bytes", str(kv_gib << 30), "--max-model-len", "4096", "--max-num-seqs", "256"]
        command = (python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "{port}")
        gib = weights_gib + kv_gib + ROOM_GIB
        return Task(
            name, 60 if tiny else 110, (*command, "--model", folder, *flags), (folder.rsplit("/", 1)[1],), (), gib
        )

    def engine(kind: str) -> Task:
        served = f"{gate}/routed" if kind == "routed" else base
        command: tuple[str, ...] = (python, here + "gate_engine.py", "--kind", kind, "--model", served)
        command += ("--adapter", f"{gate}/a0", "--rank", "8" if tiny else "32", "--size", size)
        command += (
            "--vllm-options",
            options,
            "--go",
            f"{work}/{kind}.go",
            "--out",
            f"{work}/results/engine_{kind}.json",
        )
        return Task(f"engine_{kind}", 60 if tiny else 110, command, ("base", "gate"), gib=8 + 11 + ROOM_GIB)

    services = {
        "server_large": server("server_large", large, 16, 2, "--max-loras 2", dummy=True),
        "server_small": server("server_small", small, 2, 12, "--max-loras 8"),
        "server_base": server("server_base", base, 8, 32, "--max-loras 2"),
        **{f"engine_{kind}": engine(kind) for kind in ("lora", "routed", "base")},
    }
    return Plan(models, services, steps(size, work, model, gate_set))


def steps(size: str, work: str, model: str, gate_set: tuple[str, ...]) -> list[Task]:
    """The measurements, in order of value."""
    tiny = size == "tiny"
    python, here, results = "{python}", "benchmarks/", f"{work}/results/"
    kind = "cpu" if tiny else "gpu"
    grpo = (python, here + "bench_grpo_step.py", "--preset", "cpu" if tiny else "h200", "--brief")
    talk = "--rounds 1 --episodes 8 --concurrency 4 --group 4 --turns 2 --tokens 4 --prompt 48"
    delivery = "--rounds 1 --turns 2 --tokens 8 --delivery --delivery-repeats 5 "
    few = "--episodes 4 --concurrency 4 --group 4 --prompt 96 --rank 8"
    delivery += few if tiny else "--episodes 64 --concurrency 64 --rank 32"
    preset, iterations = ("cpu-server", "3") if tiny else ("h200", "6")

    def step(name: str, seconds: int, *command: str, **more: Any) -> Task:
        out = results + name + ".json"
        flag = "--json-output" if command[1].endswith("bench_rollouts.py") else "--out"
        return Task(name, min(seconds, 60) if tiny else seconds, (*command, flag, out), out=name + ".json", **more)

    def fire(kind: str, seconds: int, optional: bool = False) -> Task:
        command: tuple[str, ...] = (python, here + "gate_engine.py", "--fire", "--go", f"{work}/{kind}.go")
        command += ("--out", f"{results}engine_{kind}.json")
        name = f"gate_vllm_{kind}"
        return Task(name, seconds, command, services=(f"engine_{kind}",), out=f"engine_{kind}.json", optional=optional)

    rollouts = (python, here + "bench_rollouts.py", "--size", kind)
    capabilities = (python, here + "bench_capabilities.py", "--preset", preset, "--iterations", iterations, "--warmup",
                    "1" if tiny else "2", "--base-url", "{url:server_small}", "--model", f"{work}/small")  # fmt: skip
    return [
        step("bench_grpo_step", 190, *grpo, "--variants", "tree,trl"),
        step("delivery_8b", 20, *rollouts, *delivery.split(), "--base-url", "{url:server_large}", "--model",
             f"{work}/large", services=("server_large",)),
        step("bench_rollouts", 100, *rollouts, *(talk if tiny else "--rounds 1 --episodes 512").split(),
             "--base-url", "{url:server_base}", "--model", f"{work}/base", services=("server_base",)),
        fire("lora", 20),
        fire("routed", 15),
        step("bench_capabilities", 125, *capabilities, services=("server_small",)),
        step("gate_hf", 60, python, here + "bench_gate.py", "--parts", "hf", *gate_set, models=("base", "gate")),
        step("gate_sft", 30, python, here + "bench_gate.py", "--parts", "sft", "--model", model, "--size", kind,
             "--work", f"{work}/gate_sft", "--rank", "8" if tiny else "32",
             "--sft-prompts", "40" if tiny else "400", idle=True),
        step("grpo_small", 60, *grpo, "--variants", "small"),
        step("grpo_check", 60, *grpo, "--variants", "check", idle=True),
        fire("base", 30, optional=True),
    ]  # fmt: skip
