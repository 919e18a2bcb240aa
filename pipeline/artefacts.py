"""What a stage must leave behind, checked with the programs that will read it; everything that is wrong is listed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pipeline.aggregate_capabilities import aggregate, parse_arguments
from pipeline.candidates import load_candidates
from pipeline.environment_status import N_SCENARIOS, scenario_faults
from pipeline.file_labels import check_discovery, load_subjects
from pipeline.files import InputError
from pipeline.labels import find_runs, load_runs
from pipeline.scenarios import load_scenarios
from pipeline.selection_export import read_entries, report_path
from pipeline.swe_grading import self_test
from render_pipeline import CapabilityConfig, EnvironmentConfig

VALIDATE_S = 600.0


class Checklist:
    """Collects faults; one bad artefact does not hide the next."""

    def __init__(self, started_ns: int) -> None:
        self.started_ns = started_ns
        self.faults: list[str] = []
        self.good: list[str] = []

    def check(self, what: str, action: Callable[[], str]) -> None:
        try:
            self.good.append(f"{what}: {action()}")
        except InputError as error:
            self.faults.append(f"{what}: {error}")

    def fresh(self, path: Path) -> Path:
        """``path``, if it was written since the start: what an earlier run left is not this run's work."""
        if not path.is_file():
            raise InputError(f"{path} is missing")
        if path.stat().st_mtime_ns < self.started_ns:
            raise InputError(f"{path} is from an earlier run; it was not written by this one")
        return path


def capability(config: CapabilityConfig, root: Path, started_ns: int) -> Checklist:
    """The artefacts of stage 1 under ``root``."""
    found = Checklist(started_ns)
    base = root / config.output_dir

    def path(name: str) -> Path:
        return base / f"{config.file_prefix}{name}"

    def candidates() -> str:
        file = load_candidates(found.fresh(path("candidate_capabilities.json")))
        subjects = load_subjects(found.fresh(path("summaries.json")), "mine")
        check_discovery(file, subjects, config.n_candidates, "candidates")
        return f"{len(file.candidates)}, with examples of both outcomes"

    def runs() -> str:
        files = [found.fresh(p) for p in find_runs([str(path("run_*.json"))])]
        labels = load_runs(files)
        if len(labels.attempts) != config.n_runs:
            raise InputError(f"expected {config.n_runs}, found {len(labels.attempts)}")
        return f"{len(labels.attempts)}, each of {len(labels.ids)} trajectories"

    def selection() -> str:
        export = found.fresh(path("selected_capabilities.json"))
        found.fresh(report_path(export))
        again = ["--runs", str(path("run_*.json")), "--summaries", str(path("summaries.json")), "--resamples", "1"]
        again += ["--rho", str(config.rho), "--delta", str(config.delta), "--k", str(config.k_consistency)]
        expected, _ = aggregate(parse_arguments([*again, "--export", str(export)]))
        names, ours = [e.skill for e in read_entries(export)], [e["skill"] for e in expected]
        if names != ours:
            raise InputError(f"{export} has {names}, but the runs and the thresholds give {ours}")
        return f"{', '.join(names) or 'nothing passes'}; every quote is in its message"

    found.check("candidates", candidates)
    found.check("label runs", runs)
    found.check("selection", selection)
    return found


def environment(config: EnvironmentConfig, root: Path, started_ns: int, done_before: set[str]) -> Checklist:
    """The artefacts of stage 2: one more capability is DONE, and its environment passes validation."""
    found = Checklist(started_ns)

    def new_environment() -> str:
        entries = read_entries(root / config.capabilities_file)
        new = [e for e in entries if e.status == "DONE" and e.skill not in done_before]
        if len(new) != 1:
            raise InputError(f"expected one newly DONE capability in {config.capabilities_file}, found {len(new)}")
        if not new[0].environment_path:
            raise InputError(f"{new[0].skill} is DONE without environment_path")
        path = found.fresh(root / new[0].environment_path)
        if path.suffix == ".json":
            _check_scenarios(path)
        else:
            _check_game(path, root)
        return f"{new[0].skill} in {new[0].environment_path}, validated"

    found.check("environment", new_environment)
    return found


def _check_game(path: Path, root: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("validate_environment.py")), str(path)]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=VALIDATE_S)
    except subprocess.TimeoutExpired:
        raise InputError(f"validation of {path} took more than {VALIDATE_S:g} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise InputError(f"validation of {path} says no: {last[-1] if last else 'no output'}")


def _check_scenarios(path: Path) -> None:
    """A scenario set instead of a game: enough of measured difficulty, and each passes its self-test again."""
    faults = scenario_faults(str(path), N_SCENARIOS)
    faults += [f"{s.name}: {problems[0]}" for s in load_scenarios(path) if (problems := self_test(s))]
    if faults:
        raise InputError(f"scenarios {path}: {'; '.join(faults[:3])}")


def done_skills(capabilities_file: Path) -> set[str]:
    """Which capabilities are DONE before the agent starts."""
    return {e.skill for e in read_entries(capabilities_file) if e.status == "DONE"}
