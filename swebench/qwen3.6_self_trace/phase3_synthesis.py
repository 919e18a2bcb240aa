"""Phase 3: scenarios that train one capability, calibrated on the model that will be trained.

    python swebench/qwen3.6_self_trace/phase3_synth_deep_call_graph_traversal.py
    python swebench/qwen3.6_self_trace/phase3_synth_semantic_logic_precision.py
    python swebench/qwen3.6_self_trace/phase3_synthesis.py --capability NAME     # any other selected capability
    python swebench/qwen3.6_self_trace/phase3_synthesis.py --all-selected        # all of them, best first

A model writes, the run's own model solves: 10 calibrated scenarios (0 < pass rate <= 0.5 on 10 rollouts, confirmed on
10 fresh ones), at most 60 tries, by ``pipeline.synthesize_scenarios``. Writes
``phase3/<capability>/scenarios_parsed.json``. A killed run goes on with the same command. Exit 1: the tries were used
up; ``scenarios_parsed.attempts.jsonl`` says why.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from checks import (
    attached,
    capability_name,
    export_key,
    require_disk,
    require_file,
    require_model,
    selected_skills,
)
from run_folder import DryRun, RunFolder, open_phase, phase_parser
from run_settings import RunSettings
from steps import Step, run_steps

from pipeline import sandbox
from pipeline.files import InputError, run_cli, write_json
from pipeline.scenarios import load_scenarios, save_scenarios, scenario_path
from pipeline.selection_export import read_entries

PHASE2 = "phase2_capability_mining.py"


def parse_arguments(
    capability: str | None, description: str | None, arguments: list[str] | None = None
) -> argparse.Namespace:
    parser = phase_parser(description)
    if capability is None:
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--capability", help="name of a selected capability")
        which.add_argument("--all-selected", action="store_true", help="every capability that phase 2 selected")
    parser.add_argument("--description", help="what the capability is, when phase 2 did not select it")
    parser.add_argument("--use-shipped", action="store_true", help="first measure the hand-written scenarios that ship")
    args = parser.parse_args(arguments)
    args.all_selected = capability is None and args.all_selected
    if args.all_selected and args.description:
        raise InputError("--description: goes with one --capability, not with --all-selected")
    args.capability = None if args.all_selected else capability_name(capability or args.capability)
    return args


def each(args: argparse.Namespace, folder: RunFolder) -> list[argparse.Namespace]:
    """The arguments of every capability that is asked for.

    Raises:
        InputError: phase 2 has not been run, or selected nothing.
    """
    if not args.all_selected:
        return [args]
    path = require_file(folder.selected, "phase 2's selection", folder.command(PHASE2))
    names = selected_skills(folder)
    if not names:
        raise InputError(f"{path}: phase 2 selected nothing; there is no capability to write scenarios for")
    return [argparse.Namespace(**{**vars(args), "capability": capability_name(name)}) for name in names]


def describe(args: argparse.Namespace, folder: RunFolder, settings: RunSettings) -> str:
    """The description that the writer gets: phase 2's, or the one that was given.

    Raises:
        InputError: phase 2 has not been run, or did not select the capability.
    """
    if args.description:
        return str(args.description)
    path = require_file(folder.selected, "phase 2's selection", folder.command(PHASE2))
    entries = {entry.skill: entry.description for entry in read_entries(path)}
    if args.capability not in entries:
        raise InputError(
            f"{args.capability} was not selected in phase 2 (selected: {', '.join(entries) or 'nothing'}); "
            "run the phase for one of those, or give --description to train it anyway"
        )
    return entries[args.capability]


def writer(settings: RunSettings) -> tuple[str, str]:
    """URL and name of the model that writes."""
    s = settings.synthesis
    return s.writer_base_url or settings.model.base_url, s.writer_model or settings.model.name


def require_models(settings: RunSettings) -> None:
    """Raises ServerError unless the models that solve and write are served: some servers answer under any name."""
    require_model(settings)
    if writer(settings) != (settings.model.base_url, settings.model.name):
        require_model(settings, *writer(settings))


def command(args: argparse.Namespace, settings: RunSettings, about: Path, output: Path, accept: int) -> list[str]:
    s, (url, model) = settings.synthesis, writer(settings)
    flags = ["-m", "pipeline.synthesize_scenarios", "--capability", args.capability, "--capabilities-file", str(about)]
    flags += ["--base-url", url, "--model", model, "--solver-base-url", settings.model.base_url]
    flags += ["--solver-model", settings.model.name, "--accept", str(accept), "--max-tries", str(s.max_tries)]
    flags += ["--rollouts", str(s.rollouts), "--max-pass-rate", str(s.max_pass_rate), "--revisions", str(s.revisions)]
    flags += ["--mutations", str(s.mutations), "--temperature", str(s.temperature), "--seed", str(s.seed)]
    flags += ["--write-max-tokens", str(s.write_max_tokens), "--solve-max-tokens", str(s.solve_max_tokens)]
    flags += ["--concurrency", str(s.concurrency), "--timeout-s", str(s.request_timeout_s), "-o", str(output)]
    return flags


def run(args: argparse.Namespace, folder: RunFolder, settings: RunSettings) -> int:
    """Shipped scenarios first when they were asked for, then written ones; 0 when there are enough."""
    export_key(settings)
    wanted, output = settings.synthesis.accept, folder.scenarios(args.capability)
    about = output.parent / "capability.json"
    write_json(about, [{"skill": args.capability, "description": describe(args, folder, settings)}])
    kept = 0
    if args.use_shipped:
        kept = measure_shipped(args, folder, settings, about, wanted)
        if kept < 0:
            return -kept
    code = 0
    if kept < wanted:
        flags = command(args, settings, about, output, wanted - kept)
        step = Step("2_written", tuple(flags), (about,), (output,), before=functools.partial(require_models, settings))
        code = run_steps(output.parent, [step])
    if code not in (0, 1):
        return code
    n = len(load_scenarios(output)) if output.exists() else 0
    sys.stdout.write(f"{args.capability}: {n} of {wanted} calibrated scenarios -> {output}\n")
    return 0 if n >= wanted else 1


def measure_shipped(
    args: argparse.Namespace, folder: RunFolder, settings: RunSettings, about: Path, wanted: int
) -> int:
    """Calibrate the shipped scenarios like any others; how many were kept, or minus the exit code of a failure."""
    output = folder.scenarios(args.capability)
    measured = output.parent / "shipped_measured.json"
    shipped = require_shipped(args.capability)
    flags = [*command(args, settings, about, measured, wanted), "--candidates", str(shipped)]
    ready = functools.partial(require_models, settings)
    step = Step("1_shipped", tuple(flags), (about, shipped), good_codes=(0, 1), before=ready)
    code = run_steps(output.parent, [step])
    if code != 0:
        return -code
    kept = load_scenarios(measured)[:wanted] if measured.exists() else []
    before = load_scenarios(output) if output.exists() else []
    names = {scenario.name for scenario in before}
    new = [scenario for scenario in kept if scenario.name not in names]
    if new:
        save_scenarios(output, [*before, *new])
    return len(kept)


def require_shipped(capability: str) -> Path:
    path = scenario_path(capability)
    if not path.exists():
        raise InputError(f"--use-shipped: no scenarios ship for {capability} ({path} is missing); drop the flag")
    return path


def dry_run(args: argparse.Namespace, folder: RunFolder, settings: RunSettings) -> int:
    checks = DryRun(args.planned)
    wanted: list[argparse.Namespace] = []
    with checks.checking("selection" if args.all_selected else "capability", there=folder.selected.exists()) as found:
        wanted = each(args, folder)
        for one in wanted:
            name = f"{one.capability}: " if args.all_selected else ""
            found.append(name + describe(one, folder, settings)[:80])
    with checks.checking("solving server", there=attached()) as found:
        found.append(require_model(settings))
    if writer(settings) != (settings.model.base_url, settings.model.name):
        with checks.checking("writing server", there=bool(settings.synthesis.writer_base_url) or attached()) as found:
            found.append(require_model(settings, *writer(settings)))
    with checks.checking("sandbox") as found:
        found.append(sandbox.find_isolation("auto").kind)
    if args.use_shipped:
        with checks.checking("shipped scenarios") as found:
            found += [f"{len(load_scenarios(require_shipped(one.capability)))}" for one in wanted]
    with checks.checking("disk") as found:
        found.append(require_disk(folder.phase3, 1.0))
    return checks.exit_code


def main_for(capability: str | None, description: str | None, arguments: list[str] | None = None) -> int:
    """The command of one capability; None takes it from ``--capability`` or ``--all-selected``.

    Of several the first that could not run ends the command (2); tries that were used up (1) let the others go on.
    """
    args = parse_arguments(capability, description, arguments)
    settings, folder = open_phase(args)
    if args.dry_run:
        return dry_run(args, folder, settings)
    wanted = each(args, folder)
    for one in wanted:
        describe(one, folder, settings)  # before anything is made
        if one.use_shipped:
            require_shipped(one.capability)
    worst = 0
    with folder.locked():
        for one in wanted:
            code = run(one, folder, settings)
            if code not in (0, 1):
                return code
            worst = max(worst, code)
    return worst


if __name__ == "__main__":
    run_cli(lambda: main_for(None, __doc__))
