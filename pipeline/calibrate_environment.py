"""Is this environment worth training on? Reads a rollouts file and answers accept or reject, with intervals.

    python pipeline/calibrate_environment.py rollouts.json --json-output calibration.json

Exit 0 = accept, 1 = reject, or inconclusive (fewer than ``--min-groups`` seeds with four scored rollouts each),
2 = could not judge (bad file, too many failed episodes). The verdict is about rollouts without a hint, because hints
are taken away before the update; hinted ones are reported beside them.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from pipeline.calibration_stats import Estimate, GroupStats, group_stats, wilson
from pipeline.command_line import Parser, non_negative_int
from pipeline.files import InputError, run_cli, write_json
from pipeline.rollout_schema import Rollout, RolloutFile, load_rollouts

SCHEMA_VERSION = 1
MIN_GROUPS = 8
MIN_ROLLOUTS = 4  # of a group that counts towards MIN_GROUPS


@dataclasses.dataclass(frozen=True)
class Bands:
    """Where an environment has to lie; all ends inclusive."""

    mean_min: float = 0.2
    mean_max: float = 0.6
    success_min: float = 0.2
    success_max: float = 0.6
    max_all_success: float = 0.2
    max_all_zero: float = 0.2
    max_constant: float = 0.5
    max_error_rate: float = 0.05


@dataclasses.dataclass(frozen=True)
class Criterion:
    """One band with what was found. ``advice`` says what to do when it is missed."""

    name: str
    found: Estimate
    low: float
    high: float
    advice: str

    @property
    def passed(self) -> bool:
        # a share over no group (every group has one rollout) is nan and cannot pass
        return self.low - 1e-12 <= self.found.value <= self.high + 1e-12


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The verdict and everything it rests on."""

    criteria: tuple[Criterion, ...]
    unhinted: GroupStats
    hinted: GroupStats | None
    error_rate: Estimate
    error_kinds: dict[str, int]
    truncation: Estimate
    out_of_turns: Estimate
    large_groups: int  # without a hint, with at least MIN_ROLLOUTS scored rollouts
    min_groups: int

    @property
    def verdict(self) -> str:
        """``accept``, ``reject``, or ``inconclusive``: too few groups to say either."""
        if self.large_groups < self.min_groups:
            return "inconclusive"
        return "accept" if all(c.passed for c in self.criteria) else "reject"


def calibrate(
    data: RolloutFile,
    bands: Bands,
    *,
    success_at: float,
    ks: Sequence[int],
    group_size: int,
    min_groups: int = MIN_GROUPS,
    seed: int = 0,
) -> Calibration:
    """Judge a rollouts file.

    Raises:
        InputError: more failed episodes than ``bands.max_error_rate``, a group larger than ``group_size``, or no
            scored rollout without a hint.
    """
    failed = Counter(r.error_kind for r in data.rollouts if r.error_kind is not None)
    error_rate = wilson(sum(failed.values()), len(data.rollouts))
    if error_rate.value > bands.max_error_rate:
        kinds = ", ".join(f"{kind} {count}" for kind, count in failed.most_common(4))
        raise InputError(
            f"{error_rate.value:.1%} of {len(data.rollouts)} episodes failed for reasons that are not the policy's "
            f"({kinds}); expected at most {bands.max_error_rate:.0%}; fix the cause and collect again"
        )
    scored = [r for r in data.rollouts if r.reward is not None]
    groups = {hinted: _groups([r for r in scored if r.hinted is hinted]) for hinted in (False, True)}
    if not groups[False]:
        raise InputError(
            "no scored rollout without a hint; expected some, because the verdict is about them; collect unhinted"
        )
    _check_sizes(data.rollouts, group_size)
    options: dict[str, Any] = {"success_at": success_at, "ks": ks, "seed": seed}
    unhinted = group_stats(groups[False], **options)
    plain = [r for r in scored if not r.hinted]
    return Calibration(
        criteria=_criteria(unhinted, bands),
        unhinted=unhinted,
        hinted=group_stats(groups[True], **options) if groups[True] else None,
        error_rate=error_rate,
        error_kinds={str(kind): count for kind, count in failed.items()},
        truncation=wilson(sum(r.truncated for r in plain), len(plain)),
        out_of_turns=wilson(sum(r.out_of_turns for r in plain), len(plain)),
        large_groups=sum(len(rewards) >= MIN_ROLLOUTS for rewards in groups[False].values()),
        min_groups=min_groups,
    )


def _groups(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        assert rollout.reward is not None
        groups[rollout.task_id].append(rollout.reward)
    return dict(groups)


def _check_sizes(rollouts: Sequence[Rollout], group_size: int) -> None:
    sizes = Counter((r.task_id, r.hinted) for r in rollouts)
    (task, _), largest = max(sizes.items(), key=lambda item: item[1])
    if largest > group_size:
        raise InputError(
            f"task {task} has {largest} rollouts; expected at most --group-size {group_size}; "
            "give the size used to collect"
        )


def _criteria(stats: GroupStats, bands: Bands) -> tuple[Criterion, ...]:
    mean, success = stats.mean_reward, stats.success_rate
    easy = "too easy: mutate it (longer chains, decoys, renamed identifiers)"
    hard = "too hard: shorten the task, add reward levels or a hint"
    return (
        Criterion("mean reward", mean, bands.mean_min, bands.mean_max, easy if mean.value > bands.mean_max else hard),
        Criterion(
            "success rate",
            success,
            bands.success_min,
            bands.success_max,
            easy if success.value > bands.success_max else hard,
        ),
        Criterion("all-success groups", stats.all_success, 0.0, bands.max_all_success, "make the easiest seeds harder"),
        Criterion("all-zero groups", stats.all_zero, 0.0, bands.max_all_zero, "give the hardest seeds partial reward"),
        Criterion(
            "constant groups",
            stats.constant,
            0.0,
            bands.max_constant,
            "add reward levels" if stats.constant.n else "collect with --num-samples 2 or more to know",
        ),
    )


# --------------------------------------------------------------------------- output


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {"value": _number(estimate.value), "ci95": [estimate.low, estimate.high], "n": estimate.n}


def _stats(stats: GroupStats) -> dict[str, Any]:
    out: dict[str, Any] = {
        name: _estimate(value) if isinstance(value, Estimate) else value
        for name, value in ((f.name, getattr(stats, f.name)) for f in dataclasses.fields(stats))
        if name != "pass_at_k"
    }
    out["pass_at_k"] = {str(p.k): {**_estimate(p.estimate), "groups_used": p.groups_used} for p in stats.pass_at_k}
    return out


def report(calibration: Calibration, data: RolloutFile, bands: Bands, success_at: float) -> dict[str, Any]:
    """The JSON of ``--json-output``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": calibration.verdict,
        "groups_large_enough": {"found": calibration.large_groups, "min": calibration.min_groups},
        "rollouts_sha256": data.sha256,
        "info": data.info,
        "success_threshold": success_at,
        "bands": dataclasses.asdict(bands),
        "criteria": [
            {"name": c.name, "passed": c.passed, "found": _number(c.found.value), "low": c.low, "high": c.high}
            for c in calibration.criteria
        ],
        "errors": {**_estimate(calibration.error_rate), "kinds": calibration.error_kinds},
        "truncation": _estimate(calibration.truncation),
        "out_of_turns": _estimate(calibration.out_of_turns),
        "unhinted": _stats(calibration.unhinted),
        "hinted": _stats(calibration.hinted) if calibration.hinted is not None else None,
    }


def _line(name: str, estimate: Estimate, note: str) -> str:
    if math.isnan(estimate.value):
        return f"{name:24}{'-':>8}   {'':14}   n={estimate.n:<6} {note}"
    return f"{name:24}{estimate.value:8.3f}   [{estimate.low:.3f}, {estimate.high:.3f}]   n={estimate.n:<6} {note}"


def render(calibration: Calibration) -> str:
    """The table for a reader."""
    stats = calibration.unhinted
    lines = [
        f"{stats.n_rollouts} scored rollouts in {stats.n_groups} groups of {stats.smallest_group}-{stats.largest_group}"
        f", {stats.reward_levels} reward levels",
        f"{'':24}{'value':>8}   95 % interval",
    ]
    for c in calibration.criteria:
        note = f"{'ok ' if c.passed else 'NO '} {c.low:g} to {c.high:g}" + ("" if c.passed else f"; {c.advice}")
        lines.append(_line(c.name, c.found, note))
    lines.append(_line("success, by group", stats.success_rate_by_group, "seeds resampled"))
    lines += [
        _line(f"pass@{p.k}", p.estimate, f"{p.groups_used} groups" if p.groups_used else "no group is that large")
        for p in stats.pass_at_k
    ]
    lines.append(_line("truncated", calibration.truncation, "cut at a token limit, counted as they scored"))
    lines.append(_line("out of turns", calibration.out_of_turns, "ended by max_steps, counted as they scored"))
    lines.append(_line("failed episodes", calibration.error_rate, "in no rate above"))
    if calibration.hinted is not None:
        lines.append(
            _line("hinted: mean reward", calibration.hinted.mean_reward, f"{calibration.hinted.n_groups} groups")
        )
        lines.append(_line("hinted: success rate", calibration.hinted.success_rate, ""))
    if calibration.verdict == "inconclusive":
        lines.append(
            f"too few to judge: {calibration.large_groups} groups with {MIN_ROLLOUTS} or more scored rollouts, "
            f"expected at least {calibration.min_groups} (--min-groups); "
            f"collect more: --num-seeds {calibration.min_groups} "
            f"--num-samples {MIN_ROLLOUTS} or above"
        )
    lines.append(f"verdict: {calibration.verdict}")
    return "\n".join(lines)


def _parse_ks(text: str, group_size: int) -> tuple[int, ...]:
    try:
        ks = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"--pass-at-k {text!r}: expected whole numbers with commas, such as 1,4,8,16") from None
    if not ks or min(ks) < 1:
        raise InputError(f"--pass-at-k {text!r}: expected numbers of at least 1")
    # the default list goes to 16; with smaller groups the larger k cannot be estimated without bias
    return tuple(k for k in ks if k <= group_size) or (1,)


def _parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("rollouts", metavar="F", help="rollouts file of train.collect_rollouts")
    add("--group-size", type=int, default=16, help="rollouts per seed that were collected")
    for field in dataclasses.fields(Bands):
        meaning = "highest share allowed" if field.name.startswith("max_") else "end of the band, inclusive"
        add(f"--{field.name.replace('_', '-')}", type=float, default=field.default, help=meaning)
    add(
        "--min-groups",
        type=non_negative_int,
        default=MIN_GROUPS,
        help=f"fewer groups of at least {MIN_ROLLOUTS} scored rollouts are inconclusive (default {MIN_GROUPS})",
    )
    add("--reward-threshold", type=float, default=1.0, help="a reward at or above it is a success")
    add("--pass-at-k", default="1,4,8,16", help="k of pass@k; those above the group size are left out")
    add("--seed", type=non_negative_int, default=0, help="seed of the bootstrap")
    add("--json-output", metavar="R", default=None, help="write the report here")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    bands = Bands(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Bands)})
    for name, value in {**dataclasses.asdict(bands), "reward_threshold": args.reward_threshold}.items():
        if not 0 <= value <= 1:  # also false for nan
            raise InputError(f"--{name.replace('_', '-')} {value}: expected a number in [0, 1]")
    for band in ("mean", "success"):
        low, high = getattr(bands, f"{band}_min"), getattr(bands, f"{band}_max")
        if low > high:
            raise InputError(f"--{band}-min {low} is above --{band}-max {high}; nothing could pass, exchange them")
    if args.group_size < 1:
        raise InputError(f"--group-size {args.group_size}: expected at least 1")
    data = load_rollouts(args.rollouts)
    calibration = calibrate(
        data,
        bands,
        success_at=args.reward_threshold,
        ks=_parse_ks(args.pass_at_k, args.group_size),
        group_size=args.group_size,
        min_groups=args.min_groups,
        seed=args.seed,
    )
    if args.json_output:
        write_json(args.json_output, report(calibration, data, bands, args.reward_threshold))
    sys.stdout.write(render(calibration) + "\n")
    return 0 if calibration.verdict == "accept" else 1


if __name__ == "__main__":
    run_cli(main)
