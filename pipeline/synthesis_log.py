"""What synthesis remembers: every try with its settings, its answers and its verdict; and what it tells at the end."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environment_calls import as_unicode
from pipeline.files import InputError, check, read_jsonl
from pipeline.scenarios import Scenario, load_scenarios, save_scenarios

OUTCOMES = ("unparsed", "unsound", "unsolved", "too_easy", "unconfirmed", "accepted")
MEANINGS = {
    "unparsed": "the answer was no scenario",
    "unsound": "a check of the scenario failed",
    "unsolved": "no rollout of the first sample passed",
    "too_easy": "the pass rate stayed above the limit",
    "unconfirmed": "the fresh sample fell outside the band",
    "accepted": "kept",
}
# What decides whether a scenario is accepted; a log goes on only with the same. How scenarios are written may change.
DECISIVE = ("capability", "solver", "rollouts", "max_pass_rate")


@dataclasses.dataclass
class Try:
    """One try, as it is logged. ``measured`` holds a pass rate for each sample, in the order they were drawn.

    ``answers`` holds each answer of the writer as it came, with its seed, its end and what was wrong with it.
    """

    index: int
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    outcome: str = "unparsed"  # one of OUTCOMES
    problems: list[str] = dataclasses.field(default_factory=list)
    revisions: int = 0
    mutations: list[str] = dataclasses.field(default_factory=list)
    measured: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    scenario: dict[str, Any] | None = None
    answers: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def logged(self) -> dict[str, Any]:
        """As JSON. Half characters (``\\ud83d`` from a cut answer) are not Unicode and become question marks."""
        return {key: _unicode(value) for key, value in dataclasses.asdict(self).items()}


def _unicode(value: Any) -> Any:
    if isinstance(value, str):
        return as_unicode(value)
    if isinstance(value, list):
        return [_unicode(v) for v in value]
    return {_unicode(k): _unicode(v) for k, v in value.items()} if isinstance(value, dict) else value


@dataclasses.dataclass
class Progress:
    """What the log says: tries made, scenarios accepted, how tries ended, and the first problem of each."""

    tries: int
    accepted: list[Scenario]
    outcomes: dict[str, int]
    problems: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)

    def count(self, outcome: str, problems: Sequence[str]) -> None:
        self.tries += 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if problems:
            self.problems[outcome, problems[0]] += 1


def log_path(output: Path) -> Path:
    """``scenarios_parsed.attempts.jsonl`` beside ``scenarios_parsed.json``."""
    return output.with_name(f"{output.stem}.attempts.jsonl")


def read_log(path: Path, settings: dict[str, Any] | None = None) -> Progress:
    """The state of an earlier run.

    Args:
        settings: of this run; None takes whatever the log was made with.

    Raises:
        InputError: the log is not ours, is damaged, or was made with settings that decide otherwise.
    """
    progress = Progress(0, [], {})
    if not path.exists():
        return progress
    for number, raw in enumerate(read_jsonl(path, "log", torn_tail_ok=True), 1):
        where = f"log {path} line {number}"
        if not isinstance(raw, dict) or raw.get("index") != progress.tries or raw.get("outcome") not in OUTCOMES:
            raise InputError(f"{where}: expected try {progress.tries}; move the file away or choose another --output")
        _check_settings(raw.get("settings"), settings, where)
        problems = raw.get("problems")
        progress.count(raw["outcome"], [str(p) for p in problems] if isinstance(problems, list) else [])
        if raw["outcome"] == "accepted":
            progress.accepted.append(check(Scenario, raw.get("scenario"), where))
    return progress


def _check_settings(found: Any, wanted: dict[str, Any] | None, where: str) -> None:
    if wanted is None or not isinstance(found, dict):
        return
    for key in DECISIVE:
        if key in found and found[key] != wanted[key]:
            raise InputError(
                f"{where}: made with {key} {found[key]}, this run has {wanted[key]}; "
                "move the log and its scenarios away or choose another --output"
            )


def write_accepted(output: Path, accepted: Sequence[Scenario]) -> None:
    """The accepted scenarios behind those that the file already has (written by hand, or by another run)."""
    names = {s.name for s in accepted}
    before = [s for s in load_scenarios(output) if s.name not in names] if output.exists() else []
    if before or accepted:
        save_scenarios(output, [*before, *accepted])


def summary(progress: Progress, output: Path) -> str:
    """The end of a run in a few lines: how many were kept, how the others ended, and the commonest reasons."""
    lines = [f"{len(progress.accepted)} accepted in {progress.tries} tries -> {output}"]
    for outcome in OUTCOMES:
        count = progress.outcomes.get(outcome, 0)
        if not count:
            continue
        lines.append(f"  {count:4} {outcome:12} {MEANINGS[outcome]}")
        reasons = Counter({text: n for (kind, text), n in progress.problems.items() if kind == outcome})
        lines += [f"       {n:4} x {' '.join(text.split())[:100]}" for text, n in reasons.most_common(3)]
    lines.append(f"every answer and its settings: {log_path(output)}")
    return "\n".join(lines) + "\n"
