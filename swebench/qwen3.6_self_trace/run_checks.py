"""What ``--dry-run`` looks at before hours are spent: agents, data set, server, backends, disk, key."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import run_server
from resources import instance_count
from run_agent_config import WITHOUT_IMAGE, require_classes, shared_config, source_repository
from run_dataset import Instance, freeze, frozen, require_gradable
from run_folder import DryRun, RunFolder, agent_python, agent_versions, read_run
from run_settings import RunSettings

from pipeline import sandbox
from pipeline.files import InputError

GIB = 1 << 30
LOCAL_GIB = 0.05  # of one instance's trajectory, working copy and logs


def check_evaluation(
    report: DryRun,
    settings: RunSettings,
    folder: RunFolder,
    served_name: str | None,
    start: list[str] | None = None,
    *,
    begun: bool = False,
) -> None:
    """The lines of ``--dry-run`` that phases 1 and 6 share. Nothing is written into ``folder``.

    Args:
        served_name: what the server must offer; None when it is loaded later.
        start: the command of the server that the phase will start itself; None when one must be there.
        begun: the run must have begun: its own instances are looked at, and nothing is downloaded.
    """
    with scratch(folder) as place:
        for name, look in without_server(settings, folder if begun else place, begun=begun):
            of_instances = name == "data set" or name.endswith(WITHOUT_IMAGE)
            with report.checking(name, there=not (begun and of_instances) or folder.run_json.exists()) as found:
                found.append(look())
    models: dict[str, Any] | None = None
    with report.checking("server") as found:
        if start is None:
            models = run_server.served(settings)
            found.append(f"{settings.model.base_url}, {len(models)} models")
        else:
            found.append(startable(settings, start))
    if served_name is not None and models is not None:
        with report.checking("model name") as found:
            run_server.require_served(settings, served_name)
            found.append(served_name)
    with report.checking("disk space") as found:
        found.append(disk_ready(settings, folder))
    report.line("key", None, f"{settings.model.api_key_env} {'set' if _key(settings) else 'not set, none is sent'}")


def require_ready(settings: RunSettings, folder: RunFolder) -> None:
    """What needs no server, before minutes go into starting one.

    Raises:
        InputError: the first check that fails.
    """
    for name, look in without_server(settings, folder):
        sys.stdout.write(f"{name}: {look()}\n")
        sys.stdout.flush()


@contextlib.contextmanager
def scratch(folder: RunFolder) -> Iterator[RunFolder]:
    """Where a dry run may freeze instances: the run's own folder once the run has begun (nothing is written then),
    before that a temporary one."""
    if folder.run_json.exists() and folder.dataset.exists():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="trace-dry-run-") as temporary:
        yield RunFolder(Path(temporary))


def without_server(
    settings: RunSettings, folder: RunFolder, *, begun: bool = False
) -> list[tuple[str, Callable[[], str]]]:
    """Name and check; a check says what it found, or raises InputError. Instances are frozen in ``folder``."""
    agent, grading = settings.agent.backend, settings.grading.backend
    warning = ", commands of the model run as this user, without a sandbox" if agent == "local" else ""
    instances = Once(lambda: of_run(folder) if begun else freeze(settings, folder))
    return [
        ("agents' environment", lambda: agents_ready(settings)),
        ("agent configuration", lambda: configuration_ready(settings)),
        ("data set", lambda: data_set_ready(settings, instances())),
        (f"agent backend {agent}", lambda: backend_ready(settings, folder, agent, instances) + warning),
        (f"grading backend {grading}", lambda: backend_ready(settings, folder, grading, instances)),
    ]


def of_run(folder: RunFolder) -> list[Instance]:
    """The instances of a run that phase 1 began.

    Raises:
        InputError: it has not begun.
    """
    read_run(folder)
    return frozen(folder)


class Once:
    """Instances that several checks look at: read, downloaded or made once, and refused once."""

    def __init__(self, make: Callable[[], list[Instance]]) -> None:
        self._make = make
        self._made: list[Instance] | InputError | None = None

    def __call__(self) -> list[Instance]:
        """Raises InputError: they cannot be had."""
        if self._made is None:
            try:
                self._made = self._make()
            except InputError as error:
                self._made = error
                raise
        if isinstance(self._made, InputError):
            raise InputError("needs the data set, which failed above")
        return self._made


def data_set_ready(settings: RunSettings, instances: list[Instance]) -> str:
    """How many there are, once it is sure that they can be graded."""
    require_gradable(instances, settings.grading.backend)
    return f"{len(instances)} instances"


def agents_ready(settings: RunSettings) -> str:
    """Versions of the agents' packages.

    Raises:
        InputError: one is not installed.
    """
    versions = agent_versions(settings)
    absent = [name for name, version in versions.items() if version == "absent"]
    if absent:
        raise InputError(f"{absent[0]} is not installed in {settings.agent.python}; make agents")
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def configuration_ready(settings: RunSettings) -> str:
    """What mini-swe-agent will be told.

    Raises:
        InputError: it would not understand it.
    """
    require_classes(settings, shared_config(settings))
    return f"{settings.agent.base_config}, {settings.agent.step_limit} steps"


def startable(settings: RunSettings, command: list[str]) -> str:
    """That a server can be started: nothing is at its address, and its program is there.

    Raises:
        InputError: otherwise.
    """
    if run_server.alive(settings):
        raise InputError(f"{settings.model.base_url} is taken; set VLLM_BASE_URL to use what is there, or stop it")
    run_server.port_of(settings)
    if shutil.which(command[0]) is None:
        raise InputError(f"server.command {command[0]}: not found")
    if command[1:2] == ["-m"]:
        package = command[2].partition(".")[0]
        code = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({package!r}))"
        found = _quiet(command[0], "-c", code)
        if found is None or found.returncode != 0:
            raise InputError(f"server.command: {command[0]} has no package {package}; install it there")
    return f"will be started: {' '.join(command[:3])} ..."


def _key(settings: RunSettings) -> bool:
    return bool(os.environ.get(settings.model.api_key_env))


COMMANDS = {"docker": ("docker", "info"), "singularity": ("singularity", "--version")}
REMEDIES = {
    "docker": "start the Docker daemon, or use another agent.backend",
    "harness": "start the Docker daemon, or use grading.backend modal",
    "singularity": "install Singularity or Apptainer, or use another agent.backend",
}
# The harness talks to the daemon itself (DOCKER_HOST); a docker program that works, or is podman, is no proof.
PING = "import docker; print(docker.from_env(timeout=20).version()['Version'])"


def backend_ready(settings: RunSettings, folder: RunFolder, name: str, instances: Callable[[], list[Instance]]) -> str:
    """What was found of a backend. ``instances``: those to run; only backends without images look at them.

    Raises:
        InputError: it cannot work here.
    """
    if name == "harness":
        done = _quiet(agent_python(settings), "-I", "-c", PING)
        if done is None or done.returncode != 0:
            why = "does not answer" if done is None else (done.stderr.strip().splitlines() or ["does not answer"])[-1]
            raise InputError(f"Docker: {why[:160]}; {REMEDIES[name]}")
        return f"Docker {done.stdout.strip()}"
    if name in COMMANDS:
        program, *arguments = COMMANDS[name]
        program = os.environ.get(f"MSWEA_{program.upper()}_EXECUTABLE", program)
        path = shutil.which(program)
        done = None if path is None else _quiet(path, *arguments)
        if done is None or done.returncode != 0:
            why = "not installed" if done is None else " ".join(done.stderr.split())[:120] or "does not answer"
            raise InputError(f"{program}: {why}; {REMEDIES[name]}")
        return str(path)
    if name == "modal":
        if not (os.environ.get("MODAL_TOKEN_ID") or Path("~/.modal.toml").expanduser().exists()):
            raise InputError("no key of Modal; run `modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET")
        return "key found"
    for instance in instances():
        source_repository(settings, folder, instance.instance_id)
    return f"sandbox {sandbox.find_isolation().kind}"


def _quiet(*command: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None


def disk_ready(settings: RunSettings, folder: RunFolder) -> str:
    """Free space and what the run may take, where Docker keeps its images and where the run folder is.

    Raises:
        InputError: not enough.
    """
    n = instance_count(settings)
    wanted = {folder.root: n * LOCAL_GIB}
    said = []
    if settings.agent.backend == "docker" or settings.grading.backend == "harness":
        images = images_of(settings)
        wanted[images.place or folder.root] = images.wanted_gib
        said.append(images.text)
    for place, gib in wanted.items():
        existing = next(p for p in (place, *place.parents) if p.exists())
        free = shutil.disk_usage(existing).free / GIB
        if free < gib:
            raise InputError(f"{free:.0f} GiB free at {existing}, about {gib:.0f} GiB needed for {n} instances")
        said.append(f"{free:.0f} GiB free at {existing}, about {gib:.1f} GiB needed")
    return ", ".join(said)


@dataclasses.dataclass(frozen=True)
class Images:
    """What the images will take. ``place``: Docker's folder, None when it is not on this machine."""

    wanted_gib: float
    place: Path | None
    text: str


def images_of(settings: RunSettings) -> Images:
    """Measured on the images of SWE-bench that Docker has (their size beyond shared layers, as ``docker system df``
    says); where it has none, ``plan.instance_disk_gib``, which is an assumption."""
    docker = os.environ.get("MSWEA_DOCKER_EXECUTABLE", "docker")
    n = instance_count(settings)
    root = _quiet(docker, "info", "--format", "{{.DockerRootDir}}")
    place = Path(root.stdout.strip()) if root is not None and root.returncode == 0 and root.stdout.strip() else None
    listed = _quiet(docker, "system", "df", "-v", "--format", "{{json .Images}}", timeout_s=300.0) if place else None
    sizes = image_sizes(listed.stdout) if listed is not None and listed.returncode == 0 else []
    if len(sizes) < MEASURED:
        one, text = settings.plan.instance_disk_gib, "images: plan.instance_disk_gib, an assumption"
    else:
        one = sum(sizes) / len(sizes)
        text = f"images: {one:.2f} GiB each, measured on {len(sizes)} that are here"
    there = min(len(sizes), n)
    return Images((n - there) * one, place if place is not None and place.exists() else None, text)


MEASURED = 5  # images, before their mean is taken for that of the others
IMAGE_NAME = re.compile(r"sweb\.eval\.")
UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def image_sizes(text: str) -> list[float]:
    """GiB beyond shared layers of each image of SWE-bench, from ``docker system df -v`` as JSON."""
    try:
        images = json.loads(text)
    except ValueError:
        return []
    found = []
    for image in images if isinstance(images, list) else []:
        match = re.fullmatch(r"([0-9.]+)\s*([kKMGT]?B)", str(image.get("UniqueSize", "")))
        if match and IMAGE_NAME.search(str(image.get("Repository", ""))):
            found.append(float(match[1]) * UNITS[match[2]] / GIB)
    return found
