"""What became of every instance, and Pass@1 over all of them.

    python swebench/qwen3.6_self_trace/run_accounting.py --preds preds.json [--verdicts F ...] [--trajectories DIR]

prints the account of anybody's files: predictions, harness reports or run summaries, mini-swe-agent trajectories. An
instance that was not graded is not resolved; it stays in the denominator, and the account says what happened to it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from run_agents import Outcome, outcome_of
from run_grading import Prediction, read_predictions

from pipeline.calibration_stats import Estimate, wilson
from pipeline.command_line import Parser
from pipeline.files import InputError, run_cli, to_json
from pipeline.readers.sniff import detect
from pipeline.readers.swebench import Report, Verdicts, read_verdicts

End = Literal[
    "resolved",
    "unresolved",  # graded, the tests do not pass
    "patch_failed",  # graded, the patch does not apply, or its tests gave no verdict
    "empty_patch",  # submitted nothing
    "limit",  # steps, time or context used up
    "format",  # no readable action, several times in a row
    "agent_error",  # server, container or process failed
    "harness_error",  # a patch, and no report of it
    "infra_failure",  # the harness' report says that the environment broke
    "not_run",
]
Graded = Literal["resolved", "unresolved", "patch_failed", "infra_failure"]
ERRORS: tuple[End, ...] = ("agent_error", "harness_error", "infra_failure")  # none of the agent; in the denominator
ENDS: tuple[End, ...] = get_args(End)
OF_AGENT: Mapping[str, End] = {"limit": "limit", "format": "format", "infrastructure": "agent_error"}


@dataclasses.dataclass(frozen=True)
class Account:
    """The end of every instance."""

    ends: dict[str, End]

    @property
    def n(self) -> int:
        return len(self.ends)

    def ids(self, end: End) -> list[str]:
        return sorted(i for i, e in self.ends.items() if e == end)

    def share(self, *ends: End) -> Estimate:
        """Share over all instances, with a Wilson interval."""
        return wilson(sum(e in ends for e in self.ends.values()), self.n)

    @property
    def pass_at_1(self) -> Estimate:
        return self.share("resolved")

    def errors(self) -> list[str]:
        """The instances that ended in an error; the next call tries them again."""
        return sorted(i for i, e in self.ends.items() if e in ERRORS)

    def restrict(self, ids: Sequence[str]) -> Account:
        wanted = set(ids)
        return Account({i: e for i, e in self.ends.items() if i in wanted})

    def to_json(self) -> dict[str, Any]:
        shares = {"error": self.share(*ERRORS), "empty_patch": self.share("empty_patch")}
        shares |= {"limit_terminated": self.share("limit"), "format": self.share("format")}
        shares |= {"patch_failed": self.share("patch_failed"), "not_run": self.share("not_run")}
        return {
            "instances": self.n,
            "resolved": len(self.ids("resolved")),
            "pass_at_1": estimate_json(self.pass_at_1),
            "shares": {name: estimate_json(value) for name, value in shares.items()},
            "ids": {end: self.ids(end) for end in ENDS},
        }


def estimate_json(value: Estimate) -> dict[str, Any]:
    """As JSON; the value of a share of nothing is null."""
    number = None if value.n == 0 else round(value.value, 6)
    return {"value": number, "low": round(value.low, 6), "high": round(value.high, 6), "n": value.n}


def account(
    ids: Sequence[str],
    predictions: Mapping[str, Prediction],
    verdicts: Mapping[str, Graded],
    outcomes: Mapping[str, Outcome],
) -> Account:
    """The end of each of ``ids``: the harness' verdict where there is a patch, else how the agent ended."""
    return Account({i: _end(i, predictions.get(i), verdicts.get(i), outcomes.get(i)) for i in ids})


def _end(
    instance_id: str,
    prediction: Prediction | None,
    verdict: Graded | None,
    outcome: Outcome | None,
) -> End:
    if prediction is None and outcome is None:
        return verdict or "not_run"
    if prediction is not None and (prediction.model_patch or "").strip():
        return verdict or "harness_error"
    if verdict == "resolved":
        raise InputError(f"{instance_id}: resolved without a patch; the files are not of one run")
    return OF_AGENT.get(outcome.kind, "empty_patch") if outcome is not None else "empty_patch"


def of_reports(reports: Mapping[str, Report]) -> dict[str, Graded]:
    """The verdicts of harness reports. One that names a broken environment is no verdict about the patch."""
    verdicts: dict[str, Graded] = {}
    for instance_id, report in reports.items():
        if report.resolved:
            verdicts[instance_id] = "resolved"
        elif report.infra_failure:
            verdicts[instance_id] = "infra_failure"
        else:
            verdicts[instance_id] = "patch_failed" if report.patch_successfully_applied is False else "unresolved"
    return verdicts


def of_files(paths: Sequence[Path]) -> dict[str, Graded]:
    """The verdicts of harness reports (keyed or flat) and run summaries, of one run.

    Raises:
        InputError: they contradict each other, or a file is none of these.
    """
    known = Verdicts()
    for path in paths:
        name = detect(path)
        if name is None or not name.startswith("swebench-"):
            raise InputError(f"{path}: expected a harness report or run summary, found {name or 'something unknown'}")
        read_verdicts(path, name, known)
    out: dict[str, Graded] = {}
    for instance_id, (verdict, _) in known.by_id.items():
        if verdict.outcome == "passed":
            out[instance_id] = "resolved"
        elif verdict.outcome == "failed" and verdict.reason != "empty patch":
            out[instance_id] = "patch_failed" if "does not apply" in verdict.reason else "unresolved"
    return out


def of_trajectories(folder: Path, ids: Sequence[str]) -> dict[str, Outcome]:
    """How mini-swe-agent ended, for the ids whose trajectory is somewhere under ``folder``."""
    found = {}
    for path in sorted(folder.rglob("*.traj.json")):
        for instance_id in ids:
            if path.name.endswith(f"{instance_id}.traj.json"):
                found[instance_id] = outcome_of(instance_id, path, path, 0.0, 1)
    return found


def table(name: str, value: Account) -> list[str]:
    """The account as lines of text."""
    p = value.pass_at_1
    lines = [f"{name}: Pass@1 {_percent(p)} ({len(value.ids('resolved'))} of {value.n} instances)"]
    for end in ENDS[1:]:
        if count := len(value.ids(end)):
            lines.append(f"  {end:<14} {count:>4}  {_percent(value.share(end))}")
    return lines


def _percent(value: Estimate) -> str:
    if value.n == 0:
        return "-"
    return f"{100 * value.value:.1f} % [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--preds", required=True, help="preds.json")
    parser.add_argument("--verdicts", nargs="*", default=[], help="report.json files or run summaries of the harness")
    parser.add_argument("--trajectories", help="folder with *.traj.json")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    predictions = read_predictions(Path(args.preds))
    verdicts = of_files([Path(p) for p in args.verdicts])
    ids = sorted(predictions)
    outcomes = of_trajectories(Path(args.trajectories), ids) if args.trajectories else {}
    value = account(ids, predictions, verdicts, outcomes)
    sys.stdout.write(to_json(value.to_json()) if args.json else "\n".join(table(args.preds, value)) + "\n")


if __name__ == "__main__":
    run_cli(main)
