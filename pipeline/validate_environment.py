"""Can this environment be trained on? Plays it with policies that need no skill, and says what it would pay them.

    python pipeline/validate_environment.py games/capability_lookup_game.py
    python pipeline/validate_environment.py capability_lookup --target-tools tools.json --json-output panel.json

Exit 0 = every check passes, 1 = some check fails, 2 = could not run (no such environment, it does not import). The
environment runs in sandboxed worker processes, never in this one. The report is keyed by the hash of its source.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.command_line import Parser, ProgressLine, positive_int
from pipeline.files import InputError, read_json, run_cli, write_json
from pipeline.panel_checks import Check, run_checks
from pipeline.panel_evidence import TARGET_PACKAGES, Settings, gather, new_game
from pipeline.remote_game import SandboxedEnvironment
from tool_calls import ToolSchema

SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Panel:
    """The verdict on one environment."""

    name: str
    content_hash: str
    isolation: str
    checks: tuple[Check, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)


def validate(source: str | os.PathLike[str], settings: Settings, **options: Any) -> Panel:
    """Run the whole panel.

    Args:
        source: an environment file or a registered name.
        options: those of ``SandboxedEnvironment`` (``isolation``, ``packages``).

    Raises:
        InputError: no such file, no sandbox.
        GameError: it does not import or registers nothing.
    """
    began = time.monotonic()
    with (
        SandboxedEnvironment(source, audit=True, hash_seed="0", **options) as environment,
        SandboxedEnvironment(source, hash_seed="1", **options) as again,
    ):
        progress = ProgressLine(f"{environment.spec.name}: episodes")
        evidence = gather(environment, again, settings, progress)
        progress.close()
        return Panel(
            name=environment.spec.name,
            content_hash=content_hash(environment.files()),
            isolation=environment.isolation.kind,
            checks=tuple(run_checks(evidence)),
            seconds=time.monotonic() - began,
        )


def content_hash(files: Sequence[Path]) -> str:
    """SHA-256 over names and bytes of an environment's files: a changed environment needs a new verdict."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.name):
        data = file.read_bytes()
        digest.update(f"{file.name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def load_target_tools(source: str, isolation: str) -> tuple[ToolSchema, ...]:
    """The target's tools: a JSON file (a list of schemas, or an object with ``tools``), or a registered game's.

    Raises:
        InputError: neither, or not a list of schemas.
    """
    if not (source.endswith(".json") or os.sep in source):
        with SandboxedEnvironment(source, isolation=isolation) as target:
            game = new_game(target)
            game.reset(0)
            return tuple(game.get_tool_schemas())
    data = read_json(source, "target tools")
    tools = data.get("tools") if isinstance(data, dict) else data
    if not isinstance(tools, list) or not tools or not all(isinstance(t, dict) for t in tools):
        raise InputError(f"target tools {source}: expected a list of tool schemas, found {str(data)[:60]!r}")
    return tuple(tools)


def report(panel: Panel, settings: Settings) -> dict[str, Any]:
    """The JSON of ``--json-output``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": "pass" if panel.passed else "fail",
        "environment": panel.name,
        "content_hash": panel.content_hash,
        "isolation": panel.isolation,
        "seeds": settings.seeds,
        "floor": settings.floor,
        "checks": [dataclasses.asdict(check) for check in panel.checks],
        "seconds": round(panel.seconds, 2),
    }


def render(panel: Panel) -> str:
    """The table for a reader."""
    words = {True: "ok", False: "FAIL", None: "-"}
    lines = [f"{panel.name}  {panel.content_hash[:16]}  isolation {panel.isolation}, {panel.seconds:.1f} s"]
    for check in panel.checks:
        lines.append(f"  {words[check.passed]:5}{check.name:16}{check.found}")
        if check.passed is False:
            lines.append(f"       {'':16}expected: {check.expected}" + (f"; {check.advice}" if check.advice else ""))
    failed = [c.name for c in panel.checks if c.passed is False]
    lines.append(f"verdict: {'pass' if not failed else 'fail (' + ', '.join(failed) + ')'}")
    return "\n".join(lines)


def _parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("environment", help="an environment file, or the name of a registered game")
    add("--seeds", type=positive_int, default=100, help="seeds that each policy plays")
    add("--floor", type=float, default=0.2, help="highest mean reward of a policy without skill")
    add("--target-tools", metavar="F", help="JSON file or registered game whose tools these must equal")
    add(
        "--target-package",
        action="append",
        metavar="P",
        help=f"package of the target that must not be imported, beside {', '.join(TARGET_PACKAGES)}",
    )
    add("--latency-ms", type=float, default=10.0, help="limit on the 95th percentile of a step")
    add("--isolation", default="auto", choices=("auto", "bwrap", "process"), help="how the environment is shut in")
    add("--packages", action="store_true", help="installed third-party packages are visible to the environment")
    add("--json-output", metavar="R", help="write the report here")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if not 0 <= args.floor <= 1:
        raise InputError(f"--floor {args.floor}: expected a number in [0, 1]")
    settings = Settings(
        seeds=args.seeds,
        floor=args.floor,
        target_packages=(*TARGET_PACKAGES, *(args.target_package or ())),
        target_tools=load_target_tools(args.target_tools, args.isolation) if args.target_tools else None,
        latency_ms=args.latency_ms,
    )
    panel = validate(args.environment, settings, isolation=args.isolation, packages=args.packages)
    if args.json_output:
        write_json(args.json_output, report(panel, settings))
    sys.stdout.write(render(panel) + "\n")
    return 0 if panel.passed else 1


if __name__ == "__main__":
    run_cli(main)
