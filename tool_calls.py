"""What the policy said: tool calls in text, read by one parser for every stage.

Floor 0 of the house: standard library only. ``game_registry`` re-exports what environments need.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

ToolSchema = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
Action = dict[str, Any]  # {"name": tool, "arguments": {...}}
Message = dict[str, Any]  # OpenAI chat message

RESPOND = "respond_to_user"  # the action of a turn that is plain text


@dataclasses.dataclass(frozen=True)
class ParsedTurn:
    """``actions`` to step through, the text around them, and what was wrong when a call could not be read."""

    actions: tuple[Action, ...]
    content: str
    error: str | None = None


def _between(text: str, begin: str, end: str) -> tuple[list[str], str]:
    """What lies between each ``begin`` and the next ``end``, and the text outside of them. One pass: a model that
    repeats a mark or a newline for thousands of tokens must not cost minutes, as lazy patterns do."""
    inside, outside, position = [], [], 0
    while (start := text.find(begin, position)) >= 0:
        stop = text.find(end, start + len(begin))
        if stop < 0:
            break
        outside.append(text[position:start])
        inside.append(text[start + len(begin) : stop])
        position = stop + len(end)
    return inside, "".join([*outside, text[position:]])


def parse_turn(
    text: str, tools: Sequence[ToolSchema] = (), extract: Callable[[str], str | None] | None = None
) -> ParsedTurn:
    """Read tool calls in the hermes form, the qwen3_xml form, or as one bare JSON object.

    Text without a call is ``respond_to_user``. A call that cannot be read gives ``error`` and no action, so that the
    loop can show it to the policy. XML values are strings; ``tools`` tells which of them are JSON of another type.
    ``extract`` (an environment's own parser: text -> action JSON, or None without a call) replaces all of this.
    """
    if extract is not None:
        raw = extract(text)
        if raw is None:
            return ParsedTurn(({"name": RESPOND, "arguments": {"message": text.strip()}},), text.strip())
        action = read_json_call(raw)
        return ParsedTurn((), "", action) if isinstance(action, str) else ParsedTurn((action,), "")
    visible = _between(text, "<think>", "</think>")[1]
    if "<think>" in visible:
        return ParsedTurn((), text, "the reasoning block <think> was not closed, so no action was taken")
    blocks, content = _between(visible, "<tool_call>", "</tool_call>")
    blocks, content = [block.strip() for block in blocks], content.strip()
    if not blocks:
        if "<tool_call>" in visible:
            return ParsedTurn((), content, "the tool call was not closed with </tool_call>")
        bare = content
        if not (bare.startswith("{") and '"name"' in bare):
            return ParsedTurn(({"name": RESPOND, "arguments": {"message": content}},), content)
        blocks, content = [bare], ""
    actions = []
    for block in blocks:
        action = _read_xml_call(block, tools) if block.startswith("<function=") else read_json_call(block)
        if isinstance(action, str):
            return ParsedTurn((), content, action)
        actions.append(action)
    return ParsedTurn(tuple(actions), content)


def read_json_call(block: str) -> Action | str:
    """The action in ``block``, or a sentence that says what is wrong with it."""
    try:
        call = json.loads(block)
    except (ValueError, RecursionError) as error:
        fault = error.__class__.__name__
        return f'the tool call is not valid JSON ({fault}); expected {{"name": ..., "arguments": {{...}}}}'
    if "\\u" in block and not _is_unicode(call):
        return "the tool call has half of a \\u pair; write the character itself"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return 'the tool call has no "name"; expected {"name": ..., "arguments": {...}}'
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON inside a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return 'the "arguments" are not a JSON object'
        if not _is_unicode(arguments):
            return "the tool call has half of a \\u pair; write the character itself"
    if not isinstance(arguments, dict):
        return 'the "arguments" are not a JSON object'
    return {"name": call["name"], "arguments": arguments}


def _is_unicode(value: Any) -> bool:
    """Whether a JSON value has no lone surrogate: half of a pair of ``\\u`` escapes, which no file can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _read_xml_call(block: str, tools: Sequence[ToolSchema]) -> Action | str:
    name, found, body = block.removeprefix("<function=").partition(">")
    if not found or not name or name.split() != [name]:
        return "the tool call is malformed; expected <function=NAME> <parameter=KEY>VALUE</parameter> </function>"
    types: dict[str, Any] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            types = {k: v.get("type") for k, v in function.get("parameters", {}).get("properties", {}).items()}
    arguments: dict[str, Any] = {}
    for key, value in _xml_parameters(body):
        arguments[key] = value
        if types.get(key) != "string":
            try:
                read = json.loads(value)
            except (ValueError, RecursionError):
                continue
            arguments[key] = read if "\\u" not in value or _is_unicode(read) else value
    return {"name": name, "arguments": arguments}


def _xml_parameters(body: str) -> list[tuple[str, str]]:
    """Names and values of ``<parameter=NAME>VALUE</parameter>``; one newline at each end of a value is layout."""
    out, position = [], 0
    while (start := body.find("<parameter=", position)) >= 0:
        position = start + len("<parameter=")
        name_end = body.find(">", position)
        name = body[position:name_end]
        if name_end < 0 or name.split() != [name]:
            continue
        stop = body.find("</parameter>", name_end)
        if stop < 0:
            break
        out.append((name, body[name_end + 1 : stop].removeprefix("\n").removesuffix("\n")))
        position = stop
    return out


def assistant_message(text: str, parsed: ParsedTurn, index: int) -> Message:
    """The OpenAI chat message of turn ``index``. ``raw_content`` keeps ``text`` where it holds more than its calls."""
    calls = [
        {
            "id": f"call_{index}_{i}",
            "type": "function",
            "function": {"name": a["name"], "arguments": json.dumps(a["arguments"], ensure_ascii=False)},
        }
        for i, a in enumerate(parsed.actions)
        if a["name"] != RESPOND
    ]
    if not calls:
        said = text or next((str(a["arguments"].get("message", "")) for a in parsed.actions), "")
        return {"role": "assistant", "content": said}
    message: Message = {"role": "assistant", "content": parsed.content, "tool_calls": calls}
    if text and text != parsed.content:
        message["raw_content"] = text
    return message


def link_tool_results(assistant: Message, new: Sequence[Message]) -> None:
    """Tool results follow their calls in order; give each the id of its call, as OpenAI clients expect."""
    ids = [c["id"] for c in assistant.get("tool_calls", [])]
    for message, call_id in zip([m for m in new if m.get("role") == "tool"], ids, strict=False):
        message["tool_call_id"] = call_id
