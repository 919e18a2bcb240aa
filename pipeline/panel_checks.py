"""The validation panel: what must hold of an environment before anybody trains on it.

Each check is a function from the evidence of ``pipeline.panel_evidence`` to one line of the table.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from game_registry import EpisodeResult, Failed, Scored
from pipeline.panel_evidence import Evidence
from pipeline.panel_policies import function_of
from pipeline.panel_static import NETWORK_MODULES, PROCESS_MODULES, TRAINER_PACKAGES
from tool_calls import ToolSchema

MAX_STEPS_ALLOWED = 500  # a longer episode is a mistake in max_steps, not a task


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the panel. ``passed`` is None when the check does not apply."""

    name: str
    passed: bool | None
    found: str
    expected: str
    advice: str = ""


def run_checks(evidence: Evidence) -> list[Check]:
    """All checks, in the order of the table; only ``runs`` when the play was given up."""
    if evidence.given_up is not None:
        return [_runs(evidence)]
    checks = [_contract(evidence), _runs(evidence), _oracle(evidence)]
    for name in ("no_op", "random", "constant", "spray", "repeat_last", "injection"):
        checks.append(_floor(evidence, name))
    checks += [_reward_range(evidence), _reward_levels(evidence), _ends(evidence), _malformed(evidence)]
    checks += [_determinism(evidence), _seed_diversity(evidence), _global_state(evidence)]
    checks += [_tool_schemas(evidence), _target_tools(evidence), _hints(evidence)]
    checks += [_isolation(evidence), _no_network(evidence), _no_files(evidence), _latency(evidence)]
    return checks


def _list(items: Sequence[object], n: int = 2) -> str:
    return "; ".join(str(i)[:160] for i in items[:n]) + (f"; and {len(items) - n} more" if len(items) > n else "")


def _contract(evidence: Evidence) -> Check:
    faults = list(dict.fromkeys(evidence.contract_faults))
    return Check("contract", not faults, _list(faults) or "ok", "the methods and messages of game_registry.Game")


def _episodes(evidence: Evidence) -> list[tuple[str, EpisodeResult]]:
    return [(name, r) for name, results in evidence.played.items() for r in results]


def _about_reward(outcome: Failed) -> bool:
    return outcome.detail.startswith(("reward must", "get_summary() must"))


def _runs(evidence: Evidence) -> Check:
    faults = [
        f"{name} on seed {r.seed}: {r.outcome.detail}"
        for name, r in _episodes(evidence)
        if isinstance(r.outcome, Failed) and not _about_reward(r.outcome)
    ]
    if evidence.given_up is not None:
        faults.append(f"given up: {evidence.given_up}")
    advice = "a valid call of a policy must never raise or hang; answer it with an error message"
    return Check(
        "runs", not faults, _list(faults) or f"{len(_episodes(evidence))} episodes", "no episode fails", advice
    )


def _oracle(evidence: Evidence) -> Check:
    expected = f"reward exactly 1 on {evidence.settings.seeds} seeds"
    if evidence.oracle_fault:
        return Check("oracle", False, evidence.oracle_fault, expected, "pass oracle=... to GameSpec")
    wrong = [
        f"seed {r.seed}: {r.outcome.reward if isinstance(r.outcome, Scored) else r.outcome.detail}"
        for r in evidence.played["oracle"]
        if r.outcome != Scored(1.0)
    ]
    solved = evidence.settings.seeds - len(wrong)
    advice = "its actions are played one per turn; replay a seed with play_sync to see where it fails"
    return Check("oracle", not wrong, _list(wrong) or f"1 on {solved} seeds", expected, advice)


def _floor(evidence: Evidence, policy: str) -> Check:
    means = {}
    for name, results in evidence.played.items():
        check, _, variant = name.partition(":")
        scored = [r.outcome.reward for r in results if isinstance(r.outcome, Scored)]
        if check == policy and scored:
            means[variant] = sum(scored) / len(scored)
    expected = f"mean reward <= {evidence.settings.floor:g}"
    if not means:
        return Check(policy, False, "no scored episode", expected, "see the check runs")
    best = max(means, key=lambda v: means[v])
    which = f" ({best})" if best else ""
    advice = "pay only for what needs the capability; end the episode at the first final action"
    return Check(policy, means[best] <= evidence.settings.floor + 1e-9, f"{means[best]:.3f}{which}", expected, advice)


def _reward_range(evidence: Evidence) -> Check:
    wrong = [
        f"{name} on seed {r.seed}: {r.outcome.detail}"
        for name, r in _episodes(evidence)
        if isinstance(r.outcome, Failed) and _about_reward(r.outcome)
    ]
    return Check("reward_range", not wrong, _list(wrong) or "ok", "every reward finite and in [0, 1]")


def _reward_levels(evidence: Evidence) -> Check:
    rewards = {round(r.outcome.reward, 6) for _, r in _episodes(evidence) if isinstance(r.outcome, Scored)}
    wanted = evidence.settings.min_levels
    shown = ", ".join(f"{r:g}" for r in sorted(rewards)[:8])
    advice = "pay for the steps on the way, so that groups of rollouts are rarely constant"
    expected = f">= {wanted} levels over random, nearly right and right play"
    passed = len(rewards) >= wanted
    if not passed and not evidence.environment.spec.name.startswith("capability_"):
        return Check("reward_levels", None, f"{len(rewards)}: {shown}; a benchmark, not trained on", expected)
    return Check("reward_levels", passed, f"{len(rewards)}: {shown}", expected, advice)


def _ends(evidence: Evidence) -> Check:
    faults = [f"{n} of policy {name} not done after max_steps" for name, n in evidence.unfinished.items()]
    steps = sorted(evidence.max_steps)
    if not steps or steps[0] < 1 or steps[-1] > MAX_STEPS_ALLOWED:
        faults.append(f"max_steps is {steps}; expected 1 to {MAX_STEPS_ALLOWED}")
    return Check("ends", not faults, _list(faults) or f"within {steps[-1]} steps", "done within max_steps")


def _malformed(evidence: Evidence) -> Check:
    faults = evidence.malformed_faults
    return Check("malformed", not faults, _list(faults) or "ok", "no action crashes it, however broken")


def _determinism(evidence: Evidence) -> Check:
    expected = "the same seed gives the same episode, twice and in another process"
    advice = "draw everything from random.Random(seed); never iterate over a set, never use hash() or the clock"
    return Check("determinism", not evidence.differences, _list(evidence.differences) or "ok", expected, advice)


def _seed_diversity(evidence: Evidence) -> Check:
    share = len(set(evidence.starts)) / evidence.settings.seeds
    expected = f">= {evidence.settings.min_distinct:.0%} of seeds start with a prompt of their own"
    return Check("seed_diversity", share >= evidence.settings.min_distinct, f"{share:.0%}", expected)


def _global_state(evidence: Evidence) -> Check:
    changes = evidence.state_changes
    advice = "keep state in the instance; a module's or a class's containers and the global random stay untouched"
    return Check("global_state", not changes, _list(changes, 4) or "ok", "nothing outside the instance changes", advice)


def _tool_schemas(evidence: Evidence) -> Check:
    expected = "function schemas with valid JSON Schema parameters and distinct names"
    tools = evidence.played["oracle"][0].tools
    faults = []
    for tool in tools:
        function = function_of(tool)
        parameters, name = function.get("parameters"), function.get("name")
        if tool.get("type") != "function" or not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,64}", name):
            faults.append(f"not a function schema: {str(tool)[:60]}")
        elif not isinstance(parameters, dict) or parameters.get("type") != "object":
            faults.append(f"{name}: parameters must be a schema of type object")
        else:
            faults += [f"{name}: {fault}" for fault in _schema_faults(parameters)]
    names = [function_of(t).get("name") for t in tools]
    faults += [f"{name} twice" for name, n in Counter(names).items() if n > 1]
    return Check("tool_schemas", not faults, _list(faults) or f"{len(tools)} tools", expected)


def _schema_faults(parameters: dict[str, Any]) -> list[str]:
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        return [f"{'.'.join(map(str, error.path)) or 'parameters'}: {error.message[:100]}"]
    unknown = set(parameters.get("required", [])) - set(parameters.get("properties", {}))
    return [f"required names no property: {', '.join(sorted(unknown))}"] if unknown else []


def _signature(tool: ToolSchema) -> tuple[str, dict[str, Any]]:
    """Name, and what fixes the interface of a tool: parameter names, types, enumerations, which are required."""
    function = function_of(tool)

    def strip(schema: Any) -> Any:
        if isinstance(schema, dict):
            kept = {k: strip(v) for k, v in schema.items() if k not in ("description", "title", "default", "examples")}
            if "required" in kept:
                kept["required"] = sorted(kept["required"])
            return kept
        return [strip(s) for s in schema] if isinstance(schema, list) else schema

    parameters = function.get("parameters", {})
    properties = {name: strip(schema) for name, schema in parameters.get("properties", {}).items()}
    return str(function.get("name")), {"properties": properties, "required": sorted(parameters.get("required", []))}


def _target_tools(evidence: Evidence) -> Check:
    expected = "every tool has the target's name, parameter names and types"
    if evidence.settings.target_tools is None:
        return Check("target_tools", None, "not asked for (--target-tools)", expected)
    target = dict(_signature(t) for t in evidence.settings.target_tools)
    faults = []
    for tool in evidence.played["oracle"][0].tools:
        name, signature = _signature(tool)
        if name not in target:
            faults.append(f"{name} is no tool of the target")
        elif signature != target[name]:
            faults.append(f"{name}: has {json.dumps(signature)[:150]}, the target {json.dumps(target[name])[:150]}")
    return Check("target_tools", not faults, _list(faults) or "equal", expected)


def _hints(evidence: Evidence) -> Check:
    hint = evidence.environment.spec.hint_prompt
    expected = "soft advice: no tool call, no answer"
    if not hint:
        return Check("hints", None, "no hint_prompt", expected)
    faults = []
    if re.search(r'<tool_call>|<function=|\{\s*"?(name|arguments)"?\s*:', hint):
        faults.append("it holds a tool call")
    enumerated = json.dumps([r.tools for r in evidence.played["oracle"][:1]])
    values = {
        str(v)
        for actions in evidence.oracles.values()
        for a in actions
        for v in a["arguments"].values()
        if isinstance(v, str | int) and len(str(v)) >= 3 and f'"{v}"' not in enumerated
    }
    words = set(re.findall(r"[\w@.#-]*\w", hint))
    faults += [f"it holds the answer {v!r} of the oracle" for v in sorted(values & words)]
    return Check("hints", not faults, _list(faults) or "ok", expected)


def _isolation(evidence: Evidence) -> Check:
    forbidden = (*evidence.settings.target_packages, *TRAINER_PACKAGES)
    static = [str(f) for f in evidence.facts.imports_of(forbidden)]
    running = [f"{m} (at run time)" for m in evidence.audit.get("imports", []) if m.split(".")[0] in forbidden]
    found = static or running
    advice = "write the simulator of the environment anew; import only the standard library and game_registry"
    return Check("isolation", not found, _list(found) or "ok", f"never imports {', '.join(forbidden)}", advice)


def _no_network(evidence: Evidence) -> Check:
    static = [str(f) for f in evidence.facts.imports_of(sorted(NETWORK_MODULES))]
    found = static + [f"{event} (at run time)" for event in evidence.audit.get("network", [])]
    return Check("no_network", not found, _list(found) or "ok", "no network module, no socket")


def _no_files(evidence: Evidence) -> Check:
    found = [str(f) for f in evidence.facts.calls]
    found += [str(f) for f in evidence.facts.imports_of(sorted(PROCESS_MODULES))]
    found += [f"{event} (at run time)" for key in ("files", "processes") for event in evidence.audit.get(key, [])]
    return Check("no_files", not found, _list(found) or "ok", "opens no file, starts no process")


def _latency(evidence: Evidence) -> Check:
    times = sorted(evidence.step_us)
    expected = f"p95 of a step < {evidence.settings.latency_ms:g} ms"
    if not times:
        return Check("latency", False, "no step", expected)
    p95 = times[int(0.95 * (len(times) - 1))] / 1000
    return Check("latency", p95 < evidence.settings.latency_ms, f"{p95:.3f} ms over {len(times)} steps", expected)
