"""What mini-swe-agent is told: the package's own configuration with the run's limits, sampling and backend."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from run_folder import RunFolder, agent_python
from run_settings import ROOT, RunSettings

from pipeline import sandbox
from pipeline.files import InputError, parse_json, resolved

WITHOUT_IMAGE = ("local", "bubblewrap")
CLASSES = {"modal": "swerex_modal"}  # where the package calls a backend otherwise
TESTBED = "/testbed"  # where the images hold the repository; the package's templates name it
COMMAND_MEMORY_MB = 2048  # of one process in bubblewrap; the package sets no limit
COMMAND_FILE_MB = 64
LABEL = "trace.run"  # on containers, so that those of this run can be told from others
PROBE = Path(__file__).resolve().with_name("run_agent_probe.py")
EXTRAS = {"swerex": "{python} -m pip install 'swe-rex[modal]>=1.4'"}  # what make agents does not install

# Of `environment`, where the package's own values end an instance too early: it waits 2 minutes for an image, and stops
# a container after 2 hours, a Modal sandbox after 1; an instance may take 150 steps of 24k tokens, beside 15 others.
# Modal's commands get `env` and nothing else, so that needs what the images' conda would set.
TESTBED_BIN = "/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin"
MODAL_ENV = {"PATH": f"{TESTBED_BIN}:/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "CONDA_DEFAULT_ENV": "testbed"}
LONG_S = 12 * 3600.0
BACKEND_DEFAULTS: dict[str, dict[str, Any]] = {
    "docker": {"pull_timeout": 1800, "container_timeout": "12h"},
    "modal": {"startup_timeout": 1800.0, "runtime_timeout": LONG_S, "deployment_timeout": LONG_S, "env": MODAL_ENV},
}

PACKAGE_TIMEOUT_S = 120.0

# Prints the package's configuration of a name as JSON; the package looks in its own folders.
SHOW_CONFIG = """
import json, sys
from minisweagent.config import get_config_from_spec
print(json.dumps(get_config_from_spec(sys.argv[1])))
"""


def _asked(command: list[str], settings: RunSettings) -> subprocess.CompletedProcess[str]:
    """A question to the agents' environment.

    Raises:
        InputError: it does not answer.
    """
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=PACKAGE_TIMEOUT_S, env=agent_environment(), cwd="/"
        )
    except subprocess.TimeoutExpired:
        text = f"agent.python {settings.agent.python}: no answer within {PACKAGE_TIMEOUT_S:.0f} s; check its disk"
        raise InputError(text) from None


def base_config(settings: RunSettings) -> dict[str, Any]:
    """The package's configuration ``agent.base_config``, or a YAML file of the user.

    Raises:
        InputError: mini-swe-agent is not installed there, or knows no such configuration.
    """
    name = settings.agent.base_config
    own = ROOT / name
    command = [agent_python(settings), "-I", "-c", SHOW_CONFIG, str(own) if own.is_file() else name]
    done = _asked(command, settings)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"agent.base_config {name}: cannot be read ({last[:200]})")
    config = parse_json(done.stdout, f"agent.base_config {name}")
    if not isinstance(config, dict) or not all(isinstance(config.get(k), dict) for k in ("agent", "model")):
        raise InputError(f"agent.base_config {name}: expected the sections agent and model")
    return config


def require_classes(settings: RunSettings, config: Mapping[str, Any]) -> None:
    """That the package has the model's class and the backend's, and knows the settings that they and the agent get.

    Args:
        config: what ``shared_config`` returned.

    Raises:
        InputError: it has not, or it would ignore a setting.
    """
    agent = settings.agent
    asked = {"model_class": agent.model_class, "agent": config["agent"], "environment": config["environment"]}
    command = [agent_python(settings), "-I", str(PROBE), json.dumps(asked)]
    done = _asked(command, settings)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"agent.python {agent.python}: mini-swe-agent is another one than expected ({last[:200]})")
    found = parse_json(done.stdout, "mini-swe-agent's classes")
    if not found["model"]:
        known = ", ".join(name for name in found["models"] if name.startswith("litellm"))
        raise InputError(f"agent.model_class {agent.model_class}: mini-swe-agent has no such class; expected {known}")
    if found["ignored_by_agent"]:
        raise InputError(
            f"agent.base_config {agent.base_config}: this mini-swe-agent knows no {found['ignored_by_agent'][0]}"
        )
    environment = found["environment"]
    if problem := environment.get("problem"):
        remedy = EXTRAS.get(environment.get("missing"), "check agent.environment")
        raise InputError(f"agent.backend {agent.backend}: {problem}; {remedy.format(python=agent.python)}")
    if unknown := sorted(set(agent.environment) - set(environment["known"])):
        near = difflib.get_close_matches(unknown[0], environment["known"], n=1, cutoff=0)[0]
        raise InputError(f"agent.environment: {agent.backend} knows no {unknown[0]!r}; did you mean {near!r}?")


def agent_environment() -> dict[str, str]:
    """The environment variables of the agents: no key but the server's, no prompt, no telemetry, no cost table."""
    kept = {k: os.environ[k] for k in ("PATH", "HOME", "LANG", "TMPDIR", "DOCKER_HOST", "HF_HOME") if k in os.environ}
    prefixes = ("MODAL_", "APPTAINER_", "SINGULARITY_", "MSWEA_DOCKER_", "MSWEA_SINGULARITY_")
    kept |= {k: v for k, v in os.environ.items() if k.startswith(prefixes)}
    fixed = {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}
    return kept | fixed | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1,localhost"}


def shared_config(settings: RunSettings) -> dict[str, Any]:
    """The part that is the same for every instance and every checkpoint: what makes two evaluations comparable."""
    config, agent, sampling = base_config(settings), settings.agent, settings.sampling
    config["agent"] = config["agent"] | {
        "step_limit": agent.step_limit,
        "cost_limit": 0,
        "wall_time_limit_seconds": agent.wall_time_limit_s,
        "max_consecutive_format_errors": agent.max_consecutive_format_errors,
    }
    kwargs: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "timeout": agent.request_timeout_s,
        "drop_params": True,
    }
    if sampling.top_k is not None:
        kwargs["extra_body"] = {"top_k": sampling.top_k}  # in the body as it is: litellm would drop it elsewhere
    config["model"] = config["model"] | {
        "model_class": agent.model_class,
        "cost_tracking": "ignore_errors",
        "model_kwargs": kwargs,
    }
    config["model"].pop("model_name", None)
    environment = {"timeout": agent.command_timeout_s, "environment_class": CLASSES.get(agent.backend, agent.backend)}
    given = [config.get("environment", {}), BACKEND_DEFAULTS.get(agent.backend, {}), agent.environment]
    env = {name: value for part in given for name, value in part.get("env", {}).items()}
    config["environment"] = given[0] | environment | given[1] | given[2] | {"env": env}
    if agent.backend in WITHOUT_IMAGE:
        config["environment"].pop("interpreter", None)
        config["environment"].pop("cwd", None)
    return config


def instance_config(
    shared: dict[str, Any], settings: RunSettings, served_name: str, instance_id: str, work: Path
) -> dict[str, Any]:
    """The configuration for one instance: model, server, and for backends without images the working copy."""
    config: dict[str, Any] = json.loads(json.dumps(shared))
    config["model"]["model_name"] = f"hosted_vllm/{served_name}"
    base_url = settings.model.base_url.rstrip("/").removesuffix("/v1")
    config["model"]["model_kwargs"]["api_base"] = f"{base_url}/v1"
    environment = config["environment"]
    if settings.agent.backend == "docker":
        arguments = environment.get("run_args", ["--rm"])
        environment["run_args"] = [*arguments, "--label", f"{LABEL}={settings.run_name}.{instance_id}"]
    if settings.agent.backend in WITHOUT_IMAGE:
        environment["cwd"] = str(work)
        template = config["agent"]["instance_template"]
        config["agent"]["instance_template"] = template.replace(TESTBED, str(work))
        if settings.agent.backend == "bubblewrap":
            environment |= bubblewrap(environment.get("env", {}))
    return config


def bubblewrap(env: dict[str, str]) -> dict[str, Any]:
    """Options of the package's bubblewrap environment: no network, no variables of ours, a private /tmp, limits.

    The package appends the writable bind of the working copy, its ``env`` and the command.
    """
    if shutil.which("bwrap") is None or shutil.which("prlimit") is None:
        raise InputError("agent.backend bubblewrap: bwrap or prlimit is missing; apt-get install bubblewrap util-linux")
    limits = [f"--as={COMMAND_MEMORY_MB << 20}", f"--fsize={COMMAND_FILE_MB << 20}", "--core=0"]
    inside = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "testbed"]
    inside += [*sandbox.system_binds(), "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    python = str(Path(sandbox.PYTHON).parent)
    variables = {"PATH": f"{python}:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    kept = {k: v for k, v in env.items() if k != "BASH_ENV"}  # the images' conda
    return {
        "executable": "prlimit",
        "wrapper_args": [*limits, "bwrap", *inside],
        "env": variables | kept,
    }


def source_repository(settings: RunSettings, folder: RunFolder, instance_id: str) -> Path:
    """Where the backends without images copy an instance's repository from.

    Raises:
        InputError: there is none.
    """
    named = settings.dataset.repositories
    root = resolved(ROOT / named, "dataset.repositories") if named else folder.root / "repositories"
    repository = root / instance_id
    if not (repository / ".git").is_dir():
        raise InputError(
            f"agent.backend {settings.agent.backend}: no Git repository {repository}; set dataset.repositories "
            "to a folder with one for each instance, or use docker"
        )
    return repository
