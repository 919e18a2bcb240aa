"""Phase 5: one LoRA per capability with GRPO, then the gate over them, then one folder that vLLM serves.

    python swebench/qwen3.6_self_trace/phase5_training.py                     # every set that phase 4 passed
    python swebench/qwen3.6_self_trace/phase5_training.py --capabilities A,B

Sub-steps, each skipped when it is done and resumed when it was killed: ``python -m train`` (torchrun when ``processes``
> 1) for all capabilities at once; rollouts by each adapter, labelled with it; ``python -m train.train_router_sft``;
``python -m moe_gate.export``. Writes ``phase5/adapters/<capability>/``, ``phase5/gate/``, ``phase5/exported/``,
``phase5/metrics.json``. The exit code of a sub-step that fails is passed on.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import generated_env
import yaml
from checks import (
    attached,
    capabilities_arguments,
    export_key,
    names_of,
    read_object,
    require_disk,
    require_file,
    require_model,
)
from phase4_env_validation import require_local
from resources import Estimate
from run_folder import DryRun, RunFolder, open_phase
from run_settings import RunSettings
from steps import Step, run_steps

from game_registry import GameError
from pipeline.files import InputError, finite, read_jsonl, run_cli, write_json, write_text
from pipeline.remote_game import SandboxedEnvironment
from pipeline.validate_environment import content_hash

PHASE4 = "phase4_env_validation.py"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return capabilities_arguments(__doc__, "every set that phase 4 passed", arguments)


def chosen(args: argparse.Namespace, folder: RunFolder, settings: RunSettings) -> list[str]:
    """The capabilities to train, in slot order.

    Raises:
        InputError: phase 4 has not passed them.
    """
    passed = [*generated_env.sets_in(generated_env.validated(folder)), *environments(folder)]
    names = names_of(args.capabilities) or passed
    if not names:
        raise InputError(f"{folder.phase4}: phase 4 has passed no scenario set; run {folder.command(PHASE4)}")
    for name in names:
        command = folder.command(f"{PHASE4} --capabilities {name}")
        verdict = read_object(require_file(folder.validation(name), "phase 4's report", command), "report")
        if verdict.get("verdict") != "pass" or name not in passed:
            raise InputError(f"{name}: phase 4's verdict is {verdict.get('verdict')!r}; improve the set first")
    return names


def environments(folder: RunFolder) -> list[str]:
    """Capabilities whose ``phase4/<capability>.json`` is a report of ``pipeline/validate_environment.py`` that passed:
    an environment of one's own, which ``capability_*_game.py`` or ``TRACE_GAME_MODULES`` registers.

    Raises:
        InputError: the file's name and the environment's disagree.
    """
    found = []
    for path in sorted(folder.phase4.glob("*.json")):
        report = read_object(path, "phase 4's report")
        if report.get("verdict") != "pass" or "environment" not in report:
            continue
        if report["environment"] != generated_env.game_of(path.stem):
            name = str(report["environment"]).removeprefix("capability_")
            raise InputError(f"{path}: reports on {report['environment']}; name the file {name}.json")
        found.append(path.stem)
    return [name for name in found if name not in generated_env.sets_in(generated_env.validated(folder))]


def require_validated(names: list[str], folder: RunFolder) -> None:
    """That what will be trained on is what phase 4's verdict is about: the scenario set, the environment's source.

    Raises:
        InputError: it was changed since, or the environment cannot be loaded.
    """
    own = environments(folder)
    for name in names:
        path = folder.validation(name)
        report = read_object(path, "phase 4's report")
        if name in own:
            known, now = report.get("content_hash"), source_hash(generated_env.game_of(name))
            again = f"python pipeline/validate_environment.py {generated_env.game_of(name)} --json-output {path}"
        else:
            place = generated_env.validated(folder)
            known, now = report.get("scenarios_digest"), generated_env.full_digest_of(place, name)
            again = folder.command(f"{PHASE4} --capabilities {name}")
        if known != now:
            raise InputError(f"{path}: its verdict is about another version of {name}; run {again}")


def source_hash(game: str) -> str:
    """Of the source of a registered environment, as ``validate_environment`` makes it.

    Raises:
        InputError: there is no such environment, or it does not load.
    """
    try:
        with SandboxedEnvironment(game, packages=True) as loaded:
            return content_hash(loaded.files())
    except GameError as error:
        raise InputError(
            f"{game}: cannot be loaded ({error}); put its file into the project or TRACE_GAME_MODULES"
        ) from None


def base_model(settings: RunSettings) -> str:
    return settings.training.base_model or settings.model.name


# --------------------------------------------------------------------------- configurations of the stages


def train_config(names: list[str], folder: RunFolder, settings: RunSettings) -> dict[str, Any]:
    """``phase5/train.yaml``: the run's settings of GRPO, and what the run decides."""
    engine = {"engine": settings.training.engine}
    return settings.training.grpo | engine | {
        "model": base_model(settings), "capabilities": [generated_env.game_of(n) for n in names],
        "output_dir": str(folder.phase5 / "grpo"), "adapter_dir": str(folder.phase5 / "adapters"),
    }  # fmt: skip


def gate_config(names: list[str], folder: RunFolder, settings: RunSettings) -> dict[str, Any]:
    """``phase5/moe_gate.yaml``: the run's settings of the gate, and what the run decides."""
    return settings.training.gate | {
        "run_name": settings.run_name, "output_dir": str(folder.gate), "base_model": base_model(settings),
        "adapter_dir": str(folder.phase5 / "adapters"), "adapter_names": names,
        "grpo_data_glob": str(folder.phase5 / "rollouts" / "*.json"),
    }  # fmt: skip


def write_configs(names: list[str], folder: RunFolder, settings: RunSettings) -> tuple[Path, Path]:
    """Both configurations as files; unchanged files are left as they are."""
    out = (folder.phase5 / "train.yaml", folder.phase5 / "moe_gate.yaml")
    for path, data in zip(
        out, (train_config(names, folder, settings), gate_config(names, folder, settings)), strict=True
    ):
        write_text(path, yaml.safe_dump(data, sort_keys=False))
    return out


def check_configs(names: list[str], folder: RunFolder, settings: RunSettings) -> str:
    """Both configurations by the programs that will read them, before anything is started.

    Raises:
        InputError: an unknown key, a wrong value.
    """
    from moe_gate.config import GateConfig
    from pipeline.files import check
    from train.config import TrainConfig, load_config

    train = train_config(names, folder, settings)
    for key in train:
        if key not in TrainConfig.model_fields:
            load_config({key: None}, {})  # names the nearest known key
    parsed = check(TrainConfig, train, "training.grpo")
    check(GateConfig, gate_config(names, folder, settings), "training.gate")
    return f"{parsed.max_iters} iterations of {parsed.groups_per_batch} x {parsed.group_size}, rank {parsed.lora_rank}"


# --------------------------------------------------------------------------- steps


def variables(folder: RunFolder, settings: RunSettings) -> dict[str, str]:
    """For every sub-step: the games, and the server."""
    sets = generated_env.validated(folder)
    found = generated_env.environment(sets) if generated_env.sets_in(sets) else {}
    if settings.training.engine == "vllm":
        found |= {"VLLM_BASE_URLS": server_urls(settings), "VLLM_MODEL": settings.model.name}
        found |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    return found


def server_urls(settings: RunSettings) -> str:
    """Several servers may sample: VLLM_BASE_URLS, else the run's own."""
    return os.environ.get("VLLM_BASE_URLS") or settings.model.base_url


def grpo_step(names: list[str], config: Path, folder: RunFolder, settings: RunSettings) -> Step:
    t = settings.training
    train = ["-m", "train", "--config", str(config), "--resume"]
    if t.processes > 1:
        ranks = [f"--nproc_per_node={t.processes}", f"--master-port={t.master_port}"]
        train = ["-m", "torch.distributed.run", *ranks, *train]
    own = environments(folder)
    place = generated_env.validated(folder)
    sets = [folder.validation(n) if n in own else generated_env.set_path(place, n) for n in names]
    adapters = tuple(folder.adapter(name) / "adapter_model.safetensors" for name in names)
    return Step("1_grpo", tuple(train), (config, *sets), adapters, variables(folder, settings))


def rollouts_step(name: str, folder: RunFolder, settings: RunSettings) -> Step:
    """Episodes of an adapter on its own environment; the successful ones teach the gate."""
    t, v = settings.training, settings.validation
    new, longest = t.grpo.get("max_new_tokens", v.max_new_tokens), t.grpo.get("max_seq_length", v.max_seq_length)
    output = folder.phase5 / "rollouts" / f"{name}.json"
    own = name in environments(folder)
    n = t.gate_tasks if own else len(generated_env.read_set(generated_env.validated(folder), name))
    flags = ["-m", "train.collect_rollouts", "--env", generated_env.game_of(name), "--model", base_model(settings)]
    flags += ["--adapter", f"{name}={folder.adapter(name)}", "--tokens", "--engine", t.engine]
    flags += ["--num-seeds", str(n), "--num-samples", str(t.gate_rollouts_per_scenario), "--temperature", "1.0"]
    flags += ["--concurrency", str(v.concurrency), "--max-new-tokens", str(new)]
    flags += ["--max-seq-length", str(longest), "--seed", str(v.seed + 1), "-o", str(output)]
    read = (folder.adapter(name) / "adapter_model.safetensors",)
    return Step(f"2_rollouts_{name}", tuple(flags), read, (output,), variables(folder, settings))


def gate_steps(names: list[str], config: Path, folder: RunFolder, settings: RunSettings) -> list[Step]:
    rollouts = tuple(folder.phase5 / "rollouts" / f"{name}.json" for name in names)
    gate, out = folder.gate / "gate.safetensors", folder.exported
    sft = ("-m", "train.train_router_sft", "--config", str(config), "--resume")
    export = ("-m", "moe_gate.export", "--gate", str(folder.gate), "--out", str(out))
    environment = variables(folder, settings)
    return [
        Step("3_gate", sft, (config, *rollouts), (gate,), environment),
        Step("4_export", export, (gate,), (out / "config.json",), environment),
    ]


def run(names: list[str], folder: RunFolder, settings: RunSettings) -> int:
    """All sub-steps; the exit code of the first that fails."""
    export_key(settings)
    train, gate = write_configs(names, folder, settings)
    steps = [grpo_step(names, train, folder, settings)]
    steps += [rollouts_step(name, folder, settings) for name in names]
    code = run_steps(folder.phase5, [*steps, *gate_steps(names, gate, folder, settings)])
    if code:
        return code
    found = metrics(names, folder)
    write_json(folder.phase5 / "metrics.json", found)
    for name, values in found["capabilities"].items():
        sys.stdout.write(f"{name}: reward {values['first_reward']} -> {values['last_reward']}\n")
    sys.stdout.write(f"gate accuracy {found['gate_accuracy']:.3f}; checkpoint for phase 6: {folder.exported}\n")
    return 0


def metrics(names: list[str], folder: RunFolder) -> dict[str, Any]:
    """What training did, from the stages' own records: reward of the first and the last iteration, gate accuracy."""
    log = folder.phase5 / "grpo" / "metrics.jsonl"
    records = [m for m in read_jsonl(log, "metrics", torn_tail_ok=True) if isinstance(m, dict) and "reward" in m]
    capabilities = {}
    for name in names:
        own = [m for m in records if m.get("adapter") == name]
        capabilities[name] = {
            "iterations": len(own),
            "first_reward": own[0]["reward"] if own else None,
            "last_reward": own[-1]["reward"] if own else None,
        }
    path = folder.gate / "report.json"
    accuracy = finite(read_object(path, "gate report").get("validation_accuracy"), f"gate report {path} accuracy")
    return {"schema_version": 1, "capabilities": capabilities, "gate_accuracy": accuracy}


# --------------------------------------------------------------------------- dry run


def dry_run(args: argparse.Namespace, folder: RunFolder, settings: RunSettings) -> int:
    checks = DryRun(args.planned)
    names: list[str] = []
    with checks.checking("scenario sets", there=any(folder.phase4.glob("*.json"))) as found:
        names = chosen(args, folder, settings)
        require_validated(names, folder)
        found.append(", ".join(names))
    with checks.checking("settings of training and gate") as found:
        found.append(check_configs(names or ["a_capability"], folder, settings))
    with checks.checking("sampling", there=attached() or settings.training.engine == "local") as found:
        if settings.training.engine == "local":
            found.append(f"{require_local(settings)} in this process")
        else:
            found += [require_model(settings, url.strip()) for url in server_urls(settings).split(",")]
    with checks.checking("GPUs") as found:
        found.append(require_gpus(settings))
    with checks.checking("disk") as found:
        found.append(require_disk(folder.phase5, wanted_gib(settings)))
    return checks.exit_code


def require_gpus(settings: RunSettings) -> str:
    """Enough of them for the trainer's processes.

    Raises:
        InputError: fewer.
    """
    import torch

    n, wanted = torch.cuda.device_count(), settings.training.processes
    if n == 0 and wanted == 1:
        return "none: this trains on the CPU, which is for models of a few hundred million parameters"
    if n < wanted:
        raise InputError(f"training.processes is {wanted}, found {n} GPUs; set CUDA_VISIBLE_DEVICES or processes")
    return f"{wanted} of {n}"


def wanted_gib(settings: RunSettings) -> float:
    """Checkpoints, adapters and the exported base, from the model's sizes where the configuration has them."""
    if settings.shape is None:
        return 1.0
    return Estimate(settings, settings.shape).training_gib()


def main() -> int:
    args = parse_arguments()
    settings, folder = open_phase(args)
    if args.dry_run:
        return dry_run(args, folder, settings)
    names = chosen(args, folder, settings)
    require_validated(names, folder)
    check_configs(names, folder, settings)
    with folder.locked():
        return run(names, folder, settings)


if __name__ == "__main__":
    run_cli(main)
