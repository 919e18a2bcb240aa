"""The miniature as one command: its steps, what it does when one fails, the server that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_miniature
import run_server
from run_declared import read_declared
from run_scripted_model import ScriptedAgent
from run_settings import RunSettings
from swe_run_helpers import MINIATURE, PHASES, ROOT, environment

TOOLS = {"tools": [{"type": "function", "function": {"name": "bash"}}]}


def test_the_six_phases_in_order_and_chained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_miniature, "has_vllm", lambda: True)
    steps = run_miniature.steps(tmp_path / "run", run_miniature.CONFIG)
    assert list(steps) == list("123456")
    for commands in steps.values():
        for command in commands:
            assert Path(command[1]).is_file(), command[1]
            assert command[2:6] == ["--config", str(run_miniature.CONFIG), "--run-dir", str(tmp_path / "run")]
    checkpoints = [command[command.index("--checkpoint") + 1 :] for command in steps["6"]]
    adapters = [[str(tmp_path / "run" / "phase5" / "adapters" / n)] for n in run_miniature.CAPABILITIES]
    assert checkpoints == [*adapters, [str(tmp_path / "run" / "phase5" / "exported"), "--serve"]]


def test_without_vllm_the_routed_model_is_left_out_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_miniature, "has_vllm", lambda: False)
    assert len(run_miniature.steps(tmp_path, run_miniature.CONFIG)["6"]) == len(run_miniature.CAPABILITIES)
    monkeypatch.setattr(run_miniature, "run_phases", lambda *_: (0, {}))
    monkeypatch.setattr(run_server, "interrupt_on_term", lambda: None)
    for phases, said in (("6", True), ("1", False)):
        monkeypatch.setattr("sys.argv", ["x", "--phases", phases, "--run-dir", str(tmp_path)])
        assert run_miniature.main() == 0
        assert (".ci/install_vllm_cpu.sh" in capsys.readouterr().out) == said


def test_a_phase_that_fails_stops_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    script = tmp_path / "phase.py"
    script.write_text(
        "import os, sys\n"
        f"open({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + ' ' + os.environ['VLLM_BASE_URL'] + '\\n')\n"
        "sys.exit(0 if '--dry-run' in sys.argv else int(sys.argv[1]))\n"
    )
    fake = {name: [[sys.executable, str(script), code]] for name, code in (("1", "0"), ("2", "1"), ("3", "0"))}
    monkeypatch.setattr(run_miniature, "steps", lambda *_: fake)
    code, seconds = run_miniature.run_phases(tmp_path, tmp_path, ["1", "2", "3"], "http://u")
    assert code == 1 and list(seconds) == ["1", "2"]
    assert log.read_text().splitlines() == [
        "0 --dry-run http://u",
        "0 http://u",
        "1 --dry-run http://u",
        "1 http://u",
    ]


def test_a_dry_run_that_fails_stops_before_the_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit(2 if '--dry-run' in sys.argv else 0)"]
    monkeypatch.setattr(run_miniature, "steps", lambda *_: {"1": [command]})
    assert run_miniature.run_phases(tmp_path, tmp_path, ["1"], "http://u")[0] == 2


def test_the_scripted_model_ends_with_the_command(tmp_path: Path) -> None:
    with run_miniature.scripted_model(tmp_path / "log", "scripted") as url:
        settings = RunSettings.model_validate({"run_name": "x", "model": {"name": "scripted", "base_url": url}})
        run_server.require_served(settings, "scripted")
    assert not run_server.alive(settings)


def test_unknown_phases() -> None:
    line = [sys.executable, str(PHASES / "run_miniature.py"), "--phases", "1,7"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.returncode == 2 and "expected numbers from 1 to 6, found 7" in done.stderr


def test_the_example_runs_it() -> None:
    script = ROOT / "examples" / "swebench_miniature" / "run.sh"
    env = environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(script), "--help"], capture_output=True, text=True, env=env, cwd="/")
    assert done.returncode == 0 and "--real-model" in done.stdout


# ---------------------------------------------------------------------- the scripted agent


def test_the_agent_plays_by_model_and_by_turn() -> None:
    """Stateless: the n-th answer follows from the messages, so a killed run and parallel ones play the same."""
    declared = {d.instance_id: d for d in read_declared(MINIATURE)}
    agent = ScriptedAgent(list(declared.values()), "scripted")
    instance = declared["mini__semrange-6"]
    start = [{"role": "system", "content": "s"}, {"role": "user", "content": f"Repair:\n{instance.problem_statement}"}]

    def said(messages: list[dict[str, str]], model: str) -> str:
        answer = agent(messages, TOOLS | {"model": model})
        assert answer is not None
        calls = answer.get("tool_calls")
        return str(calls[0]["function"]["arguments"]) if calls else str(answer["content"])

    assert instance.play("base")[0] in said(start, "scripted")
    assert "semrange/latest.py" in said(start, "run.adapter.1234")
    turn = [*start, {"role": "assistant", "content": "x"}, {"role": "tool", "content": "y"}]
    assert "not self.pre, self.pre" in said(turn, "scripted") and said(turn, "scripted") == said(turn, "scripted")
    over = start + [{"role": "assistant", "content": "x"}] * 20
    assert said(over, "scripted") == "I have nothing more to do."


def test_the_agent_leaves_other_conversations_alone() -> None:
    agent = ScriptedAgent(read_declared(MINIATURE))
    issue = read_declared(MINIATURE)[0].problem_statement
    assert agent([{"role": "user", "content": issue}], {"model": "scripted"}) is None, "no bash tool: not an agent"
    assert agent([{"role": "user", "content": "hello"}], TOOLS | {"model": "scripted"}) is None
