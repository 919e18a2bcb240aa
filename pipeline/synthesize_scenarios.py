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
import math
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
from pipeline.files import InputError, JsonlLog, ServerError, read_json, resolved, run_cli
from pipeline.mutate_scenario import mutate
from pipeline.sandbox import Isolation
from pipeline.scenarios import Scenario, load_scenarios, parse_scenario, scenario_path
from pipeline.swe_game import scenario_spec
from pipeline.swe_grading import self_test
from pipeline.synthesis_log import Progress, Try, log_path, read_log, summary, write_accepted
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


class Synthesis:
    """The loop, with the model that writes and the model that solves."""

    def __init__(self, plan: Plan, writer: TextClient, solver: TextClient, isolation: Isolation) -> None:
        self.plan, self.writer, self.solver, self.isolation = plan, writer, solver, isolation

    def settings(self) -> dict[str, Any]:
        """What a try depends on, as it is logged with each."""
        plan = self.plan
        writer = {"model": self.writer.endpoint.model, **dataclasses.asdict(plan.writing)}
        solver = {"model": self.solver.endpoint.model, **dataclasses.asdict(plan.solving)}
        out: dict[str, Any] = {"capability": plan.capability, "writer": None if plan.candidates else writer}
        out |= {"solver": solver, "rollouts": plan.rollouts, "max_pass_rate": plan.max_pass_rate}
        return out | {
            "revisions": plan.revisions,
            "mutations": plan.mutations,
            "seed": plan.seed,
            "isolation": self.isolation.kind,
        }

    async def attempt(self, index: int, existing: Sequence[str]) -> Try:
        """One try, from the request to the verdict."""
        record = Try(index, self.settings())
        scenario = await self._write(record, existing)
        if scenario is None:
            return record
        rng = random.Random(f"{self.plan.seed}:{index}")
        rate = await self._measure(record, scenario, "first")
        if record.measured[0]["no_room"] == self.plan.rollouts:
            record.outcome = "unsound"
            record.problems = [f"the task leaves no room for an answer of {self.plan.solving.max_tokens} tokens"]
            return record
        while rate > self.plan.max_pass_rate and len(record.mutations) < self.plan.mutations:
            mutated = await asyncio.to_thread(mutate, scenario, rng, None, self.isolation)
            if mutated is None or mutated[0].name in existing:
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
        measured = {"pass_rate": fresh, "n_rollouts": self.plan.rollouts, "sampling": record.settings["solver"]}
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
            completion = await self.writer.complete(messages, self.plan.writing, seed + revision)
            if completion.finish_reason == "context":
                if not revision:
                    raise InputError(_no_room(self.plan.writing.max_tokens))
                record.problems.append("no room for a revision in the writer's context")
                break
            record.revisions = revision
            scenario, record.problems = await self._judge(completion.text, completion.finish_reason, existing)
            answer = {"seed": seed + revision, "problems": record.problems}
            record.answers.append({**dataclasses.asdict(completion), **answer})
            if scenario is not None and not record.problems:
                return scenario
            record.outcome = "unparsed" if scenario is None else "unsound"
            complaint = "These checks failed:\n" + "\n".join(f"- {p}" for p in record.problems)
            complaint += "\n\nAnswer with the whole corrected JSON object, and nothing else."
            messages.append({"role": "assistant", "content": completion.text})
            messages.append({"role": "user", "content": complaint})
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

        async def rollout(number: int) -> tuple[float, bool, bool]:
            async with gate:
                agent = text_agent(self.solver, self.plan.solving, base + number * 17)
                result = await play(spec, spec.make_env(), agent, 0)
                if not isinstance(result.outcome, Scored):
                    raise ServerError(f"rollout {number} of {scenario.name}: {result.outcome.detail}")
                no_room = result.finish_reason == "context" and result.turns == 0
                return result.outcome.reward, result.truncated_turns > 0, no_room

        results = await asyncio.gather(*(rollout(n) for n in range(self.plan.rollouts)))
        rewards = [reward for reward, _, _ in results]
        rate = sum(r >= 1.0 for r in rewards) / len(rewards)
        sample = {"sample": which, "name": scenario.name, "pass_rate": rate, "rewards": rewards, "seed": base}
        sample["truncated"] = sum(cut for _, cut, _ in results) / len(results)
        record.measured.append({**sample, "no_room": sum(none for _, _, none in results)})
        return rate


def _no_room(max_tokens: int) -> str:
    return (
        f"the request leaves no room for an answer of {max_tokens} tokens in the writer's context; "
        "lower --write-max-tokens or serve the model with a longer context"
    )


async def synthesize(plan: Plan, writer: Endpoint, solver: Endpoint, output: Path, isolation: Isolation) -> Progress:
    """Run tries until enough are accepted or all are used.

    Raises:
        ServerError: an endpoint stays dead; tries that were finished are in the log.
    """
    line = ProgressLine(f"{plan.capability}: tries", plan.max_tries)
    async with TextClient(writer) as write_client, TextClient(solver) as solve_client:
        synthesis = Synthesis(plan, write_client, solve_client, isolation)
        with JsonlLog(log_path(output)) as log:  # its lock first: what is read then stays as it is
            progress = read_log(log_path(output), synthesis.settings())
            line.advance(progress.tries)
            while progress.tries < plan.max_tries and len(progress.accepted) < plan.accept:
                taken = [s.name for s in load_scenarios(output)] if output.exists() else []
                record = await synthesis.attempt(progress.tries, sorted({*taken, *(s.name for s in progress.accepted)}))
                log.append(record.logged())
                progress.count(record.outcome, record.problems)
                if record.outcome == "accepted":
                    progress.accepted.append(Scenario.model_validate(record.scenario))
                    write_accepted(output, progress.accepted)
                line.advance(note=f"{len(progress.accepted)} accepted, last: {record.outcome}")
            write_accepted(output, progress.accepted)  # a run that was killed between log and file
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
    add("--revisions", type=non_negative_int, default=2, help="times that the writer may correct a scenario")
    add("--mutations", type=non_negative_int, default=5, help="rounds of mutation for a scenario that is too easy")
    add("--temperature", type=float, default=1.0, help="temperature of both models")
    add("--write-max-tokens", type=positive_int, default=8192, help="longest answer of the writer")
    add("--solve-max-tokens", type=positive_int, default=2048, help="longest answer of the solver")
    add("--concurrency", type=positive_int, default=10, help="rollouts at a time")
    add("--timeout-s", type=float, default=300.0, help="deadline of one request")
    add("--retries", type=non_negative_int, default=5, help="attempts after the first, for one request")
    add("--seed", type=non_negative_int, default=0, help="seed of sampling and mutation")
    add("--isolation", default="auto", choices=("auto", "bwrap", "process"), help="how modules are shut in")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if not 0 < args.max_pass_rate <= 1:
        raise InputError(f"--max-pass-rate {args.max_pass_rate}: expected a number above 0 and at most 1")
    if not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise InputError(f"--temperature {args.temperature}: expected a number >= 0")
    if not (math.isfinite(args.timeout_s) and args.timeout_s > 0):
        raise InputError(f"--timeout-s {args.timeout_s}: expected seconds > 0")
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
        revisions=args.revisions,
        mutations=args.mutations,
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
    if output.is_dir():
        raise InputError(f"--output {output}: expected a file, found a folder")
    progress = asyncio.run(synthesize(plan, writer, solver, output, isolation))
    sys.stdout.write(summary(progress, output))
    return 0 if len(progress.accepted) >= plan.accept else 1


if __name__ == "__main__":
    run_cli(main)
