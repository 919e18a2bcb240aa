"""The validation panel: the good fixture passes everything, each broken one fails its own check and no other."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from game_registry import GameError
from pipeline import sandbox
from pipeline.files import InputError
from pipeline.panel_checks import Check
from pipeline.panel_evidence import Settings
from pipeline.validate_environment import Panel, content_hash, load_target_tools, main, render, validate

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures" / "environments"
GOOD = FIXTURES / "capability_ledger_game.py"
SEEDS = 24


def _load_broken() -> ModuleType:
    spec = importlib.util.spec_from_file_location("broken_environments", FIXTURES / "broken.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


broken = _load_broken()
ISOLATION = "bwrap" if sandbox._probe_bwrap()[0] is not None else "process"


def failing(panel: Panel) -> set[str]:
    return {check.name for check in panel.checks if check.passed is False}


def run(source: Path | str, seeds: int = SEEDS, **settings: object) -> Panel:
    return validate(source, Settings(seeds=seeds, **settings), isolation=ISOLATION)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def good() -> Panel:
    return run(GOOD, target_tools=load_target_tools_of_good())


def load_target_tools_of_good() -> tuple[dict[str, object], ...]:
    return load_target_tools(str(FIXTURES / "ledger_tools.json"), ISOLATION)


def test_the_good_environment_passes_every_check(good: Panel) -> None:
    assert failing(good) == set(), render(good)
    assert all(check.passed for check in good.checks), "no check was skipped"
    assert good.passed and "verdict: pass" in render(good)


def test_every_check_has_its_broken_environment(good: Panel) -> None:
    assert {check.name for check in good.checks} == set(broken.BROKEN)


@pytest.mark.parametrize("check", sorted(broken.BROKEN))
def test_a_broken_environment_fails_its_check_and_only_it(tmp_path: Path, check: str) -> None:
    file = tmp_path / GOOD.name
    file.write_text(broken.broken_source(check))
    panel = run(file, target_tools=load_target_tools_of_good(), seeds=10 if check == "latency" else SEEDS)
    assert failing(panel) == {check}, render(panel)
    assert not panel.passed and f"fail ({check})" in render(panel)


def test_content_hash_follows_the_source(tmp_path: Path, good: Panel) -> None:
    copy = tmp_path / GOOD.name
    copy.write_bytes(GOOD.read_bytes())
    assert content_hash([copy]) == content_hash([GOOD]) == good.content_hash
    copy.write_bytes(GOOD.read_bytes() + b"\n")
    assert content_hash([copy]) != good.content_hash


def test_environment_without_oracle_fails_the_oracle_check(tmp_path: Path) -> None:
    file = tmp_path / GOOD.name
    file.write_text(GOOD.read_text().replace("        oracle=oracle,\n", ""))
    panel = run(file, seeds=10)
    assert "oracle" in failing(panel)
    assert "no oracle" in next(c.found for c in panel.checks if c.name == "oracle")


def test_a_reward_that_is_not_a_number_is_found(tmp_path: Path) -> None:
    for value in ("float('nan')", "'1'"):
        file = tmp_path / GOOD.name
        assert GOOD.read_text().count("0.5 if right else looked\n") == 1
        file.write_text(GOOD.read_text().replace("0.5 if right else looked\n", f"{value} if right else looked\n"))
        assert "reward_range" in failing(run(file, seeds=10)), value


def test_an_environment_that_hangs_is_a_fault_and_not_a_hang(tmp_path: Path) -> None:
    file = tmp_path / GOOD.name
    slow = "        while True:\n            pass\n"
    file.write_text(GOOD.read_text().replace("        self.steps += 1\n", slow + "        self.steps += 1\n"))
    panel = validate(file, Settings(seeds=30), isolation=ISOLATION, step_timeout_s=0.3)
    assert failing(panel) == {"runs"} and "longer than 0.3 s" in render(panel)
    assert panel.seconds < 20, "it gives up after a few lost workers"


def test_skill_free_policies_are_floor_checked_on_the_best_variant(good: Panel) -> None:
    constant = next(c for c in good.checks if c.name == "constant")
    assert "commonest oracle script" in constant.found or "close_record" in constant.found


# --------------------------------------------------------------------------- the command


def test_command_line(tmp_path: Path) -> None:
    report = tmp_path / "panel.json"
    script = [sys.executable, "pipeline/validate_environment.py", str(GOOD), "--isolation", ISOLATION, "--seeds", "20"]
    done = subprocess.run([*script, "--json-output", str(report)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(report.read_text())
    assert (data["schema_version"], data["verdict"], data["environment"]) == (1, "pass", "capability_ledger")
    assert len(data["content_hash"]) == 64 and data["isolation"] == ISOLATION
    assert {c["name"] for c in data["checks"]} == set(broken.BROKEN)
    assert {c["passed"] for c in data["checks"]} == {True, None}


def test_exit_code_1_on_a_failed_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / GOOD.name
    file.write_text(broken.broken_source("reward_levels"))
    assert main([str(file), "--isolation", ISOLATION, "--seeds", "10"]) == 1
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("no_such_file.py", "not found"),
        ("no_such_game", "unknown game"),
        ("def f(:\n", "SyntaxError"),
        ("raise RuntimeError('boom')\n", "boom"),
        ("x = 1\n", "registers no game"),
        (
            "import game_registry as g\ng.register_game(g.GameSpec(name='A B', make_env=int))\n",
            "A B",
        ),
    ],
)
def test_bad_environments_are_one_line(tmp_path: Path, source: str, expected: str) -> None:
    target: Path | str = source
    if "\n" in source:
        target = tmp_path / "capability_bad_game.py"
        target.write_text(source)
    with pytest.raises((InputError, GameError)) as caught:
        run(target)
    assert expected in str(caught.value)


@pytest.mark.parametrize("content", ["[]", "{}", '"x"', '[{"a": 1}, 2]'])
def test_bad_target_tools(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tools.json"
    file.write_text(content)
    with pytest.raises(InputError, match="list of tool schemas"):
        load_target_tools(str(file), ISOLATION)


def test_bad_flags() -> None:
    with pytest.raises(InputError, match="--floor"):
        main([str(GOOD), "--floor", "7"])


def test_check_is_about_the_environment_alone() -> None:
    assert Check("x", None, "", "").passed is None  # a skipped check never fails a panel


SHIPPED = (
    "helpdesk",
    "capability_multi_step_task_completion",
    "capability_precondition_verification",
    "capability_structured_data_reasoning",
    "capability_tool_calling_precision",
)


@pytest.fixture(scope="module")
def helpdesk_tools() -> tuple[dict[str, object], ...]:
    return load_target_tools("helpdesk", ISOLATION)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_environments_pass(name: str, helpdesk_tools: tuple[dict[str, object], ...]) -> None:
    panel = run(name, target_tools=helpdesk_tools)
    assert failing(panel) == set(), render(panel)
