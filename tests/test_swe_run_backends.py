"""What Docker, Singularity and Modal are told: the real packages build their commands and objects, nothing is started.

The classes are those of mini-swe-agent and swebench in the agents' environment; ``subprocess.run``, the Docker client
and swe-rex (which ``make agents`` does not install) are stand-ins that write down what they were asked.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import run_agent_config
import run_dataset
from run_agents import AgentRun
from run_folder import RunFolder
from run_settings import RunSettings
from swe_run_helpers import AGENT_PYTHON, PHASES, needs_agents, row, settings_data

from pipeline.files import InputError

IMAGE = "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
ROW = row(
    "django__django-11099",
    image=IMAGE,
    eval_script="#!/bin/bash\nset -uxo pipefail\ncd /testbed\n",
    log_parser="parse_log_django",
    eval_type="pass_and_fail",
)

# Builds the environment as the package's benchmark runner does, runs one command in it, and prints what was asked.
PROBE = """
import json, subprocess, sys, types
job = json.loads(sys.argv[1])
asked = []

class Done:
    stdout, returncode = "c0ffee\\n", 0

def run(command, **options):
    asked.append({"command": [str(c) for c in command], "timeout": options.get("timeout")})
    return Done()

subprocess.run = run
subprocess.Popen = lambda command, **_: asked.append({"command": [command], "timeout": None})

class Stand:
    def __init__(self, **given):
        asked.append({"deployment": given})
        self.runtime = types.SimpleNamespace(execute=self.execute)

    async def start(self):
        asked.append({"started": True})

    async def stop(self):
        asked.append({"stopped": True})

    async def execute(self, command):
        asked.append({"run": vars(command)})
        return types.SimpleNamespace(stdout="", exit_code=0)

if job["config"]["environment"]["environment_class"] == "swerex_modal":
    for name in ("swerex", "swerex.deployment", "swerex.deployment.modal", "swerex.runtime", "swerex.runtime.abstract"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["swerex.deployment.modal"].ModalDeployment = Stand
    sys.modules["swerex.runtime.abstract"].Command = type("Command", (types.SimpleNamespace,), {})

from minisweagent.run.benchmarks.swebench import get_sb_environment
environment = get_sb_environment(job["config"], job["instance"])
environment.execute({"command": "echo it"})
sys.path.insert(0, job["phases"])
import run_agent_driver
run_agent_driver.stop_what_was_started([environment])
kind = type(environment).__name__
del environment
print(json.dumps({"kind": kind, "asked": asked}))
"""


def asked(backend: str, tmp: Path, **agent: Any) -> dict[str, Any]:
    """What the back end was asked for one instance, with the configuration that the phases write."""
    settings = RunSettings.model_validate(settings_data("http://h:1", agent={"backend": backend, **agent}))
    instance = run_dataset.checked_rows([ROW], "row")[0]
    shared = run_agent_config.shared_config(settings)
    run = AgentRun(settings, RunFolder(tmp), tmp / "out", shared, "served")
    job = run.job(instance, tmp / "work") | {"phases": str(PHASES)}
    line = [str(AGENT_PYTHON), "-I", "-c", PROBE, json.dumps(job)]
    done = subprocess.run(line, capture_output=True, text=True, env=run_agent_config.agent_environment(), timeout=60)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))  # the package logs before it


@needs_agents
def test_docker(tmp_path: Path) -> None:
    found = asked("docker", tmp_path, environment={"run_args": ["--rm", "--network=none"], "env": {"MINE": "1"}})
    start, execute, stop = found["asked"]
    line = start["command"]
    assert found["kind"] == "DockerEnvironment" and line[:4] == ["docker", "run", "-d", "--name"]
    assert line[5:7] == ["-w", "/testbed"] and line[-3:] == [IMAGE, "sleep", "12h"], (
        "the image that grades, long enough"
    )
    label = "trace.run=swebench_miniature.django__django-11099"
    assert line[7:-3] == ["--rm", "--network=none", "--label", label]
    assert start["timeout"] == 1800 and execute["timeout"] == 20
    line = execute["command"]
    assert line[:4] == ["docker", "exec", "-w", "/testbed"] and line[-4:] == ["c0ffee", "bash", "-c", "echo it"]
    given = {line[n + 1] for n, word in enumerate(line) if word == "-e"}
    assert {"BASH_ENV=/root/.bashrc", "PAGER=cat", "MINE=1"} <= given, "the images' conda, and our own beside it"
    assert "docker stop c0ffee" in stop["command"][0]


@needs_agents
def test_singularity(tmp_path: Path) -> None:
    found = asked("singularity", tmp_path)
    build, execute = found["asked"]
    assert build["command"][:3] == ["singularity", "build", "--sandbox"]
    assert build["command"][-1] == f"docker://{IMAGE}"
    line = execute["command"]
    assert line[:3] == ["singularity", "--quiet", "exec"] and line[line.index("--pwd") + 1] == "/testbed"
    assert line[-5:-3] == ["--writable", build["command"][3]] and line[-3:] == ["bash", "-c", "echo it"]
    assert "BASH_ENV=/root/.bashrc" in line


@needs_agents
def test_modal(tmp_path: Path) -> None:
    """Its commands see ``env`` and nothing else (swe-rex hands it to ``subprocess.run``), so PATH must be in it."""
    found = asked("modal", tmp_path)
    made, started, execute, stopped = found["asked"]
    assert started and stopped, "a sandbox that nobody stops is paid for until its time is up"
    made = made["deployment"]
    assert made["image"] == IMAGE and made["runtime_timeout"] == made["deployment_timeout"] == 12 * 3600
    known = {
        "image",
        "startup_timeout",
        "runtime_timeout",
        "deployment_timeout",
        "install_pipx",
        "modal_sandbox_kwargs",
    }
    assert set(made) == known, "what swe-rex 1.4 takes"
    run = execute["run"]
    assert run["env"]["PATH"].startswith("/opt/miniconda3/envs/testbed/bin:") and run["env"]["PAGER"] == "cat"
    assert run["cwd"] == "/testbed" and run["command"] == "echo it"


@needs_agents
@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ({"model_class": "litelm"}, "no such class; expected litellm, litellm_response, litellm_textbased"),
        ({"model_class": "minisweagent.models.litellm_model.Litellm"}, "no such class"),
        ({"model_class": "no_such_package.Model"}, "no such class"),
        ({"backend": "docker", "environment": {"pull_timout": 3}}, "did you mean 'pull_timeout'"),
        ({"backend": "singularity", "environment": {"container_timeout": "12h"}}, "singularity knows no"),
        ({"backend": "docker", "environment": {"run_args": "--rm"}}, "refuses its settings"),
        ({"base_config": "BASE"}, "knows no step_limits"),
    ],
)
def test_what_the_package_would_ignore_or_refuse(agent: dict[str, Any], words: str, tmp_path: Path) -> None:
    """A class that is not there, or a misspelt setting, would be found out in the first instance, or never."""
    if agent.get("base_config") == "BASE":
        base = tmp_path / "base.yaml"
        base.write_text("agent: {system_template: s, instance_template: i, step_limits: 3}\nmodel: {}\n")
        agent = {"base_config": str(base)}
    settings = RunSettings.model_validate(settings_data(agent=agent))
    with pytest.raises(InputError) as error:
        run_agent_config.require_classes(settings, run_agent_config.shared_config(settings))
    assert words in str(error.value) and "\n" not in str(error.value)


@needs_agents
@pytest.mark.parametrize("name", ["litellm", "litellm_textbased", "minisweagent.models.litellm_model.LitellmModel"])
def test_model_classes_that_are_there(name: str) -> None:
    settings = RunSettings.model_validate(settings_data(agent={"model_class": name}))
    run_agent_config.require_classes(settings, run_agent_config.shared_config(settings))


@needs_agents
def test_modal_without_swe_rex_says_what_to_install() -> None:
    if any(AGENT_PYTHON.parents[1].glob("lib/*/site-packages/swerex")):
        pytest.skip("swe-rex is installed")
    settings = RunSettings.model_validate(settings_data(agent={"backend": "modal"}))
    with pytest.raises(InputError, match=r"pip install 'swe-rex\[modal\]>=1.4'"):
        run_agent_config.require_classes(settings, run_agent_config.shared_config(settings))


def test_an_environment_whose_variables_are_no_text() -> None:
    for env in ({"A": 1}, ["A"]):
        with pytest.raises(ValueError, match="quote numbers"):
            RunSettings.model_validate(settings_data(agent={"environment": {"env": env}}))


def test_unpacked_images_of_a_killed_run_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    settings = RunSettings.model_validate(settings_data(agent={"backend": "singularity", "python": "/bin/true"}))
    run = AgentRun(settings, RunFolder(tmp_path), tmp_path / "out", {}, "m")
    assert run._environment()["TMPDIR"] == str(run.sandboxes) and run.sandboxes.is_relative_to(tmp_path)
    (run.sandboxes / "minisweagent-12345678").mkdir(parents=True)
    assert run.run([]) == {} and not run.sandboxes.exists()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "big"))
    other = AgentRun(settings, RunFolder(tmp_path), tmp_path / "out2", {}, "m")
    assert other.sandboxes.parent == tmp_path / "big", "the user's own choice of a disk"


# Creates the container of the official harness with a client that writes down what it is asked.
HARNESS = """
import json, logging, sys
from unittest import mock
from swebench.harness import run_evaluation
from swebench.harness.utils import make_test_spec
spec = make_test_spec(json.loads(sys.argv[1]))
client = mock.MagicMock()
run_evaluation.create_container(spec, client, "trace", logging.getLogger("x"))
created = client.containers.create.call_args.kwargs
print(json.dumps({"image": created["image"], "name": created["name"], "script": spec.eval_script}))
"""


@needs_agents
def test_the_harness_grades_in_the_image_that_the_agent_works_in() -> None:
    line = [str(AGENT_PYTHON), "-I", "-c", HARNESS, json.dumps(ROW)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["image"] == IMAGE and found["name"] == "sweb.eval.django__django-11099.trace"
    assert "cd /testbed" in found["script"]


@pytest.mark.parametrize(
    ("column", "backend"), [("image", "harness"), ("eval_script", "modal"), ("log_parser", "local")]
)
def test_rows_that_cannot_be_graded_are_refused_before_any_agent_runs(column: str, backend: str) -> None:
    good = run_dataset.checked_rows([ROW], "row")
    run_dataset.require_gradable(good, backend)
    without = run_dataset.checked_rows([{k: v for k, v in ROW.items() if k != column}], "row")
    with pytest.raises(InputError, match=f"no column {column!r}; .*SWE-bench/SWE-bench_Verified"):
        run_dataset.require_gradable(without, backend)
