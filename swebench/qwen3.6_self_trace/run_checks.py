"""What ``--dry-run`` looks at before hours are spent: agents, data set, server, backends, disk, key."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import run_server
from resources import images_gib, instance_count
from run_agent_config import shared_config, source_repository
from run_dataset import freeze
from run_folder import DryRun, RunFolder, agent_versions
from run_settings import RunSettings

from pipeline import sandbox
from pipeline.files import InputError

GIB = 1 << 30
LOCAL_GIB = 0.05  # of one instance's trajectory, working copy and logs


def check_evaluation(
    report: DryRun, settings: RunSettings, folder: RunFolder, served_name: str | None, start: list[str] | None = None
) -> None:
    """The lines of ``--dry-run`` that phases 1 and 6 share. Nothing is written into ``folder``.

    Args:
        served_name: what the server must offer; None when it is loaded later.
        start: the command of the server that the phase will start itself; None when one must be there.
    """
    with scratch(folder) as place:
        for name, look in without_server(settings, place):
            with report.checking(name) as found:
                found.append(look())
    with report.checking("server") as found:
        if start is None:
            found.append(f"{settings.model.base_url}, {len(run_server.served(settings))} models")
        else:
            found.append(startable(settings, start))
    if served_name is not None and start is None:
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


def without_server(settings: RunSettings, folder: RunFolder) -> list[tuple[str, Callable[[], str]]]:
    """Name and check; a check says what it found, or raises InputError. Instances are frozen in ``folder``."""
    agent, grading = settings.agent.backend, settings.grading.backend
    warning = ", commands of the model run as this user, without a sandbox" if agent == "local" else ""
    return [
        ("agents' environment", lambda: agents_ready(settings)),
        ("agent configuration", lambda: configuration_ready(settings)),
        ("data set", lambda: f"{len(freeze(settings, folder))} instances"),
        (f"agent backend {agent}", lambda: backend_ready(settings, folder, agent) + warning),
        (f"grading backend {grading}", lambda: backend_ready(settings, folder, grading)),
    ]


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
    shared_config(settings)
    return f"{settings.agent.base_config}, {settings.agent.step_limit} steps"


def startable(settings: RunSettings, command: list[str]) -> str:
    """That a server can be started: nothing is at its address, and its program is there.

    Raises:
        InputError: otherwise.
    """
    if run_server.alive(settings):
        raise InputError(f"{settings.model.base_url} is taken; set VLLM_BASE_URL to use what is there, or stop it")
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


COMMANDS = {"docker": ("docker", "info"), "harness": ("docker", "info"), "singularity": ("singularity", "--version")}
REMEDIES = {
    "docker": "start the Docker daemon, or use another agent.backend",
    "harness": "start the Docker daemon, or use grading.backend modal",
    "singularity": "install Singularity or Apptainer, or use another agent.backend",
}


def backend_ready(settings: RunSettings, folder: RunFolder, name: str) -> str:
    """What was found of a backend.

    Raises:
        InputError: it cannot work here.
    """
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
    for instance in freeze(settings, folder):
        source_repository(settings, folder, instance.instance_id)
    return f"sandbox {sandbox.find_isolation().kind}"


def _quiet(*command: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None


def disk_ready(settings: RunSettings, folder: RunFolder) -> str:
    """Free space and what the run may take.

    Raises:
        InputError: not enough.
    """
    n = instance_count(settings)
    with_images = settings.agent.backend == "docker" or settings.grading.backend == "harness"
    wanted = images_gib(settings) if with_images else n * LOCAL_GIB
    existing = next(p for p in (folder.root, *folder.root.parents) if p.exists())
    free = shutil.disk_usage(existing).free / GIB
    if free < wanted:
        raise InputError(f"{free:.0f} GiB free at {existing}, about {wanted:.0f} GiB needed for {n} instances")
    return f"{free:.0f} GiB free, about {wanted:.1f} GiB needed"
