"""Small instances declared in one YAML file each: Git repositories and SWE-bench rows are made from them.

    python swebench/qwen3.6_self_trace/run_declared.py --source swebench/qwen3.6_self_trace/miniature --output F.jsonl

A file holds the source tree at the base commit, the issue, the gold patch, the test patch and the names of the tests
that it makes pass. Commits are made with a fixed author and date, so they have the same id everywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictStr, field_validator

from pipeline.command_line import Parser
from pipeline.files import InputError, check, read_yaml, run_cli, write_text

GIT_TIMEOUT_S = 60.0
MARK = "trace-declared"  # in .git: digest of the declaration, and the commit that was made from it
LOG_PARSER = "parse_log_django"  # of the official harness; reads the lines of `unittest -v`

# As in the images: the tests come from the base commit and the test patch, whatever the model's patch did to them; then
# they run between the harness' markers. The repository comes after Python's own modules: it cannot shadow any of them.
EVAL_SCRIPT = """#!/bin/bash
set -uxo pipefail
cd "${{TESTBED:-/testbed}}"
rm -rf -- {roots}
git checkout {commit} -- {roots}
git apply -v - <<'{mark}'
{test_patch}{mark}
: '>>>>> Start Test Output'
python3 -I -S -c 'import sys, unittest; sys.path.append("."); unittest.main(None)' -v {modules}
: '>>>>> End Test Output'
"""


class Declared(BaseModel):
    """One file. ``plays``: what the scripted model does, by the role it plays (``base``, ``trained``)."""

    model_config = ConfigDict(extra="forbid")
    instance_id: StrictStr
    repo: StrictStr
    version: StrictStr
    created_at: StrictStr
    capability: StrictStr
    problem_statement: StrictStr
    files: dict[StrictStr, StrictStr] = Field(min_length=1)
    patch: StrictStr
    test_patch: StrictStr
    FAIL_TO_PASS: list[StrictStr] = Field(min_length=1)
    PASS_TO_PASS: list[StrictStr] = Field(min_length=1)
    plays: dict[StrictStr, list[StrictStr]] = Field(default_factory=dict)

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or ".git" in path.parts:
                raise ValueError(f"{name!r} is not a path inside the repository")
        return files

    def play(self, role: str) -> list[str]:
        """The commands of a role; those of ``base`` where a role has none of its own."""
        return self.plays.get(role, self.plays.get("base", []))


def read_declared(folder: Path) -> list[Declared]:
    """Every ``*.yaml`` of a folder, by instance id.

    Raises:
        InputError: a file that does not fit, or whose name is not its instance id.
    """
    out = []
    for path in sorted(folder.glob("*.yaml")):
        declared = check(Declared, read_yaml(path, "instance"), f"instance {path}")
        if declared.instance_id != path.stem:
            raise InputError(f"instance {path}: holds {declared.instance_id!r}; name the file after it")
        out.append(declared)
    return out


def git(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    """Run Git in ``folder``, free of the user's configuration; ``env`` adds variables.

    Raises:
        InputError: it fails; the text is Git's last line.
    """
    fixed = {"NAME": "TRACE", "EMAIL": "trace@localhost", "DATE": "2026-01-01T00:00:00+00:00"}
    env = (env or {}) | {f"GIT_{who}_{key}": value for who in ("AUTHOR", "COMMITTER") for key, value in fixed.items()}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ.get("PATH", os.defpath)}
    env |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "HOME": str(folder)}
    try:
        done = subprocess.run(
            ["git", "-c", "core.autocrlf=false", "-c", "init.defaultBranch=main", *arguments],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"git {arguments[0]} in {folder}: {error}; install git") from None
    if done.returncode != 0:
        raise InputError(f"git {arguments[0]} in {folder}: {' '.join(done.stderr.split())[-200:]}")
    return done.stdout


def make_repository(declared: Declared, folder: Path) -> str:
    """A Git repository with one commit; its id. One that was made from the same declaration is kept."""
    source = hashlib.sha256(declared.model_dump_json().encode()).hexdigest()
    mark = folder / ".git" / MARK
    if mark.is_file():
        known, _, commit = mark.read_text(encoding="utf-8").partition(" ")
        if known == source:
            return commit
    building = folder.with_name(f".{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    for name, text in declared.files.items():
        path = building / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    git(building, "init", "-q", "--template=")
    git(building, "add", "-A")
    git(building, "commit", "-q", "-m", f"{declared.repo} {declared.version}")
    commit = git(building, "rev-parse", "HEAD").strip()
    (building / ".git" / MARK).write_text(f"{source} {commit}", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    building.rename(folder)
    return commit


def row_of(declared: Declared, commit: str) -> dict[str, Any]:
    """The instance as a row of the official format (swebench >= 5: with its own evaluation script)."""
    touched = [line[len("+++ b/") :] for line in declared.test_patch.splitlines() if line.startswith("+++ b/")]
    roots = sorted({path.split("/")[0] for path in touched})
    script = EVAL_SCRIPT.format(
        commit=commit,
        roots=" ".join(roots),
        mark="EOF_TEST_PATCH",
        test_patch=declared.test_patch,
        modules=" ".join(path.removesuffix(".py").replace("/", ".") for path in touched),
    )
    keep = {"capability", "files", "plays"}
    return declared.model_dump(exclude=keep) | {
        "base_commit": commit,
        "environment_setup_commit": commit,
        "hints_text": "",
        "image": "",
        "eval_script": script,
        "log_parser": LOG_PARSER,
        "eval_type": "pass_and_fail",
    }


def build(source: Path, repositories: Path) -> list[dict[str, Any]]:
    """Repositories of all declared instances under ``repositories``, and their rows."""
    rows = []
    for declared in read_declared(source):
        rows.append(row_of(declared, make_repository(declared, repositories / declared.instance_id)))
    return rows


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--source", required=True, help="folder of YAML files")
    parser.add_argument("--output", required=True, help="JSONL to write; repositories go to a folder beside it")
    args = parser.parse_args()
    output = Path(args.output).resolve()
    rows = build(Path(args.source), output.parent / "repositories")
    write_text(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    sys.stdout.write(f"{len(rows)} instances: {output}\n")


if __name__ == "__main__":
    run_cli(main)
