"""Let a model write SWE scenarios for a capability, and keep those that are sound and neither too easy nor unsolvable.

    python -m pipeline.synthesize_scenarios --capability NAME --base-url http://localhost:8000 --model M

Each try: write -> parse -> self-test (at most 2 revisions) -> 10 rollouts -> 0 < pass rate <= 0.5, else mutate when it
was too easy (at most 5 rounds) -> 10 fresh rollouts that confirm it. Each sample is drawn once and in full: nothing is
measured again until it fits. The pass rate in the file is that of the fresh sample. Until 10 are accepted or 60 tries
are used; every try is a line of the log beside the output, and the same command goes on where it stopped.

Exit 0 = enough accepted, 1 = the tries were used up, 2 = could not run. A rollout that the server failed is no failed
rollout: it is drawn again, and a server that stays dead ends the command with nothing lost.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from game_registry import Scored, play
from pipeline import sandbox
from pipeline.command_line import Parser, ProgressLine, non_negative_int, positive_int
from pipeline.endpoint import Endpoint
from pipeline.files import InputError, JsonlLog, ServerError, check, read_json, read_jsonl, resolved, run_cli
from pipeline.mutate_scenario import mutate
from pipeline.sandbox import Isolation
from pipeline.scenarios import Scenario, load_scenarios, parse_scenario, save_scenarios, scenario_path
from pipeline.swe_game import scenario_spec
from pipeline.swe_grading import self_test
from pipeline.templates import render
from pipeline.text_client import Sampling, TextClient, text_agent

DOMAINS = (
    "billing", "calendars", "inventory", "text processing", "graphs", "parsing", "caching", "permissions", "geometry",
    "scheduling", "queues", "unit conversion", "version control", "games", "statistics", "networking", "file formats",
    "validation", "state machines", "search",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do, from the flags."""

    capability: str
    description: str
    accept: int
    max_tries: int
    rollouts: int
    max_pass_rate: float
    revisions: int
    mutations: int
    writing: Sampling
    solving: Sampling
    seed: int
    concurrency: int
    candidates: tuple[Scenario, ...] = ()  # scenarios to measure in place of written ones, one per try


@dataclasses.dataclass
class Try:
    """One try, as it is logged. ``measured`` holds a pass rate for each sample, in the order they were drawn."""

    index: int
    outcome: str = "unparsed"  # unparsed | unsound | unsolved | too_easy | unconfirmed | accepted
    problems: list[str] = dataclasses.field(default_factory=list)
    revisions: int = 0
    mutations: list[str] = dataclasses.field(default_factory=list)
    measured: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    scenario: dict[str, Any] | None = None
    answer: str = ""


class Synthesis:
    """The loop, with the model that writes and the model that solves."""

    def __init__(self, plan: Plan, writer: TextClient, solver: TextClient, isolation: Isolation) -> None:
        self.plan, self.writer, self.solver, self.isolation = plan, writer, solver, isolation

    async def attempt(self, index: int, existing: Sequence[str]) -> Try:
        """One try, from the request to the verdict."""
        record = Try(index)
        scenario = await self._write(record, existing)
        if scenario is None:
            return record
        rng = random.Random(f"{self.plan.seed}:{index}")
        rate = await self._measure(record, scenario, "first")
        while rate > self.plan.max_pass_rate and len(record.mutations) < self.plan.mutations:
            mutated = await asyncio.to_thread(mutate, scenario, rng, None, self.isolation)
            if mutated is None:
                break
            scenario, strategy = mutated
            record.mutations.append(strategy)
            rate = await self._measure(record, scenario, f"after mutation {len(record.mutations)}")
        record.scenario = scenario.model_dump(exclude_none=True)
        if not 0 < rate <= self.plan.max_pass_rate:
            record.outcome = "unsolved" if rate == 0 else "too_easy"
            return record
        fresh = await self._measure(record, scenario, "fresh")
        if not 0 < fresh <= self.plan.max_pass_rate:
            record.outcome = "unconfirmed"
            return record
        sampling = {"model": self.solver.endpoint.model, **dataclasses.asdict(self.plan.solving)}
        measured = {"pass_rate": fresh, "n_rollouts": self.plan.rollouts, "sampling": sampling}
        record.scenario = scenario.model_copy(update=measured).model_dump(exclude_none=True)
        record.outcome = "accepted"
        return record

    async def _write(self, record: Try, existing: Sequence[str]) -> Scenario | None:
        """A sound scenario, or None with the reasons in ``record``."""
        if self.plan.candidates:
            return await self._given(record, existing)
        request, _ = render(
            "swebench/scenario_synthesis.md",
            {
                "capability": self.plan.capability,
                "description": self.plan.description,
                "domain": DOMAINS[record.index % len(DOMAINS)],
                "existing": list(existing),
            },
        )
        messages: list[dict[str, Any]] = [{"role": "user", "content": request}]
        seed = self.plan.seed * 100_003 + record.index * 101
        for revision in range(self.plan.revisions + 1):
            record.revisions = revision
            completion = await self.writer.complete(messages, self.plan.writing, seed + revision)
            record.answer = completion.text
            scenario, problems = await self._judge(completion.text, completion.finish_reason, existing)
            record.problems = problems
            if scenario is not None and not problems:
                return scenario
            record.outcome = "unparsed" if scenario is None else "unsound"
            complaint = "These checks failed:\n" + "\n".join(f"- {p}" for p in problems)
            complaint += "\n\nAnswer with the whole corrected JSON object, and nothing else."
            messages += [
                {"role": "assistant", "content": completion.text},
                {
                    "role": "user",
                    "content": f"{complaint}\n\nAnswer with the whole corrected JSON object, and nothing else.",
                },
            ]
        return None

    async def _given(self, record: Try, existing: Sequence[str]) -> Scenario | None:
        scenario = self.plan.candidates[record.index]
        if scenario.name in existing:
            record.problems = [f"the name {scenario.name} is taken"]
        else:
            record.problems = await asyncio.to_thread(self_test, scenario, self.isolation)
        record.outcome = "unsound"
        record.scenario = scenario.model_dump(exclude_none=True)
        return None if record.problems else scenario

    async def _judge(self, text: str, finish_reason: str, existing: Sequence[str]) -> tuple[Scenario | None, list[str]]:
        if finish_reason == "length":
            return None, ["the answer was cut at the token limit; write a shorter module and fewer tests"]
        try:
            scenario = parse_scenario(text)
        except InputError as error:
            return None, [str(error)]
        if scenario.name in existing:
            return scenario, [f"the name {scenario.name} is taken"]
        scenario = scenario.model_copy(update={"pass_rate": None, "n_rollouts": None, "sampling": None})
        return scenario, await asyncio.to_thread(self_test, scenario, self.isolation)

    async def _measure(self, record: Try, scenario: Scenario, which: str) -> float:
        """Pass rate of one full sample; a rollout passes when its reward is 1."""
        spec = scenario_spec("capability_candidate", [scenario], self.isolation.kind)
        gate = asyncio.Semaphore(self.plan.concurrency)
        base = (self.plan.seed * 1009 + record.index) * 10_007 + len(record.measured) * 1013

        async def rollout(number: int) -> tuple[float, bool]:
            async with gate:
                agent = text_agent(self.solver, self.plan.solving, base + number * 17)
                result = await play(spec, spec.make_env(), agent, 0)
                if not isinstance(result.outcome, Scored):
                    raise ServerError(f"rollout {number} of {scenario.name}: {result.outcome.detail}")
                return result.outcome.reward, result.truncated_turns > 0

        results = await asyncio.gather(*(rollout(n) for n in range(self.plan.rollouts)))
        rewards = [reward for reward, _ in results]
        rate = sum(r >= 1.0 for r in rewards) / len(rewards)
        truncated = sum(cut for _, cut in results) / len(results)
        record.measured.append({"sample": which, "pass_rate": rate, "rewards": rewards, "truncated": truncated})
        return rate


# --------------------------------------------------------------------------- log and output


@dataclasses.dataclass
class Progress:
    """What the log says: tries made, scenarios accepted."""

    tries: int
    accepted: list[Scenario]
    outcomes: dict[str, int]


def read_log(path: Path) -> Progress:
    """The state of an earlier run.

    Raises:
        InputError: the log is not ours.
    """
    progress = Progress(0, [], {})
    if not path.exists():
        return progress
    for number, raw in enumerate(read_jsonl(path, "log", torn_tail_ok=True), 1):
        if not isinstance(raw, dict) or raw.get("index") != progress.tries or not isinstance(raw.get("outcome"), str):
            raise InputError(f"log {path} line {number}: expected try {progress.tries}; choose another --output")
        progress.tries += 1
        progress.outcomes[raw["outcome"]] = progress.outcomes.get(raw["outcome"], 0) + 1
        if raw["outcome"] == "accepted":
            progress.accepted.append(check(Scenario, raw["scenario"], f"log {path} line {number}"))
    return progress


def _write_accepted(output: Path, accepted: Sequence[Scenario]) -> None:
    """The accepted scenarios behind those that the file already has (written by hand, or by another run)."""
    names = {s.name for s in accepted}
    before = [s for s in load_scenarios(output) if s.name not in names] if output.exists() else []
    if before or accepted:
        save_scenarios(output, [*before, *accepted])


async def synthesize(plan: Plan, writer: Endpoint, solver: Endpoint, output: Path, isolation: Isolation) -> Progress:
    """Run tries until enough are accepted or all are used.

    Raises:
        ServerError: an endpoint stays dead; tries that were finished are in the log.
    """
    log_path = output.with_name(f"{output.stem}.attempts.jsonl")
    progress = read_log(log_path)
    line = ProgressLine(f"{plan.capability}: tries", plan.max_tries)
    line.advance(progress.tries)
    async with TextClient(writer) as write_client, TextClient(solver) as solve_client:
        synthesis = Synthesis(plan, write_client, solve_client, isolation)
        with JsonlLog(log_path) as log:
            while progress.tries < plan.max_tries and len(progress.accepted) < plan.accept:
                taken = [s.name for s in load_scenarios(output)] if output.exists() else []
                record = await synthesis.attempt(progress.tries, sorted({*taken, *(s.name for s in progress.accepted)}))
                log.append(dataclasses.asdict(record))
                progress.tries += 1
                progress.outcomes[record.outcome] = progress.outcomes.get(record.outcome, 0) + 1
                if record.outcome == "accepted":
                    progress.accepted.append(Scenario.model_validate(record.scenario))
                    _write_accepted(output, progress.accepted)
                line.advance(note=f"{len(progress.accepted)} accepted, last: {record.outcome}")
    _write_accepted(output, progress.accepted)  # a run that was killed between log and file
    line.close(f"{len(progress.accepted)} accepted")
    return progress


def _description(capability: str, capabilities_file: str | None) -> str:
    """The description of the selection file.

    Raises:
        InputError: no such file, or the capability is not in it.
    """
    if capabilities_file is None:
        return capability.replace("_", " ")
    data = read_json(capabilities_file, "selection file")
    entries = data if isinstance(data, list) else []
    for entry in entries:
        if isinstance(entry, dict) and entry.get("skill") == capability:
            return str(entry.get("description") or capability)
    known = ", ".join(str(e.get("skill")) for e in entries if isinstance(e, dict))
    raise InputError(f"selection file {capabilities_file}: no skill {capability!r}; it has {known or 'none'}")


def _parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--capability", required=True, help="snake_case name")
    add("--capabilities-file", metavar="F", help="selection file with the capability's description")
    add("--base-url", required=True, help="endpoint of the model that writes")
    add("--model", required=True, help="model that writes")
    add("--solver-base-url", help="endpoint of the model that solves (default: --base-url)")
    add("--solver-model", help="model that solves: the one to be trained (default: --model)")
    add("--candidates", metavar="F", help="measure the scenarios of this file in place of written ones")
    add(
        "-o",
        "--output",
        metavar="F",
        help="scenario file (default: pipeline/swebench/<capability>/scenarios_parsed.json)",
    )
    add("--accept", type=positive_int, default=10, help="stop at this many accepted scenarios")
    add("--max-tries", type=positive_int, default=60, help="stop after this many tries")
    add("--rollouts", type=positive_int, default=10, help="rollouts in one sample")
    add("--max-pass-rate", type=float, default=0.5, help="accept at a pass rate above 0 and at most this")
    add("--revisions", type=int, default=2, help="times that the writer may correct a scenario")
    add("--mutations", type=int, default=5, help="rounds of mutation for a scenario that is too easy")
    add("--temperature", type=float, default=1.0, help="temperature of both models")
    add("--write-max-tokens", type=positive_int, default=8192, help="longest answer of the writer")
    add("--solve-max-tokens", type=positive_int, default=2048, help="longest answer of the solver")
    add("--concurrency", type=positive_int, default=10, help="rollouts at a time")
    add("--timeout-s", type=float, default=300.0, help="deadline of one request")
    add("--retries", type=int, default=5, help="attempts after the first, for one request")
    add("--seed", type=non_negative_int, default=0, help="seed of sampling and mutation")
    add("--isolation", default="auto", choices=("auto", "bwrap", "process"), help="how modules are shut in")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if not 0 < args.max_pass_rate <= 1:
        raise InputError(f"--max-pass-rate {args.max_pass_rate}: expected a number above 0 and at most 1")
    isolation = sandbox.find_isolation(args.isolation)
    candidates = tuple(load_scenarios(args.candidates)) if args.candidates else ()
    if args.candidates and (args.output is None or resolved(args.output) == resolved(args.candidates)):
        raise InputError("--candidates: give an --output that is another file; the accepted scenarios go there")
    plan = Plan(
        capability=args.capability,
        description=_description(args.capability, args.capabilities_file),
        accept=args.accept,
        max_tries=min(args.max_tries, len(candidates)) if candidates else args.max_tries,
        rollouts=args.rollouts,
        max_pass_rate=args.max_pass_rate,
        revisions=max(0, args.revisions),
        mutations=max(0, args.mutations),
        writing=Sampling(args.temperature, args.write_max_tokens),
        solving=Sampling(args.temperature, args.solve_max_tokens),
        seed=args.seed,
        concurrency=args.concurrency,
        candidates=candidates,
    )
    key = os.environ.get("VLLM_API_KEY", "")
    patience: dict[str, Any] = {"api_key": key, "timeout_s": args.timeout_s, "retries": args.retries}
    writer = Endpoint(args.base_url, args.model, **patience)
    solver = Endpoint(args.solver_base_url or args.base_url, args.solver_model or args.model, **patience)
    output = Path(args.output) if args.output else scenario_path(args.capability)
    output.parent.mkdir(parents=True, exist_ok=True)
    progress = asyncio.run(synthesize(plan, writer, solver, output, isolation))
    counts = ", ".join(f"{name} {count}" for name, count in sorted(progress.outcomes.items()))
    sys.stdout.write(f"{len(progress.accepted)} accepted in {progress.tries} tries ({counts or 'none'}) -> {output}\n")
    return 0 if len(progress.accepted) >= plan.accept else 1


if __name__ == "__main__":
    run_cli(main)
