"""Grading by the official harness, and agents in containers: what can be tested of both without Docker."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import run_agent_config
import run_checks
import run_dataset
import run_grading
from run_agents import AgentRun
from run_checks import backend_ready, disk_ready
from run_folder import RunFolder
from run_settings import RunSettings, load_settings
from swe_run_helpers import build_miniature, needs_agents, settings_data

from pipeline.files import InputError, ServerError

# Stands in for the agents' Python: plays the harness, which writes its logs into the working directory.
HARNESS = """#!{python}
import json, pathlib, sys
arguments = sys.argv[1:]
pathlib.Path("arguments.json").write_text(json.dumps(arguments))
assert arguments[:2] == ["-m", "swebench.harness.run_evaluation"], arguments
flags = {{a: arguments[n + 1] for n, a in enumerate(arguments) if a.startswith("--")}}
if {fails}:
    sys.exit("docker.errors.DockerException: no daemon")
for i, p in json.loads(pathlib.Path(flags["--predictions_path"]).read_text()).items():
    if not p["model_patch"]:
        continue
    root = pathlib.Path("logs/run_evaluation") / flags["--run_id"] / p["model_name_or_path"].replace("/", "__") / i
    if (root / "report.json").exists():
        continue
    root.mkdir(parents=True, exist_ok=True)
    (root / "patch.diff").write_text(p["model_patch"])
    if p["model_patch"] == "breaks the harness":
        continue
    report = {{"patch_is_None": False, "patch_exists": True, "patch_successfully_applied": True,
               "resolved": p["model_patch"] == "good"}}
    (root / "report.json").write_text(json.dumps({{i: report}}))
"""


def harness(tmp: Path, fails: bool = False) -> str:
    path = tmp / "harness"
    path.write_text(HARNESS.format(python=sys.executable, fails=fails))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


class Case:
    """Miniature rows, and predictions by the last letter of the instance."""

    def __init__(self, tmp: Path, patches: dict[str, str], **sections: Any) -> None:
        self.tmp, self.folder = tmp, RunFolder(tmp / "run")
        rows = run_dataset.checked_rows(build_miniature(self.folder.root / "repositories"), "rows")
        self.instances = [i for i in rows if i.instance_id[-1] in patches]
        self.out = self.folder.phase1
        self.out.mkdir(parents=True)
        self.folder.dataset.write_text("".join(json.dumps(i.row()) + "\n" for i in self.instances))
        grading = {"backend": "harness"} | sections.pop("grading", {})
        self.settings = RunSettings.model_validate(settings_data(grading=grading, **sections))
        self.predict(patches)

    def predict(self, patches: dict[str, str]) -> None:
        names = {i.instance_id[-1]: i.instance_id for i in self.instances}
        entries = {
            names[n]: {"instance_id": names[n], "model_name_or_path": "org/m", "model_patch": patch}
            for n, patch in patches.items()
        }
        (self.out / "preds.json").write_text(json.dumps(entries))

    def grade(self) -> dict[str, bool | None]:
        reports = run_grading.grade(self.settings, self.folder, self.out, self.instances)
        return {i[-1]: report.resolved for i, report in reports.items()}


def test_the_harness_grades_the_frozen_data_set(tmp_path: Path) -> None:
    case = Case(tmp_path, {"1": "good", "2": "bad", "3": ""}, agent={"python": harness(tmp_path)})
    assert case.grade() == {"1": True, "2": False}
    arguments = json.loads((case.out / "grading" / "arguments.json").read_text())
    flags = {a: arguments[n + 1] for n, a in enumerate(arguments) if a.startswith("--")}
    assert flags["--dataset_name"] == str(case.folder.dataset) and flags["--modal"] == "false"
    assert flags["--timeout"] == "60" and arguments[-3:] == [i.instance_id for i in case.instances]
    keyed = json.loads((case.out / "report.json").read_text())
    assert keyed["mini__ledger-1"]["resolved"] is True and set(keyed) == {"mini__ledger-1", "mini__pathroute-2"}


def test_two_runs_on_one_docker_host_have_containers_of_different_names(tmp_path: Path) -> None:
    """The harness removes a container of the name that it wants: another run's, in the middle of its tests."""
    names = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        case = Case(tmp_path / place, {"1": "good"}, agent={"python": harness(tmp_path / place)})
        for _ in range(2):  # the second call goes on in the same logs
            assert case.grade() == {"1": True}
            arguments = json.loads((case.out / "grading" / "arguments.json").read_text())
            names.append(arguments[arguments.index("--run_id") + 1])
    assert names[0] == names[1] != names[2] == names[3] and all(name.startswith("trace-") for name in names)


def test_a_new_patch_of_an_instance_is_graded_anew(tmp_path: Path) -> None:
    case = Case(tmp_path, {"1": "bad", "2": "good"}, agent={"python": harness(tmp_path)})
    assert case.grade() == {"1": False, "2": True}
    case.predict({"1": "good", "2": "good"})
    assert case.grade() == {"1": True, "2": True}


def test_what_broke_on_modal_is_tried_again(tmp_path: Path) -> None:
    """The harness passes over the folders that are there, also those without a report."""
    python = harness(tmp_path)
    case = Case(tmp_path, {"1": "breaks the harness"}, agent={"python": python}, grading={"backend": "modal"})
    assert case.grade() == {}
    (prediction,) = run_grading.read_predictions(case.out / "preds.json").values()
    logs = run_grading.log_folder(case.out / "grading", prediction)
    (logs / "run_instance.log").write_text("the first try")
    case.grade()
    assert logs.exists() and not (logs / "run_instance.log").exists()


def test_a_harness_that_fails_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    case = Case(tmp_path, {"1": "good"}, agent={"python": harness(tmp_path, fails=True)})
    with pytest.raises(ServerError, match=r"harness ended with 1; .*no daemon"):
        case.grade()
    assert not (case.out / "report.json").exists()


@needs_agents
def test_the_real_harness_takes_our_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets as far as Docker, which is not there: flags, data set and predictions were all read."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    case = Case(tmp_path, {"1": "diff", "2": ""})
    with pytest.raises(ServerError, match="ended with 1"):
        case.grade()
    log = (case.out / "grading" / "harness.log").read_text()
    assert "DockerException" in log and "unrecognized arguments" not in log and "KeyError" not in log


def test_containers_are_labelled_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed run leaves containers behind; the next one removes its own, and no others."""
    calls = tmp_path / "calls"
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n[ "$1" = ps ] && echo c1 && echo c2\nexit 0\n')
    docker.chmod(0o755)
    monkeypatch.setenv("MSWEA_DOCKER_EXECUTABLE", str(docker))
    settings = load_settings()
    shared = {"agent": {}, "model": {"model_kwargs": {}}, "environment": {"run_args": ["--rm", "--network=none"]}}
    config = run_agent_config.instance_config(shared, settings, "m", "a__b-1", tmp_path)
    label = f"{run_agent_config.LABEL}=qwen36_self_trace.a__b-1"
    assert config["environment"]["run_args"] == ["--rm", "--network=none", "--label", label]
    settings = settings.model_copy(update={"agent": settings.agent.model_copy(update={"python": sys.executable})})
    run = AgentRun(settings, RunFolder(tmp_path), tmp_path, shared, "m")
    run._remove_containers("a__b-1")
    assert calls.read_text().splitlines() == [f"ps -aq --filter label={label}", "rm -f c1 c2"]


def test_the_served_model_is_asked_by_litellm(tmp_path: Path) -> None:
    settings = load_settings()
    shared = {"agent": {}, "model": {"model_kwargs": {"temperature": 0.7}}, "environment": {}}
    config = run_agent_config.instance_config(shared, settings, "Qwen/Qwen3.6-27B", "a__b-1", tmp_path)
    assert config["model"]["model_name"] == "hosted_vllm/Qwen/Qwen3.6-27B"
    assert config["model"]["model_kwargs"] == {"temperature": 0.7, "api_base": "http://localhost:8000/v1"}
    assert shared["model"] == {"model_kwargs": {"temperature": 0.7}}, "the shared part must stay as it is"


@pytest.mark.parametrize("base_url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_v1_suffix_is_optional(base_url: str, tmp_path: Path) -> None:
    settings = RunSettings.model_validate(settings_data(base_url, agent={"backend": "docker"}))
    shared = {"agent": {}, "model": {"model_kwargs": {}}, "environment": {}}
    config = run_agent_config.instance_config(shared, settings, "m", "a__b-1", tmp_path)
    assert config["model"]["model_kwargs"]["api_base"] == "http://h:1/v1"


def test_bubblewrap_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command as the package does: no network, none of our variables, nothing of ours readable or writable."""
    monkeypatch.setenv("VLLM_API_KEY", "a-secret-key")
    work = tmp_path / "testbed"
    work.mkdir()
    (tmp_path / "secret.txt").write_text("a-secret-file")
    options = run_agent_config.bubblewrap({"PAGER": "cat", "BASH_ENV": "/root/.bashrc"})
    assert "BASH_ENV" not in options["env"]
    line = [options["executable"], *options["wrapper_args"], "--bind", str(work), str(work), "--chdir", str(work)]
    for name, value in options["env"].items():
        line += ["--setenv", name, value]
    probe = (
        f"env; cat {tmp_path}/secret.txt; ls /root /home /etc/passwd; cat /proc/net/route; touch /usr/x {tmp_path}/x;"
        " python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 22), 2)'; git --version; echo made > kept"
    )
    done = subprocess.run([*line, "bash", "-c", probe], capture_output=True, text=True, timeout=60)
    assert "a-secret" not in done.stdout + done.stderr and "PAGER=cat" in done.stdout and "git version" in done.stdout
    assert "ConnectionRefusedError" in done.stderr, "loopback of its own, without a server"
    assert len(done.stdout.partition("git version")[0].partition("Iface")[2].splitlines()) <= 1, "no route"
    assert (work / "kept").read_text() == "made\n" and not (tmp_path / "x").exists()
    big = subprocess.run([*line, "bash", "-c", "head -c 100M /dev/zero > big"], capture_output=True, timeout=60)
    assert big.returncode != 0 and (work / "big").stat().st_size <= run_agent_config.COMMAND_FILE_MB << 20


def test_backends_that_cannot_work_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RunSettings.model_validate(settings_data())
    folder = RunFolder(tmp_path)
    for name in ("DOCKER", "SINGULARITY"):
        monkeypatch.setenv(f"MSWEA_{name}_EXECUTABLE", "/bin/false")
    for backend, words in (("docker", "Docker daemon"), ("singularity", "Apptainer")):
        with pytest.raises(InputError, match=words):
            backend_ready(settings, folder, backend, list)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MODAL_TOKEN_ID", raising=False)
    with pytest.raises(InputError, match="modal token new"):
        backend_ready(settings, folder, "modal", list)
    monkeypatch.setenv("MODAL_TOKEN_ID", "x")
    assert backend_ready(settings, folder, "modal", list) == "key found"


@needs_agents
def test_the_harness_is_asked_whether_it_reaches_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own client: a ``docker`` program that answers (podman, a context of its own) is not what it uses."""
    monkeypatch.setenv("MSWEA_DOCKER_EXECUTABLE", "/bin/true")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    settings = RunSettings.model_validate(settings_data())
    assert backend_ready(settings, RunFolder(tmp_path), "docker", list) == "/bin/true"
    with pytest.raises(InputError, match=r"^Docker: docker\.errors\.DockerException.*grading\.backend modal$"):
        backend_ready(settings, RunFolder(tmp_path), "harness", list)


def test_disk_space_is_counted_per_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings()
    usage = os.statvfs(tmp_path)
    assert usage.f_bavail >= 0
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": 100 << 30})())
    monkeypatch.setenv("MSWEA_DOCKER_EXECUTABLE", "/bin/false")
    with pytest.raises(InputError, match="about 500 GiB needed for 500 instances"):
        disk_ready(settings, RunFolder(tmp_path / "not" / "there"))
    assert "0.4 GiB needed" in disk_ready(RunSettings.model_validate(settings_data()), RunFolder(tmp_path))


def docker_with(tmp: Path, images: list[dict[str, str]]) -> Path:
    """A ``docker`` whose images lie in ``<tmp>/docker`` and are these."""
    (tmp / "docker").mkdir()
    (tmp / "images.json").write_text(json.dumps(images))
    program = tmp / "program"
    answers = [f"[ $1 = info ] && echo {tmp}/docker && exit 0", f"[ $1 = system ] && exec cat {tmp}/images.json"]
    program.write_text("\n".join(["#!/bin/sh", *answers, "exit 1"]))
    program.chmod(0o755)
    return program


def image(n: int, size: str) -> dict[str, str]:
    return {"Repository": f"swebench/sweb.eval.x86_64.a_1776_a-{n}", "Tag": "latest", "UniqueSize": size}


def test_the_size_of_images_is_measured_where_some_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Docker's own count beyond shared layers; other images are not counted, and those here need no more room."""
    images = [image(n, size) for n, size in enumerate(["1.5GB", "500MB", "2GB", "1GB", "1000000kB"])]
    other = [{"Repository": "postgres", "UniqueSize": "900GB"}, image(9, "N/A")]
    monkeypatch.setenv("MSWEA_DOCKER_EXECUTABLE", str(docker_with(tmp_path, images + other)))
    found = run_checks.images_of(load_settings())
    one = 1.2e9 / 2**30
    assert found.wanted_gib == pytest.approx(495 * one) and found.place == tmp_path / "docker"
    assert found.text == f"images: {one:.2f} GiB each, measured on 5 that are here"


@pytest.mark.parametrize("images", [[], [image(1, "9GB")] * 4])
def test_too_few_images_leave_the_assumption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: list[dict[str, str]]
) -> None:
    monkeypatch.setenv("MSWEA_DOCKER_EXECUTABLE", str(docker_with(tmp_path, images)))
    found = run_checks.images_of(load_settings())
    assert found.wanted_gib == 500 - len(images) and "an assumption" in found.text


def test_room_is_asked_for_where_docker_keeps_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run folder's disk may be full of room, and Docker's not."""
    monkeypatch.setenv("MSWEA_DOCKER_EXECUTABLE", str(docker_with(tmp_path, [])))
    free = {str(tmp_path / "docker"): 100 << 30}
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": free.get(str(path), 9000 << 30)})())
    with pytest.raises(InputError, match=f"100 GiB free at {tmp_path}/docker, about 500 GiB needed"):
        disk_ready(load_settings(), RunFolder(tmp_path / "run"))
