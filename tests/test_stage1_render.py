"""The renderer: exact numbers, unknown keys, missing values, drift of the reviewed prompts, commands that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from stage1_helpers import ROOT, Done, run_main

import render_pipeline
from pipeline import _summarize, aggregate_capabilities, label_capabilities
from pipeline.files import InputError
from pipeline.templates import PROMPTS, render
from render_pipeline import CapabilityConfig, context_of, load_config

MINIMAL = "model: some/model\neval_results: results.json\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def rendered(tmp_path: Path, text: str, stage: str = "capability") -> Done:
    return run_main(render_pipeline.main, write(tmp_path, text), "--stage", stage, "--output", tmp_path / "out.md")


@pytest.mark.parametrize(
    ("stage", "name"), [("capability", "capability_selection"), ("environment", "environment_generation")]
)
def test_the_published_commands_write_to_prompts_rendered(stage: str, name: str) -> None:
    config = ROOT / "configs" / f"{name}.yaml"
    command = [sys.executable, "render_pipeline.py", str(config), "--stage", stage]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    path = ROOT / "prompts" / "rendered" / f"{load_config(config, stage).run_name}_{stage}.md"
    assert path.is_file() and str(path) in done.stdout
    assert ("rho = 0.10" if stage == "capability" else "hint_ratio = 0.25-0.5") in done.stdout
    text = path.read_text()
    assert "{{" not in text and "{%" not in text


@pytest.mark.parametrize("benchmark", ["tau-bench", "swebench"])
def test_reviewed_prompts_have_not_drifted(benchmark: str) -> None:
    folder = PROMPTS / benchmark
    config = load_config(folder / "capability_selection.yaml", "capability")
    text, _ = render("general/capability_selection.md", context_of(config))
    assert text == (folder / "capability_selection.md").read_text(), (
        f"run: python render_pipeline.py prompts/{benchmark}/capability_selection.yaml --stage capability "
        f"--output prompts/{benchmark}/capability_selection.md"
    )


def test_prompts_is_not_a_package() -> None:
    assert not list(PROMPTS.rglob("__init__.py"))


# --------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("number", ["0.10", "0.1", "0.1000000000000000055", "0.123456789012345678", "1", "1e-2"])
def test_thresholds_are_written_as_they_stand(tmp_path: Path, number: str) -> None:
    assert rendered(tmp_path, f"{MINIMAL}rho: {number}\n").returncode == 0
    found = re.search(r"--rho (\S+)", (tmp_path / "out.md").read_text())
    assert found is not None
    assert Decimal(found.group(1)) == Decimal(number)
    if "e" not in number:
        assert found.group(1) == number


@pytest.mark.parametrize("value", [".nan", ".inf", "lots", "[1]", "true", "1.5", "-0.1"])
def test_bad_thresholds(tmp_path: Path, value: str) -> None:
    done = rendered(tmp_path, f"{MINIMAL}rho: {value}\n")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "out.md").exists()


# --------------------------------------------------------------------------- keys and values


@pytest.mark.parametrize(
    ("line", "near"), [("k_consistancy: 8", "k_consistency"), ("Rho: 0.1", "rho"), ("n_run: 3", "n_runs")]
)
def test_unknown_keys_name_the_nearest(tmp_path: Path, line: str, near: str) -> None:
    done = rendered(tmp_path, f"{MINIMAL}{line}\n")
    assert done.returncode == 2 and f"{near!r}" in done.stderr and line.split(":")[0] in done.stderr


def test_unknown_keys_inside_vllm_name_the_nearest(tmp_path: Path) -> None:
    done = rendered(tmp_path, "model: m\nvllm:\n  serve_arg: x\n", "environment")
    assert done.returncode == 2 and "'serve_args'" in done.stderr


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("eval_results: x\n", "model"),
        ("model: m\n", "eval_results"),
        ("model: ''\neval_results: x\n", "model"),
        ("model: 3\neval_results: x\n", "model"),
        ("model: m\nmodel: n\neval_results: x\n", "appears twice"),
        (f"{MINIMAL}n_runs: 0\n", "n_runs"),
        (f"{MINIMAL}n_runs: 5\n", "k_consistency is 8"),
        (f"{MINIMAL}run_name: ../evil\n", "run_name"),
        (f"{MINIMAL}benchmark: tau3\n", "benchmark"),
        ('model: "a\\nb"\neval_results: x\n', "model"),
        ("- a\n", "expected keys"),
        ("model: [\n", "not valid YAML"),
        ("\n", "empty"),
        ("model: !!python/object/apply:os.system ['true']\neval_results: x\n", "not valid YAML"),
    ],
)
def test_bad_configurations(tmp_path: Path, text: str, word: str) -> None:
    done = rendered(tmp_path, text)
    assert done.returncode == 2 and word in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out.md").exists()


def test_missing_configuration(tmp_path: Path) -> None:
    assert "not found" in run_main(render_pipeline.main, tmp_path / "no.yaml", "--stage", "capability").stderr


def test_a_variable_without_a_value_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "t.md").write_text("{{ model }} {{ surprise }}")
    with pytest.raises(InputError, match="surprise"):
        render("t.md", {"model": "m"}, tmp_path)
    (tmp_path / "t.md").write_text("{{ model ")
    with pytest.raises(InputError, match=r"t\.md line 1"):
        render("t.md", {"model": "m"}, tmp_path)
    with pytest.raises(InputError, match="not found"):
        render("nowhere.md", {}, tmp_path)


def test_a_value_of_none_counts_as_missing() -> None:
    config = CapabilityConfig.model_validate({"model": "m"})
    assert "eval_results" not in context_of(config)


def test_used_variables_include_those_of_partials(tmp_path: Path) -> None:
    (tmp_path / "t.md").write_text("{{ a }} {% include 'p.md' %}")
    (tmp_path / "p.md").write_text("{{ b }}")
    assert render("t.md", {"a": 1, "b": 2, "c": 3}, tmp_path) == ("1 2", ["a", "b"])


# --------------------------------------------------------------------------- what the prompt asks for


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    text = f"{MINIMAL}eval_labels: my reports\nsplit: '60:40'\nfile_prefix: x_\noutput_dir: some folder\n"
    assert rendered(tmp_path, text).returncode == 0
    return (tmp_path / "out.md").read_text()


def commands(prompt: str) -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", prompt, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    return [shlex.split(line) for line in lines]


def test_every_command_of_the_prompt_parses(prompt: str) -> None:
    parsers = {
        "pipeline/_summarize.py": _summarize.parse_arguments,
        "pipeline/aggregate_capabilities.py": aggregate_capabilities.parse_arguments,
        "pipeline/label_capabilities.py": label_capabilities.parse_arguments,
    }
    seen = set()
    for command in commands(prompt):
        assert command[0] == "python"
        assert (ROOT / command[1]).is_file()
        seen.add(command[1])
        if command[1] in parsers:
            parsers[command[1]](command[2:])  # exits on an unknown option
    assert seen >= set(parsers)


def test_paths_with_spaces_stay_whole(prompt: str) -> None:
    words = [word for command in commands(prompt) for word in command]
    assert "my reports" in words and "some folder/x_summaries.json" in words
    assert "some folder/x_run_*.json" in words


def test_the_prompt_says_what_it_must(prompt: str) -> None:
    for words in (
        "60:40",
        "--check",
        "Stop",
        "10 labelling agents",
        "fresh context",
        "verbatim",
        "at least 8 of 10 runs",
    ):
        assert words in prompt or (words == "verbatim" and "letter by letter" in prompt), words
    labeller = prompt[prompt.index("<labelling_agent>") : prompt.index("</labelling_agent>")]
    assert "blind.json" in labeller and "candidates_blind.json" in labeller
    for leak in ("x_summaries.json", "rho", "Delta", "failed trajectories", "selected"):
        assert leak not in labeller
    assert "{{" not in prompt and "{%" not in prompt and "None" not in prompt


def test_environment_stage_takes_its_configuration(tmp_path: Path) -> None:
    path = write(tmp_path, "model: m\nhint_ratio: '0.5-0.25'\n")
    with pytest.raises(InputError, match="hint_ratio"):
        load_config(path, "environment")
    config = load_config(write(tmp_path, "model: m\nvllm:\n  env: {A: b}\n  serve_args: --x 1\n"), "environment")
    context = context_of(config)
    assert context["port"] == 5050 and context["vllm"]["serve_args"] == "--x 1" and "conda_env" not in context["vllm"]
