"""What somebody meets who starts with the README: one command for the whole run, hints that work, dry runs that write
nothing, disk that is said once, environments of one's own in phase 5."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import checks
import generated_env
import phase1_baseline_eval as phase1
import phase2_capability_mining as phase2
import phase3_synthesis as phase3
import phase4_env_validation as phase4
import phase5_training as phase5
import phase6_final_eval as phase6
import pytest
import resources
import run_checks
import run_server
import swe_phase_helpers as helpers
from run_folder import RunFolder, open_phase, phase_parser
from run_settings import RunSettings, load_settings
from stage2_helpers import scenario as small
from swe_phase_helpers import PHASES, ROOT, Run

from pipeline.files import InputError, ServerError
from pipeline.remote_game import SandboxedEnvironment
from pipeline.scenarios import save_scenarios
from pipeline.validate_environment import content_hash

NOWHERE = "http://127.0.0.1:9"
INVENTED = ["state_machine_reasoning", "error_message_reading"]
RUN_ALL = ["bash", str(PHASES / "run_all.sh")]


def select(run: Run, *names: str) -> None:
    entries = [{"skill": name, "description": f"about {name}"} for name in names]
    helpers.write(run.folder.selected, entries)


# --------------------------------------------------------------------------- phase 3 takes the names from phase 2


def all_selected(run: Run, *flags: str) -> Any:
    return phase3.parse_arguments(None, "", ["--run-dir", str(run.folder.root), "--all-selected", *flags])


@pytest.mark.parametrize(("codes", "expected", "called"), [((1, 0), 1, 2), ((0, 0), 0, 2), ((2, 0), 2, 1)])
def test_every_invented_name_is_synthesized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: tuple[int, int], expected: int, called: int
) -> None:
    """Tries that were used up (1) do not keep the next capability from its turn; a fault (2) does."""
    run, seen = Run(tmp_path, NOWHERE), []
    select(run, *INVENTED)

    def fake(args: Any, _folder: RunFolder, _settings: RunSettings) -> int:
        seen.append(args.capability)
        return codes[len(seen) - 1]

    monkeypatch.setattr(phase3, "run", fake)
    where = ["--config", str(run.config), "--run-dir", str(run.folder.root)]
    assert phase3.main_for(None, "", [*where, "--all-selected"]) == expected
    assert seen == INVENTED[:called]


def test_all_selected_needs_a_selection(tmp_path: Path) -> None:
    run = Run(tmp_path, NOWHERE)
    with pytest.raises(InputError, match=r"phase2_capability_mining\.py"):
        phase3.each(all_selected(run), run.folder)
    select(run)
    with pytest.raises(InputError, match="selected nothing"):
        phase3.each(all_selected(run), run.folder)
    with pytest.raises(InputError, match="--description"):
        all_selected(run, "--description", "text")


# --------------------------------------------------------------------------- run_all.sh


@pytest.mark.parametrize(
    ("flags", "said"), [(["--dryrun"], "--dryrun"), (["x"], "'x'"), (["--config"], "lacks"), (["--run-dir="], "lacks")]
)
def test_run_all_refuses_what_it_does_not_know(flags: list[str], said: str) -> None:
    env = os.environ | {"PYTHON": "/bin/false"}
    done = subprocess.run([*RUN_ALL, *flags], capture_output=True, text=True, env=env)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


def recorder(tmp: Path, after: str = "") -> dict[str, str]:
    python = tmp / "python"
    python.write_text(f'#!/bin/bash\necho "$CUDA_VISIBLE_DEVICES $*" >> {tmp}/calls\n{after}\n')
    python.chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if k not in ("RUN", "CONFIG", "SERVE", "TRAIN") and "VLLM_" not in k}
    return kept | {"PYTHON": str(python)}


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:9"])
def test_run_all_dry_starts_no_server_and_passes_its_flags_through(tmp_path: Path, url: str) -> None:
    env = recorder(tmp_path, "[[ $* != *phase3* ]]") | {"VLLM_BASE_URL": url}
    flags = ["--config", "c d.yaml", "--run-name=n", "--run-dir", "r"]
    done = subprocess.run([*RUN_ALL, "--dry-run", *flags], capture_output=True, text=True, env=env)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert done.returncode == 2, "phase 3's check failed, and the others followed"
    assert [re.findall(r"(phase[1-6])_", call) for call in calls] == [[f"phase{n}"] for n in range(1, 7)]
    for call in calls:
        assert "run_server.py" not in call and call.endswith("--dry-run --planned")
        assert "--config c d.yaml --run-name n --run-dir r" in call


# What run_server.py does, for a recorder in Python's place: the command after --, with VLLM_BASE_URL.
SERVER = """case "$1" in *run_server.py)
  while [[ "$1" != -- ]]; do shift; done
  shift; VLLM_BASE_URL=http://started "$@"; code=$?; echo "server stopped" >> {calls}; exit $code ;;
esac
"""
PHASES_1_TO_5 = ["phase1_baseline_eval", "phase2_capability_mining", "phase3_synthesis", "phase4_env_validation"]
PHASES_1_TO_5 += ["phase5_training"]


def called(tmp: Path) -> list[tuple[str, str]]:
    """GPUs and name of every program that was called."""
    lines = (tmp / "calls").read_text().splitlines()
    return [(line.split()[0], Path(line.split()[1]).stem) if ".py" in line else ("", line) for line in lines]


@pytest.mark.parametrize("fails", ["", "phase3_synthesis", "phase1_baseline_eval"])
def test_run_all_starts_one_server_for_phases_1_to_5(tmp_path: Path, fails: str) -> None:
    after = SERVER.format(calls=tmp_path / "calls") + (f"[[ $1 != *{fails}* || $* == *--dry-run* ]]" if fails else "")
    done = subprocess.run([*RUN_ALL, "--run-dir", "r"], capture_output=True, text=True, env=recorder(tmp_path, after))
    calls = called(tmp_path)
    assert calls[:2] == [("0,1,2,3", "phase1_baseline_eval"), ("0,1,2,3", "run_server")], "checked, then started"
    expected = [("4,5,6,7", name) for name in PHASES_1_TO_5]
    if fails:
        assert done.returncode == 1 and calls[-1] == ("", "server stopped")
        assert calls[2:-1] == expected[: PHASES_1_TO_5.index(fails) + 1], "no phase follows one that failed"
    else:
        assert done.returncode == 0, done.stderr
        assert calls[2:] == [*expected, ("", "server stopped"), ("0,1,2,3", "phase6_final_eval")]


def test_run_all_with_a_server_that_is_there(tmp_path: Path) -> None:
    """It is used and left running; phase 6 has one of its own beside it, on the GPUs that have trained."""
    env = recorder(tmp_path) | {"VLLM_BASE_URL": "http://there"}
    done = subprocess.run([*RUN_ALL, "--run-dir", "r"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert called(tmp_path) == [("4,5,6,7", name) for name in [*PHASES_1_TO_5, "phase6_final_eval"]]
    last = (tmp_path / "calls").read_text().splitlines()[-1]
    assert last.endswith("--run-dir r --serve")


def test_run_all_does_not_start_a_server_for_a_phase_1_that_cannot_run(tmp_path: Path) -> None:
    done = subprocess.run(RUN_ALL, capture_output=True, text=True, env=recorder(tmp_path, "exit 2"))
    assert done.returncode == 2 and called(tmp_path) == [("0,1,2,3", "phase1_baseline_eval")]


def test_the_plan_of_a_run_that_has_not_begun_is_no_fault(tmp_path: Path) -> None:
    """LATER is what an earlier phase, or the server, brings; a real fault stays one."""
    run = Run(tmp_path, NOWHERE)
    phase3_main = functools.partial(phase3.main_for, None, "")
    cases = [(phase2.main, [], 3), (phase3_main, ["--all-selected"], 2), (phase4.main, [], 2), (phase5.main, [], 2)]
    for main, flags, n in cases:
        done = run.here(main, "--dry-run", "--planned", *flags)
        assert done.returncode == 0 and done.stdout.count("LATER ") == n, done.stdout
        assert run.here(main, "--dry-run", *flags).stdout.count("FAIL ") == n
    few = Run(tmp_path, NOWHERE, training={"processes": 64})
    done = few.here(phase5.main, "--dry-run", "--planned")
    assert done.returncode == 2 and "FAIL  GPUs" in done.stdout


def test_the_plan_of_phase_6_looks_at_what_is_there_already(tmp_path: Path) -> None:
    """Docker and the disk are looked at now; instances, export and phase 1 come later."""
    docker = Run(tmp_path, NOWHERE, agent={"python": "/no/such/python", "backend": "docker"})
    with mock.patch.dict(os.environ, {"MSWEA_DOCKER_EXECUTABLE": "no-such-docker"}):
        said = docker.here(phase6.main, "--dry-run", "--planned", "--serve").stdout
    later = [line.removeprefix("LATER ") for line in said.splitlines() if line.startswith("LATER ")]
    assert later == ["checkpoint", "phase 1 and its protocol", "instances", "data set"]
    assert "FAIL  agent backend docker: no-such-docker: not installed" in said
    local = local_run(tmp_path).here(phase6.main, "--dry-run", "--planned", "--serve").stdout
    assert "LATER agent backend local" in local and "LATER grading backend local" in local


def test_a_plan_does_not_excuse_a_server_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "server_from_environment", lambda: NOWHERE)
    run = Run(tmp_path, NOWHERE)
    done = run.here(phase4.main, "--dry-run", "--planned")
    assert done.returncode == 2 and "LATER scenario sets" in done.stdout and "FAIL  solving model" in done.stdout


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_run_all_stops_what_it_started(tmp_path: Path, sign: signal.Signals, code: int) -> None:
    """The program in run_server.py's place gets SIGTERM and is waited for; no phase follows."""
    trap = "[[ $* != *--dry-run* ]] || exit 0\n"
    trap += f"trap 'sleep 0.3; echo over >> {tmp_path}/calls; exit 130' TERM; for i in $(seq 200); do sleep 0.1; done"
    process = subprocess.Popen(RUN_ALL, env=recorder(tmp_path, trap), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not (tmp_path / "calls").exists() or "run_server" not in (tmp_path / "calls").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(sign)
    assert process.wait(20) == code
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3 and "phase1" in calls[0] and "run_server" in calls[1] and calls[2] == "over"


# --------------------------------------------------------------------------- hints


def opened(*flags: str) -> RunFolder:
    return open_phase(phase_parser("").parse_args(list(flags)))[1]


def test_a_hint_has_the_flags_that_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = helpers.write_config(tmp_path / "my config.yaml", helpers.settings_of(NOWHERE))
    where = "python swebench/qwen3.6_self_trace/p.py"
    assert opened().command("p.py") == where
    assert opened("--config", str(config)).command("p.py") == f"{where} --config {shlex.quote(str(config))}"
    both = opened("--config", str(config), "--run-dir", str(tmp_path), "--run-name", "n")
    assert shlex.split(both.command("p.py"))[2:] == [
        "--run-name", "n", "--run-dir", str(tmp_path), "--config", str(config),
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert opened().command("p.py") == f"python {PHASES}/p.py", "works from where we are"


def test_a_phase_says_the_hint_and_a_copied_folder_names_itself(tmp_path: Path) -> None:
    copy = tmp_path / "benchmarks" / "mine"
    shutil.copytree(PHASES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    config = helpers.write_config(tmp_path / "mine.yaml", helpers.settings_of(NOWHERE))
    line = [sys.executable, str(copy / "phase3_synthesis.py"), "--all-selected", "--config", str(config)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert f"run python benchmarks/mine/phase2_capability_mining.py --config {config}" in done.stderr


# --------------------------------------------------------------------------- the README


def test_the_readme_gives_the_servers_command_line() -> None:
    settings = load_settings()
    text = " ".join((PHASES / "README.md").read_text(encoding="utf-8").replace("\\\n", " ").split())
    variables = " ".join(f"{key}={value}" for key, value in settings.server.env.items())
    assert f"{variables} vllm serve {settings.model.name} {' '.join(settings.server.args.split())}" in text


def test_every_command_of_the_readme_that_needs_a_server_has_one() -> None:
    block = (PHASES / "README.md").read_text(encoding="utf-8").split("```bash\n")[2].partition("```")[0]
    lines = [line for line in block.splitlines() if "phase" in line]
    assert len(lines) == 6
    for line in lines:
        assert "launch_phase1.sh" in line or "run_server.py -- " in line or "--serve" in line, line


# --------------------------------------------------------------------------- disk


def test_disk_is_one_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings()
    plan = settings.plan.model_copy(update={"instance_disk_gib": 3.0})
    settings = settings.model_copy(update={"plan": plan})
    assert settings.shape is not None and settings.agent.backend == "docker"
    monkeypatch.setattr(run_checks.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1500 << 30}))
    assert "about 1500.0 GiB needed" in run_checks.disk_ready(settings, RunFolder(tmp_path))
    rows = resources.Estimate(settings, settings.shape).rows()
    assert rows[0].disk == rows[5].disk == "1500 GiB of images"
    assert rows[4].disk.startswith(f"{phase5.wanted_gib(settings):.1f} GiB: ")


# --------------------------------------------------------------------------- a server's start


def test_the_process_and_its_log_are_said_before_the_server_is_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = helpers.settings_of(NOWHERE, server={"command": ["python", "-c", "raise SystemExit(3)"]})
    with pytest.raises(ServerError), run_server.running(RunSettings.model_validate(data), tmp_path / "server.log"):
        raise AssertionError("must not come here")
    said = capsys.readouterr().out
    assert re.search(r"starting as process \d+", said) and f"log {tmp_path}/server.log" in said
    assert "healthy" not in said


def test_what_needs_no_server_is_checked_before_one_is_started(tmp_path: Path) -> None:
    server = {"command": ["touch", str(tmp_path / "x")]}
    run = Run(tmp_path, NOWHERE, agent={"python": "/no/such/python"}, server=server)
    done = run.phase("phase1_baseline_eval.py", "--serve")
    assert done.returncode == 2 and "agent.python /no/such/python: not found" in done.stderr
    assert not (tmp_path / "x").exists() and not (run.folder.root / "server.log").exists()


# --------------------------------------------------------------------------- dry runs


def local_run(tmp: Path) -> Run:
    """Of the miniature's instances, with a Python for the agents that is not there: its checks fail at once."""
    data = {"name": str(PHASES / "miniature"), "expected_instances": 8}
    agent = {"backend": "local", "python": "/no/such/python"}
    return Run(tmp, NOWHERE, dataset=data, agent=agent, grading={"backend": "local"})


@pytest.mark.parametrize(
    ("main", "flags", "said"),
    [(phase1.main, (), "OK    data set: 8 instances"), (phase6.main, ("--checkpoint", "x"), "FAIL  data set: ")],
)
def test_a_dry_run_writes_nothing_and_looks_on_beside_a_running_phase(
    tmp_path: Path, main: Any, flags: tuple[str, ...], said: str
) -> None:
    run = local_run(tmp_path)
    with run.folder.locked():
        done = run.here(main, "--dry-run", *flags)
    assert done.returncode == 2 and said in done.stdout, done.stderr
    assert "another phase" not in done.stdout + done.stderr
    (run.folder.root / ".lock").unlink()
    assert list(run.folder.root.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "said"), [((), "phase5_training.py --run-dir"), (("--checkpoint", "./none"), "not found")]
)
def test_a_missing_checkpoint_is_one_line_of_phase_6s_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(run_checks, "freeze", lambda *_: [])
    run = local_run(tmp_path)
    done = run.here(phase6.main, "--dry-run", *flags)
    lines = done.stdout.splitlines()
    assert done.returncode == 2 and lines[0].startswith("FAIL  checkpoint: ") and said in lines[0]
    assert any("disk space" in line for line in lines) and any("server" in line for line in lines[1:])
    assert not run.folder.root.exists()


# --------------------------------------------------------------------------- environments in place of scenarios


def validated(run: Run, name: str, **report: Any) -> None:
    good: dict[str, Any] = {"schema_version": 1, "verdict": "pass", "environment": f"capability_{name}", "checks": []}
    helpers.write(run.folder.validation(name), good | report)


def test_an_environment_that_passed_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, NOWHERE, training={"gate_tasks": 7})
    settings = load_settings(run.config)
    args = phase5.parse_arguments(["--run-dir", str(run.folder.root)])
    validated(run, "tool_use_order")
    validated(run, "not_so_good", verdict="fail")
    assert phase5.chosen(args, run.folder, settings) == ["tool_use_order"]
    step = phase5.rollouts_step("tool_use_order", run.folder, settings)
    assert step.command[step.command.index("--env") + 1] == "capability_tool_use_order"
    assert step.command[step.command.index("--num-seeds") + 1] == "7"
    assert "TRACE_SCENARIOS" not in step.environment, "there is no scenario set"
    grpo = phase5.grpo_step(["tool_use_order"], tmp_path / "c", run.folder, settings)
    assert run.folder.validation("tool_use_order") in grpo.inputs, "another report: trained again"
    save_scenarios(generated_env.set_path(generated_env.validated(run.folder), "deep_call_graph_traversal"), [small()])
    helpers.write(run.folder.validation("deep_call_graph_traversal"), {"schema_version": 1, "verdict": "pass"})
    assert phase5.chosen(args, run.folder, settings) == ["deep_call_graph_traversal", "tool_use_order"]


def test_a_report_under_another_name_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, NOWHERE)
    validated(run, "one_name", environment="capability_other_name")
    with pytest.raises(InputError, match=r"name the file other_name\.json"):
        phase5.environments(run.folder)


def test_an_environment_that_was_changed_since_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is keyed by the hash of the source: another source needs another verdict before hours of training."""
    name = "structured_data_reasoning"  # one that ships
    real = phase5.source_hash(f"capability_{name}")
    run = Run(tmp_path, NOWHERE, training={"engine": "local", "base_model": str(tmp_path)})
    monkeypatch.setattr(phase5, "source_hash", lambda game: real)
    validated(run, name, content_hash=real)
    phase5.require_validated([name], run.folder)
    assert run.here(phase5.main, "--dry-run").returncode == 0
    for known in ({"content_hash": "0" * 64}, {}):
        validated(run, name, **known)
        with pytest.raises(InputError, match=rf"another version of {name}; run python pipeline/validate_env\S+ "):
            phase5.require_validated([name], run.folder)
        assert run.here(phase5.main, "--dry-run").returncode == 2
    assert not run.folder.phase5.exists()


def test_the_hash_is_that_of_the_report() -> None:
    game = "capability_structured_data_reasoning"
    file = ROOT / "games" / f"{game}_game.py"
    assert file.is_file()
    with SandboxedEnvironment(game) as loaded:
        assert content_hash(loaded.files()) == phase5.source_hash(game)
    with pytest.raises(InputError, match="capability_nobody_wrote_this"):
        phase5.source_hash("capability_nobody_wrote_this")


def test_a_scenario_set_that_was_changed_since_phase_4(tmp_path: Path) -> None:
    run = Run(tmp_path, NOWHERE)
    place = generated_env.validated(run.folder)
    save_scenarios(generated_env.set_path(place, "deep_call_graph_traversal"), [small()])
    report = {"schema_version": 1, "verdict": "pass"}
    for known in (generated_env.full_digest_of(place, "deep_call_graph_traversal"), "0", None):
        helpers.write(run.folder.validation("deep_call_graph_traversal"), report | {"scenarios_digest": known})
        if known and len(known) == 64:
            phase5.require_validated(["deep_call_graph_traversal"], run.folder)
            continue
        with pytest.raises(InputError, match=r"run python .*phase4_env_validation\.py .*--capabilities deep_call"):
            phase5.require_validated(["deep_call_graph_traversal"], run.folder)
