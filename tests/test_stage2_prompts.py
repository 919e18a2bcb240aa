"""The prompts of stage 2: no drift, every command in them exists with the flags that it is given."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REVIEWED = ("tau-bench", "swebench")


def render(tmp_path: Path, config: Path) -> str:
    output = tmp_path / "prompt.md"
    command = [sys.executable, "render_pipeline.py", str(config), "--stage", "environment", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output.read_text()


@pytest.mark.parametrize("benchmark", REVIEWED)
def test_reviewed_prompts_have_not_drifted(tmp_path: Path, benchmark: str) -> None:
    folder = ROOT / "prompts" / benchmark
    assert (
        render(tmp_path, folder / "environment_generation.yaml") == (folder / "environment_generation.md").read_text()
    ), (
        f"run: python render_pipeline.py prompts/{benchmark}/environment_generation.yaml --stage environment "
        f"--output prompts/{benchmark}/environment_generation.md"
    )


def test_the_shipped_configuration_renders(tmp_path: Path) -> None:
    text = render(tmp_path, ROOT / "configs" / "environment_generation.yaml")
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in text and "--tensor-parallel-size 4" in text
    assert "{{" not in text and "{%" not in text


def test_a_minimal_configuration_renders(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("model: m\nrun_name: r\nvllm:\n  conda_env: env\n  serve_args: [--dtype, half]\n")
    text = render(tmp_path, config)
    assert "conda activate env" in text and "--dtype half" in text and "tau2" not in text


def commands(text: str) -> list[list[str]]:
    found = []
    for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            while words and "=" in words[0]:  # variables before the command
                words = words[1:]
            if words and words[0] == "python" and "game_registry" not in words:
                found.append(words[1:])
    return found


@functools.cache
def help_of(program: tuple[str, ...]) -> str:
    done = subprocess.run([sys.executable, *program, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "prompts/tau-bench/environment_generation.md",
        "prompts/swebench/environment_generation.md",
        "docs/environments.md",
    ],
)
def test_every_command_exists_with_its_flags(text: str) -> None:
    seen = commands((ROOT / text).read_text())
    assert len(seen) >= 4
    for words in seen:
        program = tuple(words[:2]) if words[0] == "-m" else tuple(words[:1])
        for flag in (w for w in words if w.startswith("-") and w != "-m"):
            assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", help_of(program)), f"{program}: {flag}"


def test_the_prompt_says_what_the_program_checks() -> None:
    text = (ROOT / "prompts" / "tau-bench" / "environment_generation.md").read_text()
    for said in ("at most 5 rounds", "PENDING", "DONE", "never imported or wrapped", "exits 0"):
        assert said in text, said


def test_the_document_names_every_check() -> None:
    broken = (ROOT / "tests" / "fixtures" / "environments" / "broken.py").read_text()
    text = (ROOT / "docs" / "environments.md").read_text()
    for name in re.findall(r'^    "(\w+)": \[', broken, flags=re.MULTILINE):
        assert f"`{name}`" in text, name
