"""Base and checkpoints in one table: the same instances, the same protocol, differences paired by instance."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from run_accounting import ENDS, ERRORS, Account, End, estimate_json
from run_evaluation import Summary
from run_folder import RunFolder

from pipeline.calibration_stats import Estimate
from pipeline.files import InputError, write_json, write_text
from train.evaluation_stats import Interval, paired_difference

HEADS: tuple[tuple[str, tuple[End, ...]], ...] = (
    ("errors", (*ERRORS, "not_run")),
    ("empty patch", ("empty_patch",)),
    ("limit", ("limit", "format")),
    ("patch fails", ("patch_failed",)),
)


@dataclasses.dataclass(frozen=True)
class Paired:
    """Checkpoint against base on identical instances.

    ``difference``: Pass@1 of the checkpoint minus that of the base, with a paired bootstrap interval over instances.
    ``won`` and ``lost``: instances that only the checkpoint, only the base resolved. ``p_value``: exact McNemar test
    (two-sided binomial over the discordant instances; McNemar 1947).
    """

    difference: Interval
    won: tuple[str, ...]
    lost: tuple[str, ...]
    p_value: float

    def to_json(self) -> dict[str, Any]:
        gone = {"won": list(self.won), "lost": list(self.lost), "mcnemar_p": round(self.p_value, 6)}
        return {"difference": self.difference.to_json(), **gone}


def mcnemar(won: int, lost: int) -> float:
    """min(1, 2 * P[X <= min(won, lost)]) for X ~ Binomial(won + lost, 1/2), in exact integers."""
    n, low = won + lost, min(won, lost)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(low + 1)) / (1 << n))


def paired(base: Account, other: Account) -> Paired:
    """Compare two accounts of the same instances.

    Raises:
        ValueError: their instances differ.
    """
    if base.ends.keys() != other.ends.keys():
        raise ValueError("the accounts are of different instances")
    ids = sorted(base.ends)
    before, after = ([account.ends[i] == "resolved" for i in ids] for account in (base, other))
    won = tuple(i for i, b, a in zip(ids, before, after, strict=True) if a and not b)
    lost = tuple(i for i, b, a in zip(ids, before, after, strict=True) if b and not a)
    after_N, before_N = ({n: float(value) for n, value in enumerate(values)} for values in (after, before))
    return Paired(paired_difference(after_N, before_N), won, lost, mcnemar(len(won), len(lost)))


def require_comparable(base: Summary, other: Summary) -> Account:
    """The base's account on the instances of ``other``.

    Raises:
        InputError: another protocol, an instance that the base did not run, or one whose row has changed.
    """
    if changed := base.protocol.differences(other.protocol):
        shown = ", ".join(changed[:3])
        raise InputError(f"{base.name} and {other.name} differ in {shown}; run both with one configuration")
    missing = sorted(other.instances.keys() - base.instances.keys())
    if missing:
        raise InputError(f"{base.name} was not run on {missing[0]}; run phase 1 on all instances")
    if moved := sorted(i for i, row in other.instances.items() if base.instances[i] != row):
        raise InputError(f"{moved[0]} is not the same instance in {base.name} and {other.name}; use one data set")
    return base.to_account().restrict(list(other.instances))


def compare(folder: RunFolder, base: Summary, others: Sequence[Summary], part: str) -> tuple[Path, str]:
    """Write ``comparison.json`` and ``comparison.md``; the table's path and text.

    Args:
        others: evaluations of one and the same set of instances.
        part: what that set is called.
    """
    account = require_comparable(base, others[0])
    rows: list[tuple[Summary, Account, Paired | None]] = [(base, account, None)]
    for other in others:
        require_comparable(base, other)
        rows.append((other, other.to_account(), paired(account, other.to_account())))
    systems = [_row_json(summary, value, difference) for summary, value, difference in rows]
    write_json(
        folder.phase6 / "comparison.json",
        {
            "schema_version": 1,
            "run_name": base.run_name,
            "part": part,
            "instances": sorted(account.ends),
            "protocol_digest": base.protocol_digest,
            "systems": systems,
        },
    )
    text = markdown(base.run_name, part, rows)
    path = folder.phase6 / "comparison.md"
    write_text(path, text)
    return path, text


def _row_json(summary: Summary, value: Account, difference: Paired | None) -> dict[str, Any]:
    return {
        "name": summary.name,
        "model": summary.model,
        "checkpoint": summary.checkpoint,
        "resolved": len(value.ids("resolved")),
        "pass_at_1": estimate_json(value.pass_at_1),
        "ends": {end: len(value.ids(end)) for end in ENDS},
        "against_base": None if difference is None else difference.to_json(),
    }


def markdown(run_name: str, part: str, rows: Sequence[tuple[Summary, Account, Paired | None]]) -> str:
    """The table: rates in percent with 95 % intervals, differences in percentage points."""
    n = rows[0][1].n
    lines = [f"# {run_name}: {n} instances ({part}), Pass@1 over all of them", ""]
    heads = ["system", "Pass@1 %", "against base, points", "won / lost", "p", *(head for head, _ in HEADS)]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for summary, value, difference in rows:
        shares = [f"{100 * value.share(*ends).value:.1f}" if n else "-" for _, ends in HEADS]
        cells = [summary.name, _percent(value.pass_at_1), *_difference(difference), *shares]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Intervals: Wilson for rates, paired bootstrap over instances for differences; p: exact McNemar."]
    return "\n".join(lines) + "\n"


def _percent(value: Estimate) -> str:
    return f"{100 * value.value:.1f} [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def _difference(value: Paired | None) -> list[str]:
    if value is None:
        return ["", "", ""]
    d = value.difference
    points = f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"
    return [points, f"{len(value.won)} / {len(value.lost)}", f"{value.p_value:.3f}"]
