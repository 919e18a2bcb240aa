"""The environment contract, the registry, and the one episode loop on messages.

Every stage (collect, calibrate, validate, train, evaluate) talks to an environment through this file, so an
environment that passes one of them runs in all of them. Floor 0 of the house: standard library only.

An environment is a class with the published methods (see ``Game``) and is registered on import::

    from game_registry import GameSpec, register_game
    register_game(GameSpec(name="capability_lookup", make_env=LookupGame, max_gen_tokens=48, oracle=oracle))

``python -m game_registry`` lists what is registered.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import importlib
import importlib.util
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import tool_calls
from environment_calls import AgentError as AgentError
from environment_calls import EnvironmentFault, as_unicode, guard, list_of, require_json
from tool_calls import RESPOND, Action, ParsedTurn, ToolSchema, parse_turn
from tool_calls import Message as Message
from tool_calls import read_json_call as read_json_call

ROOT = Path(__file__).resolve().parent


class GameError(ValueError):
    """A fault of a registration, a name or an environment module; the text says what to do."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """The episode ran; ``reward`` is a finite number in [0, 1]."""

    reward: float


@dataclasses.dataclass(frozen=True)
class Failed:
    """Something other than the policy failed; no reward exists. Never counted as reward 0."""

    kind: str  # "environment", "timeout", "server", ...
    detail: str


Outcome = Scored | Failed


class Game(Protocol):
    """One environment instance. Plain Python, no I/O, fast; ``reset(seed)`` fixes everything.

    ``get_messages()`` is the conversation without the system prompt, OpenAI style. After ``reset`` it ends with a
    message that the policy must answer (it may hold example turns before that). ``step`` takes one action as JSON,
    appends the assistant turn and then what the policy must see (role ``tool`` or ``user``). It never raises on a
    malformed action: a fault of the policy is an observation.
    """

    @property
    def done(self) -> bool: ...

    @property
    def max_steps(self) -> int: ...

    def reset(self, seed: int) -> None: ...
    def get_system_prompt(self) -> str: ...
    def get_tool_schemas(self) -> list[ToolSchema]: ...
    def get_messages(self) -> list[Message]: ...
    def step(self, action_json: str) -> None: ...
    def get_summary(self) -> dict[str, Any]: ...  # {"reward": float, "steps": int, "reason": str, "domain": str}


@dataclasses.dataclass(frozen=True)
class GameSpec:
    """What the registry knows about an environment.

    Args:
        name: unique; ``capability_<name>`` for a capability, anything else for a target benchmark.
        make_env: no arguments; with ``needs_user_llm`` it takes the keyword ``user_llm``, a function from messages to
            text.
        extract_action: text of a turn -> action JSON, or None when there is no call. Default: ``parse_turn``.
        action_space: tool names, for the reader; empty = whatever ``get_tool_schemas`` says.
        stop_sequences: strings that end a turn, beside the end-of-turn token.
        max_gen_tokens: tokens per turn.
        hint_prompt: text added to the system prompt for the hinted part of a group.
        base_prompt: the system prompt to train on; default is the environment's own.
        tools_in: ``chat_template`` hands the schemas to the template, ``system_prompt`` means that the prompt has them.
        oracle: (+) actions that solve a seed, used by validation only.
        description: (+) the capability in two sentences, as the selection file has it.
    """

    name: str
    make_env: Callable[..., Game]
    extract_action: Callable[[str], str | None] | None = None
    action_space: tuple[str, ...] = ()
    stop_sequences: tuple[str, ...] = ()
    system_prompt: str = ""
    max_gen_tokens: int = 1024
    needs_user_llm: bool = False
    hint_prompt: str | None = None
    base_prompt: str | None = None
    tools_in: Literal["chat_template", "system_prompt"] = "chat_template"
    oracle: Callable[[int], Sequence[Action]] | None = None
    description: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9_]*", self.name):
            raise GameError(f"game name {self.name!r}: expected snake_case (a-z, 0-9, _); rename it in its GameSpec")
        if not callable(self.make_env):
            raise GameError(f"game {self.name}: make_env must be callable, found {type(self.make_env).__name__}")
        if self.max_gen_tokens < 1:
            raise GameError(f"game {self.name}: max_gen_tokens must be >= 1, found {self.max_gen_tokens}")
        if self.tools_in not in ("chat_template", "system_prompt"):
            found = repr(self.tools_in)
            raise GameError(f"game {self.name}: tools_in must be chat_template or system_prompt, found {found}")


_REGISTRY: dict[str, GameSpec] = {}
_ORIGIN: dict[str, str] = {}
_FAILED_IMPORTS: dict[str, str] = {}
_DISCOVERED: set[str] = set()
_loading: list[str] = []


def register_game(spec: GameSpec) -> GameSpec:
    """Add ``spec``. A second registration of a name from another module is an error."""
    frame_module = sys._getframe(1).f_globals.get("__file__") or sys._getframe(1).f_globals.get("__name__", "?")
    origin = _loading[-1] if _loading else str(frame_module)
    previous = _ORIGIN.get(spec.name)
    if previous is not None and previous != origin:
        raise GameError(f"game {spec.name!r} is registered twice: in {previous} and in {origin}; rename one of them")
    _REGISTRY[spec.name] = spec
    _ORIGIN[spec.name] = origin
    return spec


def load_game_file(path: str | os.PathLike[str]) -> list[str]:
    """Import one environment file and return the names that it registered.

    Raises:
        GameError: the file is missing, fails to import, or registers nothing.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise GameError(f"environment file {path}: not found; expected a capability_<name>_game.py")
    module_name = f"_trace_game_{file.stem}_{abs(hash(str(file))):x}"
    before = dict(_ORIGIN)
    loaded = importlib.util.spec_from_file_location(module_name, file)
    assert loaded is not None and loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    sys.modules[module_name] = module
    _loading.append(str(file))
    try:
        loaded.loader.exec_module(module)
    except GameError:
        raise
    except Exception as error:  # foreign code: whatever it raises is its fault and is named as such
        sys.modules.pop(module_name, None)
        raise GameError(f"environment file {file}: import failed with {type(error).__name__}: {error}") from error
    finally:
        _loading.pop()
    names = [n for n, origin in _ORIGIN.items() if origin == str(file)]
    if not names and before == _ORIGIN:
        raise GameError(f"environment file {file}: registers no game; call register_game(GameSpec(...)) at its end")
    return names


def discover(root: str | os.PathLike[str] | None = None) -> dict[str, GameSpec]:
    """Import every environment and return the registry.

    Looks at ``capability_*_game.py`` in ``root`` (default: this file's folder), at the modules of ``games/``, and at
    the modules named in ``TRACE_GAME_MODULES``. A module that fails is a warning here and an error when its game is
    asked
    for.
    """
    folder = Path(root).resolve() if root is not None else ROOT
    sources = sorted(folder.glob("capability_*_game.py"))
    sources += sorted(p for p in (folder / "games").glob("*.py") if not p.name.startswith("_"))
    if folder != ROOT:
        sources += sorted(p for p in (ROOT / "games").glob("*.py") if not p.name.startswith("_"))
    for source in sources:
        _import_once(str(source), lambda s=source: _load_if_game(s))  # type: ignore[misc]
    for module in filter(None, (m.strip() for m in os.environ.get("TRACE_GAME_MODULES", "").split(","))):
        _import_once(module, lambda m=module: _load_module(m))  # type: ignore[misc]
    return dict(_REGISTRY)


def _load_if_game(source: Path) -> None:
    if not source.is_file():
        raise GameError(f"environment file {source}: expected a file, found a folder or a device")
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GameError(f"environment file {source}: cannot be read ({error})") from None
    if "register_game(" in text:
        load_game_file(source)


def _load_module(module: str) -> None:
    _loading.append(module)
    try:
        importlib.import_module(module)
    except GameError:
        raise
    except Exception as error:
        raise GameError(f"TRACE_GAME_MODULES: {module}: import failed with {type(error).__name__}: {error}") from error
    finally:
        _loading.pop()


def _import_once(key: str, load: Callable[[], None]) -> None:
    if key in _DISCOVERED:
        return
    _DISCOVERED.add(key)
    try:
        load()
    except GameError as error:
        _FAILED_IMPORTS[key] = str(error)
        warnings.warn(str(error), stacklevel=3)


def get_game(name: str, root: str | os.PathLike[str] | None = None) -> GameSpec:
    """The registered spec of ``name``.

    Raises:
        GameError: unknown name (the nearest known ones are listed), or its module failed to import.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = _REGISTRY if name in _REGISTRY else discover(root)
    if name in known:
        return known[name]
    for key, reason in _FAILED_IMPORTS.items():
        if name in key or ("registered twice" in reason and f"{name!r}" in reason):
            raise GameError(reason)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)
    broken = f"; these modules failed to import: {', '.join(_FAILED_IMPORTS)}" if _FAILED_IMPORTS else ""
    raise GameError(f"unknown game {name!r}; expected one of {', '.join(near)}{broken}")


class GameMix:
    """``a:2,b:1``: deals whole groups to games in proportion to weights; nobody starves.

    Every deal adds ``n * w_i / sum w`` to each game's credit and hands the groups to the largest credits, so after any
    number of deals each game has its exact share within one group. ``state`` is part of a checkpoint.
    """

    def __init__(self, games: dict[str, float]) -> None:
        if not games:
            raise GameError("game mix is empty; expected NAME:WEIGHT,NAME:WEIGHT")
        for name, weight in games.items():
            if not (math.isfinite(weight) and weight > 0):
                raise GameError(f"game mix: weight of {name} must be a positive number, found {weight}")
        total = sum(games.values())
        self.weights = {name: weight / total for name, weight in games.items()}
        self.state = dict.fromkeys(games, 0.0)

    @classmethod
    def parse(cls, text: str) -> GameMix:
        games: dict[str, float] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, weight = part.partition(":")
            if name in games:
                raise GameError(f"game mix {text!r}: {name} appears twice")
            try:
                games[name] = float(weight) if weight else 1.0
            except ValueError:
                raise GameError(f"game mix {text!r}: weight of {name} must be a number, found {weight!r}") from None
        return cls(games)

    def deal(self, n: int) -> list[str]:
        """The games of the next ``n`` groups."""
        for name, weight in self.weights.items():
            self.state[name] += n * weight
        dealt = []
        for _ in range(n):
            name = max(self.state, key=lambda g: (self.state[g], g))
            self.state[name] -= 1.0
            dealt.append(name)
        return dealt


@dataclasses.dataclass(frozen=True)
class Turn:
    """What an agent is asked: the whole conversation (system first), and what is new since its last answer."""

    index: int
    messages: list[Message]
    new_messages: list[Message]
    tools: list[ToolSchema]


@dataclasses.dataclass(frozen=True)
class Reply:
    """An agent's answer. ``actions`` is set when a server or a scripted policy gives calls instead of text.

    ``finish_reason``: ``stop``, ``length`` (cut at the token limit of a turn) or ``context`` (no room for another
    turn).
    """

    text: str = ""
    finish_reason: str = "stop"
    actions: tuple[Action, ...] | None = None


Agent = Callable[[Turn], Awaitable[Reply]]


@dataclasses.dataclass
class EpisodeResult:
    """One episode. ``finish_reason`` is ``done``, ``max_steps``, ``context`` or the kind of failure."""

    seed: int
    outcome: Outcome
    messages: list[Message]
    tools: list[ToolSchema]
    finish_reason: str
    turns: int = 0
    invalid_calls: int = 0
    truncated_turns: int = 0
    summary: dict[str, Any] = dataclasses.field(default_factory=dict)


async def play(
    spec: GameSpec, env: Game, agent: Agent, seed: int, *, hinted: bool = False, deadline_s: float | None = None
) -> EpisodeResult:
    """Run one episode: ask the agent, parse the action, step, until done; then read the reward.

    Args:
        env: an instance from ``spec.make_env``; it is reset here.
        hinted: add ``spec.hint_prompt`` to the system prompt.
        deadline_s: wall-clock limit; past it the outcome is ``Failed("timeout")``.
    """
    result = EpisodeResult(seed, Failed("environment", "not started"), [], [], "environment")
    try:
        async with asyncio.timeout(deadline_s):
            await _play(spec, env, agent, seed, hinted, result)
    except TimeoutError:
        result.outcome = Failed("timeout", f"episode exceeded {deadline_s} s")
    except AgentError as error:
        result.outcome = Failed(error.kind, as_unicode(error.detail))
    except EnvironmentFault as error:
        result.outcome = Failed("environment", as_unicode(str(error)))
    if isinstance(result.outcome, Failed):
        result.finish_reason = result.outcome.kind
    return result


async def _play(spec: GameSpec, env: Game, agent: Agent, seed: int, hinted: bool, result: EpisodeResult) -> None:
    guard(env.reset, seed)
    system = spec.base_prompt if spec.base_prompt is not None else guard(env.get_system_prompt)
    if hinted and spec.hint_prompt:
        system = f"{system}\n\n{spec.hint_prompt}"
    if not isinstance(system, str):
        raise EnvironmentFault(f"get_system_prompt() must return text, found {type(system).__name__}")
    require_json("get_system_prompt()", system)
    tools = result.tools = list_of("tool schema", env.get_tool_schemas)
    seen = list_of("message", env.get_messages)
    new = [{"role": "system", "content": system}, *seen] if system else list(seen)
    messages = result.messages
    messages.extend(new)
    n_seen = len(seen)
    result.finish_reason = "max_steps"
    max_steps = guard(getattr, env, "max_steps")
    if not isinstance(max_steps, int):
        raise EnvironmentFault(f"max_steps must be an integer, found {max_steps!r:.60}")
    for index in range(max_steps):
        reply = await agent(Turn(index, messages, new, tools))
        if reply.finish_reason == "context":
            result.finish_reason = "context"
            break
        result.turns = index + 1
        parsed = _parse_reply(spec, reply, tools)
        messages.append(tool_calls.assistant_message(reply.text, parsed, index))
        if parsed.error is not None:
            result.invalid_calls += 1
        new = [] if parsed.error is None else [{"role": "user", "content": f"Error: {parsed.error}."}]
        result.truncated_turns += reply.finish_reason == "length"
        for action in parsed.actions:
            if guard(getattr, env, "done"):
                break
            payload = json.dumps(action, ensure_ascii=False)
            # a step that waits for a server, or says that it is slow, runs in a thread; other episodes go on meanwhile
            if spec.needs_user_llm or getattr(env, "slow_step", False):
                await asyncio.to_thread(guard, env.step, payload)
            else:
                guard(env.step, payload)
            current = list_of("message", env.get_messages, n_seen)
            new.extend(dict(m) for m in current[n_seen:] if m.get("role") != "assistant")
            n_seen = len(current)
        tool_calls.link_tool_results(messages[-1], new)
        messages.extend(new)
        if guard(getattr, env, "done"):
            result.finish_reason = "done"
            break
    result.summary, result.outcome = _score(env)


def _parse_reply(spec: GameSpec, reply: Reply, tools: list[ToolSchema]) -> ParsedTurn:
    if reply.actions is not None:
        return ParsedTurn(reply.actions, reply.text)
    parsed = parse_turn(reply.text, tools, spec.extract_action)
    calls = [a for a in parsed.actions if a["name"] != RESPOND]
    if reply.finish_reason == "length" and not calls:
        return ParsedTurn((), reply.text, "the message was cut at the token limit before an action was complete")
    return parsed


def _score(env: Game) -> tuple[dict[str, Any], Outcome]:
    finalize = getattr(env, "_finalize_with_verification", None)
    if finalize is not None:
        guard(finalize)
    summary = guard(env.get_summary)
    if not isinstance(summary, dict) or "reward" not in summary:
        raise EnvironmentFault(f"get_summary() must return a dict with 'reward', found {summary!r:.80}")
    reward = summary["reward"]
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
    if not is_number or not 0 <= reward <= 1:  # NaN and infinities fail the comparison
        raise EnvironmentFault(f"reward must be a finite number in [0, 1], found {reward!r:.80}")
    require_json("get_summary()", summary)
    return dict(summary), Scored(float(reward))


def play_sync(spec: GameSpec, env: Game, agent: Agent, seed: int, **options: Any) -> EpisodeResult:
    """``play`` for agents that never wait (oracles, scripted policies)."""
    return asyncio.run(play(spec, env, agent, seed, **options))


def scripted_agent(actions: Sequence[Action]) -> Agent:
    """An agent that plays ``actions`` one per turn, as the text a policy would write, then stays silent."""
    queue = list(actions)

    async def agent(turn: Turn) -> Reply:
        if not queue:
            return Reply(text="")
        action = queue.pop(0)
        if action["name"] == RESPOND:
            return Reply(text=str(action["arguments"].get("message", "")))
        return Reply(text=json.dumps(action, ensure_ascii=False))

    return agent


if __name__ == "__main__":
    import argparse

    import game_registry as registry  # the imported copy holds the registrations, this __main__ copy does not

    argparse.ArgumentParser("python -m game_registry", description="List the registered environments.").parse_args()
    for known_name, known_spec in sorted(registry.discover().items()):
        sys.stdout.write(f"{known_name:48} {known_spec.description}\n")
