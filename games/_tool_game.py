"""A small base class for writers of tool-calling environments.

A subclass names its tools, draws a task from a random generator and grades; this class keeps the conversation, checks
arguments, turns every fault of the policy into an observation, counts steps and writes the summary::

    class LookupGame(ToolGame):
        name = "capability_lookup"
        system_prompt = "Call one tool as JSON. Tools: open(id)"
        tools = (Tool("open", "Open a file.", {"id": {"type": "integer"}}),)

        def draw_task(self, rng): ...          # sets the state, returns the messages that open the conversation
        def call(self, action): ...            # carries out a checked call, returns the observation
        def reward(self): ...                  # from the state, in [0, 1]
        def solution(self): ...                # the actions that solve the task, for the oracle

Environments are plain Python without I/O; their only randomness is the generator that ``reset(seed)`` makes.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from game_registry import Message
from tool_calls import RESPOND, Action, ToolSchema, read_json_call

_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "array": list,
    "object": dict,
}


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool that the policy may call. ``parameters``: JSON-schema properties, required unless ``optional``."""

    name: str
    description: str
    parameters: Mapping[str, Mapping[str, Any]]
    optional: tuple[str, ...] = ()

    def schema(self) -> ToolSchema:
        """The OpenAI form, as chat templates and servers expect it."""
        parameters = {
            "type": "object",
            "properties": {key: dict(value) for key, value in self.parameters.items()},
            "required": [key for key in self.parameters if key not in self.optional],
            "additionalProperties": False,
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with ``arguments``, as a sentence for the policy; None when they fit the tool's schema."""
    expected = ", ".join(tool.parameters) or "no arguments"
    for key in arguments:
        if key not in tool.parameters:
            return f"{tool.name} has no argument {key!r}; expected {expected}"
    for key, schema in tool.parameters.items():
        if key not in arguments:
            if key in tool.optional:
                continue
            return f"{tool.name} needs the argument {key!r}"
        fault = _check_value(arguments[key], schema)
        if fault is not None:
            return f"argument {key!r} of {tool.name} {fault}"
    return None


def _check_value(value: Any, schema: Mapping[str, Any]) -> str | None:
    kind = schema.get("type")
    if kind is not None and (
        not isinstance(value, _JSON_TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")
    ):
        return f"must be of type {kind}, found {json.dumps(value, default=str)[:40]}"
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {', '.join(map(str, schema['enum']))}"
    if "minimum" in schema and value < schema["minimum"]:
        return f"must be at least {schema['minimum']}"
    if "maximum" in schema and value > schema["maximum"]:
        return f"must be at most {schema['maximum']}"
    return None


def bare_call(name: str, **arguments: Any) -> str:
    """A call as the policy writes it: one JSON object and nothing else."""
    return json.dumps({"name": name, "arguments": arguments})


class ToolGame:
    """Conversation, dispatch and bookkeeping of a tool-calling environment; see the module's text.

    ``domain`` may change with the task. ``finished`` is set by ``call`` when the episode is over before ``max_steps``
    (a state-changing call cannot be taken back). ``random.Random(text)`` hashes the text with SHA-512, so a seed gives
    the same task in every process, and two games never share a stream.
    """

    name: str = ""
    system_prompt: str = ""
    tools: Sequence[Tool] = ()
    step_limit: int = 1

    def __init__(self) -> None:
        self.domain = self.name
        self.finished = False
        self.reason = "not started"
        self._steps = 0
        self._messages: list[Message] = []

    # ---- what a subclass fills in

    def draw_task(self, rng: random.Random) -> list[Message]:
        """Set the state of one task and return the messages that open the conversation."""
        raise NotImplementedError

    def call(self, action: Action) -> str:
        """Carry out a call whose name and arguments were checked; return what the policy sees."""
        raise NotImplementedError

    def follow_up(self) -> str | None:
        """What the scripted user says after a tool result, if anything."""
        return None

    def respond(self, text: str) -> str:
        """The scripted user's answer to plain text."""
        return "Please do it with one of your tools."

    def reward(self) -> float:
        """The grade of the state so far, in [0, 1]."""
        raise NotImplementedError

    def solution(self) -> list[Action]:
        """The actions that solve the current task."""
        raise NotImplementedError

    # ---- the published contract

    @property
    def done(self) -> bool:
        return self.finished or self._steps >= self.max_steps

    @property
    def max_steps(self) -> int:
        return self.step_limit

    def reset(self, seed: int) -> None:
        self.finished, self.reason, self._steps = False, "no call was made", 0
        self._messages = list(self.draw_task(random.Random(f"{self.name}:{seed}")))

    def get_system_prompt(self) -> str:
        return self.system_prompt

    def get_tool_schemas(self) -> list[ToolSchema]:
        return [tool.schema() for tool in self.tools]

    def get_messages(self) -> list[Message]:
        return list(self._messages)

    def get_summary(self) -> dict[str, Any]:
        return {"reward": self.reward(), "steps": self._steps, "reason": self.reason, "domain": self.domain}

    def step(self, action_json: str) -> None:
        if self.done:
            return
        self._steps += 1
        action = read_json_call(action_json)
        if isinstance(action, str):
            self._append({"role": "assistant", "content": action_json}, _user(f"Error: {action}."))
            self.reason = "the call could not be read"
        elif action["name"] == RESPOND:
            text = str(action["arguments"].get("message", ""))
            self._append({"role": "assistant", "content": text}, _user(self.respond(text)))
        else:
            call = json.dumps(action, ensure_ascii=False)
            self._append({"role": "assistant", "content": call}, {"role": "tool", "content": self._dispatch(action)})
            said = None if self.done else self.follow_up()
            if said is not None:
                self._append(_user(said))

    # ---- inside

    def _append(self, *messages: Message) -> None:
        self._messages.extend(messages)

    def _dispatch(self, action: Action) -> str:
        tool = next((t for t in self.tools if t.name == action["name"]), None)
        if tool is None:
            self.reason = "unknown tool"
            known = ", ".join(t.name for t in self.tools)
            return f"Error: there is no tool {action['name'][:40]!r}; expected one of {known}."
        fault = check_arguments(tool, action["arguments"])
        if fault is not None:
            self.reason = "arguments do not fit the schema"
            return f"Error: {fault}."
        return self.call(action)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def oracle_of(make_env: Callable[[], ToolGame]) -> Callable[[int], list[Action]]:
    """The ``oracle`` of a ``GameSpec``: the solution of the task that ``seed`` draws."""

    def oracle(seed: int) -> list[Action]:
        env = make_env()
        env.reset(seed)
        return env.solution()

    return oracle
