"""Train on SWE scenarios: each seed is a module with a fault; the agent reads, edits and submits.

    TRACE_GAME_MODULES=pipeline.swe_game python -m train --game capability_deep_call_graph_traversal --model M

registers one game per ``pipeline/swebench/<capability>/scenarios_parsed.json``; TRACE_SCENARIOS names another folder of
that form. Two ways to act, in any mixture: the tools below over several turns, or one answer with SEARCH/REPLACE
blocks, which edits and submits at once. The edited module is graded in sandboxes of its own (``pipeline.swe_grading``);
it never runs in this process, and the agent sees no test.
Reward = share of the target's cases that pass x share of guards kept; 0 for an edit that repairs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from game_registry import GameSpec, Message, register_game
from pipeline import sandbox
from pipeline.sandbox import Isolation
from pipeline.scenarios import EditError, Scenario, apply_edit, edits_in, load_scenarios
from pipeline.swe_grading import grade, reward
from tool_calls import RESPOND, Action, ToolSchema, read_json_call

MAX_STEPS = 8
SYSTEM = (
    "You repair Python modules. Read the issue and the module, find the cause, and change as little as needed. Either "
    "call replace_text and then submit, or answer once with blocks of the form\n"
    "<<<<<<< SEARCH\nlines as they are\n=======\nlines as they should be\n>>>>>>> REPLACE"
)
PATH = {"type": "string", "description": "name of the module's file"}


def _tool(name: str, description: str, **properties: dict[str, Any]) -> ToolSchema:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("view_file", "Show the module as it is now.", path=PATH),
    _tool(
        "replace_text",
        "Replace a piece of the module. The search text must occur exactly once.",
        path=PATH,
        search={"type": "string", "description": "text as it is, with its indentation"},
        replace={"type": "string", "description": "text as it should be"},
    ),
    _tool("submit", "Hand the module in; final."),
]


class ScenarioGame:
    """``seed`` chooses the scenario: seed modulo their number. ``slow_step`` asks the loop to step in a thread."""

    max_steps = MAX_STEPS
    slow_step = True  # submitting grades the module, which takes about half a second

    def __init__(self, scenarios: Sequence[Scenario], isolation: Isolation) -> None:
        self._scenarios = scenarios
        self._isolation = isolation

    def reset(self, seed: int) -> None:
        self.scenario = self._scenarios[seed % len(self._scenarios)]
        self.code = self.scenario.module_code
        self.steps = 0
        self.edits = 0
        self.reward: float | None = None
        text = (
            f"{self.scenario.pr_description}\n\nThe module {self.scenario.module_filename}:\n```python\n{self.code}```"
        )
        self._messages: list[Message] = [{"role": "user", "content": text}]

    @property
    def done(self) -> bool:
        return self.reward is not None

    def get_system_prompt(self) -> str:
        return SYSTEM

    def get_tool_schemas(self) -> list[ToolSchema]:
        return TOOLS

    def get_messages(self) -> list[Message]:
        return self._messages

    def step(self, action_json: str) -> None:
        if self.done:
            return
        self.steps += 1
        action = read_json_call(action_json)
        if isinstance(action, str):
            self._observe(action_json, "user", f"Error: {action}.")
        elif action["name"] == RESPOND:
            said = str(action["arguments"].get("message", ""))
            self._observe(said, "user", self._answer(said))
        else:
            self._observe(action_json, "tool", self._call(action["name"], action["arguments"]))
        if self.steps >= self.max_steps and not self.done:
            self._submit()

    def _observe(self, said: str, role: str, content: str) -> None:
        self._messages.append({"role": "assistant", "content": said})
        self._messages.append({"role": role, "content": content})

    def _answer(self, text: str) -> str:
        """One answer with SEARCH/REPLACE blocks edits and submits; one without is asked to act."""
        blocks = edits_in(text)
        if not blocks:
            return "Edit the module with replace_text or a SEARCH/REPLACE block, and submit it."
        code = self.code
        try:
            for search, replace in blocks:
                code = apply_edit(code, search, replace)
        except EditError as error:
            return f"Error: {error}."
        self.code = code
        self.edits += len(blocks)
        self._submit()
        return "Submitted."

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        wanted = {t["function"]["name"]: t["function"]["parameters"]["required"] for t in TOOLS}.get(name)
        if wanted is None:
            return f"Error: unknown tool {name!r}."
        if set(arguments) != set(wanted) or not all(isinstance(v, str) for v in arguments.values()):
            return f"Error: {name} needs the text arguments {', '.join(wanted) or '(none)'}."
        if "path" in arguments and arguments["path"] != self.scenario.module_filename:
            return f"Error: no such file; the module is {self.scenario.module_filename}."
        if name == "view_file":
            return self.code
        if name == "submit":
            self._submit()
            return "Submitted."
        try:
            self.code = apply_edit(self.code, arguments["search"], arguments["replace"])
        except EditError as error:
            return f"Error: {error}."
        self.edits += 1
        return "Replaced."

    def _submit(self) -> None:
        if self.code == self.scenario.module_code:  # nothing was changed: no need to run anything
            self.reward = 0.0
            return
        result = grade(self.scenario, self.code, isolation=self._isolation)
        self.reward = reward(self.scenario, result, self._isolation)

    def get_summary(self) -> dict[str, Any]:
        reason = "submitted" if self.done else "open"
        return {
            "reward": self.reward or 0.0,
            "steps": self.steps,
            "reason": reason,
            "domain": self.scenario.domain or "swe",
            "scenario": self.scenario.name,
            "edits": self.edits,
        }


def scenario_spec(name: str, scenarios: Sequence[Scenario], isolation: str = "auto", description: str = "") -> GameSpec:
    """A game over a scenario set.

    Raises:
        InputError: at the first ``make_env``, when there is no sandbox.
    """

    def make_env() -> ScenarioGame:
        return ScenarioGame(scenarios, sandbox.find_isolation(isolation))

    def oracle(seed: int) -> list[Action]:
        scenario = scenarios[seed % len(scenarios)]
        edit = {
            "path": scenario.module_filename,
            "search": scenario.oracle_search,
            "replace": scenario.oracle_replace,
        }
        return [{"name": "replace_text", "arguments": edit}, {"name": "submit", "arguments": {}}]

    return GameSpec(
        name=name,
        make_env=make_env,
        max_gen_tokens=2048,
        oracle=oracle,
        description=description or f"Repair modules of {len(scenarios)} scenarios.",
        hint_prompt="Before you edit, follow the calls from the symptom to the line that decides it.",
    )


def register_folder(folder: Path, register: Callable[[GameSpec], GameSpec] = register_game) -> list[str]:
    """Register ``capability_<name>`` for every scenario file below ``folder``; returns the names."""
    names = []
    for file in sorted(folder.glob("*/scenarios_parsed.json")):
        register(scenario_spec(f"capability_{file.parent.name}", load_scenarios(file)))
        names.append(f"capability_{file.parent.name}")
    return names


def oracle_text(scenario: Scenario) -> str:
    """The oracle's edit as one answer with a SEARCH/REPLACE block."""
    return f"<<<<<<< SEARCH\n{scenario.oracle_search}\n=======\n{scenario.oracle_replace}\n>>>>>>> REPLACE"


register_folder(Path(os.environ.get("TRACE_SCENARIOS") or Path(__file__).resolve().parent / "swebench"))
