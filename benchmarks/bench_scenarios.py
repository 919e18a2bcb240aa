"""The shipped SWE scenarios on a real model: pass rates with intervals, and a few tries of synthesis from end to end.

    python benchmarks/bench_scenarios.py --output benchmarks/results/scenarios_smollm2.json --docs
    python benchmarks/bench_scenarios.py --base-url http://localhost:8000 --model M --output runs/bench/scenarios.json

Without ``--base-url`` a vLLM server of ``--model`` (a folder) is started and ended. Each rollout is a line in the
work folder, so a run that was stopped goes on. ``--docs`` writes the table between the marks in docs/environments.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.serving import served
from game_registry import Scored, play
from pipeline import sandbox
from pipeline.calibration_stats import wilson
from pipeline.command_line import Parser, ProgressLine, non_negative_int, positive_int
from pipeline.endpoint import Endpoint
from pipeline.files import InputError, JsonlLog, ServerError, read_jsonl, run_cli, write_block, write_json
from pipeline.scenarios import Scenario, load_scenarios
from pipeline.swe_game import scenario_spec
from pipeline.synthesis_log import log_path, read_log
from pipeline.text_client import Sampling, TextClient, text_agent

ROOT = Path(__file__).resolve().parents[1]
SETS = ROOT / "pipeline" / "swebench"
# Whole prompts only: a CPU server of vLLM 0.32 dies of a request with a seed whose prompt is split into chunks.
CPU_FLAGS = "--enforce-eager --enable-prefix-caching --no-enable-chunked-prefill --max-num-batched-tokens 8192"
PARTS = ("rates", "synthesis")
Key = tuple[str, int]


def shipped() -> list[tuple[str, Scenario]]:
    """(capability, scenario) of every set that ships."""
    files = sorted(SETS.glob("*/scenarios_parsed.json"))
    return [(file.parent.name, scenario) for file in files for scenario in load_scenarios(file)]


# --------------------------------------------------------------------------- pass rates


async def rollout(
    scenario: Scenario, isolation: str, client: TextClient, sampling: Sampling, seed: int
) -> dict[str, Any]:
    """One episode of one scenario, as a record.

    Raises:
        ServerError: the server or the sandbox failed; such an episode enters no rate.
    """
    spec = scenario_spec("capability_measured", [scenario], isolation)
    result = await play(spec, spec.make_env(), text_agent(client, sampling, seed), 0)
    if not isinstance(result.outcome, Scored):
        raise ServerError(f"{scenario.name}: {result.outcome.kind}: {result.outcome.detail}")
    counts = {"turns": result.turns, "truncated_turns": result.truncated_turns, "edits": result.summary["edits"]}
    return {"reward": result.outcome.reward, "finish_reason": result.finish_reason, **counts}


def _earlier(path: Path, settings: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    """Rollouts of a run with the same settings that was stopped."""
    done: dict[Key, dict[str, Any]] = {}
    if not path.exists():
        return done
    for number, raw in enumerate(read_jsonl(path, "rollouts", torn_tail_ok=True), 1):
        if not isinstance(raw, dict) or raw.get("settings") != settings:
            raise InputError(f"{path} line {number}: made with other settings; remove it or choose another --output")
        done[raw["scenario"], raw["sample"]] = raw
    return done


async def measure(args: argparse.Namespace, url: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """``--rollouts`` of every shipped scenario; a row each."""
    scenarios, sampling = shipped(), Sampling(args.temperature, args.max_tokens)
    path = args.work_dir / "rollouts.jsonl"
    done = _earlier(path, settings)
    todo = [(s, i) for i in range(args.rollouts) for _, s in scenarios if (s.name, i) not in done]
    line = ProgressLine("rollouts", len(todo))
    gate = asyncio.Semaphore(args.concurrency)
    async with TextClient(Endpoint(url, args.served_name)) as client:
        with JsonlLog(path) as log:

            async def one(scenario: Scenario, index: int) -> None:
                async with gate:
                    seed = args.seed * 100_003 + index * 101 + sum(scenario.name.encode())
                    found = await rollout(scenario, args.isolation, client, sampling, seed)
                record = {"scenario": scenario.name, "sample": index, "settings": settings, **found}
                log.append(record)
                done[scenario.name, index] = record
                line.advance(note=scenario.name)

            try:
                async with asyncio.TaskGroup() as group:
                    for scenario, index in todo:
                        group.create_task(one(scenario, index))
            except ExceptionGroup as failed:  # the first one says why; the others were cancelled or say the same
                raise failed.exceptions[0] from None
    line.close()
    return [_row(name, s, [done[s.name, i] for i in range(args.rollouts)]) for name, s in scenarios]


def _row(capability: str, scenario: Scenario, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates of one scenario. A rollout passes when its reward is 1."""
    n = len(records)
    rate = wilson(sum(r["reward"] >= 1.0 for r in records), n)
    edited = wilson(sum(r["edits"] > 0 for r in records), n)
    return {
        "capability": capability,
        "scenario": scenario.name,
        "n": n,
        "pass_rate": {"value": rate.value, "ci95": [rate.low, rate.high]},
        "edited": {"value": edited.value, "ci95": [edited.low, edited.high]},
        "mean_reward": sum(r["reward"] for r in records) / n,
        "turns": sum(r["turns"] for r in records) / n,
        "truncated": sum(r["truncated_turns"] > 0 for r in records) / n,
        "no_room": sum(r["finish_reason"] == "context" for r in records) / n,
        "in_band": 0 < rate.value <= 0.5,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/environments.md, in Markdown."""
    lines = [
        "| capability | scenario | pass rate % (95 %) | edited the module % | cut answers % | 0 < rate <= 0.5 |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = (100 * max(0.0, x) for x in row["pass_rate"]["ci95"])
        rate = f"{100 * row['pass_rate']['value']:.0f} ({low:.0f}-{high:.0f})"
        cells = [row["capability"], row["scenario"], rate, f"{100 * row['edited']['value']:.0f}"]
        cells += [f"{100 * row['truncated']:.0f}", "yes" if row["in_band"] else "no"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --------------------------------------------------------------------------- synthesis


def synthesize(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """The published command with a small budget; what it said and how its tries ended."""
    output = args.work_dir / "synthesis" / "scenarios.json"
    flags = ["--capability", "semantic_logic_precision", "--base-url", url, "--model", args.served_name]
    flags += ["--max-tries", str(args.tries), "--rollouts", str(args.rollouts), "--seed", str(args.seed)]
    flags += ["--temperature", str(args.temperature), "--write-max-tokens", str(args.write_max_tokens)]
    flags += ["--solve-max-tokens", str(args.max_tokens), "-o", str(output)]
    flags += ["--isolation", args.isolation]
    began = time.monotonic()
    command = [sys.executable, "-m", "pipeline.synthesize_scenarios", *flags]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code not in (0, 1):
        raise InputError(f"synthesis ended with exit code {code}; its own message is above")
    progress = read_log(log_path(output))
    reasons = [{"outcome": kind, "problem": text, "n": n} for (kind, text), n in progress.problems.most_common(10)]
    found = {"tries": progress.tries, "accepted": len(progress.accepted), "outcomes": progress.outcomes}
    return {"exit": code, "seconds": round(time.monotonic() - began, 1), **found, "commonest_problems": reasons}


# --------------------------------------------------------------------------- command


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    if args.base_url:
        yield args.base_url
        return
    flags = ["--dtype", "bfloat16", "--max-model-len", "8192", "--max-num-seqs", str(args.concurrency)]
    flags += ["--served-model-name", args.served_name, *args.server_flags.split()]
    with served(args.model, flags, args.work_dir / "server.log", args.server_start_s) as url:
        yield url


def _parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON to write")
    add("--work-dir", type=Path, default=Path("runs/bench_scenarios"), help="log of rollouts, tries, server's log")
    add("--base-url", help="a server that runs (default: one is started)")
    add("--model", default="models/smollm2", help="model folder, or the name that --base-url serves")
    add("--parts", default="rates,synthesis", help="what to do")
    add("--rollouts", type=positive_int, default=10, help="rollouts of a scenario")
    add("--tries", type=positive_int, default=4, help="tries of synthesis")
    add("--temperature", type=float, default=1.0, help="of both models")
    add("--max-tokens", type=positive_int, default=160, help="longest answer of the solver")
    add("--write-max-tokens", type=positive_int, default=2048, help="longest answer of the writer")
    add("--concurrency", type=positive_int, default=32, help="rollouts at a time")
    add("--seed", type=non_negative_int, default=0, help="seed of sampling")
    add("--server-flags", default=CPU_FLAGS, help="of the server that is started")
    add("--server-start-s", type=float, default=300.0, help="deadline of its start")
    add("--isolation", default="auto", choices=("auto", "bwrap", "process"), help="how modules are shut in")
    add("--docs", action="store_true", help="refresh the table in docs/environments.md")
    return parser


def main() -> int:
    args = _parser().parse_args()
    parts = args.parts.split(",")
    if not set(parts) <= set(PARTS):
        raise InputError(f"--parts {args.parts}: expected some of {', '.join(PARTS)}")
    sandbox.find_isolation(args.isolation)  # before a server is started for nothing
    args.served_name = args.model if args.base_url else Path(args.model).name
    args.work_dir.mkdir(parents=True, exist_ok=True)
    names = ("temperature", "max_tokens", "seed")
    settings = {"model": args.served_name, **{name: getattr(args, name) for name in names}}
    result: dict[str, Any] = {"schema_version": 1, "settings": {**settings, "rollouts": args.rollouts}}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout`: the server that was started ends too
    began = time.monotonic()
    with _server(args) as url:
        result["server_start_s"] = round(time.monotonic() - began, 1)
        if "rates" in parts:
            began = time.monotonic()
            result["scenarios"] = asyncio.run(measure(args, url, settings))
            result["seconds"] = round(time.monotonic() - began, 1)
        if "synthesis" in parts:
            result["synthesis"] = synthesize(args, url)
    write_json(args.output, result)
    if "rates" in parts:
        sys.stdout.write(table(result["scenarios"]) + "\n")
        if args.docs:
            write_block(ROOT / "docs" / "environments.md", "scenarios", table(result["scenarios"]))
    return 0


if __name__ == "__main__":
    run_cli(main)
