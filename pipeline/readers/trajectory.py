"""What a reader yields, and how a trajectory becomes a ``Record``: compaction, redaction, one id scheme."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Literal

from environment_calls import as_unicode
from pipeline.files import InputError
from pipeline.readers.stream import describe

TOLERANCE = 1e-6  # benchmarks compare rewards with 1 this way


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a trajectory ended. ``fault`` says whose fault an ``infrastructure`` outcome is."""

    outcome: Literal["passed", "failed", "infrastructure", "unknown"]
    reward: float | None = None
    reason: str = ""
    fault: str = ""


NO_VERDICT = Verdict("unknown", reason="no verdict in the input")


def by_reward(reward: float, threshold: float, reason: str = "") -> Verdict:
    """Passed when ``reward`` reaches ``threshold``; the reason is kept for failures only."""
    if reward >= threshold - TOLERANCE:
        return Verdict("passed", reward)
    return Verdict("failed", reward, reason or f"reward {reward:g}")


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One episode as its file has it; ``messages`` are raw, in the order of the conversation."""

    benchmark: str
    domain: str
    task_id: str
    trial: int
    verdict: Verdict
    messages: list[Any]
    source: str

    @property
    def id(self) -> str:
        """``domain:task`` (an SWE-bench instance id stands alone), with ``#trial`` from the second trial on."""
        alone = not self.domain or self.benchmark == "swebench"
        head = self.task_id if alone else f"{self.domain}:{self.task_id}"
        return as_unicode(f"{head}#{self.trial}" if self.trial else head)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Characters kept of a message and of a tool result or call."""

    content: int = 300
    tool: int = 200


@dataclasses.dataclass
class Tally:
    """What compaction removed."""

    cut_chars: int = 0
    redacted: int = 0


_SECRET = re.compile(
    r"""\b(?:sk|pk|rk)-[A-Za-z0-9_\-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bhf_[A-Za-z0-9]{20,}|\bAKIA[0-9A-Z]{16}\b
    |\bxox[abprs]-[A-Za-z0-9\-]{10,}|(?<=Bearer\ )[A-Za-z0-9._\-]{16,}
    |(?<=api_key["']:\ ["'])[^"']+|(?<=api_key["']:["'])[^"']+|(?<=api_key=)[^\s&"',)]+""",
    re.VERBOSE | re.IGNORECASE,
)


_MARKS = ("sk-", "pk-", "rk-", "gh", "hf_", "akia", "xox", "bearer", "api_key")  # one of them is in every secret
MARGIN = 200  # characters around a cut that are looked at too, so that no cut hides half a key from the search


def clean(text: str, tally: Tally) -> str:
    """``text`` that UTF-8 can hold, with API keys replaced."""
    text = as_unicode(text)
    low = text.lower()
    if not any(mark in low for mark in _MARKS):  # ten times faster than the expression
        return text
    text, found = _SECRET.subn("[redacted]", text)
    tally.redacted += found
    return text


def cut(text: str, limit: int, tally: Tally) -> str:
    """Clean, and at most about ``limit`` characters: two thirds from the start, the rest from the end."""
    if len(text) <= limit + 2 * MARGIN:
        text = clean(text, tally)
        if len(text) <= limit:
            return text
    head = limit * 2 // 3
    tail = limit - head
    gap = len(text) - limit
    tally.cut_chars += gap
    start = clean(text[: head + MARGIN], tally)[:head]
    end = clean(text[len(text) - tail - MARGIN :], tally)[-tail:] if tail else ""
    return f"{start} […{gap} chars cut…] {end}"


def text_of(content: Any) -> str:
    """The text of a message's content: None, a string, or a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(p) for p in content)
    return json.dumps(content, ensure_ascii=False)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        for key in ("text", "refusal", "reasoning"):
            if isinstance(part.get(key), str):
                return str(part[key])
        return f"[{part.get('type', 'part')}]"  # an image or audio: named, never copied
    return json.dumps(part, ensure_ascii=False)


def calls_of(message: dict[str, Any], where: str) -> list[tuple[str, str]]:
    """(name, arguments as text) of a message's tool calls: flat or nested, arguments of any type."""
    raw = message.get("tool_calls") or []
    if isinstance(message.get("function_call"), dict):
        raw = [*raw, message["function_call"]] if isinstance(raw, list) else raw
    if not isinstance(raw, list):
        raise InputError(f"{where}: tool_calls: expected a list, found {describe(raw)}")
    found = []
    for call in raw:
        if not isinstance(call, dict):
            raise InputError(f"{where}: tool_calls: expected objects, found {describe(call)}")
        body = call["function"] if isinstance(call.get("function"), dict) else call
        name = body.get("name", call.get("function"))
        if not isinstance(name, str):
            raise InputError(f"{where}: a tool call has no name, found {describe(call)}")
        arguments = body.get("arguments")
        found.append(
            (name, arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False))
        )
    return found


def from_responses(raw: dict[str, Any]) -> dict[str, Any]:
    """An item of the Responses API as a chat message; anything else as it is."""
    if raw.get("type") == "function_call_output":
        return {"role": "tool", "content": raw.get("output")}
    if raw.get("type") == "function_call":
        return {"role": "assistant", "tool_calls": [raw]}
    output = raw.get("output")
    if raw.get("object") != "response" or not isinstance(output, list):
        return raw
    parts = [o for o in output if isinstance(o, dict)]
    text = [text_of(o.get("content")) for o in parts if o.get("type") == "message"]
    calls = [o for o in parts if o.get("type") == "function_call"]
    return {"role": "assistant", "content": "\n".join(text), "tool_calls": calls}


def compact_message(raw: Any, index: int, limits: Limits, tally: Tally, where: str) -> dict[str, Any]:
    """A raw message as the fields of ``records.Message``."""
    if not isinstance(raw, dict):
        raise InputError(f"{where}: message {index}: expected an object, found {describe(raw)}")
    if "role" not in raw:
        raw = from_responses(raw)
    role = raw.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(f"{where}: message {index}: expected a role, found {describe(raw)}")
    before = tally.cut_chars
    limit = limits.tool if role in ("tool", "function") else limits.content
    content = text_of(raw.get("content"))
    error = raw.get("error")
    if isinstance(error, dict) and isinstance(
        error.get("message"), str
    ):  # Inspect keeps a tool's fault beside its output
        content = f"{content}\n[error {error.get('type', '')}] {error['message']}".strip()
    calls = [
        {"name": clean(name, tally), "arguments": cut(arguments, limits.tool, tally)}
        for name, arguments in calls_of(raw, f"{where}: message {index}")
    ]
    if raw.get("requestor") == "user" and role == "tool":
        role = "user_tool"  # the user simulator's own tools are not the agent's
    return {
        "index": index,
        "role": clean(role, tally),
        "content": cut(content, limit, tally),
        "calls": tuple(calls),
        "cut_chars": tally.cut_chars - before,
    }


def as_id(value: Any, where: str) -> str:
    """A task id as text: ``"0"`` and ``0`` are the same task.

    Raises:
        InputError: neither a non-empty string nor an integer.
    """
    if isinstance(value, str) and value:
        return as_unicode(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise InputError(f"{where}: expected an id (text or integer), found {describe(value)}")
