"""The stages of the helpdesk evidence run: published stage commands with everything filled in, most valuable first.

Every method gets the same number of rollouts: four adapters of ``b`` iterations each, against one adapter of ``4 b``
iterations, either on the target's mined tasks (``direct``) or on the four environments together (``joint``). Each
training runs once; what it was after fewer iterations is taken from its checkpoints.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import candidate_checks
import other_candidates
from scheduler import Stage
from sizes import Size

from pipeline.files import InputError, read_json
from train.evaluation_systems import MERGE_NAMES
from train.merge_methods import METHODS

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"
TARGET = "helpdesk"
VERDICT = (1,)
GATE_FILE = "gate.safetensors"
GATE_ITERATIONS = 4  # whose rollouts a gate learns from (LAST of gate_config.py)
ENVIRONMENT = {  # of every stage: the candidates beside the shipped ones
    "TRACE_GAME_MODULES": "other_candidates",
}
ALL_CANDIDATES = tuple(sorted(str(c["name"]) for c in candidate_checks.CANDIDATES))


def python(*arguments: object) -> tuple[str, ...]:
    return (sys.executable, *map(str, arguments))


def all_stages(run: Path, model: str, size: Size, plugin: bool) -> list[Stage]:
    """What is known so far: everything after the selection depends on it, and the last evaluation on the gate's GRPO.

    Args:
        plugin: run the exported routed model in vLLM too.
    """
    stages = [*mining_stages(run, model, size)]
    if (run / "done" / "04_selection_a.json").exists():
        names = capability_names(run, size.count)
        stages += environment_stages(run, model, size, names)
        stages += training_stages(run, model, size, names)
        stages += composition_stages(run, model, size, names, plugin)
    stages += validation_stages(run)
    return stages


def mining_stages(run: Path, model: str, size: Size) -> Iterator[Stage]:
    """Stage 1, twice: ``mine_a`` is used, ``mine_b`` on other tasks says whether the selection would have been the
    same."""
    for part, first_seed in (("a", 0), ("b", 20_000)):
        folder = run / f"mine_{part}"
        rollouts, report = folder / "rollouts.json", folder / "selected_capabilities.report.json"
        yield Stage(
            f"01_rollouts_{part}",
            python("-m", "train.collect_rollouts", "--env", TARGET, "--model", model, "--num-seeds", size.mine_seeds,
                   "--num-samples", size.mine_samples, "--seed-start", first_seed, "--seed", 0, "-o", rollouts),
            makes=(rollouts,),
        )  # fmt: skip
        yield Stage(
            f"02_summaries_{part}",
            python("pipeline/_summarize.py", "--input", rollouts, "--output", folder / "summaries.json"),
            needs=(f"01_rollouts_{part}",),
        )
        yield Stage(
            f"03_labels_{part}",
            python("pipeline/label_capabilities.py", "--labeler", "checks", "--checks-module", "candidate_checks",
                   "--input", rollouts, "--output-dir", folder / "labels"),
            needs=(f"01_rollouts_{part}",),
        )  # fmt: skip
        yield Stage(
            f"04_selection_{part}",
            python("pipeline/aggregate_capabilities.py", "--runs", folder / "labels" / "run_*.json", "--candidates",
                   folder / "labels" / "candidate_capabilities.json", "--summaries", folder / "summaries.json",
                   "--export", folder / "selected_capabilities.json"),
            needs=(f"02_summaries_{part}", f"03_labels_{part}"), also_done=VERDICT, proof=report, makes=(report,),
        )  # fmt: skip


def ranked_capabilities(run: Path, part: str = "a") -> list[dict[str, object]]:
    """All candidates: the selected ones first, then the rejected ones, each by mean Delta. Of equal ones those come
    first that helpdesk's own checks know.

    Raises:
        InputError: the selection of that mining run is missing or damaged.
    """
    path = run / f"mine_{part}" / "selected_capabilities.report.json"
    report = read_json(path, "selection report")
    entries = report.get("candidates") if isinstance(report, dict) else None
    if not isinstance(entries, list) or not entries:
        raise InputError(f"selection report {path}: expected candidates; run the mining stages again")
    others = other_candidates.NAMES
    return sorted(
        entries, key=lambda e: (not e["selected"], -float(e["mean_delta"]), e["skill"] in others, str(e["skill"]))
    )


def capability_names(run: Path, count: int) -> list[str]:
    """The ``count`` best candidates, best first."""
    return [str(entry["skill"]) for entry in ranked_capabilities(run)[:count]]


def rejected_names(names: Sequence[str]) -> list[str]:
    """The candidates that were not taken."""
    return [name for name in ALL_CANDIDATES if name not in names]


def validation_stages(run: Path) -> Iterator[Stage]:
    """Stage 2, part one: every environment against the panel. Needs no model.

    The other candidates have no file of their own that a sandbox could be given; all are the project's own code.
    """
    open_ground = shutil.which("bwrap") is None
    for name in ALL_CANDIDATES:
        output = run / "environments" / f"{name}.validation.json"
        yield Stage(
            f"05_validate_{name}",
            python("pipeline/validate_environment.py", f"capability_{name}", "--target-tools", TARGET,
                   "--json-output", output,
                   *(("--isolation", "process") if open_ground or name in other_candidates.NAMES else ())),
            also_done=VERDICT, proof=output, makes=(output,),
        )  # fmt: skip


def environment_stages(run: Path, model: str, size: Size, names: Sequence[str]) -> Iterator[Stage]:
    """Stage 2, part two: the environments that are trained in are calibrated on this model."""
    for name in names:
        folder = run / "environments"
        rollouts, verdict = folder / f"{name}.rollouts.json", folder / f"{name}.calibration.json"
        yield Stage(
            f"06_rollouts_{name}",
            python("-m", "train.collect_rollouts", "--env", f"capability_{name}", "--model", model, "--num-seeds",
                   size.calibrate_seeds, "--num-samples", size.calibrate_samples, "--seed", 0, "-o", rollouts),
            needs=("04_selection_a",), makes=(rollouts,),
        )  # fmt: skip
        yield Stage(
            f"06_calibrate_{name}",
            python("pipeline/calibrate_environment.py", rollouts, "--group-size", size.calibrate_samples,
                   "--success-min", 0.05, "--mean-min", 0.05, "--max-all-zero", 0.5, "--json-output", verdict),
            needs=(f"06_rollouts_{name}",), also_done=VERDICT, proof=verdict, makes=(verdict,),
        )  # fmt: skip


# ------------------------------------------------------------------ training


def training_runs(run: Path, size: Size, names: Sequence[str]) -> dict[str, tuple[list[str], int, list[str]]]:
    """Training run -> its adapters, iterations of each, and its flags. All get the same rollouts per capability."""
    last = size.budgets[-1]
    games = [f"capability_{name}" for name in names]
    others = rejected_names(names)
    fair = len(names) * last
    return {
        "train": (list(names), last, ["--capabilities", ",".join(games)]),
        "direct": (
            ["direct"], fair,
            ["--games", f"{TARGET}:1", "--name", "direct", "--no-rollout-log", "--train-seeds", f"0:{size.mine_seeds}"],
        ),
        "joint": (
            ["joint"], fair, ["--games", ",".join(f"{g}:1" for g in games), "--name", "joint", "--no-rollout-log"],
        ),
        "others": (others, last, ["--capabilities", ",".join(f"capability_{n}" for n in others)]),
    }  # fmt: skip


def training_stages(run: Path, model: str, size: Size, names: Sequence[str]) -> Iterator[Stage]:
    """Stage 3: four adapters at once, and the rivals beside them; then what each was at every budget.

    One that gets no signal any more (it solves its environment, or always does the same there) is done, and ends no
    other one.
    """
    runs = training_runs(run, size, names)
    for key, (_, iterations, flags) in runs.items():
        yield Stage(
            f"07_train_{key}",
            python("-m", "train", "--config", "examples/quickstart/train.yaml", "--model", model, "--group-size",
                   size.group_size, "--groups-per-batch", size.groups, "--lr", size.lr, "--lora-rank", size.lora_rank,
                   "--lora-alpha", 2 * size.lora_rank, "--max-iters", iterations, "--save-every", size.save_every,
                   "--keep-checkpoints", 1000, "--solved-reward", 0,
                   "--resume", "--output-dir", run / "training" / key, "--adapter-dir",
                   run / "training" / key / "final", *flags),
            needs=("04_selection_a", *(("07_train_train",) if key == "others" else ())),
            makes=(run / "training" / key / "checkpoints",),
        )  # fmt: skip
    for key, (adapters, iterations, _) in runs.items():
        folder = run / "training" / key
        budgets = size.budgets[-1:] if key == "others" else size.budgets
        outs = [adapters_folder(run, budget) for budget in budgets]
        factor = iterations // size.budgets[-1]
        yield Stage(
            f"08_adapters_{key}",
            python(HERE / "freeze.py", "--train", folder, "--adapters", folder / "final", "--names", ",".join(adapters),
                   "--iterations", ",".join(str(factor * budget) for budget in budgets), "--out", *outs),
            needs=(f"07_train_{key}",), makes=tuple(out / name for out in outs for name in adapters),
        )  # fmt: skip


def adapters_folder(run: Path, budget: int) -> Path:
    return run / f"adapters_{budget}"


# ------------------------------------------------------------------ composition


def gate_members(names: Sequence[str], size: Size) -> dict[str, tuple[str, ...]]:
    """Gates of the comparisons beside ``routed``: the first 1, 2, .. N - 1 capabilities, the candidates that the Delta
    filter rejects, and random choices among all candidates (never the filter's own choice)."""
    found = {f"first_{k}": tuple(names[:k]) for k in range(1, len(names))}
    found["rejected"] = tuple(rejected_names(names))
    rng, taken = random.Random(0), {frozenset(names), frozenset(found["rejected"])}
    while len(found) < len(names) + size.draws:
        members = tuple(rng.sample(ALL_CANDIDATES, len(names)))
        if frozenset(members) not in taken:
            taken.add(frozenset(members))
            found[f"random_{len(taken) - 2}"] = members
    return found


def gate_stages(
    run: Path, model: str, size: Size, gate: str, members: Sequence[str], budget: int, mine: Sequence[str]
) -> Iterator[Stage]:
    """Configuration and SFT of one gate over ``members``, on rollouts up to ``budget``."""
    needs = adapters_of(members, mine)
    logs = [run / "training" / key / "rollouts" for key in ("train", "others") if any(key in n for n in needs)]
    yield Stage(
        f"09_config_{gate}",
        python(QUICKSTART / "gate_config.py", "--run", run, "--model", model, "--adapters",
               adapters_folder(run, budget), "--gate", f"gates/{gate}", "--config",
               gate_config(run, gate), "--steps", size.gate_steps, "--min-reward",
               size.gate_min_reward, "--until", budget, "--rollouts", *logs, "--names", *members),
        needs=needs, makes=(gate_config(run, gate), run / "gates" / f"{gate}_rollouts"),
    )  # fmt: skip
    yield Stage(
        f"09_gate_{gate}",
        python("-m", "train.train_router_sft", "--config", gate_config(run, gate), "--resume"),
        needs=(f"09_config_{gate}", *needs), makes=(run / "gates" / gate / "gate.safetensors",),
    )  # fmt: skip


def adapters_of(members: Sequence[str], mine: Sequence[str]) -> tuple[str, ...]:
    """The stages that make the adapters ``members``; ``mine`` are the capabilities of the main training."""
    parts = {"train": set(members) & set(mine), "others": set(members) - set(mine)}
    return tuple(f"08_adapters_{key}" for key, found in parts.items() if found)


def gate_config(run: Path, gate: str) -> Path:
    return run / "gates" / f"{gate}.yaml"


def scoring(model: str, size: Size, envs: str, trials: int, out: Path, in_flight: int = 256) -> list[object]:
    """What every evaluation has in common. ``in_flight``: with a server 256 fill it; gates in this process decode
    ``max_rows`` together."""
    return [
        "-m", "train.evaluate", "--model", model, "--envs", envs, "--seeds", size.score_seeds, "--trials", trials,
        "--max-rows", size.max_rows, "--concurrency", in_flight, "--bootstrap", 100, "--out-dir", out,
    ]  # fmt: skip


def plain_score(run: Path, model: str, size: Size, names: Sequence[str]) -> Stage:
    """Adapters, rivals (also at the smaller budgets), merges and the prompt-chosen adapter: all in flight at once."""
    last = size.budgets[-1]
    others = [f"{key}={adapters_folder(run, last) / key}" for key in ("direct", "joint")]
    others += [f"{k}_{b}={adapters_folder(run, b) / k}" for b in size.budgets[:-1] for k in ("direct", "joint")]
    return Stage(
        "11_score_plain",
        python(*scoring(model, size, TARGET, size.trials, run / "score"), "--adapters",
               ",".join(str(adapters_folder(run, last) / name) for name in names), "--other-adapters",
               ",".join(others), "--merge", ",".join(size.merges), "--choose",
               run / "mine_a" / "labels" / "candidate_capabilities.json"),
        needs=("10_score_base", *(f"08_adapters_{key}" for key in ("train", "direct", "joint"))),
    )  # fmt: skip


def gate_score(
    run: Path, model: str, size: Size, name: str, gate: Path, needs: Sequence[str], flag: str = "--gate"
) -> Stage:
    # the file, not the folder: what a system is must not depend on what else lies beside its gate
    return Stage(
        f"11_score_{name}",
        python(
            *scoring(model, size, TARGET, size.trials, run / "score", size.max_rows), flag, f"{name}={gate / GATE_FILE}"
        ),
        needs=("10_score_base", *needs),
    )


def composition_stages(run: Path, model: str, size: Size, names: Sequence[str], plugin: bool) -> Iterator[Stage]:
    """Stage 4: the gates, and everything on the target's score seeds."""
    last, gates = size.budgets[-1], run / "gates"
    yield Stage(
        "10_score_base",
        python(*scoring(model, size, TARGET, size.trials, run / "score")),
        needs=("04_selection_a",),
    )
    adapters = adapters_of(names, names)
    trained = ("09_gate_routed", *adapters)
    yield from gate_stages(run, model, size, "routed", names, last, names)
    yield gate_score(run, model, size, "routed", gates / "routed", trained)
    yield grpo_stage(run, size, names, trained)
    yield plain_score(run, model, size, names)
    if plugin:
        yield from plugin_stages(run, model, size, trained)
    yield gate_score(run, model, size, "soft", gates / "routed", trained, "--soft-gate")
    if (gates / "grpo" / "gate.safetensors").exists():
        yield gate_score(run, model, size, "routed_grpo", gates / "grpo", ("10_gate_grpo", *adapters))
    for gate, members in gate_members(names, size).items():
        yield from gate_stages(run, model, size, gate, members, last, names)
        yield gate_score(run, model, size, gate, gates / gate, (f"09_gate_{gate}", *adapters_of(members, names)))
    for budget in size.budgets[:-1]:
        yield from gate_stages(run, model, size, f"routed_{budget}", names, budget, names)
        needs = (f"09_gate_routed_{budget}", *adapters_of(names, names))
        yield gate_score(run, model, size, f"routed_{budget}", gates / f"routed_{budget}", needs)
    yield Stage(
        "12_transfer",
        python(*scoring(model, size, ",".join(f"capability_{n}" for n in names), size.transfer_trials,
                        run / "transfer"),
               "--adapters", ",".join(str(adapters_folder(run, last) / name) for name in names)),
        needs=adapters,
    )  # fmt: skip


def grpo_stage(run: Path, size: Size, names: Sequence[str], needs: tuple[str, ...]) -> Stage:
    out = run / "gates" / "grpo"
    return Stage(
        "10_gate_grpo",
        python("-m", "train.grpo_gater", "--config", gate_config(run, "routed"), "--games",
               ",".join(f"capability_{name}:1" for name in names), "--init-gate", run / "gates" / "routed",
               "--output-dir", out, "--max-iters", size.gate_iters, "--group-size", size.group_size,
               "--groups-per-batch", size.groups, "--save-every", 1, "--resume"),
        needs=needs,
        also_done=(2,),  # adapters that solve their environments leave it no group with a signal
        proof=out / "gate.safetensors",
    )  # fmt: skip


def plugin_stages(run: Path, model: str, size: Size, needs: tuple[str, ...]) -> Iterator[Stage]:
    """The routed model through the vLLM plugin, on the same seeds as in this process; and the base in this process."""
    yield Stage(
        "12_export",
        python("-m", "moe_gate.export", "--gate", run / "gates" / "routed", "--out", run / "routed"),
        needs=needs, makes=(run / "routed",),
    )  # fmt: skip
    evaluation = python(
        *scoring(model, size, TARGET, size.trials, run / "score_vllm"), "--engine", "local", "--routed-base-url",
        "SERVER_URL",
    )  # fmt: skip
    yield Stage(
        "12_plugin",
        python(HERE / "with_server.py", "--model", run / "routed", f"--flags={size.plugin_flags}", "--", *evaluation),
        needs=("12_export",),
    )


def systems(names: Sequence[str], size: Size) -> Mapping[str, str]:
    """Every system on the score seeds, and its kind in an evaluation."""
    gates = ["soft", "routed", "routed_grpo", *gate_members(names, size), *(f"routed_{b}" for b in size.budgets[:-1])]
    rivals = [*("direct", "joint"), *(f"{k}_{b}" for b in size.budgets[:-1] for k in ("direct", "joint"))]
    merges = [MERGE_NAMES[method] for method in METHODS if method in size.merges]
    found = {"base": "base", **dict.fromkeys(names, "adapter"), **dict.fromkeys(rivals, "other")}
    return found | dict.fromkeys(merges, "merge") | {"chosen": "chosen"} | dict.fromkeys(gates, "routed")
