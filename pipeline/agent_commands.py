"""How each coding agent is started without a person, and where its cost can be read.

Flags are those of the agents' own command-line references (claude: print mode; codex: exec; mini-swe-agent: mini).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import shutil
from pathlib import Path

from pipeline.files import InputError

KNOWN = ("claude", "codex", "mini-swe-agent")
AGENTS_BIN = Path(__file__).resolve().parents[1] / ".venv-agents" / "bin"  # of ``make agents``


@dataclasses.dataclass(frozen=True)
class Request:
    """What to run: the prompt and the limits. ``cost_limit`` is in dollars, None for none."""

    prompt_file: Path
    work_dir: Path
    model: str | None
    cost_limit: float | None
    extra: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Launch:
    """A command line. ``stdin``: the prompt goes to standard input. ``trajectory``: a file in which the cost grows."""

    command: tuple[str, ...]
    stdin: bool
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    trajectory: Path | None = None
    notes: tuple[str, ...] = ()


def launch(agent: str, request: Request) -> Launch:
    """The command line of a known agent, or of any command.

    In a command of your own ``{prompt_file}`` and ``{model}`` are replaced; without ``{prompt_file}`` it gets the
    prompt on standard input.

    Raises:
        InputError: the program is not installed.
    """
    if agent == "claude":
        return _claude(request)
    if agent == "codex":
        return _codex(request)
    if agent == "mini-swe-agent":
        return _mini(request)
    return _custom(agent, request)


def _program(name: str, hint: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise InputError(f"--agent: program {name!r} is not on the PATH; {hint}")
    return found


def mini_program() -> str:
    """The ``mini`` of mini-swe-agent: on the PATH, else the one that ``make agents`` installs into the project.

    Raises:
        InputError: neither is there.
    """
    found = shutil.which("mini") or shutil.which("mini", path=str(AGENTS_BIN))
    if found is None:
        raise InputError(
            f"--agent: program 'mini' is not on the PATH and not in {AGENTS_BIN}; "
            "run `make agents` in the project's folder, or name another agent"
        )
    return found


def _claude(request: Request) -> Launch:
    program = _program("claude", "install Claude Code, or name another agent")
    command = [program, "-p", "--output-format", "stream-json", "--verbose", "--permission-mode", "bypassPermissions"]
    command += ["--model", request.model] if request.model else []
    command += ["--max-budget-usd", f"{request.cost_limit:g}"] if request.cost_limit is not None else []
    return Launch((*command, *request.extra), stdin=True)


def _codex(request: Request) -> Launch:
    program = _program("codex", "install the Codex CLI, or name another agent")
    command = [program, "exec", "--json", "--sandbox", "workspace-write", "--skip-git-repo-check"]
    command += ["--model", request.model] if request.model else []
    notes = ("codex reports tokens, not cost: only the time limit is enforced",) if request.cost_limit else ()
    return Launch((*command, *request.extra, "-"), stdin=True, notes=notes)


def _mini(request: Request) -> Launch:
    trajectory = request.work_dir / "agent.traj.json"
    command = [mini_program(), "--yolo", "--exit-immediately", "--output", str(trajectory)]
    command += ["--model", request.model] if request.model else []
    command += ["--cost-limit", f"{request.cost_limit:g}"] if request.cost_limit is not None else []
    command += [*request.extra, "--task", request.prompt_file.read_text(encoding="utf-8")]
    environment = {"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1"}  # it would ask questions otherwise
    return Launch(tuple(command), stdin=False, environment=environment, trajectory=trajectory)


def _custom(agent: str, request: Request) -> Launch:
    try:
        words = shlex.split(agent)
    except ValueError as error:
        raise InputError(f"--agent {agent!r}: {error}; quote it as for a shell") from None
    if not words:
        raise InputError(f"--agent: expected one of {', '.join(KNOWN)} or a command line")
    words[0] = _program(words[0], f"expected one of {', '.join(KNOWN)} or an installed program")
    has_file = any("{prompt_file}" in w for w in words)
    filled = [
        w.replace("{prompt_file}", str(request.prompt_file)).replace("{model}", request.model or "") for w in words
    ]
    return Launch((*filled, *request.extra), stdin=not has_file)


def cost_of_line(line: str) -> float | None:
    """The running cost in a line of an agent's JSON log, None when it has none."""
    if "total_cost_usd" not in line:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(line)
        cost = data.get("total_cost_usd") if isinstance(data, dict) else None
        if isinstance(cost, int | float) and not isinstance(cost, bool):
            return float(cost)
    return None


def cost_of_trajectory(path: Path) -> float | None:
    """The cost in a mini-swe-agent trajectory; None while it is missing or half-written."""
    with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        cost = json.loads(path.read_text(encoding="utf-8"))["info"]["model_stats"]["instance_cost"]
        if isinstance(cost, int | float) and not isinstance(cost, bool):
            return float(cost)
    return None
