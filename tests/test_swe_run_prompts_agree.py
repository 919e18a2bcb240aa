"""``prompts/swebench/`` and the reference run say the same paths, names and numbers. Both are read here."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
from decimal import Decimal
from pathlib import Path
from typing import Any

import generated_env
import phase2_capability_mining as phase2
import phase3_synthesis as phase3
import pytest
import yaml
from run_folder import RunFolder
from run_settings import ROOT, load_settings, server_flag
from swe_phase_helpers import PHASES

from pipeline import environment_status
from pipeline.scenarios import MIN_GUARDS, MIN_TESTS, Scenario
from render_pipeline import CapabilityConfig, EnvironmentConfig, load_config

PROMPTS = ROOT / "prompts" / "swebench"
SETTINGS = load_settings()
FOLDER = RunFolder(ROOT / SETTINGS.output_root / SETTINGS.run_name)
CAPABILITY = load_config(PROMPTS / "capability_selection.yaml", "capability")
ENVIRONMENT = load_config(PROMPTS / "environment_generation.yaml", "environment")
MINING = (PROMPTS / "capability_selection.md").read_text(encoding="utf-8")
SYNTHESIS = (PROMPTS / "environment_generation.md").read_text(encoding="utf-8")
README = (PHASES / "README.md").read_text(encoding="utf-8")
Flags = dict[str, list[str]]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def flags_of(words: list[str]) -> Flags:
    """``--flag a b`` -> {"--flag": [a, b]}, with paths relative to the project."""
    found: Flags = {}
    key = ""
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-?[0-9.]+", word):
            key, found[word] = word, []
        elif key:
            found[key].append(word.removeprefix(f"{ROOT}/"))
    return found


def commands(text: str, program: str) -> list[Flags]:
    """Flags of every call of ``program`` in the code blocks of a prompt."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if program in words:
                found.append(flags_of(words[words.index(program) + 1 :]))
    assert found, f"the prompt does not call {program}"
    return found


def arguments() -> argparse.Namespace:
    return phase2.parse_arguments([])


# --------------------------------------------------------------------------- configurations


def test_model_and_name() -> None:
    for config in (CAPABILITY, ENVIRONMENT):
        assert (config.model, config.run_name) == (SETTINGS.model.name, SETTINGS.run_name)
        assert config.benchmark == "swebench"


def test_numbers_of_the_selection() -> None:
    assert isinstance(CAPABILITY, CapabilityConfig)
    m = SETTINGS.mining
    assert (CAPABILITY.n_runs, CAPABILITY.n_candidates, CAPABILITY.k_consistency) == (m.n_runs, m.n_candidates, m.k)
    assert (CAPABILITY.rho, CAPABILITY.delta) == (Decimal(m.rho), Decimal(m.delta))
    assert (m.n_runs, m.k, m.rho, m.delta) == (10, 8, "0.10", "0.20")  # the published ones
    assert CAPABILITY.split == SETTINGS.mine_score  # an agent mines the part that the run does not score


def test_paths() -> None:
    assert isinstance(CAPABILITY, CapabilityConfig) and isinstance(ENVIRONMENT, EnvironmentConfig)
    assert CAPABILITY.eval_results == relative(FOLDER.phase1 / "trajectories")
    assert CAPABILITY.eval_labels == relative(FOLDER.phase1 / "report.json")
    assert CAPABILITY.output_dir == relative(FOLDER.phase2)
    assert ENVIRONMENT.capabilities_file == relative(FOLDER.selected)
    assert ENVIRONMENT.output_dir == relative(FOLDER.phase3)
    assert ENVIRONMENT.eval_results == relative(FOLDER.phase2 / "summaries.json")  # the mine part only


def test_the_server() -> None:
    assert isinstance(ENVIRONMENT, EnvironmentConfig)
    wanted = flags_of(shlex.split(SETTINGS.server.args))
    given = flags_of(shlex.split(str(ENVIRONMENT.vllm.serve_args)))
    assert given and all(wanted[flag] == values for flag, values in given.items())
    assert SETTINGS.model.base_url.endswith(f":{ENVIRONMENT.port}")
    assert len(str(ENVIRONMENT.gpu_device).split(",")) == server_flag(SETTINGS, "--tensor-parallel-size", 1)


def test_the_settings_of_sampling() -> None:
    assert isinstance(ENVIRONMENT, EnvironmentConfig)
    assert float(ENVIRONMENT.temperature) == SETTINGS.synthesis.temperature == SETTINGS.validation.temperature
    assert ENVIRONMENT.group_size == SETTINGS.training.grpo["group_size"]
    assert float(ENVIRONMENT.reward_threshold) == 1.0  # what phases 3 and 4 call a pass


# --------------------------------------------------------------------------- commands of the rendered prompts


def test_summaries_are_made_by_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the lengths of texts, and the predictions, which the prompt's agent does not need."""
    monkeypatch.setattr(phase2, "require_file", lambda path, *_: path)
    step = phase2.summarize_step(arguments(), FOLDER, SETTINGS)
    ours = flags_of(list(step.command[1:]))
    (theirs,) = commands(MINING, "pipeline/_summarize.py")
    assert set(theirs["--input"]) < set(ours["--input"])
    for flag in ("--output", "--blind-output", "--split", "--part"):
        assert theirs[flag] == ours[flag], flag


def test_the_selection_is_made_by_the_same_commands() -> None:
    select, report = phase2.select_steps(arguments(), FOLDER, SETTINGS)
    assert commands(MINING, "pipeline/aggregate_capabilities.py") == [flags_of(list(select.command[1:]))]
    assert commands(MINING, "pipeline/report.py") == [flags_of(list(report.command[1:]))]


def test_label_runs_have_the_same_places() -> None:
    step = phase2.label_step(arguments(), FOLDER, SETTINGS)
    ours = flags_of(list(step.command[1:]))
    runs = commands(MINING, "pipeline/label_capabilities.py")[-1]
    assert (runs["--n-runs"], runs["--output-dir"], runs["--input"]) == (
        ours["--n-runs"],
        ours["--output-dir"],
        ours["--input"],
    )
    assert {relative(p) for p in step.outputs} == {f"{runs['--output-dir'][0]}/run_{n:02}.json" for n in range(1, 11)}


def test_scenarios_are_made_by_the_same_command() -> None:
    args = phase3.parse_arguments("any_skill_here", "", [])
    output = FOLDER.scenarios("SKILL")
    ours = flags_of(phase3.command(args, SETTINGS, FOLDER.selected, output, SETTINGS.synthesis.accept)[1:])
    written, given = commands(SYNTHESIS, "pipeline.synthesize_scenarios")
    for flag in ("--base-url", "--model", "--temperature", "-o"):
        assert written[flag] == given[flag] == ours[flag], flag
    assert written["--capabilities-file"] == [relative(FOLDER.selected)]


def test_numbers_in_the_text_of_the_prompt() -> None:
    text, s = " ".join(SYNTHESIS.split()), SETTINGS.synthesis
    assert f"solved {s.rollouts} times" in text
    assert f"at most {s.mutations} rounds" in text
    assert f"{s.max_tries} tries did not give {s.accept} scenarios" in text
    assert f"a set of at least {s.accept} scenarios" in text
    assert f"at least {MIN_TESTS} pytest tests" in text and f"At least {MIN_GUARDS} tests other than" in text
    assert environment_status.MAX_SCENARIO_RATE == s.max_pass_rate == SETTINGS.validation.max_pass_rate


def test_defaults_of_the_synthesis_are_the_runs_numbers() -> None:
    """The prompt's command leaves them out, so they must be the defaults of the program."""
    from pipeline.synthesize_scenarios import _parser

    defaults = {a.dest: a.default for a in _parser()._actions}
    s = SETTINGS.synthesis
    for name in ("accept", "max_tries", "rollouts", "max_pass_rate", "revisions", "mutations"):
        assert defaults[name] == getattr(s, name), name


def test_numbers_in_the_text_of_the_selection_prompt() -> None:
    text, m = " ".join(MINING.split()), SETTINGS.mining
    assert f"Label, {m.n_runs} times independently" in text
    assert f"in at least {m.k} of {m.n_runs} runs" in text
    assert f"a share of at least {m.rho} of all failed" in text and f"higher by at least {m.delta} on failed" in text
    assert f"at most {m.n_candidates} capabilities" in text


def test_the_game_of_a_set_is_registered_the_same_way() -> None:
    variables = generated_env.environment(FOLDER.phase3)
    modules, folder = variables["TRACE_GAME_MODULES"], relative(FOLDER.phase3)
    assert f"`TRACE_GAME_MODULES={modules} TRACE_SCENARIOS={folder}`" in SYNTHESIS
    assert generated_env.game_of("SKILL") in SYNTHESIS


def test_keys_of_a_scenario_are_those_that_the_program_reads() -> None:
    rules = (PROMPTS / "partials" / "scenario_rules.md").read_text(encoding="utf-8")
    table = [line for line in rules.splitlines() if line.startswith("| `")]
    named = {name for line in table for name in re.findall(r"`([a-z_]+)`", line.split("|")[1])}
    assert named == set(Scenario.model_fields) - {"pass_rate", "n_rollouts", "sampling"}


def test_shipped_scenarios_that_are_named_exist() -> None:
    for name in re.findall(r"`(pipeline/swebench/[a-z_/.]+json)`", SYNTHESIS):
        assert (ROOT / name).is_file(), name


# --------------------------------------------------------------------------- the README


def test_the_readme_names_every_script_and_only_scripts_that_exist() -> None:
    scripts = {p.name for p in PHASES.glob("phase[1-6]_*.py")} - {"phase3_synthesis.py"}
    named = set(re.findall(r"\bphase\d_\w+\.py\b", README))
    assert {n for n in named if "<" not in n} - {"phase3_synthesis.py"} == scripts
    for name in re.findall(r"`?(?:swebench/qwen3\.6_self_trace|configs|examples)/[\w./]+\.(?:py|sh|yaml)", README):
        assert (ROOT / name.strip("`")).is_file(), name


def test_the_script_of_the_whole_run_calls_every_phase_in_order(tmp_path: Path) -> None:
    """With programs that only write down how they were called, beside a server that is there."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\necho "$CUDA_VISIBLE_DEVICES $*" >> {tmp_path}/calls\n')
    python.chmod(0o755)
    env = os.environ | {"PYTHON": str(python), "SERVE": "0,1", "TRAIN": "2,3", "RUN": str(tmp_path / "run")}
    env |= {"VLLM_BASE_URL": "http://there"}
    done = subprocess.run(["bash", str(PHASES / "run_all.sh")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [re.findall(r"(phase[1-6])_\w+\.py", c)[-1] for c in calls] == [f"phase{n}" for n in (1, 2, 3, 4, 5, 6)]
    for call in calls:
        assert call.startswith("2,3 ") and f"--run-dir {tmp_path}/run" in call and "--config" not in call
    assert calls[2].endswith("--all-selected"), "phase 2 chooses the names"
    assert calls[-1].endswith("--serve") and "--checkpoint" not in calls[-1], "phase 5's export of this run"
    python.write_text("#!/bin/bash\nexit 7\n")
    assert subprocess.run(["bash", str(PHASES / "run_all.sh")], env=env).returncode == 7


@pytest.mark.parametrize(
    "said",
    [
        f"{SETTINGS.mining.n_runs} blind labellings",
        f"Cov >= {SETTINGS.mining.rho} and Delta >= {SETTINGS.mining.delta}",
        f"in {SETTINGS.mining.k} of {SETTINGS.mining.n_runs} |",
        f"{SETTINGS.synthesis.accept} calibrated ones, at most {SETTINGS.synthesis.max_tries} tries",
        f"solves each {SETTINGS.synthesis.rollouts} times",
        f"{SETTINGS.validation.rollouts} fresh rollouts per scenario",
        f"0 < pass rate <= {SETTINGS.validation.max_pass_rate}",
        f'mine_score: "{SETTINGS.mine_score}"',
        f"tensor parallel {server_flag(SETTINGS, '--tensor-parallel-size', 0)}",
        f"context {server_flag(SETTINGS, '--max-model-len', 0)}",
        f"{SETTINGS.agent.step_limit} steps",
        f"temperature {SETTINGS.sampling.temperature}, top_p {SETTINGS.sampling.top_p}",
        f"top_k {SETTINGS.sampling.top_k}",
        f"{SETTINGS.sampling.max_tokens:,} tokens a reply",
        f"runs/{SETTINGS.run_name}/phase5/exported",
    ],
)
def test_numbers_of_the_readme_are_the_configurations(said: str) -> None:
    assert said in " ".join(README.split())


def test_the_published_configuration_has_the_published_numbers() -> None:
    data: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "swebench_qwen36_vllm.yaml").read_text(encoding="utf-8"))
    assert data["sampling"] == {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "max_tokens": 24_576}
    assert data["agent"]["step_limit"] == 150 and data["model"]["name"] == "Qwen/Qwen3.6-27B"
    for said in ("--tensor-parallel-size 4", "--tool-call-parser qwen3_xml", "--max-lora-rank 32"):
        assert said in data["server"]["args"]
