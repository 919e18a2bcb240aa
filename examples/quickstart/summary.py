"""What the quickstart showed: one table, the claims it must support, time and memory. Written to quickstart.json too.

Exit 0 = every claim holds, 1 = some claim does not (the table says which).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pipeline.files import read_json, run_cli, write_block, write_json

STRUCTURED, PRECISION = "structured_data_reasoning", "tool_calling_precision"
GIB = 1024**3


def row(results: dict[str, Any], env: str, mode: str, system: str) -> dict[str, Any]:
    return dict(results[env][mode][system])


def difference(results: dict[str, Any], env: str, mode: str, system: str, key: str) -> dict[str, float]:
    found = row(results, env, mode, system)[key]
    return dict(found) if found is not None else {"value": 0.0, "low": 0.0, "high": 0.0}


def claims(results: dict[str, Any], names: list[str], peak: float) -> list[dict[str, Any]]:
    """Each claim with what was measured and whether it holds. Differences are paired by seed, in success rate."""
    found = []

    def add(text: str, value: float, holds: bool, interval: dict[str, float] | None = None) -> None:
        found.append({"claim": text, "value": round(value, 4), "interval": interval, "holds": holds})

    if STRUCTURED in names:
        d = difference(results, f"capability_{STRUCTURED}", "greedy", STRUCTURED, "success_vs_base")
        add("structured data reasoning, greedy: adapter - base >= +0.20", d["value"], d["value"] >= 0.20, d)
    if PRECISION in names:
        d = difference(results, f"capability_{PRECISION}", "sampled", PRECISION, "success_vs_base")
        add("tool-calling precision, temperature 1: adapter - base >= +0.25", d["value"], d["value"] >= 0.25, d)
        d = difference(results, f"capability_{PRECISION}", "greedy", PRECISION, "success_vs_base")
        add("tool-calling precision, greedy: adapter - base >= 0", d["value"], d["value"] >= 0, d)
    for mode in ("sampled", "greedy"):
        d = difference(results, "helpdesk", mode, "routed", "success_vs_base")
        add(f"helpdesk, {mode}: routed - base, 95 % interval above 0", d["value"], d["low"] > 0, d)
        d = difference(results, "helpdesk", mode, "routed", "success_vs_best_single")
        add(f"helpdesk, {mode}: routed >= best single adapter", d["value"], d["value"] >= 0, d)
    add("peak memory of a process <= 10 GiB", peak / GIB, peak <= 10 * GIB)
    return found


def print_tables(results: dict[str, Any]) -> None:
    for env, modes in results.items():
        for mode, systems in modes.items():
            print(f"\n{env}, {mode}: success rate [95 % interval], difference to base")
            for name, values in systems.items():
                success, delta = values["success"], values["success_vs_base"]
                change = f"{delta['value']:+.3f} [{delta['low']:+.3f}, {delta['high']:+.3f}]" if delta else ""
                print(f"  {name:34} {success['value']:.3f} [{success['low']:.3f}, {success['high']:.3f}]  {change}")


def read_results(run: Path, names: list[str]) -> dict[str, Any]:
    """Results of all evaluations of the run: environment -> mode -> system."""
    results: dict[str, Any] = {}
    for folder in ("evaluation", *(f"evaluation_{name}" for name in names)):
        results |= read_json(run / folder / "evaluation.json", "evaluation")["results"]
    return results


def markdown(results: dict[str, Any], names: list[str], found: list[dict[str, Any]], footer: str) -> str:
    """The README's table."""
    lines = ["| held-out success rate, % | greedy | temperature 1 |", "|---|---|---|"]
    for env in (*(f"capability_{name}" for name in names), "helpdesk"):
        for system in results[env]["greedy"]:
            if env != "helpdesk" and system == "union":
                continue
            cells = []
            for mode in ("greedy", "sampled"):
                success = results[env][mode][system]["success"]
                low, high = 100 * success["low"], 100 * success["high"]
                cells.append(f"{100 * success['value']:.1f} [{low:.0f}, {high:.0f}]")
            lines.append(f"| {env.removeprefix('capability_')}: {system} | {' | '.join(cells)} |")
    missed = [claim["claim"] for claim in found if not claim["holds"]]
    verdict = f"Not reached in this run: {'; '.join(missed)}." if missed else "Every claim that the demo checks holds."
    return "\n".join([*lines, "", verdict, footer])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--names", nargs="+", required=True, help="capabilities that were trained")
    parser.add_argument("--readme", type=Path, help="also write the table into this file, between its marks")
    args = parser.parse_args()
    results = read_results(args.run, args.names)
    stages = {p.stem: read_json(p, "stage record") for p in sorted((args.run / "done").glob("*.json"))}
    seconds = sum(s["seconds"] for s in stages.values())
    peak = max(s["peak_bytes"] for s in stages.values())
    found = claims(results, args.names, peak)
    print_tables(results)
    print()
    for claim in found:
        interval = claim["interval"]
        text = f" [{interval['low']:+.3f}, {interval['high']:+.3f}]" if interval else ""
        print(f"{'holds' if claim['holds'] else 'FAILS'}  {claim['claim']}: {claim['value']:+.3f}{text}")
    footer = f"{seconds / 60:.1f} minutes in {len(stages)} stages, largest process {peak / GIB:.1f} GiB."
    print(f"\n{footer}")
    for name, record in stages.items():
        print(f"  {name:44} {record['seconds']:7.1f} s  {record['peak_bytes'] / GIB:5.2f} GiB")
    report = {
        "schema_version": 1,
        "capabilities": args.names,
        "claims": found,
        "seconds": round(seconds, 1),
        "peak_bytes": peak,
        "stages": stages,
        "results": results,
    }
    write_json(args.run / "quickstart.json", report)
    if args.readme is not None:
        write_block(args.readme, "quickstart", markdown(results, args.names, found, footer))
    print(f"\n{args.run}/quickstart.json and {args.run}/evaluation/report.html written")
    return 0 if all(c["holds"] for c in found) else 1


if __name__ == "__main__":
    run_cli(main)
