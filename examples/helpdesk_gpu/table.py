"""What the evidence run showed: one table, what the paper claims beside it, curves, transfer, agreement, costs.

    python examples/helpdesk_gpu/table.py --run runs/helpdesk_gpu --size gpu --out results/helpdesk_gpu

Writes ``helpdesk.json``, figures (SVG), ``report.html`` (offline), and with ``--readme`` the README's block. Numbers
are success rates on the score seeds unless said otherwise; differences are paired by seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import findings
import machine
import plan
import scores
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from scheduler import record_of
from sizes import SIZES, Size

from pipeline.files import InputError, read_json, read_jsonl, run_cli, write_block, write_json, write_text
from train.svg import interval_chart, line_chart

MODES = {"greedy": "greedy", "sampled": "temperature 1"}
LABELS = {
    "base": "base",
    "direct": "GRPO on the mined helpdesk tasks themselves, same budget of rollouts",
    "joint": "one adapter on all environments, same budget of rollouts",
    "merge": "linear merge",
    "ties": "TIES merge",
    "dare_ties": "DARE-TIES merge",
    "chosen": "adapter chosen by the base from descriptions",
    "soft": "soft gate",
    "routed": "token top-1 gate (SFT)",
    "routed_grpo": "token top-1 gate after GRPO",
    "union": "union of base and adapters (ceiling)",
}
TRAININGS = {
    "train": "the capabilities' adapters together",
    "direct": "GRPO on the mined tasks",
    "joint": "one adapter on all environments",
    "others": "the other candidates' adapters together",
}
SAMPLED = {
    True: "base and adapters sampled by a vLLM server, gates by transformers",
    False: "sampled by transformers",
}
BESIDE = (
    "Not among them: mining, calibration, and what the gate's GRPO samples. A single adapter has its part of the first."
)


def collect(run: Path, size: Size) -> dict[str, Any]:
    """Everything that the stages left, as one object; what was not run is absent, or None.

    Raises:
        InputError: there is no selection yet, or a file is damaged.
    """
    names = plan.capability_names(run, size.count)
    results = scores.results(run, size, names)
    other = run / "mine_b" / "selected_capabilities.report.json"
    parts = [plan.ranked_capabilities(run, part) for part in ("a", "b" if other.exists() else "a")]
    return {
        "schema_version": 1,
        "capabilities": names,
        "rows": rows(results, names),
        "curve": curve(run, size, names, results),
        "count": count(results, names),
        "filter": filter_rows(results, names, run, size),
        "transfer": transfer(run, names),
        "accepted": [str(e["skill"]) for e in plan.ranked_capabilities(run) if e["selected"]],
        "selection": findings.selection_agreement(*parts) if other.exists() else None,
        "environments": [environment(run, name) for name in plan.ALL_CANDIDATES],
        "choice": scores.choice(run),
        "routing": scores.routing(run, size, names),
        "gates": scores.gate_reports(run, size, names),
        "claims": findings.claims(run, names, size, results),
        "costs": costs(run),
        "info": info(run, size),
    }


def info(run: Path, size: Size) -> dict[str, Any]:
    found: dict[str, Any] = {"model": findings.model_name(run), "served": findings.served(run)}
    found |= {"seeds": size.score_seeds, "trials": size.trials, "transfer_trials": size.transfer_trials}
    return found | {"size": dataclasses.asdict(size), "machine": machine.machine(run)}


def rows(results: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """The table, in the order of the issue: base, the rivals, the singles, the compositions, the ceiling."""
    order = ["base", "direct", "joint", *names]
    order += [key for key in LABELS if key not in order]
    found = []
    for key in order:
        if key in results.get("greedy", {}):
            cells = {mode: results[mode][key] for mode in MODES}
            found.append({"system": key, "label": LABELS.get(key, f"adapter {key}"), "modes": cells})
    return found


def curve(run: Path, size: Size, names: Sequence[str], results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Success at temperature 1 against rollouts used, for the methods that train."""
    points: list[dict[str, Any]] = []
    for budget in size.budgets:
        suffix = "" if budget == size.budgets[-1] else f"_{budget}"
        for system, key in (("routed", "train"), ("direct", "direct"), ("joint", "joint")):
            factor = 1 if key == "train" else len(names)
            if f"{system}{suffix}" in results.get("sampled", {}):
                used = episodes(run / "training" / key, factor * budget)
                success = results["sampled"][f"{system}{suffix}"]["success"]
                # a training that had ended by then: the same adapter again
                points = [p for p in points if (p["system"], p["rollouts"]) != (system, used)]
                points.append({"system": system, "budget": budget, "rollouts": used, "success": success})
    return points


def episodes(folder: Path, iterations: int) -> int:
    """Rollouts that all adapters of a training run sampled up to an iteration."""
    records = read_jsonl(folder / "metrics.jsonl", "training metrics", torn_tail_ok=True)
    return int(sum(r["episodes"] for r in records if "episodes" in r and r["iteration"] <= iterations))


def count(results: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Success of the gate over the first k capabilities, k = 1 .. N."""
    gates = {**{k: f"first_{k}" for k in range(1, len(names))}, len(names): "routed"}
    return [
        {"capabilities": k, **{mode: results[mode][gate]["success"] for mode in MODES}}
        for k, gate in sorted(gates.items())
        if gate in results.get("greedy", {})
    ]


def filter_rows(results: Mapping[str, Any], names: Sequence[str], run: Path, size: Size) -> list[dict[str, Any]]:
    """The gate over the filter's choice, over what it rejects, and over random candidates, with the mean Delta."""
    delta = {str(entry["skill"]): float(str(entry["mean_delta"])) for entry in plan.ranked_capabilities(run)}
    gates = {"routed": tuple(names), **plan.gate_members(names, size)}
    found = []
    for gate, members in gates.items():
        if len(members) == len(names) and gate in results.get("greedy", {}):
            success = {mode: results[mode][gate]["success"] for mode in MODES}
            mean = sum(delta.get(name, 0.0) for name in members) / len(members)
            found.append({"gate": gate, "capabilities": list(members), "mean_delta": mean, **success})
    return sorted(found, key=lambda row: -row["mean_delta"])


def transfer(run: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Success at temperature 1 of the base and of each adapter in each environment."""
    path = run / "transfer" / "evaluation.json"
    if not path.exists():
        return []
    results = read_json(path, "evaluation")["results"]

    def success(system: str) -> dict[str, Any]:
        return {env: results[f"capability_{env}"]["sampled"][system]["success"] for env in names}

    return [{"adapter": system, "success": success(system)} for system in ("base", *names)]


def environment(run: Path, name: str) -> dict[str, Any]:
    """Verdicts of validation and calibration of one environment; None where there is none."""
    found: dict[str, Any] = {"name": name}
    for part, stage in (("validation", "05_validate"), ("calibration", "06_calibrate")):
        record, report = record_of(run, f"{stage}_{name}"), run / "environments" / f"{name}.{part}.json"
        done = record.exists() and report.exists()
        found[f"{part}_passed"] = "exit_code" not in read_json(record, "stage record") if done else None
        found[part] = read_json(report, part) if done else None
    return found


def costs(run: Path) -> dict[str, Any]:
    """Wall seconds and peak memory of every stage; rollouts and sampled tokens of every training run.

    Stages run beside one another, so their seconds add up to more than the clock's.
    """
    done = {p.stem: read_json(p, "stage record") for p in sorted((run / "done").glob("*.json"))}
    training = {}
    for path in sorted((run / "training").glob("*/metrics.jsonl")):
        records = list(read_jsonl(path, "training metrics", torn_tail_ok=True))
        iterations = [r for r in records if "episodes" in r]
        training[path.parent.name] = {
            "rollouts": int(sum(r["episodes"] for r in iterations)),
            "sampled_tokens": int(sum(r["sampled_tokens"] for r in iterations)),
            "finished": f"07_train_{path.parent.name}" in done,
        }
    seconds = {name: record["seconds"] for name, record in done.items()}
    peak = max((record["peak_bytes"] for record in done.values()), default=0)
    total = round(sum(seconds.values()), 1)
    pieces = machine.wall_seconds(run)
    return {
        "stage_seconds": seconds, "total_s": total, "pieces_s": pieces, "peak_bytes": peak, "training": training,
    }  # fmt: skip


def figures(data: Mapping[str, Any]) -> dict[str, str]:
    """Name -> SVG."""
    points = [(r["label"], [(MODES[m], c["success"]) for m, c in r["modes"].items()]) for r in data["rows"]]
    found = {}
    if points:
        found["systems"] = interval_chart(points, "Success on held-out helpdesk tasks with 95 % intervals")
    series: dict[str, list[tuple[float, float]]] = {}
    for point in data["curve"]:
        series.setdefault(point["system"], []).append((point["rollouts"], point["success"]["value"]))
    if series:
        title = "Success at temperature 1 against rollouts used"
        found["curve"] = line_chart(series, title, "success", x_label="rollouts")
    if data["count"]:
        total = len(data["capabilities"])
        found["count"] = interval_chart(
            [(f"{p['capabilities']} of {total}", [(MODES[m], p[m]) for m in MODES if m in p]) for p in data["count"]],
            "Success of the routed model against the number of capabilities",
        )
    if len(data["filter"]) > 1:
        found["filter"] = interval_chart(
            [(f"{p['gate']}, Delta {p['mean_delta']:.2f}", [(MODES[m], p[m]) for m in MODES]) for p in data["filter"]],
            "Success of the gate by the mean Delta of its capabilities",
        )
    return found


def percent(value: Mapping[str, float] | None) -> str:
    if value is None:
        return ""
    return f"{100 * value['value']:.1f} [{100 * value['low']:.0f}, {100 * value['high']:.0f}]"


def signed(value: Mapping[str, float] | None) -> str:
    if value is None:
        return ""
    return f"{100 * value['value']:+.1f} [{100 * value['low']:+.0f}, {100 * value['high']:+.0f}]"


def markdown(data: Mapping[str, Any]) -> str:
    """The README's block."""
    head = "| helpdesk, held-out success, % | greedy | temperature 1 | to the best single adapter |"
    lines = [head, "|---|---|---|---|"] if data["rows"] else []
    for row in data["rows"]:
        sampled = row["modes"]["sampled"]
        cells = [percent(row["modes"]["greedy"]["success"]), percent(sampled["success"])]
        lines.append(f"| {row['label']} | {' | '.join(cells)} | {signed(sampled['success_vs_best_single'])} |")
    lines += [*([""] if lines else []), "| claim | measured | holds |", "|---|---|---|"]
    lines += [f"| {c['claim']} | {c['measured']} | {c['verdict']} |" for c in data["claims"]]
    lines += ["", *transfer_table(data), *caveats(data), *remarks(data)]
    return "\n".join(lines)


def transfer_table(data: Mapping[str, Any]) -> list[str]:
    if not data["transfer"]:
        return []
    names = data["capabilities"]
    lines = [f"| success in, % (temperature 1) | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in data["transfer"]:
        lines.append(f"| {row['adapter']} | {' | '.join(percent(row['success'][name]) for name in names)} |")
    return [*lines, ""]


def caveats(data: Mapping[str, Any]) -> list[str]:
    """What to know before the claims are believed, in sentences."""
    lines = ["Routed in the claims: the gate after SFT, at temperature 1. Unsure: the 95 % interval holds 0."]
    if refuted := [f"{c['claim']} ({c['measured']})" for c in data["claims"] if c["verdict"].startswith("no")]:
        lines.append(f"Does not hold here: {'; '.join(refuted)}.")
    training = data["costs"]["training"]
    whole = training.get("train", {}).get("rollouts", 0)
    early = [f"{TRAININGS[name]} after {run['rollouts']} of {whole} rollouts" for name, run in training.items()
             if run["finished"] and run["rollouts"] < 0.98 * whole]  # fmt: skip
    if early:
        lines.append(f"Ended early, because no group had a signal any more: {', '.join(early)}.")
    if data["transfer"]:
        home = {row["adapter"]: row["success"][row["adapter"]]["value"] for row in data["transfer"][1:]}
        least = min(home, key=lambda name: home[name])
        lines.append(f"Learned least: {least}, {100 * home[least]:.1f} % in its own environment after training.")
    return lines


def remarks(data: Mapping[str, Any]) -> list[str]:
    """What the numbers are of, in sentences."""
    costs, info, lines = data["costs"], data["info"], []
    lines += [f"Trained: {', '.join(data['capabilities'])}, the candidates of the highest Delta; the filter accepts "
              f"{', '.join(data['accepted']) or 'none'}."]  # fmt: skip
    if data["selection"] is not None:
        again = ", ".join(data["selection"]["selected"][1]) or "none"
        lines += [f"After a second mining run, on other tasks, it accepts {again} (Jaccard index "
                  f"{data['selection']['jaccard']:.2f})."]  # fmt: skip
    used = [
        f"{TRAININGS[name]} {run['rollouts']} ({run['sampled_tokens']}{'' if run['finished'] else '; goes on'})"
        for name, run in sorted(costs["training"].items(), key=lambda item: list(TRAININGS).index(item[0]))
    ]
    if used:
        lines += [f"Rollouts (sampled tokens) of the trainings: {', '.join(used)}. {BESIDE}"]
    versions = ", ".join(f"{name} {version}" for name, version in info["machine"].items())
    pieces = costs["pieces_s"]
    minutes = f"{sum(pieces) / 60:.0f} minutes in {len(pieces)} piece{'s' * (len(pieces) != 1)}"
    minutes += f" ({costs['total_s'] / 60:.0f} stage minutes in {len(costs['stage_seconds'])} stages)"
    scored = "Nothing is scored yet"
    if info["model"]:
        scored = f"Model {info['model']}, {SAMPLED[info['served']]}, {info['trials']} per seed at temperature 1"
    if data["transfer"]:
        scored += f" ({info['transfer_trials']} in the table of environments)"
    lines += [f"{scored}, seeds {info['seeds']}; {minutes}; {versions}."]
    return lines


def verdict(passed: bool | None) -> str:
    return "not run" if passed is None else "yes" if passed else "no"


def page(data: Mapping[str, Any], drawn: Mapping[str, str]) -> str:
    template = Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"percent": percent, "signed": signed, "verdict": verdict}
    return environment.from_string(template).render(
        data=data, figures={name: Markup(svg) for name, svg in drawn.items()}, modes=MODES, trainings=TRAININGS,
        beside=BESIDE, sampled=SAMPLED, caveats=caveats(data),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--size", choices=SIZES, required=True, help="of the run")
    parser.add_argument("--out", type=Path, required=True, help="folder for helpdesk.json, figures and report.html")
    parser.add_argument("--readme", type=Path, help="also write the table into this file, between its marks")
    args = parser.parse_args()
    if not args.run.is_dir():
        raise InputError(f"--run {args.run}: not a folder; run examples/helpdesk_gpu/run.py first")
    data = collect(args.run, SIZES[args.size])
    drawn = figures(data)
    block = markdown(data)
    write_json(args.out / "helpdesk.json", data)
    for name, svg in drawn.items():
        write_text(args.out / f"{name}.svg", svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
    write_text(args.out / "report.html", page(data, drawn))
    print(block)
    if args.readme is not None:
        write_block(args.readme, "helpdesk_gpu", block)
    print(f"{args.out}/helpdesk.json and {args.out}/report.html written")
    return 0


if __name__ == "__main__":
    run_cli(main)
