"""Running the agents: typed ends, resumption, crashes, dead servers, with a stand-in driver that needs no litellm.

The real package is run in test_swe_run_end_to_end.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import run_agent_worker
import run_agents
import run_dataset
from run_declared import git
from run_folder import RunFolder
from run_settings import RunSettings
from scripted_server import ScriptedServer
from swe_run_helpers import AGENT_PYTHON, FAKE_DRIVER, PHASES, needs_agents, row, settings_data

from pipeline.files import InputError, ServerError

CONFIG: dict[str, Any] = {
    "agent": {"instance_template": "{{task}}"},
    "model": {"model_kwargs": {}},
    "environment": {"environment_class": "local"},
}


class Bench:
    """A run of the stand-in driver. ``calls``: how often each instance was really started."""

    def __init__(self, tmp: Path, monkeypatch: pytest.MonkeyPatch, url: str, workers: int = 2) -> None:
        self.tmp, self.out = tmp, tmp / "run" / "phase1"
        self.calls_file = tmp / "calls.txt"
        self.calls_file.touch()
        driver = tmp / "driver.py"
        driver.write_text(FAKE_DRIVER.replace("CALLS", repr(str(self.calls_file))))
        monkeypatch.setattr(run_agent_worker, "DRIVER", driver)
        data = settings_data(url, agent={"python": sys.executable, "backend": "local", "workers": workers})
        data["dataset"]["repositories"] = str(tmp / "repositories")
        self.settings = RunSettings.model_validate(data)
        self.folder = RunFolder(tmp / "run")

    def instances(self, words: dict[str, str]) -> list[run_dataset.Instance]:
        """One instance for each (id, first word of the issue), with a repository of one file."""
        rows = []
        for name, word in words.items():
            repository = self.tmp / "repositories" / name
            repository.mkdir(parents=True, exist_ok=True)
            if not (repository / ".git").exists():
                (repository / "a.py").write_text("x = 1\n")
                git(repository, "init", "-q")
                git(repository, "add", "-A")
                git(repository, "commit", "-q", "-m", "base")
            commit = git(repository, "rev-parse", "HEAD").strip()
            rows.append(row(name, problem_statement=f"{word} it", base_commit=commit))
        return run_dataset.checked_rows(rows, "rows")

    def run(self, words: dict[str, str]) -> dict[str, run_agents.Outcome]:
        return self.agents().run(self.instances(words))

    def agents(self) -> run_agents.AgentRun:
        return run_agents.AgentRun(self.settings, self.folder, self.out, CONFIG, "scripted")

    def calls(self) -> list[str]:
        return sorted(self.calls_file.read_text().split())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripted_server: ScriptedServer) -> Bench:
    return Bench(tmp_path, monkeypatch, scripted_server.url)


@pytest.mark.parametrize(
    ("status", "patch", "detail", "kind"),
    [
        ("Submitted", "diff", "", "submitted"),
        ("Submitted", " \n", "", "empty_patch"),
        ("LimitsExceeded", "", "", "limit"),
        ("TimeExceeded", "", "", "limit"),
        ("ContextWindowExceededError", "", "", "limit"),
        ("BadRequestError", "", "This model's maximum context length is 65536 tokens", "limit"),
        ("BadRequestError", "", "'max_tokens' or 'max_completion_tokens' is too large: 24576", "limit"),
        ("BadRequestError", "", "temperature must be in [0, 2]", "infrastructure"),
        ("RepeatedFormatError", "", "", "format"),
        ("APIConnectionError", "", "", "infrastructure"),
        ("Timeout", "", "", "infrastructure"),
        ("CalledProcessError", "diff", "", "infrastructure"),
        ("", "", "", "infrastructure"),
    ],
)
def test_ends(status: str, patch: str, detail: str, kind: str) -> None:
    assert run_agents.classify(status, patch, detail) == kind


def test_every_end_is_typed_and_in_the_predictions(bench: Bench) -> None:
    words = {"mini__a-1": "solve", "mini__b-1": "limit", "mini__c-1": "empty", "mini__d-1": "format"}
    words |= {"mini__e-1": "crash_once", "mini__f-1": "server"}
    outcomes = bench.run(words)
    kinds = {i[6]: o.kind for i, o in outcomes.items()}
    assert kinds == {
        "a": "submitted",
        "b": "limit",
        "c": "empty_patch",
        "d": "format",
        "e": "submitted",
        "f": "infrastructure",
    }
    assert outcomes["mini__e-1"].attempts == 2 and outcomes["mini__f-1"].detail == "why"
    run_agents.write_predictions(bench.out, outcomes, "m")
    preds = json.loads((bench.out / "preds.json").read_text())
    assert {i: bool(p["model_patch"]) for i, p in preds.items()} == {i: i in ("mini__a-1", "mini__e-1") for i in words}


def test_finished_ones_are_not_run_again_and_errors_are(bench: Bench) -> None:
    words = {"mini__a-1": "solve", "mini__b-1": "server", "mini__c-1": "limit"}
    bench.run(words)
    assert bench.calls() == ["mini__a-1", "mini__b-1", "mini__b-1", "mini__c-1"]
    outcomes = bench.run(words | {"mini__b-1": "solve"})
    assert outcomes["mini__b-1"].kind == "submitted"
    assert bench.calls() == ["mini__a-1", "mini__b-1", "mini__b-1", "mini__b-1", "mini__c-1"]


def test_a_process_that_dies_says_why_and_takes_no_other_with_it(bench: Bench) -> None:
    outcomes = bench.run({"mini__a-1": "crash", "mini__b-1": "solve", "mini__c-1": "solve"})
    assert outcomes["mini__a-1"].kind == "infrastructure"
    assert outcomes["mini__a-1"].detail == "last words of the driver"
    assert outcomes["mini__b-1"].kind == outcomes["mini__c-1"].kind == "submitted"


def test_an_agent_that_hangs_is_killed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_agents, "HANG_MARGIN_S", 0.0)
    agent = bench.settings.agent.model_copy(
        update={"wall_time_limit_s": 1, "command_timeout_s": 0, "request_timeout_s": 0, "infrastructure_retries": 0}
    )
    bench.settings = bench.settings.model_copy(update={"agent": agent})
    began = time.monotonic()
    assert bench.run({"mini__a-1": "hang"})["mini__a-1"].kind == "infrastructure"
    assert time.monotonic() - began < 20


def test_a_dead_server_stops_the_run_and_loses_nothing(bench: Bench, scripted_server: ScriptedServer) -> None:
    bench.run({"mini__a-1": "solve"})
    scripted_server.stop()
    words = {"mini__a-1": "solve", "mini__b-1": "server", "mini__c-1": "server"}
    with pytest.raises(ServerError, match="died while agents ran"):
        bench.run(words)
    assert sorted(run_agents.read_outcomes(bench.out, list(words))) == ["mini__a-1"]
    scripted_server.start()
    assert {o.kind for o in bench.run(dict.fromkeys(words, "solve")).values()} == {"submitted"}
    assert bench.calls().count("mini__a-1") == 1


def test_a_server_that_dies_while_agents_wait_is_noticed(
    bench: Bench, scripted_server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents retry for minutes; the run must not wait for them."""
    monkeypatch.setattr(run_agents, "WATCH_S", 0.05)
    threading.Timer(0.5, scripted_server.stop).start()
    began = time.monotonic()
    with pytest.raises(ServerError, match="died while agents ran"):
        bench.run({"mini__a-1": "hang", "mini__b-1": "hang"})
    assert time.monotonic() - began < 15


KILLED = """
import sys
sys.path[:0] = {paths!r}
import pathlib, pytest, test_swe_run_agents as t
patch = pytest.MonkeyPatch()
bench = t.Bench(pathlib.Path({tmp!r}), patch, {url!r})
bench.run(dict.fromkeys({names!r}, "slow"))
"""


def test_a_killed_run_goes_on_where_it_was(bench: Bench, scripted_server: ScriptedServer) -> None:
    """SIGKILL in the middle: what was finished stays, no process survives, the rest is run once more."""
    names = [f"mini__{letter}-1" for letter in "abcdef"]
    code = KILLED.format(paths=sys.path, tmp=str(bench.tmp), url=scripted_server.url, names=names)
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + 60
    while len(run_agents.read_outcomes(bench.out, names)) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = set(run_agents.read_outcomes(bench.out, names))
    assert 2 <= len(done) < len(names)
    deadline = time.monotonic() + 10
    while [line for line in _processes() if str(bench.tmp / "driver.py") in line]:
        assert time.monotonic() < deadline, "the drivers must die with it"
        time.sleep(0.05)
    before = bench.calls()
    outcomes = bench.run(dict.fromkeys(names, "solve"))
    assert {o.kind for o in outcomes.values()} == {"submitted"} and sorted(outcomes) == names
    again = bench.calls()
    assert {n for n in names if again.count(n) > before.count(n)} == set(names) - done


@needs_agents
def test_the_real_driver_ends_with_its_phase_while_it_works(tmp_path: Path) -> None:
    """Its stdin closes when the phase dies, even by SIGKILL; here it is busy with a job that it can never read."""
    os.mkfifo(tmp_path / "job.json")
    driver = subprocess.Popen(
        [str(AGENT_PYTHON), "-I", str(PHASES / "run_agent_driver.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert driver.stdin is not None
    driver.stdin.write(f"{tmp_path / 'job.json'}\n".encode())
    driver.stdin.flush()
    time.sleep(0.3)
    assert driver.poll() is None
    driver.stdin.close()
    assert driver.wait(10) == -signal.SIGKILL


FAKE_PACKAGE = """
import pathlib, subprocess
class Environment:
    def __init__(self, output): self.output = output
    def stop(self): (self.output / "stopped").write_text("")
def get_sb_environment(config, instance): return Environment(pathlib.Path(config["output"]))
def process_instance(instance, output, config, progress):
    get_sb_environment({"output": str(output)}, instance)
    print("heard by the log", flush=True)
    if instance["instance_id"] == "broken":
        raise RuntimeError("cannot start")
    done = subprocess.run("cat; cat &", shell=True, capture_output=True, text=True, timeout=10)
    (output / "heard").write_text(repr(done.stdout))
"""


def test_the_driver_keeps_its_channels_to_itself(tmp_path: Path) -> None:
    """A command that reads stdin hears nothing, a background one steals no job, an exception ends one job only."""
    package = tmp_path / "fake" / "minisweagent" / "run" / "benchmarks"
    (package / "utils").mkdir(parents=True)
    (package / "swebench.py").write_text(FAKE_PACKAGE)
    (package / "utils" / "batch_progress.py").write_text("RunBatchProgressManager = int")
    lines = ""
    for name in ("one", "broken", "two"):
        job = {"instance": {"instance_id": name}, "config": {}, "output": str(tmp_path / name)}
        (tmp_path / f"{name}.json").write_text(json.dumps(job | {"log": str(tmp_path / f"{name}.log")}))
        lines += f"{tmp_path / name}.json\n"
    driver = subprocess.Popen(
        [sys.executable, str(PHASES / "run_agent_driver.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "fake")},
        start_new_session=True,
    )
    assert driver.stdin is not None and driver.stdout is not None
    driver.stdin.write(lines)
    driver.stdin.flush()
    assert [driver.stdout.readline() for _ in range(3)] == ["over\n"] * 3
    driver.stdin.close()
    driver.wait(10)
    driver.stdout.close()
    assert (tmp_path / "one" / "heard").read_text() == (tmp_path / "two" / "heard").read_text() == "''"
    assert all((tmp_path / name / "stopped").exists() for name in ("one", "broken", "two")), "also after an error"
    assert "heard by the log" in (tmp_path / "one.log").read_text()
    assert "RuntimeError: cannot start" in (tmp_path / "broken.log").read_text()


def _processes() -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return lines


def test_a_torn_trajectory_is_an_error_not_an_end(tmp_path: Path) -> None:
    path = tmp_path / "x.traj.json"
    path.write_text('{"info": {"exit_status": "Submi')
    outcome = run_agents.outcome_of("x", path, tmp_path / "absent.log", 0.0, 1)
    assert (outcome.kind, outcome.exit_status, outcome.detail) == ("infrastructure", "NoTrajectory", "no message")


def test_real_trajectories(shared_data: Path) -> None:
    folder = shared_data / "trajectories" / "mini_swe_agent"
    kinds = {p.name: run_agents.outcome_of("x", p, p, 0.0, 1) for p in folder.glob("*.traj.json")}
    assert kinds["v2.2.7_pydicom__pydicom-1256.traj.json"].kind == "submitted"
    assert kinds["v2.2.7_pydicom__pydicom-1256.traj.json"].model_calls > 10
    assert kinds["v1.15.0_django__django-16255.traj.json"].kind == "submitted"
    broken = kinds["v2.2.7_reasoner_error_pvlib__pvlib-python-1154.traj.json"]
    assert (broken.kind, broken.exit_status, broken.patch) == ("infrastructure", "Timeout", "")


def test_replies_that_were_cut_are_counted(tmp_path: Path) -> None:
    def reply(reason: str) -> dict[str, Any]:
        return {"role": "assistant", "extra": {"response": {"choices": [{"finish_reason": reason}]}}}

    path = tmp_path / "x.traj.json"
    messages = [reply("length"), reply("stop"), {"role": "user", "extra": {"response": "text"}}, reply("length")]
    path.write_text(json.dumps({"info": {"exit_status": "LimitsExceeded"}, "messages": messages}))
    assert run_agents.outcome_of("x", path, path, 0.0, 1).truncated == 2


def test_a_working_copy_holds_the_base_commit_and_no_future(bench: Bench) -> None:
    """What came after the base commit is often the fix itself."""
    (instance,) = bench.instances({"mini__a-1": "solve"})
    repository = bench.tmp / "repositories" / "mini__a-1"
    (repository / "a.py").write_text("x = 2  # the fix\n")
    git(repository, "commit", "-q", "-a", "-m", "the fix")
    run_agents.working_copy(repository, instance.base_commit, bench.tmp / "copy")
    assert (bench.tmp / "copy" / "a.py").read_text() == "x = 1\n"
    assert "fix" not in git(bench.tmp / "copy", "log", "--all", "--format=%s")
    with pytest.raises(InputError):
        run_agents.working_copy(repository, "f" * 40, bench.tmp / "copy2")


def test_a_backend_without_images_needs_repositories(bench: Bench) -> None:
    instances = run_dataset.checked_rows([row("mini__z-9")], "rows")
    with pytest.raises(InputError, match=r"set dataset\.repositories"):
        bench.agents().run(instances)
