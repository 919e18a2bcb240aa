"""Phase 4: may the scenario sets of phase 3 be trained on?

    python swebench/qwen3.6_self_trace/phase4_env_validation.py                        # every set of phase 3
    python swebench/qwen3.6_self_trace/phase4_env_validation.py --capabilities deep_call_graph_traversal

Per set: the panel (the oracle earns 1; policies without skill and forged verdicts earn next to nothing), and fresh
rollouts by the trainer's own sampling loop, which nothing was chosen by: a scenario is confirmed when 0 < pass rate <=
max_pass_rate there. Unconfirmed ones are left out of training. Writes ``phase4/<capability>.json`` and, for phase 5,
``phase4/scenarios/<capability>/scenarios_parsed.json``. Exit 1: some set failed; its report says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import generated_env
import scenario_panel
from checks import (
    attached,
    capabilities_arguments,
    export_key,
    names_of,
    read_object,
    require_disk,
    require_file,
    require_model,
)
from pydantic import BaseModel, ConfigDict, StrictStr
from run_folder import DryRun, RunFolder, open_phase
from run_settings import RunSettings
from steps import Step, run_steps

from pipeline import environment_status, sandbox
from pipeline.calibration_stats import wilson
from pipeline.files import InputError, ServerError, check, finite, run_cli, write_json
from pipeline.panel_checks import Check
from pipeline.scenarios import Scenario, save_scenarios
from pipeline.selection_export import read_entries

SUCCESS = 1.0 - 1e-9


class PanelRecord(BaseModel):
    """The panel's checks as they are kept."""

    model_config = ConfigDict(extra="ignore")
    floor: float
    checks: list[Check]


class RolloutRecord(BaseModel):
    """What is needed of an episode."""

    model_config = ConfigDict(extra="ignore")
    task_id: StrictStr
    outcome: StrictStr
    reward_info: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Rate:
    """What fresh rollouts say of one scenario; ``errors`` are no failed rollouts and enter no rate."""

    passed: int
    scored: int
    errors: int

    @property
    def value(self) -> float:
        return self.passed / self.scored if self.scored else 0.0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return capabilities_arguments(__doc__, "every set of phase 3", arguments)


def chosen(args: argparse.Namespace, folder: RunFolder, settings: RunSettings) -> list[str]:
    """The capabilities to validate.

    Raises:
        InputError: phase 3 left no set, or not this one.
    """
    found = names_of(args.capabilities) or generated_env.sets_in(folder.phase3)
    if not found:
        raise InputError(
            f"{folder.phase3}: holds no scenarios; run {folder.command('phase3_synthesis.py --all-selected')}"
        )
    for name in found:
        command = folder.command(f"phase3_synthesis.py --capability {name}")
        require_file(folder.scenarios(name), "phase 3's scenarios", command)
    return found


def rollouts_step(capability: str, folder: RunFolder, settings: RunSettings, n: int) -> tuple[Step, Path]:
    """Fresh rollouts of every scenario, by the loop that training uses."""
    v = settings.validation
    output = folder.phase4 / "rollouts" / f"{capability}-{generated_env.digest_of(folder.phase3, capability)}.json"
    model = settings.training.base_model or settings.model.name
    flags = ["-m", "train.collect_rollouts", "--env", generated_env.game_of(capability), "--model", model]
    flags += ["--num-seeds", str(n), "--num-samples", str(v.rollouts), "--temperature", str(v.temperature)]
    flags += ["--seed", str(v.seed), "--concurrency", str(v.concurrency), "--max-new-tokens", str(v.max_new_tokens)]
    flags += ["--max-seq-length", str(v.max_seq_length), "-o", str(output)]
    if v.engine == "local":
        return Step(f"{capability}_rollouts", (*flags, "--engine", "local"), (), (output,), _variables(folder)), output
    flags += ["--base-url", settings.model.base_url]
    variables = _variables(folder) | {"VLLM_MODEL": settings.model.name}
    return Step(f"{capability}_rollouts", tuple(flags), (), (output,), variables, good_codes=(0, 1)), output


def _variables(folder: RunFolder) -> dict[str, str]:
    return generated_env.environment(folder.phase3)


def rates_of(path: Path, scenarios: Sequence[Scenario], wanted: int) -> list[Rate]:
    """Pass rates of a rollouts file; task ``i`` is scenario ``i``.

    Raises:
        InputError: the file is damaged. ServerError: fewer than half of a scenario's rollouts could be scored.
    """
    data = read_object(path, "rollouts file")
    counts = [[0, 0, 0] for _ in scenarios]
    entries = data.get("simulations") or []
    if not isinstance(entries, list):
        raise InputError(f"rollouts file {path}: simulations is no list; delete the file")
    for number, entry in enumerate(entries):
        where = f"rollouts file {path} simulations[{number}]"
        record = check(RolloutRecord, entry, where)
        index = int(record.task_id) if record.task_id.isdecimal() else len(scenarios)
        if index >= len(scenarios):
            raise InputError(f"{where}: task {record.task_id!r} is no scenario of the set; delete the file")
        if record.outcome != "scored":
            counts[index][2] += 1
            continue
        reward = finite((record.reward_info or {}).get("reward"), f"{where} reward")
        counts[index][0] += reward >= SUCCESS
        counts[index][1] += 1
    rates = [Rate(*count) for count in counts]
    for scenario, rate in zip(scenarios, rates, strict=True):
        if 2 * rate.scored < wanted:
            path.unlink()  # errors are kept in the file and would not be drawn again
            raise ServerError(
                f"{scenario.name}: {rate.errors} of {wanted} rollouts failed for reasons that are not the policy's; "
                "check the server and run the same command again"
            )
    return rates


def report(
    capability: str, scenarios: Sequence[Scenario], rates: Sequence[Rate], checks: list[dict[str, Any]], s: RunSettings
) -> dict[str, Any]:
    """The JSON of one set; its verdict follows from the panel and the number of confirmed scenarios."""
    v = s.validation
    rows = []
    for scenario, rate in zip(scenarios, rates, strict=True):
        interval = wilson(rate.passed, rate.scored)
        rows.append(
            {
                "name": scenario.name, "pass_rate": rate.value, "interval": [interval.low, interval.high],
                "n_rollouts": rate.scored, "errors": rate.errors, "earlier_pass_rate": scenario.pass_rate,
                "confirmed": 0 < rate.value <= v.max_pass_rate,
            }
        )  # fmt: skip
    n = sum(0 < rate.value <= v.max_pass_rate for rate in rates)
    good = scenario_panel.passed(checks) and n >= v.min_confirmed
    scored = sum(rate.scored for rate in rates)
    return {
        "schema_version": 1, "capability": capability, "verdict": "pass" if good else "fail", "confirmed": n,
        "min_confirmed": v.min_confirmed, "max_pass_rate": v.max_pass_rate,
        "mean_pass_rate": sum(rate.passed for rate in rates) / scored, "scenarios": rows, "checks": checks,
        "sampling": {"model": s.model.name, "temperature": v.temperature, "seed": v.seed},
    }  # fmt: skip


def panel_of(
    capability: str, folder: RunFolder, settings: RunSettings, scenarios: list[Scenario]
) -> list[dict[str, Any]]:
    """The panel's checks; kept beside the rollouts, so that a killed run does not play them again."""
    kept = folder.phase4 / "panel" / f"{capability}-{generated_env.digest_of(folder.phase3, capability)}.json"
    if kept.is_file():
        known = check(PanelRecord, read_object(kept, "panel"), f"panel {kept}")
        if known.floor == settings.validation.floor:
            return [dataclasses.asdict(c) for c in known.checks]
    isolation = sandbox.find_isolation("auto")
    checks = scenario_panel.Panel(scenarios, isolation, settings.validation.floor).checks()
    data = [dataclasses.asdict(c) for c in checks]
    write_json(kept, {"schema_version": 1, "floor": settings.validation.floor, "checks": data})
    return data


def validate(capability: str, folder: RunFolder, settings: RunSettings) -> tuple[int, dict[str, Any]]:
    """Panel, rollouts and verdict of one set; the exit code of a step that could not run, and the report."""
    scenarios = generated_env.read_set(folder.phase3, capability)
    checks = panel_of(capability, folder, settings, scenarios)
    step, output = rollouts_step(capability, folder, settings, len(scenarios))
    code = run_steps(folder.phase4, [step])
    if code:
        return code, {}
    rates = rates_of(output, scenarios, settings.validation.rollouts)
    found = report(capability, scenarios, rates, checks, settings)
    place = generated_env.validated(folder)
    target = generated_env.set_path(place, capability)
    if found["verdict"] == "pass":
        save_scenarios(target, [s for s, row in zip(map(_measured, scenarios, rates), found["scenarios"], strict=True)
                                if row["confirmed"]])  # fmt: skip
        found["scenarios_digest"] = generated_env.full_digest_of(place, capability)  # phase 5 trains on these alone
        write_json(folder.validation(capability), found)
        mark_done(capability, folder, target, found["confirmed"])
    else:
        write_json(folder.validation(capability), found)
        target.unlink(missing_ok=True)  # of an earlier verdict
    return 0, found


def _measured(scenario: Scenario, rate: Rate) -> Scenario:
    return scenario.model_copy(update={"pass_rate": rate.value, "n_rollouts": rate.scored})


def mark_done(capability: str, folder: RunFolder, scenarios: Path, n: int) -> None:
    """DONE in phase 2's selection, where the capability is in it (it may come from ``--description``)."""
    if folder.selected.exists() and capability in [entry.skill for entry in read_entries(folder.selected)]:
        where = ["--capabilities", str(folder.selected), "--scenarios", str(scenarios), "--n-scenarios", str(n)]
        environment_status.main(["done", "--skill", capability, *where])


def render(found: dict[str, Any]) -> str:
    lines = [f"{found['capability']}: mean pass rate {found['mean_pass_rate']:.2f}"]
    lines.append(scenario_panel.table([Check(**check) for check in found["checks"]]))
    for row in found["scenarios"]:
        low, high = row["interval"]
        word = "confirmed" if row["confirmed"] else "left out"
        lines.append(f"  {word:10} {row['pass_rate']:.2f} [{low:.2f}, {high:.2f}] of {row['n_rollouts']} {row['name']}")
    lines.append(f"verdict: {found['verdict']} ({found['confirmed']} confirmed, {found['min_confirmed']} wanted)")
    return "\n".join(lines)


def dry_run(args: argparse.Namespace, folder: RunFolder, settings: RunSettings) -> int:
    checks = DryRun(args.planned)
    with checks.checking("scenario sets", there=bool(generated_env.sets_in(folder.phase3))) as found:
        found += [f"{n}: {len(generated_env.read_set(folder.phase3, n))}" for n in chosen(args, folder, settings)]
    with checks.checking("sandbox") as found:
        found.append(sandbox.find_isolation("auto").kind)
    with checks.checking("solving model", there=attached() or settings.validation.engine == "local") as found:
        if settings.validation.engine == "local":
            found.append(str(require_local(settings)))
        else:
            found.append(require_model(settings))
    with checks.checking("disk") as found:
        found.append(require_disk(folder.phase4, 1.0))
    return checks.exit_code


def require_local(settings: RunSettings) -> str:
    """The folder of the model for the engine in this process; a hub name is left to the hub."""
    name = settings.training.base_model or settings.model.name
    if name.startswith((".", "/")) and not Path(name).is_dir():
        raise InputError(f"training.base_model {name}: not found; give a model folder or a hub name")
    return name


def main() -> int:
    args = parse_arguments()
    settings, folder = open_phase(args)
    if args.dry_run:
        return dry_run(args, folder, settings)
    names = chosen(args, folder, settings)
    export_key(settings)
    verdicts = []
    with folder.locked():
        for name in names:
            code, found = validate(name, folder, settings)
            if code:
                return code
            sys.stdout.write(render(found) + "\n")
            verdicts.append(found["verdict"])
    return 0 if all(verdict == "pass" for verdict in verdicts) else 1


if __name__ == "__main__":
    run_cli(main)
