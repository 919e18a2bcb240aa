"""Phase 5: the commands it gives to the trainers, its checks, and one real run of phases 2 to 5 in small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import generated_env
import phase2_capability_mining as phase2
import phase3_synthesis as phase3
import phase4_env_validation as phase4
import phase5_training as phase5
import pytest
import swe_phase_helpers as helpers
import yaml
from forked_commands import forked
from run_folder import RunFolder
from run_settings import RunSettings, load_settings
from scripted_answers import SOLVES_EVERY, token_answers
from scripted_server import ScriptedServer
from stage2_helpers import scenario as small
from steps import Step, call
from swe_phase_helpers import Run, ScriptedAnswers, fill_phase1
from tiny_models import tiny_model_folder

from moe_gate.config import load_gate_config
from pipeline.files import InputError
from pipeline.scenarios import load_scenarios, save_scenarios
from train.config import load_config

NAMES = ["deep_call_graph_traversal", "semantic_logic_precision"]


def fill(folder: RunFolder, *names: str, verdict: str = "pass") -> None:
    """Phase 4 as done."""
    for name in names:
        report = {"schema_version": 1, "capability": name, "verdict": verdict}
        place = generated_env.validated(folder)
        if verdict == "pass":
            save_scenarios(generated_env.set_path(place, name), [small(), small(name="second_one")])
            report["scenarios_digest"] = generated_env.full_digest_of(place, name)
        helpers.write(folder.validation(name), report)


def opened(run: Run, *flags: str) -> tuple[Any, RunFolder, RunSettings]:
    where = ["--config", str(run.config), "--run-dir", str(run.folder.root)]
    return phase5.parse_arguments([*where, *flags]), run.folder, load_settings(run.config)


def steps_of(run: Run, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> list[Step]:
    seen: list[Step] = []

    def keep(_folder: Path, steps: list[Step]) -> int:
        seen.extend(steps)
        return 3

    monkeypatch.setattr(phase5, "run_steps", keep)
    assert phase5.run(names, run.folder, load_settings(run.config)) == 3  # a sub-step's exit code is passed on
    return seen


# --------------------------------------------------------------------------- commands


def test_the_sub_steps_and_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, "http://server:8000")
    fill(run.folder, *NAMES)
    steps = steps_of(run, monkeypatch, NAMES)
    assert [s.name for s in steps] == ["1_grpo", *(f"2_rollouts_{n}" for n in NAMES), "3_gate", "4_export"]
    assert [s.command[:2] for s in steps] == [
        ("-m", "train"),
        ("-m", "train.collect_rollouts"),
        ("-m", "train.collect_rollouts"),
        ("-m", "train.train_router_sft"),
        ("-m", "moe_gate.export"),
    ]
    for step in steps:
        assert step.environment["VLLM_BASE_URLS"] == "http://server:8000"
        assert step.environment["TRACE_SCENARIOS"] == str(run.folder.phase4 / "scenarios")
    assert all("--resume" in steps[i].command for i in (0, 3))


def test_torchrun_for_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, "http://s", training={"processes": 4, "master_port": 29502})
    fill(run.folder, NAMES[0])
    command = steps_of(run, monkeypatch, NAMES[:1])[0].command
    assert command[:6] == ("-m", "torch.distributed.run", "--nproc_per_node=4", "--master-port=29502", "-m", "train")


def test_the_trainers_read_the_configurations_that_are_written(tmp_path: Path) -> None:
    run = Run(tmp_path, "http://s", training={"grpo": {"lr": 3e-5}, "gate": {"base_bias": 4.0}})
    fill(run.folder, *NAMES)
    train, gate = phase5.write_configs(NAMES, run.folder, load_settings(run.config))
    trained = load_config({"config": str(train)}, {})
    assert trained.capabilities == tuple(f"capability_{n}" for n in NAMES) and trained.lr == 3e-5
    assert trained.model == helpers.MODEL and Path(trained.adapter_dir) == run.folder.phase5 / "adapters"
    gated = load_gate_config(gate)
    assert gated.adapter_names == NAMES and gated.base_bias == 4.0
    assert Path(gated.output_dir) == run.folder.gate and Path(gated.adapter_dir) == Path(trained.adapter_dir)


def test_the_published_settings(tmp_path: Path) -> None:
    settings = load_settings()
    folder = RunFolder(tmp_path)
    said = phase5.check_configs(NAMES, folder, settings)
    assert said == "40 iterations of 8 x 16, rank 32"
    config = phase5.train_config(NAMES, folder, settings)
    assert config["lr"] == 1e-5 and config["model"] == "Qwen/Qwen3.6-27B" and config["engine"] == "vllm"
    gate = phase5.gate_config(NAMES, folder, settings)
    assert (gate["lr"], gate["base_bias"], gate["load_balance_coef"]) == (5e-4, 5.0, 0.001)


def test_rollouts_for_the_gate_are_labelled_with_their_adapter(tmp_path: Path) -> None:
    run = Run(tmp_path, "http://s")
    fill(run.folder, NAMES[0])
    step = phase5.rollouts_step(NAMES[0], run.folder, load_settings(run.config))
    value = step.command[step.command.index("--adapter") + 1]
    assert value == f"{NAMES[0]}={run.folder.adapter(NAMES[0])}" and "--tokens" in step.command
    assert step.command[step.command.index("--num-seeds") + 1] == "2"


def test_several_servers_may_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BASE_URLS", "http://a:1,http://b:2")
    run = Run(tmp_path, "http://s")
    assert phase5.variables(run.folder, load_settings(run.config))["VLLM_BASE_URLS"] == "http://a:1,http://b:2"


# --------------------------------------------------------------------------- faults


def test_a_misspelt_setting_is_named_before_anything_starts(tmp_path: Path) -> None:
    run = Run(tmp_path, "http://s", training={"grpo": {"group_sise": 8}})
    fill(run.folder, NAMES[0])
    with pytest.raises(InputError, match=r"group_sise.*group_size"):
        phase5.check_configs(NAMES[:1], run.folder, load_settings(run.config))
    assert not run.folder.phase5.exists()


def test_a_wrong_value_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, "http://s", training={"gate": {"lr": -1}})
    with pytest.raises(InputError, match=r"training\.gate: lr"):
        phase5.check_configs(NAMES[:1], run.folder, load_settings(run.config))


def test_only_what_phase_4_passed_is_trained(tmp_path: Path) -> None:
    run = Run(tmp_path, "http://s")
    fill(run.folder, NAMES[0])
    fill(run.folder, NAMES[1], verdict="fail")
    assert phase5.chosen(*opened(run)) == NAMES[:1]
    with pytest.raises(InputError, match="'fail'"):
        phase5.chosen(*opened(run, "--capabilities", NAMES[1]))
    with pytest.raises(InputError, match=r"phase4_env_validation\.py --capabilities another_skill"):
        phase5.chosen(*opened(run, "--capabilities", "another_skill"))


def test_slots_are_in_the_order_that_was_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path, "http://s")
    fill(run.folder, *NAMES)
    assert phase5.chosen(*opened(run, "--capabilities", ",".join(reversed(NAMES)))) == NAMES[::-1]


def test_dry_run_and_missing_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, "http://127.0.0.1:9", training={"processes": 64})
    assert phase5.dry_run(*opened(run)) == 2
    text = capsys.readouterr().out
    lines = {line[6:].split(":")[0]: line[:4].strip() for line in text.splitlines()}
    settings = "settings of training and gate"
    assert lines == {"scenario sets": "FAIL", settings: "OK", "sampling": "FAIL", "GPUs": "FAIL", "disk": "OK"}
    assert "phase4_env_validation.py --run-dir" in text
    assert not run.folder.root.exists()


def test_dry_run_of_a_model_that_trains_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, "http://127.0.0.1:9", training={"engine": "local", "base_model": str(tmp_path)})
    fill(run.folder, NAMES[0])
    assert phase5.dry_run(*opened(run)) == 0, capsys.readouterr().out
    gone = Run(tmp_path, "http://127.0.0.1:9", training={"engine": "local", "base_model": "/no/such/folder"})
    assert phase5.dry_run(*opened(gone)) == 2 and "/no/such/folder" in capsys.readouterr().out


# --------------------------------------------------------------------------- really run

TINY = {
    "engine": "local",
    "grpo": {
        "group_size": 2, "groups_per_batch": 1, "max_iters": 1, "lora_rank": 2, "lora_alpha": 4, "max_new_tokens": 8,
        "max_seq_length": 4096, "dtype": "float32", "device": "cpu", "dynamic_sampling_max_batches": 1,
    },
    "gate_rollouts_per_scenario": 3,
    "gate": {"min_reward": 0.0, "max_length": 1500, "total_steps": 4, "eval_every": 2, "on_policy_rounds": 0,
             "dtype": "float32"},
}  # fmt: skip


def test_phases_2_to_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted model labels, writes and solves; a random model of a few kilobytes is trained, gated and exported.

    The trainers are processes of their own, with the commands and variables of the phases; ``steps.call``, which starts
    them otherwise, and the phases as scripts: test_swe_run_steps.py, test_swe_run_phase2.py, test_swe_run_phase3.py.
    """
    monkeypatch.setattr("steps.call", forked(call))
    model = tiny_model_folder(tmp_path / "model", max_position_embeddings=16_384)
    answers = ScriptedAnswers()
    with ScriptedServer(
        model=helpers.MODEL, completion=token_answers(answers, model), max_model_len=16_384,
        chat=lambda messages, body: answers.chat(messages, body) or "",
    ) as server:  # fmt: skip
        run = Run(tmp_path, server.url, training=TINY | {"base_model": str(model)})
        fill_phase1(run)
        for main in (phase2.main, lambda: phase3.main_for(NAMES[0], ""), phase4.main, phase5.main):
            done = run.here(main)
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        asked = len(server.requests)
        again = run.here(phase4.main)
        assert again.returncode == 0 and len(server.calls("/v1/completions")) > 0 and len(server.requests) == asked

    report = run.read("phase4", f"{NAMES[0]}.json")
    assert report["verdict"] == "pass" and report["scenarios"][0]["pass_rate"] == pytest.approx(1 / SOLVES_EVERY)
    assert {c["name"] for c in report["checks"]} >= {"self_test", "oracle", "no_op", "spray", "injection", "forgery"}
    (kept,) = load_scenarios(generated_env.set_path(generated_env.validated(run.folder), NAMES[0]))
    assert kept.n_rollouts == 3
    selection = {entry["skill"]: entry for entry in run.read("phase2", "selected_capabilities.json")}
    assert selection[NAMES[0]]["status"] == "DONE" and selection[NAMES[1]]["status"] == "PENDING"
    _check_training(run)


def _check_training(run: Run) -> None:
    assert (run.folder.adapter(NAMES[0]) / "adapter_model.safetensors").is_file()
    metrics = run.read("phase5", "metrics.json")
    assert metrics["capabilities"][NAMES[0]]["iterations"] == 1 and 0 <= metrics["gate_accuracy"] <= 1
    exported = run.read("phase5", "exported", "config.json")
    assert exported["architectures"] == ["TraceRoutedLlamaForCausalLM"]
    assert exported["trace_gate"]["slot_names"] == ["base", NAMES[0]]
    again = run.here(phase5.main)  # what a kill between two sub-steps leaves undone: test_swe_run_steps.py
    assert again.returncode == 0 and again.stdout.count("done before") == 4


def test_the_configuration_files_are_yaml_that_a_person_can_read(tmp_path: Path) -> None:
    run = Run(tmp_path, "http://s")
    fill(run.folder, NAMES[0])
    for path in phase5.write_configs(NAMES[:1], run.folder, load_settings(run.config)):
        text = path.read_text()
        assert "!!" not in text and isinstance(yaml.safe_load(text), dict)
