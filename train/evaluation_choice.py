"""The prompt-chosen baseline: the base model reads what each adapter is for and the task, and picks one per episode.

One extra greedy call of the base per task, through the same engine and the same episode loop; stock multi-LoRA serving
is all it needs. The reply is read by name. One that names no option, or several, is invalid: the base plays that task,
and the share of such replies is reported.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from game_registry import Failed, GameSpec, Message, Reply, Turn, play
from pipeline.files import InputError, ServerError, check, read_json, write_json
from train.engine import SamplingParams
from train.engines import OpenEngine
from train.rollout import ABORT_KINDS, EnvironmentPool, run_all

BASE_OPTION = "base"
MAX_TASK_CHARS = 12_000  # of the task's text; the middle of a longer one is left out
MAX_REPLY_TOKENS = 24
CALLS_IN_FLIGHT = 64


@dataclasses.dataclass(frozen=True)
class Option:
    """An adapter that can be picked: its name, its PEFT folder, and what it is for."""

    name: str
    folder: str
    description: str


@dataclasses.dataclass(frozen=True)
class Pick:
    """What the base picked for one seed; ``option`` is None for the base. ``valid``: the reply named one option."""

    option: str | None
    valid: bool
    said: str
    prompt_tokens: int


class _Described(BaseModel):
    """An entry of a selection (``skill``) or of a candidates file (``name``)."""

    model_config = ConfigDict(extra="ignore")
    skill: str | None = None
    name: str | None = None
    description: str


def read_descriptions(path: str) -> dict[str, str]:
    """Capability -> description from ``selected_capabilities.json`` or ``candidate_capabilities.json``.

    Raises:
        InputError: missing, damaged, or an entry without name and description.
    """
    data = read_json(path, "capability descriptions")
    entries = data.get("candidates") if isinstance(data, dict) else data
    if not isinstance(entries, list):
        raise InputError(f"capability descriptions {path}: expected a selection or a candidates file")
    found = {}
    for number, raw in enumerate(entries):
        entry = check(_Described, raw, f"capability descriptions {path} entry {number}")
        name = entry.skill or entry.name
        if not name:
            raise InputError(f"capability descriptions {path} entry {number}: neither skill nor name; export it again")
        found[name] = " ".join(entry.description.split())
    return found


def options_from(folders: Mapping[str, str], path: str) -> tuple[Option, ...]:
    """The adapters with their descriptions; ``capability_x`` and ``x`` are one name.

    Raises:
        InputError: an adapter without a description.
    """
    known = read_descriptions(path)
    options = []
    for name, folder in folders.items():
        text = known.get(name) or known.get(name.removeprefix("capability_"))
        if not text:
            raise InputError(f"--choose {path}: no description of adapter {name}; there is: {', '.join(known)}")
        options.append(Option(name, folder, text))
    if not options:
        raise InputError("--choose: expected --adapters to choose from, found none")
    return tuple(options)


def choice_messages(task: Sequence[Message], options: Sequence[Option], order_key: str) -> list[Message]:
    """The question. The order of the options is drawn from ``order_key``, so that none is favoured by its place."""
    lines = [f"- {o.name}: {o.description}" for o in options]
    lines.append(f"- {BASE_OPTION}: no specialist is needed.")
    random.Random(order_key).shuffle(lines)
    listed = "\n".join(lines)
    return [
        {
            "role": "system",
            "content": "You decide which specialist handles a task.\nSpecialists:\n"
            f"{listed}\nReply with the name of one specialist and nothing else.",
        },
        {"role": "user", "content": f"The task:\n{task_text(task)}\n\nName of the specialist:"},
    ]


def task_text(messages: Sequence[Message]) -> str:
    """The conversation before the first turn as text, its middle cut when it is very long."""
    text = "\n".join(f"[{m['role']}] {_content(m)}" for m in messages)
    if len(text) <= MAX_TASK_CHARS:
        return text
    half = MAX_TASK_CHARS // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}"


def _content(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or []]
    return " ".join([str(content), *calls]).strip()


def read_choice(text: str, names: Sequence[str]) -> tuple[str | None, bool]:
    """The option that ``text`` names, and whether it names exactly one (``base`` is None).

    Case, and spaces or hyphens for underscores, do not matter.
    """
    said = re.sub(r"[\s\-_]+", "_", text.lower())
    found = [n for n in (*names, BASE_OPTION) if re.search(rf"(?<![a-z0-9]){re.escape(n.lower())}(?![a-z0-9])", said)]
    found = [n for n in found if not any(n != other and n in other for other in found)]  # the longer name was meant
    if len(found) != 1:
        return None, False
    return (None if found[0] == BASE_OPTION else found[0]), True


class _Chooser:
    """An agent whose first answer is its last: it asks the base for a pick and plays nothing."""

    def __init__(self, opened: OpenEngine, options: Sequence[Option], key: str, room: int) -> None:
        self.opened, self.options, self.key, self.room = opened, options, key, room
        self.pick: Pick | None = None

    async def __call__(self, turn: Turn) -> Reply:
        codec = self.opened.codec
        ids = codec.prompt_ids(choice_messages(turn.messages, self.options, self.key))
        if len(ids) + MAX_REPLY_TOKENS > self.room:
            raise InputError(
                f"--choose: the question has {len(ids)} tokens, the context {self.room}; shorten the descriptions"
            )
        sample = await self.opened.engine.sample(ids, SamplingParams(MAX_REPLY_TOKENS, temperature=0.0), None)
        said = codec.decode(sample.token_ids).strip()
        option, valid = read_choice(said, [o.name for o in self.options])
        self.pick = Pick(option, valid, said, len(ids))
        return Reply(finish_reason="context")


async def pick_adapters(
    opened: OpenEngine,
    spec: GameSpec,
    seeds: Sequence[int],
    options: Sequence[Option],
    room: int,
    user_llm: Callable[..., str] | None,
) -> dict[int, Pick]:
    """One pick per seed.

    Raises:
        ServerError: the engine gave up.
        InputError: an environment that cannot be started, or a question that does not fit the context.
    """
    picks: dict[int, Pick] = {}
    queue = iter(seeds)
    pool = EnvironmentPool(spec, user_llm)

    async def work() -> None:
        for seed in queue:
            chooser = _Chooser(opened, options, f"{spec.name}/{seed}", opened.fit(room))
            game = pool.take()
            result = await play(spec, game, chooser, seed)
            if chooser.pick is None:
                detail = result.outcome.detail if isinstance(result.outcome, Failed) else "no turn was asked for"
                if isinstance(result.outcome, Failed) and result.outcome.kind in ABORT_KINDS:
                    raise ServerError(detail)
                raise InputError(f"environment {spec.name}, seed {seed}: cannot be started ({detail}); validate it")
            picks[seed] = chooser.pick
            pool.give_back(game)

    await run_all(work() for _ in range(min(CALLS_IN_FLIGHT, len(seeds))))
    return picks


class _StoredPicks(BaseModel):
    model_config = ConfigDict(extra="forbid")
    schema_version: int
    settings: dict[str, Any]
    picks: dict[int, Pick]


def load_picks(path: Path, settings: Mapping[str, Any]) -> dict[int, Pick]:
    """Picks of an earlier start with the same settings; none where there is no file, or one of other settings."""
    if not path.exists():
        return {}
    stored = check(_StoredPicks, read_json(path, "picks"), f"picks {path}")
    return stored.picks if stored.settings == json.loads(json.dumps(settings)) else {}


def save_picks(path: Path, settings: Mapping[str, Any], picks: Mapping[int, Pick]) -> None:
    """Write all picks of one environment."""
    write_json(
        path,
        {
            "schema_version": 1,
            "settings": dict(settings),
            "picks": {str(seed): dataclasses.asdict(picks[seed]) for seed in sorted(picks)},
        },
    )


def summarise_picks(picks: Mapping[int, Pick], seeds: Sequence[int]) -> dict[str, Any]:
    """What the report says: how often each was picked, the share of invalid replies, and the cost of asking."""
    chosen = [picks[seed] for seed in seeds]
    counts = Counter(p.option or BASE_OPTION for p in chosen)
    return {
        "picks": dict(sorted(counts.items())),
        "invalid_share": sum(not p.valid for p in chosen) / len(chosen),
        "tasks": len(chosen),
        "mean_prompt_tokens": sum(p.prompt_tokens for p in chosen) / len(chosen),
        "invalid_examples": [p.said[:80] for p in chosen if not p.valid][:5],
    }
