"""Headless agents: the prompt's own commands, played by a script and by mini-swe-agent; limits; artefacts that lie."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from stage1_helpers import ROOT, Done, run_main

import render_pipeline
from pipeline import agent_commands, run_agent
from pipeline.agent_commands import Request, cost_of_line, cost_of_trajectory, launch
from pipeline.files import InputError

NAMES = ["check_stock_first", "exact_item_number", "polite_closing", "refund_policy_use", "whole_order_reading"]
N_RUNS = 2

WRITE_CANDIDATES = """
import json, sys
records = json.load(open(sys.argv[1] + "/summaries.json"))["trajectories"]
pick = {o: next(r["id"] for r in records if r["outcome"] == o) for o in ("failed", "passed")}
examples = [{"task_id": pick["failed"], "reward": 0.0, "note": "ships at once, message 1"},
            {"task_id": pick["passed"], "reward": 1.0, "note": "looks first, message 1"}]
names = json.loads(sys.argv[2])
candidates = [{"name": n, "description": f"The agent does {n}.", "example_trajectories": examples} for n in names]
json.dump({"candidates": candidates}, open(sys.argv[1] + "/candidate_capabilities.json", "w"))
"""
WRITE_LABELS = """
import json, sys
folder, attempt = sys.argv[1], int(sys.argv[2])
names = [c["name"] for c in json.load(open(folder + "/candidates_blind.json"))["candidates"]]
labels = {}
for record in json.load(open(folder + "/blind.json"))["trajectories"]:
    assert "outcome" not in record and "reward" not in record
    text = record["messages"][1]["content"]
    label = "PRESENT" if "looked" in text else "LACKING"
    labels[record["id"]] = {n: {"label": "NA"} for n in names[1:]}
    labels[record["id"]][names[0]] = {"label": label, "message": 1, "quote": " ".join(text.split()[:3])}
json.dump({"attempt": attempt, "labels": labels}, open(f"{folder}/labels_{attempt:02}.json", "w"))
"""


@pytest.fixture(autouse=True)
def this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's commands say ``python``: the one that runs the tests."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def make_config(folder: Path) -> Path:
    """A configuration whose inputs and outputs lie in ``folder``."""
    entries = []
    for task in range(8):
        good = task % 2 == 0
        text = f"I looked and ship item {task}." if good else f"I ship item {task}."
        messages = [{"role": "user", "content": f"Send item {task}."}, {"role": "assistant", "content": text}]
        reward = {"reward": float(good)}
        entries.append({"task_id": str(task), "sample_idx": 0, "reward_info": reward, "messages": messages})
    source = folder / "rollouts.json"
    source.write_text(json.dumps({"info": {"env": "desk"}, "simulations": entries}))
    (folder / "out").mkdir()
    path = folder / "config.yaml"
    fields = {"model": "m", "run_name": "t", "eval_results": str(source), "output_dir": str(folder / "out")}
    path.write_text(yaml.safe_dump(fields | {"n_runs": N_RUNS, "k_consistency": 2, "n_candidates": 5}))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return make_config(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """The configuration of a run in which a script played the prompt's commands, and how it went."""
    path = make_config(tmp_path_factory.mktemp("finished"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        return path, run_with(path, scripted(path, good_commands(path)))


def copy_of(finished: tuple[Path, Done], config: Path) -> str:
    """A command that leaves the artefacts of the finished run in another folder, as if just written."""
    return f"cp {shlex.quote(str(finished[0].parent / 'out'))}/* {shlex.quote(str(config.parent / 'out'))}/"


def good_commands(config: Path) -> list[str]:
    """What a good agent would run: the commands of the prompt, and its own writing between them."""
    loaded = render_pipeline.load_config(config, "capability")
    text, _ = render_pipeline.render("general/capability_selection.md", render_pipeline.context_of(loaded))
    summarize, check_candidates, check_labels, make_runs, select = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    out = shlex.quote(str(config.parent / "out"))
    found = [
        summarize,
        f"python -c {shlex.quote(WRITE_CANDIDATES)} {out} {shlex.quote(json.dumps(NAMES))}",
        check_candidates,
    ]
    for n in range(1, N_RUNS + 1):
        found.append(f"python -c {shlex.quote(WRITE_LABELS)} {out} {n}")
        found.append(check_labels.replace("labels_NN", f"labels_{n:02}"))
    return [*found, make_runs, select]


def run_with(config: Path, agent: str, *more: str | Path) -> Done:
    base = ["--stage", "capability", "--agent", agent, "--config", config, "--work-dir", config.parent / "work"]
    return run_main(run_agent.main, *base, *more)


def scripted(config: Path, commands: list[str], name: str = "agent.sh") -> str:
    path = config.parent / name
    path.write_text("set -e\n" + "\n".join(commands) + "\n")
    return f"bash {shlex.quote(str(path))}"


def result(config: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((config.parent / "work" / "result.json").read_text())
    return found


# --------------------------------------------------------------------------- end to end


def test_the_commands_of_the_prompt_do_the_stage(finished: tuple[Path, Done]) -> None:
    config, done = finished
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("good")] == ["good"] * 3
    assert "selection: check_stock_first" in done.stdout
    found = result(config)
    assert found["complete"] and found["returncode"] == 0 and not found["faults"]
    assert (config.parent / "out" / "selection_report.html").is_file()
    log = (config.parent / "work" / "agent.log").read_text()
    assert "8 trajectories: 4 passed, 4 failed" in log


def mini_program() -> str | None:
    """The ``mini`` command: on the PATH, beside this Python, or where MINI_SWE_AGENT says."""
    return (
        os.environ.get("MINI_SWE_AGENT")
        or shutil.which("mini")
        or shutil.which("mini", path=str(ROOT / ".venv-agents/bin"))
    )


@pytest.mark.skipif(mini_program() is None, reason="mini-swe-agent is not installed (make agents)")
def test_mini_swe_agent_does_the_stage(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package with its deterministic model: the actions are real shell commands in a real environment."""
    program = mini_program()
    assert program is not None
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{Path(program).parent}")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(config.parent / "mini"))
    actions = [*good_commands(config), "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    outputs = [
        {"role": "assistant", "content": f"Step {n}.", "extra": {"actions": [{"command": a}], "cost": 0.01}}
        for n, a in enumerate(actions)
    ]
    script = config.parent / "scripted.yaml"
    script.write_text(
        yaml.safe_dump({"model": {"model_class": "deterministic", "model_name": "d", "outputs": outputs}})
    )
    more = ["--agent-args", f"-c mini.yaml -c {shlex.quote(str(script))} -c environment.timeout=120"]
    done = run_with(config, "mini-swe-agent", *more, "--time-limit", "300")
    assert done.returncode == 0, done.stdout + done.stderr
    found = result(config)
    assert found["complete"] and found["cost"] == pytest.approx(0.01 * len(actions), abs=0.02)
    trajectory = json.loads((config.parent / "work" / "agent.traj.json").read_text())
    assert trajectory["info"]["exit_status"] == "Submitted"
    assert "Find the capabilities that m lacks" in trajectory["messages"][1]["content"]


# --------------------------------------------------------------------------- what is missing is said


def test_an_agent_that_does_nothing(config: Path) -> None:
    done = run_with(config, "true")
    assert done.returncode == 1
    missing = [line for line in done.stdout.splitlines() if line.startswith("missing or wrong")]
    assert len(missing) == 3 and "candidate_capabilities.json is missing" in missing[0]
    assert result(config)["complete"] is False


def test_an_agent_that_stops_halfway(config: Path, finished: tuple[Path, Done]) -> None:
    out = shlex.quote(str(config.parent / "out"))
    done = run_with(config, scripted(config, [copy_of(finished, config), f"rm {out}/run_* {out}/selected*", "exit 7"]))
    assert done.returncode == 1 and "exit code 7" in done.stdout
    assert "good: candidates" in done.stdout and "missing or wrong: label runs" in done.stdout


def test_what_an_earlier_run_left_does_not_count(config: Path, finished: tuple[Path, Done]) -> None:
    assert run_with(config, scripted(config, [copy_of(finished, config)])).returncode == 0
    time.sleep(0.05)
    done = run_with(config, "true")
    assert done.returncode == 1 and done.stdout.count("from an earlier run") == 3


@pytest.mark.parametrize(
    ("forgery", "word"),
    [
        ("echo '[]' > {out}/selected_capabilities.json", "the runs and the thresholds give"),
        ("sed -i 's/I ship item/I sold item/' {out}/run_01.json", "does not contain"),
        ("rm {out}/run_02.json", "expected 2, found 1"),
        ("sed -i 's/desk:1/desk:99/' {out}/candidate_capabilities.json", "desk:99"),
    ],
)
def test_forged_artefacts_are_found(config: Path, finished: tuple[Path, Done], forgery: str, word: str) -> None:
    out = shlex.quote(str(config.parent / "out"))
    done = run_with(config, scripted(config, [copy_of(finished, config), forgery.replace("{out}", out)]))
    assert done.returncode == 1 and word in done.stdout, done.stdout


# --------------------------------------------------------------------------- limits and streams


def test_the_time_limit_ends_the_agent_and_its_children(config: Path) -> None:
    marker = config.parent / "alive"
    agent = scripted(config, [f"(while true; do date > {shlex.quote(str(marker))}; sleep 0.1; done) &", "sleep 60"])
    start = time.monotonic()
    done = run_with(config, agent, "--time-limit", "1")
    assert done.returncode == 1 and "stopped at the time limit" in done.stdout
    assert time.monotonic() - start < 20
    before = marker.stat().st_mtime_ns
    time.sleep(0.5)
    assert marker.stat().st_mtime_ns == before  # the child is gone too


def test_the_cost_limit_is_enforced_from_the_log(config: Path) -> None:
    lines = [f"echo '{json.dumps({'type': 'result', 'total_cost_usd': c})}'" for c in (0.5, 1.5)]
    done = run_with(config, scripted(config, [*lines, "sleep 60"]), "--cost-limit", "1", "--time-limit", "30")
    assert done.returncode == 1 and "stopped at the cost limit" in done.stdout and "cost $1.50" in done.stdout


def test_an_agent_that_ignores_the_polite_signal_is_killed(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_agent, "TERM_GRACE_S", 0.5)
    start = time.monotonic()
    done = run_with(config, scripted(config, ["trap '' TERM", "sleep 60 & wait; sleep 60"]), "--time-limit", "0.5")
    assert "time limit" in done.stdout and time.monotonic() - start < 15


def test_the_prompt_arrives_on_standard_input_or_as_a_file(config: Path) -> None:
    assert "Find the capabilities that m lacks" in run_with(config, "cat").stdout
    assert "Find the capabilities that m lacks" in run_with(config, "cat {prompt_file}").stdout
    assert "MODEL=mm" in run_with(config, "echo MODEL={model} {prompt_file}", "--model", "mm").stdout
    log = (config.parent / "work" / "agent.log").read_text()
    assert log.startswith("MODEL=mm")


def test_output_that_is_not_text_is_kept(config: Path) -> None:
    done = run_with(config, scripted(config, [r"printf 'a\xff\n'"]))
    assert "a\ufffd" in done.stdout


# --------------------------------------------------------------------------- starting


@pytest.mark.parametrize(
    ("agent", "word"), [("no-such-agent-here", "not on the PATH"), ("'", "quote it"), ("  ", "expected one of")]
)
def test_agents_that_cannot_be_started(config: Path, agent: str, word: str) -> None:
    done = run_with(config, agent)
    assert done.returncode == 2 and word in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("more", [["--time-limit", "0"], ["--cost-limit", "-1"]])
def test_bad_limits(config: Path, more: list[str]) -> None:
    assert run_with(config, "true", *more).returncode == 2


def test_command_lines_of_known_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path="/bin": f"{path}/{name}")
    prompt = tmp_path / "prompt.md"
    prompt.write_text("do it")
    request = Request(prompt, tmp_path, "some-model", 2.5, ("--extra",))
    claude = launch("claude", request)
    assert claude.stdin and claude.command[:2] == ("/bin/claude", "-p")
    assert "--max-budget-usd" in claude.command and "2.5" in claude.command and claude.command[-1] == "--extra"
    codex = launch("codex", request)
    assert codex.command[1] == "exec" and codex.command[-1] == "-" and codex.stdin and codex.notes
    assert codex.command[codex.command.index("--sandbox") + 1] == "workspace-write"
    mini = launch("mini-swe-agent", request)
    assert not mini.stdin and mini.command[-2:] == ("--task", "do it") and mini.trajectory is not None
    assert "--cost-limit" in mini.command
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    for agent, remedy in [("claude", "Claude Code"), ("codex", "Codex CLI"), ("mini-swe-agent", "make agents")]:
        with pytest.raises(InputError, match=f"not on the PATH.*{remedy}"):
            launch(agent, request)


def test_mini_is_found_where_make_agents_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The PATH goes first; a folder without the program changes nothing."""
    prompt = tmp_path / "prompt.md"
    prompt.write_text("do it")
    request = Request(prompt, tmp_path, None, None)
    agents, path = tmp_path / "agents", tmp_path / "path"
    for folder in (agents, path):
        folder.mkdir()
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setattr(agent_commands, "AGENTS_BIN", agents)
    with pytest.raises(InputError, match="make agents"):
        launch("mini-swe-agent", request)
    for folder in (agents, path):
        program = folder / "mini"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        assert launch("mini-swe-agent", request).command[0] == str(program)


def test_the_folder_of_make_agents_is_the_makefiles() -> None:
    assert ROOT / ".venv-agents/bin" == agent_commands.AGENTS_BIN
    assert f"{agent_commands.AGENTS_BIN.relative_to(ROOT)}/python -m pip install" in (ROOT / "Makefile").read_text()


def test_costs_are_read_where_agents_put_them(tmp_path: Path) -> None:
    assert cost_of_line('{"total_cost_usd": 0.25}') == 0.25
    for line in ("total_cost_usd", '{"total_cost_usd": true}', '["total_cost_usd"]', "hello"):
        assert cost_of_line(line) is None
    path = tmp_path / "t.json"
    assert cost_of_trajectory(path) is None
    path.write_text('{"info": {"model_stats": {"instance_cost": 1.5}}}')
    assert cost_of_trajectory(path) == 1.5
    path.write_text('{"info": ')
    assert cost_of_trajectory(path) is None


# --------------------------------------------------------------------------- the environment stage

SELECTION = [
    {"skill": "a_skill", "status": "DONE", "environment_path": "capability_a_skill_game.py"},
    {"skill": "b_skill"},
]


def environment_config(tmp_path: Path) -> Path:
    (tmp_path / "selected.json").write_text(json.dumps(SELECTION))
    path = tmp_path / "environment.yaml"
    path.write_text(f"model: m\ncapabilities_file: {tmp_path / 'selected.json'}\n")
    return path


@pytest.mark.skipif(
    not (render_pipeline.PROMPTS / "general" / "environment_generation.md").is_file(), reason="prompt not there yet"
)
@pytest.mark.parametrize(
    ("after", "word"),
    [
        (SELECTION, "found 0"),
        ([SELECTION[0], {"skill": "b_skill", "status": "DONE"}], "without environment_path"),
        ([SELECTION[0], {"skill": "b_skill", "status": "DONE", "environment_path": "nowhere_game.py"}], "is missing"),
        ([SELECTION[0], {"skill": "b_skill", "status": "DONE", "environment_path": "broken_game.py"}], "says no"),
    ],
)
def test_the_environment_stage_wants_one_new_validated_environment(tmp_path: Path, after: Any, word: str) -> None:
    config = environment_config(tmp_path)
    broken = f"echo 'raise ValueError' > {tmp_path}/broken_game.py"
    script = tmp_path / "agent.sh"
    script.write_text(f"{broken}\necho {shlex.quote(json.dumps(after))} > {tmp_path}/selected.json\n")
    base = ["--stage", "environment", "--agent", f"bash {script}", "--config", config, "--work-dir", tmp_path / "work"]
    done = run_main(run_agent.main, *base, "--root", tmp_path)
    assert done.returncode == 1 and word in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, "b_skill in set.json, validated"),
        ({"pass_rate": 0.9}, "0 scenarios have a pass rate above 0 and at most 0.5; expected 1"),
        ({"oracle_replace": "    pass"}, "scenarios"),
    ],
)
def test_a_scenario_set_is_tested_again_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], word: str
) -> None:
    """SWE capabilities end in a scenario file, which the panel of games cannot judge."""
    monkeypatch.setattr("pipeline.artefacts.N_SCENARIOS", 1)
    shipped = ROOT / "pipeline" / "swebench" / "semantic_logic_precision" / "scenarios_parsed.json"
    scenario = json.loads(shipped.read_text())[0] | {"pass_rate": 0.3, "n_rollouts": 10} | change
    (tmp_path / "candidate.json").write_text(json.dumps([scenario]))
    after = [SELECTION[0], {"skill": "b_skill", "status": "DONE", "environment_path": "set.json"}]
    script = tmp_path / "agent.sh"
    script.write_text(
        f"cp {tmp_path}/candidate.json {tmp_path}/set.json\n"
        f"echo {shlex.quote(json.dumps(after))} > {tmp_path}/selected.json\n"
    )
    config = environment_config(tmp_path)
    base = ["--stage", "environment", "--agent", f"bash {script}", "--config", config, "--work-dir", tmp_path / "work"]
    done = run_main(run_agent.main, *base, "--root", tmp_path)
    assert done.returncode == (0 if not change else 1) and word in done.stdout, done.stdout + done.stderr
