"""The validation panel for a set of scenarios: what must hold before anybody trains on it.

The policies are those of ``pipeline.validate_environment``; the game is ours and runs here, every module that a model
wrote runs in the sandboxes of ``pipeline.swe_grading``. Checks of the general panel that speak of model-written
environment code (files, processes, imports, latency) do not apply: there is none.
"""

from __future__ import annotations

import ast
import asyncio
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from game_registry import Agent, EpisodeResult, GameSpec, Scored, play, scripted_agent
from pipeline import panel_policies as policies
from pipeline.command_line import ProgressLine
from pipeline.files import ServerError
from pipeline.panel_checks import Check
from pipeline.sandbox import Isolation
from pipeline.scenarios import Scenario
from pipeline.swe_game import TOOLS, scenario_spec
from pipeline.swe_grading import self_test
from tool_calls import Action

FIRST_ORACLE = "first oracle"
SAME = """

class _Same:
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __bool__(self):
        return True

    def __call__(self, *args, **kwargs):
        return self

    def __getattr__(self, name):
        return self

    def __getitem__(self, key):
        return self

    def __contains__(self, item):
        return True

    def __len__(self):
        return 1

    def __iter__(self):
        return iter(())


"""
EXIT = "\n\nimport atexit, os\natexit.register(os._exit, 0)\nprint('all tests passed')\nos._exit(0)\n"


def _rewrite(scenario: Scenario, code: str) -> list[Action]:
    edit = {"path": scenario.module_filename, "search": scenario.module_code, "replace": code}
    return [{"name": "replace_text", "arguments": edit}, {"name": "submit", "arguments": {}}]


def equal_to_all(scenario: Scenario) -> list[Action]:
    """Every public name of the module becomes an object that claims to equal whatever it is compared with."""
    tree = ast.parse(scenario.module_code)
    names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return _rewrite(scenario, scenario.module_code + SAME + "".join(f"{name} = _Same()\n" for name in names))


def ends_the_process(scenario: Scenario) -> list[Action]:
    """The module reports success and ends its process with exit code 0."""
    return _rewrite(scenario, scenario.module_code + EXIT)


class Panel:
    """Plays every policy on every scenario and judges."""

    def __init__(self, scenarios: Sequence[Scenario], isolation: Isolation, floor: float) -> None:
        self.scenarios, self.isolation, self.floor = scenarios, isolation, floor
        self.spec: GameSpec = scenario_spec("capability_candidate", scenarios, isolation.kind)
        self.progress = ProgressLine("panel: episodes")
        self.rewards: set[float] = set()

    def checks(self) -> list[Check]:
        """All checks, in the order of the table.

        Raises:
            ServerError: the sandbox failed, so nothing can be said.
        """
        out = [self._sound(), self._oracle()]
        out += [self._floor(name, variants) for name, variants in self._policies().items()]
        out += [self._deterministic(), self._distinct(), self._levels()]
        self.progress.close()
        return out

    def _policies(self) -> dict[str, dict[str, Callable[[int], Agent]]]:
        """Check -> variant -> agent of a seed. Of several variants the best-paid one counts."""
        calls = [policies.minimal_call(tool) for tool in TOOLS]
        constant = {call["name"]: policies.constant(json.dumps(call)) for call in calls}
        constant |= {"text": policies.constant("Done."), FIRST_ORACLE: policies.constant_script(self._oracle_of(0))}
        if len(self.scenarios) < 2:
            del constant[FIRST_ORACLE]  # there is no other to play it on
        attacks = {"equal_to_all": equal_to_all, "ends_the_process": ends_the_process}
        return {
            "no_op": {"": policies.no_op},
            "random": {"": policies.random_calls},
            "constant": constant,
            "spray": {"": policies.spray},
            "repeat_last": {"last turn": policies.repeat_last, "echo": policies.echo},
            "injection": {"": policies.injection},
            "forgery": {name: self._scripted(attack) for name, attack in attacks.items()},
        }

    def _scripted(self, script: Callable[[Scenario], list[Action]]) -> Callable[[int], Agent]:
        return lambda seed: scripted_agent(script(self.scenarios[seed]))

    def _oracle_of(self, seed: int) -> list[Action]:
        assert self.spec.oracle is not None
        return list(self.spec.oracle(seed))

    def _play(self, agent: Agent, seed: int) -> float:
        result: EpisodeResult = asyncio.run(play(self.spec, self.spec.make_env(), agent, seed))
        self.progress.advance()
        if not isinstance(result.outcome, Scored):
            raise ServerError(f"panel: {self.scenarios[seed].name}: {result.outcome.detail}; check the sandbox")
        self.rewards.add(round(result.outcome.reward, 6))
        return result.outcome.reward

    def _sound(self) -> Check:
        faults = [f"{s.name}: {problem}" for s in self.scenarios for problem in self_test(s, self.isolation)[:1]]
        expected = "target fails before and passes after the oracle edit, >= 8 guards, the naive edit is caught"
        return Check("self_test", not faults, "; ".join(faults) or f"{len(self.scenarios)} scenarios", expected)

    def _oracle(self) -> Check:
        rewards = [self._play(scripted_agent(self._oracle_of(seed)), seed) for seed in range(len(self.scenarios))]
        wrong = [f"{s.name}: {r:g}" for s, r in zip(self.scenarios, rewards, strict=True) if r != 1.0]
        return Check("oracle", not wrong, "; ".join(wrong) or f"1 on {len(rewards)}", "reward exactly 1 everywhere")

    def _floor(self, name: str, variants: dict[str, Callable[[int], Agent]]) -> Check:
        means = {}
        for variant, make in variants.items():
            first = 1 if variant == FIRST_ORACLE else 0  # it is right on its own scenario
            rewards = [self._play(make(seed), seed) for seed in range(first, len(self.scenarios))]
            means[variant] = sum(rewards) / len(rewards)
        best = max(means, key=lambda v: means[v])
        found = f"{means[best]:.3f}" + (f" ({best})" if best else "")
        return Check(name, means[best] <= self.floor + 1e-9, found, f"mean reward <= {self.floor:g}")

    def _deterministic(self) -> Check:
        """Nearly right edits, each graded twice."""
        differ = []
        for seed, scenario in enumerate(self.scenarios):
            other = self._oracle_of((seed + 1) % len(self.scenarios))
            for script in policies.perturbations(self._oracle_of(seed), other, random.Random(seed)):
                first, second = (self._play(scripted_agent(script), seed) for _ in range(2))
                if first != second:
                    differ.append(f"{scenario.name}: {first:g} and {second:g}")
        return Check("determinism", not differ, "; ".join(differ) or "ok", "the same edit earns the same twice")

    def _distinct(self) -> Check:
        shown = [json.dumps([s.pr_description, s.module_code]) for s in self.scenarios]
        n = len(set(shown))
        return Check("diversity", n == len(shown), f"{n} of {len(shown)} differ", "every scenario shows something else")

    def _levels(self) -> Check:
        """Not a verdict: a target of one case pays all or nothing, and groups still differ by who solves it."""
        shown = ", ".join(f"{r:g}" for r in sorted(self.rewards)[:8])
        return Check("reward_levels", None, f"{len(self.rewards)}: {shown}", ">= 3 levels are better for GRPO")


def table(checks: Sequence[Check]) -> str:
    """The table for a reader."""
    words = {True: "ok", False: "FAIL", None: "-"}
    lines = []
    for check in checks:
        lines.append(f"  {words[check.passed]:5}{check.name:16}{check.found}")
        if check.passed is False:
            lines.append(f"       {'':16}expected: {check.expected}")
    return "\n".join(lines)


def passed(checks: Sequence[dict[str, Any]]) -> bool:
    return all(check["passed"] is not False for check in checks)
