"""The stages of the helpdesk evidence run: published stage commands with everything filled in, in order.

Every method gets the same number of rollouts: four adapters of ``b`` iterations each, against one adapter of ``4 b``
iterations, either on the target's own tasks (``direct``) or on the four environments together (``joint``).
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.files import InputError, read_json

QUICKSTART = Path(__file__).resolve().parent.parent / "quickstart"
TARGET = "helpdesk"
CANDIDATES = 4  # environments that ship for the target's candidates


VERDICT = (1,)
LEAST_BUDGET = 2  # iterations


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is run. ``budgets``: iterations per adapter after which everything is measured; the last is the
    result.

    Raises:
        InputError: a budget below 2. The gate learns from rollouts of the adapters, and the first iteration samples
            from the base.
    """

    mine_seeds: int
    mine_samples: int
    calibrate_seeds: int
    calibrate_samples: int
    group_size: int
    groups: int
    budgets: tuple[int, ...]
    lr: float
    gate_steps: int
    gate_iters: int
    gate_min_reward: float
    score_seeds: str
    trials: int
    transfer_trials: int
    count: int
    max_rows: int
    bootstrap: int
    ablations: bool

    def __post_init__(self) -> None:
        if not self.budgets or min(self.budgets) < LEAST_BUDGET:
            raise InputError(
                f"budgets {self.budgets}: expected at least {LEAST_BUDGET} iterations each, because the first samples "
                "from the base and leaves the gate no rollout of an adapter; raise them"
            )


SIZES = {
    "gpu": Size(200, 4, 50, 16, 16, 16, (10, 20, 40), 2e-4, 400, 20, 1.0, "10000:10128", 5, 3, 4, 512, 10_000, True),
    "cpu": Size(96, 2, 24, 8, 8, 12, (7, 14), 4e-4, 200, 4, 1.0, "10000:10064", 2, 2, 2, 128, 10_000, True),
    "tiny": Size(12, 1, 3, 4, 4, 3, (2,), 4e-4, 20, 1, 0.0, "10000:10004", 1, 1, 2, 64, 200, False),
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One command. ``also_done``: exit codes that are a result too, such as 1 for a verdict of no."""

    name: str
    command: tuple[str, ...]
    also_done: tuple[int, ...] = ()


def python(*arguments: object) -> tuple[str, ...]:
    return (sys.executable, *map(str, arguments))


def mining_stages(run: Path, model: str, size: Size) -> Iterator[Stage]:
    """Stage 1, twice: ``mine_a`` is used, ``mine_b`` on other tasks says whether the selection would have been the
    same."""
    for part, first_seed in (("a", 0), ("b", 20_000)):
        folder = run / f"mine_{part}"
        rollouts = folder / "rollouts.json"
        yield Stage(
            f"01_rollouts_{part}",
            python("-m", "train.collect_rollouts", "--env", TARGET, "--model", model, "--num-seeds", size.mine_seeds,
                   "--num-samples", size.mine_samples, "--seed-start", first_seed, "--seed", 0, "-o", rollouts),
        )  # fmt: skip
        yield Stage(
            f"02_summaries_{part}",
            python("pipeline/_summarize.py", "--input", rollouts, "--output", folder / "summaries.json"),
        )
        yield Stage(
            f"03_labels_{part}",
            python("pipeline/label_capabilities.py", "--labeler", "checks", "--checks-module", "games.helpdesk",
                   "--input", rollouts, "--output-dir", folder / "labels"),
        )  # fmt: skip
        yield Stage(
            f"04_selection_{part}",
            python("pipeline/aggregate_capabilities.py", "--runs", folder / "labels" / "run_*.json", "--candidates",
                   folder / "labels" / "candidate_capabilities.json", "--summaries", folder / "summaries.json",
                   "--export", folder / "selected_capabilities.json"),
            also_done=VERDICT,
        )  # fmt: skip


def ranked_capabilities(run: Path, part: str = "a") -> list[dict[str, object]]:
    """All candidates: the selected ones first, then the rejected ones, each by mean Delta.

    Raises:
        InputError: the selection of that mining run is missing or damaged.
    """
    path = run / f"mine_{part}" / "selected_capabilities.report.json"
    report = read_json(path, "selection report")
    entries = report.get("candidates") if isinstance(report, dict) else None
    if not isinstance(entries, list) or not entries:
        raise InputError(f"selection report {path}: expected candidates; run the mining stages again")
    return sorted(entries, key=lambda e: (not e["selected"], -float(e["mean_delta"]), str(e["skill"])))


def capability_names(run: Path, count: int) -> list[str]:
    """The ``count`` best candidates, best first."""
    return [str(entry["skill"]) for entry in ranked_capabilities(run)[:count]]


def environment_stages(run: Path, model: str, size: Size, names: Sequence[str]) -> Iterator[Stage]:
    """Stage 2: each environment is validated, then calibrated on this model."""
    for name in names:
        folder = run / "environments"
        env = f"capability_{name}"
        yield Stage(
            f"05_validate_{name}",
            python("pipeline/validate_environment.py", env, "--target-tools", TARGET, "--json-output",
                   folder / f"{name}.validation.json"),
            also_done=VERDICT,
        )  # fmt: skip
        yield Stage(
            f"06_rollouts_{name}",
            python("-m", "train.collect_rollouts", "--env", env, "--model", model, "--num-seeds", size.calibrate_seeds,
                   "--num-samples", size.calibrate_samples, "--seed", 0, "-o", folder / f"{name}.rollouts.json"),
        )  # fmt: skip
        yield Stage(
            f"07_calibrate_{name}",
            python("pipeline/calibrate_environment.py", folder / f"{name}.rollouts.json", "--group-size",
                   size.calibrate_samples, "--success-min", 0.05, "--mean-min", 0.05, "--max-all-zero", 0.5,
                   "--json-output", folder / f"{name}.calibration.json"),
            also_done=VERDICT,
        )  # fmt: skip


def training_stages(run: Path, model: str, size: Size, names: Sequence[str]) -> Iterator[Stage]:
    """Stage 3 up to each budget, and after each the gate and the evaluation that the curve needs."""
    environments = [f"capability_{name}" for name in names]
    mix = ",".join(f"{env}:1" for env in environments)
    for budget in size.budgets:
        adapters = adapters_folder(run, budget)
        common = [
            "-m", "train", "--config", "examples/quickstart/train.yaml", "--model", model, "--group-size",
            size.group_size, "--groups-per-batch", size.groups, "--lr", size.lr, "--resume", "--adapter-dir", adapters,
        ]  # fmt: skip
        fair = len(names) * budget
        yield Stage(
            f"08_train_{budget}",
            python(*common, "--capabilities", ",".join(environments), "--max-iters", budget, "--output-dir",
                   run / "train"),
        )  # fmt: skip
        yield Stage(
            f"09_direct_{budget}",
            python(*common, "--games", f"{TARGET}:1", "--name", "direct", "--max-iters", fair, "--output-dir",
                   run / "train_direct", "--no-rollout-log"),
        )  # fmt: skip
        yield Stage(
            f"10_joint_{budget}",
            python(*common, "--games", mix, "--name", "joint", "--max-iters", fair, "--output-dir", run / "train_joint",
                   "--no-rollout-log"),
        )  # fmt: skip
        gate = f"gate_{budget}"
        yield from gate_stages(run, model, size, names, gate, adapters)
        if budget != size.budgets[-1]:
            yield Stage(
                f"12_score_{budget}",
                evaluation(run, model, size, names, budget, [f"routed={run / gate}"], f"score_{budget}", ["--merge"]),
            )


def adapters_folder(run: Path, budget: int) -> Path:
    return run / f"adapters_{budget}"


def gate_stages(
    run: Path, model: str, size: Size, names: Sequence[str], gate: str, adapters: Path
) -> Iterator[Stage]:
    """Configuration and SFT of one gate over ``names``."""
    yield Stage(
        f"11_config_{gate}",
        python(QUICKSTART / "gate_config.py", "--run", run, "--model", model, "--adapters", adapters, "--gate", gate,
               "--steps", size.gate_steps, "--min-reward", size.gate_min_reward, "--names", *names),
    )  # fmt: skip
    yield Stage(f"11_{gate}", python("-m", "train.train_router_sft", "--config", run / f"moe_{gate}.yaml", "--resume"))


def scoring(model: str, size: Size, envs: str, trials: int) -> list[object]:
    """What every evaluation has in common."""
    return [
        "-m", "train.evaluate", "--model", model, "--envs", envs, "--seeds", size.score_seeds, "--trials", trials,
        "--max-rows", size.max_rows, "--bootstrap", size.bootstrap,
    ]  # fmt: skip


def evaluation(
    run: Path,
    model: str,
    size: Size,
    names: Sequence[str],
    budget: int,
    gates: Sequence[str],
    out: str,
    more: Sequence[object] = (),
) -> tuple[str, ...]:
    """Everything on the target's score seeds."""
    adapters = adapters_folder(run, budget)
    return python(
        *scoring(model, size, TARGET, size.trials), "--adapters", ",".join(str(adapters / name) for name in names),
        "--other-adapters", f"direct={adapters / 'direct'},joint={adapters / 'joint'}", "--gate", ",".join(gates),
        "--out-dir", run / out, *more,
    )  # fmt: skip


def subsets(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Gates of the ablations: the first 1, 2, .. N - 1 capabilities, and every other pair (the Delta filter on and
    off)."""
    found = {f"first_{k}": tuple(names[:k]) for k in range(1, len(names))}
    for i, j in itertools.combinations(range(len(names)), 2):
        pair = (names[i], names[j])
        if len(names) > 2 and pair not in found.values():
            found[f"pair_{i + 1}_{j + 1}"] = pair
    return found


def final_stages(run: Path, model: str, size: Size, names: Sequence[str]) -> Iterator[Stage]:
    """Stage 4 and the evaluation of everything at the last budget."""
    budget = size.budgets[-1]
    adapters = adapters_folder(run, budget)
    gates = {"routed": f"gate_{budget}"}
    yield Stage(
        "13_gate_grpo",
        python("-m", "train.grpo_gater", "--config", run / f"moe_gate_{budget}.yaml", "--games",
               ",".join(f"capability_{name}:1" for name in names), "--init-gate", run / f"gate_{budget}",
               "--output-dir", run / "gate_grpo", "--max-iters", size.gate_iters, "--group-size", size.group_size,
               "--groups-per-batch", size.groups, "--resume"),
        also_done=(2,),  # adapters that solve their environments leave it no group with a signal
    )  # fmt: skip
    if (run / "gate_grpo" / "gate.safetensors").exists():
        gates["routed_grpo"] = "gate_grpo"
    if size.ablations:
        for name, members in subsets(names).items():
            yield from gate_stages(run, model, size, members, f"gate_{name}", adapters)
            gates[name] = f"gate_{name}"
    yield Stage(
        "14_score",
        evaluation(
            run, model, size, names, budget, [f"{name}={run / gate}" for name, gate in gates.items()], "score",
            ["--merge", "linear,ties,dare_ties", "--choose", run / "mine_a" / "labels" / "candidate_capabilities.json",
             "--soft-gate", run / f"gate_{budget}", "--train-metrics", run / "train" / "metrics.jsonl"],
        ),
    )  # fmt: skip
    yield Stage(
        "15_transfer",
        python(*scoring(model, size, ",".join(f"capability_{n}" for n in names), size.transfer_trials), "--adapters",
               ",".join(str(adapters / name) for name in names), "--out-dir", run / "transfer"),
    )  # fmt: skip
    yield Stage(
        "16_export", python("-m", "moe_gate.export", "--gate", run / f"gate_{budget}", "--out", run / "routed")
    )


def vllm_stage(run: Path, model: str, size: Size) -> Stage:
    """The routed model through the vLLM plugin, on the same seeds as in this process."""
    return Stage(
        "17_vllm",
        python(Path(__file__).with_name("with_server.py"), "--model", run / "routed", "--", *python(
            *scoring(model, size, TARGET, size.trials), "--engine", "local", "--routed-base-url", "SERVER_URL",
            "--out-dir", run / "score_vllm")),
    )  # fmt: skip
