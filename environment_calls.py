"""Calls of environment code, which may be anybody's: what it raises or returns against the contract is a typed fault.

Floor 0 of the house, beside ``game_registry``: standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

ROLES = frozenset({"system", "user", "assistant", "tool"})


class AgentError(RuntimeError):
    """The agent could not answer for a reason that is not the policy's (dead server, deadline, nonsense reply).

    ``kind`` becomes the outcome's kind, so the episode leaves every rate and baseline.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class EnvironmentFault(RuntimeError):
    """The environment broke its contract; the episode failed, and is no reward."""


def guard(method: Callable[..., Any], *args: Any) -> Any:
    """Call foreign environment code.

    Raises:
        AgentError: from a user simulator inside the environment, unchanged.
        EnvironmentFault: for whatever else it raises, with its text.
    """
    try:
        return method(*args)
    except AgentError:
        raise  # a user simulator inside the environment lost its server
    except (Exception, SystemExit) as error:  # sys.exit in an environment must not end the command
        name = args[1] if method is getattr else getattr(method, "__name__", "call")
        raise EnvironmentFault(f"{name} raised {type(error).__name__}: {error}") from error


def as_unicode(text: str) -> str:
    """``text`` with half characters (lone surrogates), which no file can hold, as question marks."""
    return text.encode("utf-8", "replace").decode()


def require_json(what: str, value: Any) -> None:
    """Rollouts are written as JSON in UTF-8: no NaN, no lone surrogate, no object of a library.

    Raises:
        EnvironmentFault: ``value`` cannot be written so.
    """
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFault(f"{what} holds what JSON cannot: {error}") from None


def list_of(kind: str, method: Callable[[], Any], known: int = 0) -> list[Any]:
    """What ``get_messages`` or ``get_tool_schemas`` returns, checked to be what the contract says.

    Args:
        known: items at the start whose text was checked before.

    Raises:
        EnvironmentFault: it is something else.
    """
    items = guard(method)
    if not isinstance(items, list | tuple):
        raise EnvironmentFault(f"{method.__name__}() must return a list, found {type(items).__name__}")
    for item in items:
        if kind == "message":
            fine = isinstance(item, dict) and item.get("role") in ROLES
            fine = fine and isinstance(item.get("content"), str | list | None)
        else:
            fine = isinstance(item, dict) and isinstance(item.get("function", item).get("name"), str)
        if not fine:
            raise EnvironmentFault(f"{method.__name__}() holds what is no {kind}: {item!r:.80}")
    require_json(f"{method.__name__}()", items[known:])
    return list(items)
