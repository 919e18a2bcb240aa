"""Compare base, adapters and every way to compose them on held-out seeds of any environments, in one table.

    python -m train.evaluate --model M --envs helpdesk,capability_a --seeds 10000:10128 --trials 3 \\
        --adapters pipeline/adapters/a,pipeline/adapters/b --merge linear,ties,dare_ties \\
        --choose pipeline/selected_capabilities.json --soft-gate runs/gate --gate runs/gate --out-dir runs/eval

Systems: the base, each single adapter, merges, the adapter that the base picks per task from the descriptions
(``chosen``), the gate as a soft mixture and as top-1 routing, and the union of base and singles as a ceiling. Base,
adapters, merges and ``chosen`` run on one engine (in this process, or stock vLLM with ``--base-url``); gates run here
(``--gate``) or on servers of the exported model (``--routed-base-url``).

Every system plays the same seeds, greedy once and at temperature 1 ``--trials`` times. Writes ``evaluation.json``,
``report.html`` (self-contained) and the episodes under ``rollouts/``. A killed run goes on with the same command.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from game_registry import GameSpec
from pipeline.command_line import non_negative_int
from pipeline.files import InputError, finite, read_json, read_jsonl, run_cli, write_json, write_text
from pipeline.remote_game import resolve_game
from pipeline.split import refuse_mined
from train.adapter_folder import as_folders, parse_adapters
from train.engines import EngineOptions, add_engine_flags, engine_options, open_engine
from train.evaluation_choice import summarise_picks
from train.evaluation_report import render_report
from train.evaluation_stats import BOOTSTRAP, Trial, compare, summarize, union_trials
from train.evaluation_systems import UNION, add_system_flags, refuse_empty, systems_from
from train.identity import base_identity
from train.systems import MODES, Plan, ResultStore, System, open_routed, release_memory, sample_missing
from train.user_llm import UserLLM, add_user_llm_flags, user_llm_from

SCHEMA_VERSION = 1
OVERALL = "all environments"
CURVE_KEYS = frozenset({"reward", "success", "entropy", "informative", "eval_reward"})
ROUTED_TRACES = 48  # episodes of each environment whose routes are traced for the heat map


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--envs", required=True, help="comma list of environments")
    parser.add_argument("--seeds", default="10000:10128", metavar="FIRST:END", help="held-out seeds [%(default)s]")
    parser.add_argument("--trials", type=int, default=3, help="episodes per seed at temperature 1 [%(default)s]")
    parser.add_argument("--modes", default="greedy,sampled", help="comma list of greedy, sampled [%(default)s]")
    parser.add_argument("--routing-stats", help="JSON of routing statistics, when the routed model is on a server")
    parser.add_argument(
        "--out-dir", type=Path, required=True, help="folder for evaluation.json, report.html, rollouts/"
    )
    parser.add_argument("--train-metrics", default="", help="comma list of metrics.jsonl of training runs (for curves)")
    parser.add_argument("--summaries", help="stage-1 summaries with a split: mined seeds are refused")
    parser.add_argument("--allow-mined", action="store_true", help="score on mined seeds all the same")
    parser.add_argument("--bootstrap", type=int, default=BOOTSTRAP, help="bootstrap draws [%(default)s]")
    parser.add_argument("--seed", type=non_negative_int, default=0, help="of sampling and bootstrap [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=256, help="episodes in flight [%(default)s]")
    parser.add_argument("--max-new-tokens", type=int, help="per turn [the environment's max_gen_tokens]")
    parser.add_argument("--max-seq-length", type=int, default=16384, help="tokens of one episode [%(default)s]")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="seconds of one episode [%(default)s]")
    parser.add_argument("--root", type=Path, help="folder with capability_*_game.py files [the project's]")
    add_system_flags(parser)
    add_engine_flags(parser)
    add_user_llm_flags(parser)
    return parser


def plan_from(args: argparse.Namespace) -> Plan:
    """The sampling plan.

    Raises:
        InputError: a flag that cannot work.
    """
    first, _, end = args.seeds.partition(":")
    if not (first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise InputError(f"--seeds {args.seeds!r}: expected FIRST:END with FIRST < END, for example 10000:10128")
    for name in ("trials", "concurrency", "max_seq_length", "bootstrap"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')}: expected >= 1, found {getattr(args, name)}")
    modes = tuple(dict.fromkeys(filter(None, (m.strip() for m in args.modes.split(",")))))
    if not modes or any(m not in MODES for m in modes):
        raise InputError(f"--modes {args.modes!r}: expected a comma list of {', '.join(MODES)}")
    if not args.deadline_s > 0:
        raise InputError(f"--deadline-s: expected seconds > 0, found {args.deadline_s}")
    return Plan(
        seeds=range(int(first), int(end)),
        trials=args.trials,
        modes=modes,
        max_new_tokens=args.max_new_tokens,
        max_seq_length=args.max_seq_length,
        deadline_s=args.deadline_s,
        sampling_seed=args.seed,
        concurrency=args.concurrency,
    )


def main() -> int:
    args = build_parser().parse_args()
    plan = plan_from(args)
    refuse_empty(args)
    names = list(dict.fromkeys(filter(None, (n.strip() for n in args.envs.split(",")))))
    if not names:
        raise InputError("--envs: expected a comma list of environments, found none")
    specs = [resolve_game(name, args.root) for name in names]
    if args.summaries == "":  # no leave to score what was mined
        raise InputError("--summaries '': expected a file; give it, or leave the flag out")
    if args.summaries:
        tasks = ((name, str(seed)) for name in names for seed in plan.seeds)
        refuse_mined(tasks, args.summaries, allow=args.allow_mined)
    options = engine_options(args)
    curves = read_curves(args.train_metrics)
    singles, beside = parse_adapters(args.adapters or ""), parse_adapters(args.other_adapters or "")
    with as_folders(singles) as folders, as_folders(beside) as others:
        systems = systems_from(args, folders, others)
        base = base_identity(options.model)
        store = ResultStore(args.out_dir / "rollouts", plan, options.served_model or options.model, base)
        try:
            asyncio.run(sample_all(args, options, systems, specs, plan, store))
            entries = {
                (system.name, spec.name, mode): store.finish(system, spec, mode)
                for system in systems
                for spec in specs
                for mode in plan.modes
            }
        finally:
            store.close()
        result = evaluate_entries(entries, systems, plan, args.bootstrap, args.seed)
        result["info"] = describe_run(args, options, plan)
        result["routing"] = read_routing(args, specs, systems)
        result["choice"] = {
            spec.name: summarise_picks(store.picks(system, spec), list(plan.seeds))
            for system in systems
            if system.kind == "chosen"
            for spec in specs
        }
    write_json(args.out_dir / "evaluation.json", result)
    write_text(args.out_dir / "report.html", render_report(result, curves, entries))
    print_table(result)
    print(f"{args.out_dir}/evaluation.json and {args.out_dir}/report.html written")
    return 0


async def sample_all(
    args: argparse.Namespace,
    options: EngineOptions,
    systems: Sequence[System],
    specs: Sequence[GameSpec],
    plan: Plan,
    store: ResultStore,
) -> None:
    """Run what is missing: everything on the base's engine first, then each routed mixture on its own."""
    user_llm = user_llm_from(args)
    plain = [s for s in systems if s.kind != "routed"]
    unasked = any(set(plan.seeds) - store.picks(s, g).keys() for s in plain if s.kind == "chosen" for g in specs)
    if unasked or any(store.missing(s, spec, mode) for s in plain for spec in specs for mode in plan.modes):
        opened = await open_engine(options)
        try:
            await sample_missing(opened, plain, specs, plan, store, user_llm)
        finally:
            await opened.engine.close()
        del opened
        release_memory()
    for system in (s for s in systems if s.kind == "routed"):
        await _sample_routed(args, options, system, specs, plan, store, user_llm)


async def _sample_routed(
    args: argparse.Namespace,
    options: EngineOptions,
    system: System,
    specs: Sequence[GameSpec],
    plan: Plan,
    store: ResultStore,
    user_llm: UserLLM | None,
) -> None:
    missing = any(store.missing(system, spec, mode) for spec in specs for mode in plan.modes)
    traced = all(routing_file(args.out_dir, spec.name, system).exists() for spec in specs)
    if not missing and (traced or system.base_url):
        return
    opened, model = await open_routed(options, system)
    try:
        if missing:
            await sample_missing(opened, [system], specs, plan, store, user_llm)
        if model is not None:
            for spec in specs:
                log = store.log(system, spec, plan.modes[0])
                statistics = trace_routing(model, list(log.entries.values()))
                write_json(routing_file(args.out_dir, spec.name, system), statistics)
    finally:
        await opened.engine.close()
    del opened, model
    release_memory()


def routing_file(out_dir: Path, env: str, system: System) -> Path:
    """Where the routes of one environment are kept; another gate has another file."""
    return out_dir / "routing" / f"{env}.{system.fingerprint()}.json"


def trace_routing(model: Any, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Routes of the sampled tokens of up to ``ROUTED_TRACES`` episodes, by one forward each.

    Gates are token-causal, so these are the routes that the tokens had while they were sampled.
    ``layer_shares[l][s]``: share of slot s among the sampled tokens in adapted layer l.
    """
    import torch

    from moe_gate import routing_state, trace_routes

    names = list(routing_state(model).slot_names)
    counts: Any = None
    chosen = sorted(entries, key=lambda e: (int(e["task_id"]), e["sample_idx"]))[:ROUTED_TRACES]
    for entry in chosen:
        sampled = torch.tensor(entry["action_mask"], dtype=torch.bool)
        routes = trace_routes(model, entry["token_ids"])[:, sampled]
        one_hot = torch.nn.functional.one_hot(routes.long(), len(names)).sum(1)
        counts = one_hot if counts is None else counts + one_hot
    shares = counts.double() / counts.sum(1, keepdim=True).clamp_min(1)
    return {
        "schema_version": SCHEMA_VERSION,
        "slots": names,
        "layer_shares": [[round(x, 6) for x in row] for row in shares.tolist()],
        "share_of_slot": dict(zip(names, (counts.sum(0) / counts.sum()).tolist(), strict=True)),
        "episodes": len(chosen),
        "tokens": int(counts[0].sum()),
    }


def read_routing(args: argparse.Namespace, specs: Sequence[GameSpec], systems: Sequence[System]) -> dict[str, Any]:
    """Routing statistics of each environment that has some."""
    found = {}
    routed = [s for s in systems if s.kind == "routed"]
    for system in routed:
        for spec in specs:
            path = routing_file(args.out_dir, spec.name, system)
            if path.exists():
                name = spec.name if len(routed) == 1 else f"{spec.name}, {system.name}"
                found[name] = read_json(path, "routing statistics")
    if args.routing_stats:
        data = read_json(args.routing_stats, "routing statistics")
        if not isinstance(data, dict) or "layer_shares" not in data or "share_of_slot" not in data:
            raise InputError(f"routing statistics {args.routing_stats}: expected layer_shares and share_of_slot")
        found["server"] = {"slots": list(data["share_of_slot"]), **data}
    return found


def read_curves(text: str) -> dict[str, list[dict[str, float]]]:
    """Adapter -> its training iterations (``iteration``, ``reward``, ...) from metrics files.

    Raises:
        InputError: a file that is missing, damaged, or without an iteration and a reward in any line.
    """
    curves: dict[str, list[dict[str, float]]] = {}
    for path in filter(None, (p.strip() for p in text.split(","))):
        rows = 0
        for record in read_jsonl(path, "training metrics", torn_tail_ok=True):
            if not isinstance(record, dict) or "iteration" not in record or not CURVE_KEYS & record.keys():
                continue
            where = f"training metrics {path}"
            row = {key: finite(record[key], where) for key in ("iteration", *CURVE_KEYS) if key in record}
            curves.setdefault(str(record.get("adapter", Path(path).parent.name)), []).append(row)
            rows += 1
        if rows == 0:
            raise InputError(f"training metrics {path}: no line has iteration and reward; give a run's metrics.jsonl")
    return curves


def trials_of(entries: Sequence[dict[str, Any]]) -> list[Trial]:
    """Rollout entries as trials; an entry that failed has no reward."""
    return [
        Trial(
            seed=int(e["task_id"]),
            trial=int(e["sample_idx"]),
            reward=e["reward_info"]["reward"] if e["outcome"] == "scored" else None,
            truncated=e["truncated_turns"] > 0 or e["finish_reason"] == "context",
            turns=e["turns"],
            invalid_calls=e["invalid_calls"],
            tokens=e["n_action_tokens"],
            error_kind=e.get("error_kind"),
        )
        for e in entries
    ]


def evaluate_entries(
    entries: Mapping[tuple[str, str, str], Sequence[dict[str, Any]]],
    systems: Sequence[System],
    plan: Plan,
    draws: int,
    seed: int,
) -> dict[str, Any]:
    """``results[env][mode][system]``: rates with intervals and paired differences; with several envs also over all."""
    envs = list(dict.fromkeys(env for _, env, _ in entries))
    singles = [s.name for s in systems if s.kind == "adapter"]
    experts = ["base", *singles]
    results: dict[str, Any] = {}
    pooled: dict[tuple[str, str], list[Trial]] = {}
    for number, env in enumerate(envs):
        for mode in plan.modes:
            table = {s.name: trials_of(entries[s.name, env, mode]) for s in systems}
            if singles:
                table[UNION] = union_trials({name: table[name] for name in experts})
            results.setdefault(env, {})[mode] = _rows(table, singles, draws, seed)
            for name, trials in table.items():  # seed numbers repeat over environments, tasks do not
                moved = [dataclasses.replace(t, seed=t.seed + number * 10**12) for t in trials]
                pooled.setdefault((mode, name), []).extend(moved)
    if len(envs) > 1:
        for mode in plan.modes:
            table = {name: trials for (m, name), trials in pooled.items() if m == mode}
            results.setdefault(OVERALL, {})[mode] = _rows(table, singles, draws, seed)
    return {
        "schema_version": SCHEMA_VERSION,
        "systems": [{"name": s.name, "kind": s.kind, "weights": s.fingerprint()} for s in systems],
        "results": results,
    }


def _rows(table: Mapping[str, Sequence[Trial]], singles: Sequence[str], draws: int, seed: int) -> dict[str, Any]:
    differences = compare(table, "base", singles, draws, seed)
    return {name: {**summarize(trials, draws, seed).to_json(), **differences[name]} for name, trials in table.items()}


def describe_run(args: argparse.Namespace, options: EngineOptions, plan: Plan) -> dict[str, Any]:
    return {
        "model": options.served_model or options.model,
        "engine": options.kind,
        "dtype": options.dtype if options.kind == "local" else "the server's",
        "seeds": args.seeds,
        "trials": plan.trials,
        "modes": list(plan.modes),
        "seed": args.seed,
        "bootstrap": args.bootstrap,
        "max_new_tokens": plan.max_new_tokens,
        "max_seq_length": plan.max_seq_length,
        "interval": "95 % percentile bootstrap over seeds; differences are paired by seed",
    }


def print_table(result: Mapping[str, Any]) -> None:
    """The comparison as text."""
    for env, modes in result["results"].items():
        for mode, rows in modes.items():
            best = next((row["best_single"] for row in rows.values() if row["best_single"]), None)
            single = f"vs {best}" if best else ""
            sys.stdout.write(
                f"\n{env}, {mode}\n  {'system':32} {'reward':>8} {'95 % interval':>18} {'vs base':>24}  {single}\n"
            )
            for name, row in rows.items():
                differences = f"{_difference(row['vs_base']):24}  {_difference(row['vs_best_single'])}".rstrip()
                sys.stdout.write(f"  {name:32} {_interval(row['reward'])} {differences}\n")
    for env, choice in result["choice"].items():
        picks = ", ".join(f"{name} {count}" for name, count in choice["picks"].items())
        sys.stdout.write(f"\nchosen on {env}: {picks}; invalid replies {100 * choice['invalid_share']:.1f} %\n")


def _interval(value: Mapping[str, float] | None) -> str:
    if value is None:
        return f"{'no scored episode':>27}"
    return f"{value['value']:8.3f}  [{value['low']:6.3f}, {value['high']:6.3f}]"


def _difference(value: Mapping[str, float] | None) -> str:
    if value is None:
        return ""
    return f"{value['value']:+7.3f} [{value['low']:+6.3f}, {value['high']:+6.3f}]"


if __name__ == "__main__":
    run_cli(main)
