"""The evidence of the validation panel: an environment in sandboxed workers, played by every policy of the panel.

All play goes through ``game_registry.play``, the loop of collection, training and evaluation. The verdicts are drawn
from the evidence in ``pipeline.panel_checks``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from game_registry import Agent, EpisodeResult, Scored, play, scripted_agent
from pipeline import panel_policies as policies
from pipeline.command_line import ProgressLine
from pipeline.panel_static import SourceFacts, read_facts
from pipeline.remote_game import EnvironmentFault, RemoteGame, SandboxedEnvironment
from tool_calls import Action, ToolSchema

DETERMINISM_SEEDS = 20
MAX_LOST_WORKERS = 3  # an environment that hangs costs the deadline of a step each time; more would only repeat it
TARGET_PACKAGES = ("tau2", "tau_bench", "swebench")
MALFORMED = (
    "",
    "null",
    "[]",
    "7",
    "{",
    "not json",
    '{"name": 5, "arguments": {}}',
    '{"arguments": {}}',
    '{"name": "no_such_tool", "arguments": {"a": 1}}',
    '{"name": "x", "arguments": [1, 2]}',
    '{"name": "respond_to_user", "arguments": {"message": null}}',
    '{"name": "respond_to_user", "arguments": {"message": {"a": [1]}}}',
    '{"name": "respond_to_user", "arguments": {}}',
    '{"name": "\\ud800", "arguments": {}}',
    '{"name": "x", "arguments": ' + '{"a":' * 40 + "1" + "}" * 40 + "}",
    '{"name": "' + "x" * 100_000 + '", "arguments": {}}',
)


@dataclasses.dataclass(frozen=True)
class Settings:
    seeds: int = 100
    floor: float = 0.2  # of the oracle's reward, which is 1
    target_packages: tuple[str, ...] = TARGET_PACKAGES
    target_tools: tuple[ToolSchema, ...] | None = None
    latency_ms: float = 10.0
    budget_s: float = 900.0  # of all play; the shipped environments take less than 10
    min_levels: int = 3
    min_distinct: float = 0.95


@dataclasses.dataclass
class Evidence:
    """Everything that the checks look at."""

    settings: Settings
    environment: SandboxedEnvironment
    facts: SourceFacts
    oracles: dict[int, list[Action]] = dataclasses.field(default_factory=dict)
    oracle_fault: str | None = None
    given_up: str | None = None  # why only what was played so far is known
    deadline: float = math.inf  # of all play, on the monotonic clock
    progress: ProgressLine | None = None
    starts: list[str] = dataclasses.field(default_factory=list)  # what the policy sees first, per seed
    played: dict[str, list[EpisodeResult]] = dataclasses.field(default_factory=dict)  # policy -> episodes
    unfinished: dict[str, int] = dataclasses.field(default_factory=dict)  # policy -> episodes not done at max_steps
    max_steps: set[int] = dataclasses.field(default_factory=set)
    differences: list[str] = dataclasses.field(default_factory=list)  # from determinism
    state_changes: list[str] = dataclasses.field(default_factory=list)
    malformed_faults: list[str] = dataclasses.field(default_factory=list)
    contract_faults: list[str] = dataclasses.field(default_factory=list)
    step_us: list[int] = dataclasses.field(default_factory=list)
    audit: dict[str, list[str]] = dataclasses.field(default_factory=dict)


def scripted_user(messages: Any = None, *_: Any, **__: Any) -> str:
    """The user simulator of the panel, for environments that need one."""
    return "Yes, please go ahead."


def new_game(environment: SandboxedEnvironment) -> RemoteGame:
    spec = environment.spec
    game = spec.make_env(user_llm=scripted_user) if spec.needs_user_llm else spec.make_env()
    assert isinstance(game, RemoteGame)
    return game


# --------------------------------------------------------------------------- gathering


class _GivenUp(RuntimeError):
    pass


def gather(
    environment: SandboxedEnvironment,
    again: SandboxedEnvironment,
    settings: Settings,
    progress: ProgressLine | None = None,
) -> Evidence:
    """Play everything.

    Args:
        environment: with ``audit=True``.
        again: the same environment in another process with another hash seed.
    """
    evidence = Evidence(settings, environment, read_facts(environment.files()), progress=progress)
    evidence.deadline = time.monotonic() + settings.budget_s
    before = environment.request("state")
    _ask_oracle(evidence)
    environment.step_us = evidence.step_us
    try:
        asyncio.run(_play_all(evidence))
    except _GivenUp as reason:
        evidence.given_up = str(reason)
        return evidence
    environment.step_us = None
    _probe_contract(evidence)
    _probe_malformed(evidence)
    evidence.differences = _differences(evidence, again)
    if environment.restarts == 0:
        after = environment.request("state")
        evidence.state_changes += sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
        evidence.audit = environment.request("audit")
    return evidence


def _ask_oracle(evidence: Evidence) -> None:
    oracle = evidence.environment.spec.oracle
    if oracle is None:
        evidence.oracle_fault = "the GameSpec has no oracle"
        return
    for seed in range(evidence.settings.seeds):
        try:
            actions = list(oracle(seed))
        except Exception as error:  # the fault of foreign code, whatever its type
            evidence.oracle_fault = f"oracle({seed}) failed: {error}"
            return
        if not all(isinstance(a, dict) and isinstance(a.get("arguments"), dict) and "name" in a for a in actions):
            evidence.oracle_fault = f"oracle({seed}) must give actions {{name, arguments}}, gave {str(actions)[:80]}"
            return
        evidence.oracles[seed] = actions


def panel_policies(evidence: Evidence) -> dict[str, dict[str, Callable[[int], Agent]]]:
    """Check name -> variant -> agent of a seed. Of several variants the best-paid one counts."""
    tools = evidence.played["oracle"][0].tools if evidence.played.get("oracle") else []
    constants = {
        policies.minimal_call(t)["name"]: policies.constant(json.dumps(policies.minimal_call(t))) for t in tools
    }
    constants["text"] = policies.constant("Done.")
    if len(evidence.oracles) > 1:
        scripts = Counter(json.dumps(actions, sort_keys=True) for actions in evidence.oracles.values())
        constants["commonest oracle script"] = policies.constant_script(json.loads(scripts.most_common(1)[0][0]))
    return {
        "no_op": {"": policies.no_op},
        "random": {"": policies.random_calls},
        "constant": constants,
        "spray": {"": policies.spray},
        "repeat_last": {"last turn": policies.repeat_last, "echo": policies.echo},
        "injection": {"": policies.injection},
    }


async def _play_all(evidence: Evidence) -> None:
    spec, seeds = evidence.environment.spec, range(evidence.settings.seeds)
    game = new_game(evidence.environment)
    for seed in seeds:
        with contextlib.suppress(EnvironmentFault):  # the check `runs` says so
            game.reset(seed)
            start = [game.get_system_prompt(), game.get_messages()]
            evidence.starts.append(json.dumps(start, sort_keys=True, default=str))
    await _play_policy(evidence, game, "oracle", lambda s: scripted_agent(evidence.oracles.get(s, [])))
    for check, variants in panel_policies(evidence).items():
        for variant, make in variants.items():
            await _play_policy(evidence, game, f"{check}:{variant}", make)
    evidence.played["perturbed"] = []
    for seed in (s for s in seeds if len(evidence.oracles) > 1 and s in evidence.oracles):
        other = evidence.oracles[(seed + 1) % len(evidence.oracles)]
        for script in policies.perturbations(evidence.oracles[seed], other, random.Random(seed)):
            agent = policies.constant_script(script)(seed)
            evidence.played["perturbed"].append(await play(spec, game, agent, seed))
            _check_workers(evidence)


async def _play_policy(evidence: Evidence, game: RemoteGame, name: str, make: Callable[[int], Agent]) -> None:
    results = evidence.played[name] = []
    for seed in range(evidence.settings.seeds):
        result = await play(evidence.environment.spec, game, make(seed), seed)
        results.append(result)
        if evidence.progress is not None:
            evidence.progress.advance(note=name)
        _check_workers(evidence)
        evidence.max_steps.add(game.max_steps)
        asked_every_turn = result.invalid_calls == 0  # an unreadable call is answered by the loop, not by a step
        if isinstance(result.outcome, Scored) and not game.done and (asked_every_turn or name == "oracle"):
            evidence.unfinished[name] = evidence.unfinished.get(name, 0) + 1


def _check_workers(evidence: Evidence) -> None:
    if evidence.environment.restarts > MAX_LOST_WORKERS:
        raise _GivenUp(f"more than {MAX_LOST_WORKERS} workers were lost")
    if time.monotonic() > evidence.deadline:
        played = sum(map(len, evidence.played.values()))
        raise _GivenUp(f"{played} episodes took {evidence.settings.budget_s:g} s; steps must take less than 10 ms")


def _probe_contract(evidence: Evidence) -> None:
    faults = evidence.contract_faults
    game = new_game(evidence.environment)
    try:
        for seed in range(3):
            game.reset(seed)
            start = game.get_messages()
            faults += _message_faults(start, "after reset")
            if not start or start[-1].get("role") not in ("user", "tool"):
                faults.append("after reset the last message must have role user or tool, so that the policy answers it")
            if not isinstance(game.get_system_prompt(), str):
                faults.append("get_system_prompt() must return text")
            game.step(json.dumps({"name": "respond_to_user", "arguments": {"message": "Hello."}}))
            new = game.get_messages()[len(start) :]
            faults += _message_faults(new, "after a step")
            if not new or new[0].get("role") != "assistant":
                faults.append("step() must append the assistant turn and then what the policy must see")
            elif not game.done and new[-1].get("role") not in ("user", "tool"):
                faults.append("after a step that does not end the episode the last message must have role user or tool")
            faults += _summary_faults(game.get_summary())
    except EnvironmentFault as error:
        faults.append(str(error))


def _message_faults(messages: Sequence[Any], when: str) -> list[str]:
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "tool"):
            return [f"{when}: messages must have role user, assistant or tool, found {str(message)[:80]}"]
        if not isinstance(message.get("content"), str | None):
            return [f"{when}: message content must be text, found {type(message.get('content')).__name__}"]
    return []


def _summary_faults(summary: Any) -> list[str]:
    if not isinstance(summary, dict):
        return ["get_summary() must return a dict"]
    kinds = {"reward": float | int, "steps": int, "reason": str, "domain": str}
    return [
        f"get_summary()[{key!r}] must be {getattr(kind, '__name__', 'a number')}, found {summary.get(key)!r:.40}"
        for key, kind in kinds.items()
        if not isinstance(summary.get(key), kind)
    ]


def _wrong_type_calls(tools: Sequence[ToolSchema]) -> list[str]:
    calls = []
    for function in map(policies.function_of, tools):
        names = list(function.get("parameters", {}).get("properties", {}))
        for value in (None, 5, -1e308, "x", [], {}, [[1]], {"a": {"b": 1}}, True, "é\u0000\ud800"):
            calls.append(json.dumps({"name": function.get("name"), "arguments": dict.fromkeys(names, value)}))
        calls.append(json.dumps({"name": function.get("name"), "arguments": {}}))
        calls.append(json.dumps({"name": function.get("name"), "arguments": {**dict.fromkeys(names, 1), "surplus": 1}}))
    return calls


def _probe_malformed(evidence: Evidence) -> None:
    game = new_game(evidence.environment)
    try:
        game.reset(0)
        texts = [*MALFORMED, *_wrong_type_calls(game.get_tool_schemas())]
    except EnvironmentFault:
        return  # the check `runs` says so
    for text in texts:
        if evidence.environment.restarts > MAX_LOST_WORKERS:
            break
        try:
            game.reset(0)
            game.step(text)
            game.get_summary()
            for _ in range(2):  # also when the episode is over
                game.step(text)
        except EnvironmentFault as error:
            evidence.malformed_faults.append(f"{text[:60]!r}: {error}")


# --------------------------------------------------------------------------- determinism


def _transcript(environment: SandboxedEnvironment, game: RemoteGame, seed: int, script: Sequence[Action]) -> str:
    """A digest of everything visible in two episodes of a seed: the oracle's and a random one."""
    digest = hashlib.sha256()
    for agent in (policies.constant_script(script)(seed), policies.random_calls(seed)):
        result = asyncio.run(play(environment.spec, game, agent, seed))
        seen = [game.get_system_prompt(), result.tools, result.messages, str(result.outcome), result.summary]
        digest.update(json.dumps(seen, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _differences(evidence: Evidence, again: SandboxedEnvironment) -> list[str]:
    """Where the same seed gave something else: played twice, in another process, beside another episode."""
    environment, seeds = evidence.environment, list(range(min(DETERMINISM_SEEDS, evidence.settings.seeds)))
    scripts = {s: evidence.oracles.get(s, []) for s in seeds}
    first_game = new_game(environment)
    first = {s: _transcript(environment, first_game, s, scripts[s]) for s in seeds}
    second_game = new_game(environment)
    second = {s: _transcript(environment, second_game, s, scripts[s]) for s in reversed(seeds)}
    other_game = new_game(again)
    other = {s: _transcript(again, other_game, s, scripts[s]) for s in reversed(seeds)}
    out = [f"seed {s}: played again in the same process" for s in seeds if first[s] != second[s]]
    out += [f"seed {s}: another process and PYTHONHASHSEED" for s in seeds if first[s] != other[s]]
    evidence.state_changes += _interleaved(evidence, seeds[: len(seeds) // 2])
    return out


def _interleaved(evidence: Evidence, seeds: Sequence[int]) -> list[str]:
    """Two episodes step by step in turn must look as they do alone."""
    environment = evidence.environment
    for seed in seeds:
        pair = (seed, seed + 1)
        scripts = [evidence.oracles.get(s, []) for s in pair]
        alone = [_stepped(environment, [s], [script])[0] for s, script in zip(pair, scripts, strict=True)]
        if _stepped(environment, pair, scripts) != alone:
            return [f"episodes of seeds {pair[0]} and {pair[1]} disturb each other"]
    return []


def _stepped(environment: SandboxedEnvironment, seeds: Sequence[int], scripts: Sequence[Sequence[Action]]) -> list[str]:
    games = [new_game(environment) for _ in seeds]
    try:
        for game, seed in zip(games, seeds, strict=True):
            game.reset(seed)
        for index in range(max(map(len, scripts), default=0)):
            for game, script in zip(games, scripts, strict=True):
                if index < len(script) and not game.done:
                    game.step(json.dumps(script[index]))
        return [json.dumps([game.get_messages(), game.get_summary()], default=str) for game in games]
    except EnvironmentFault as error:
        return [f"fault: {error}"]
