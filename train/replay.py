"""Play dumped rollouts again: the recorded turns go through the environment as it is now, and rewards are compared.

    python -m train.replay runs/x/rollouts/a_000003.jsonl [--env capability_a] [--json-output R] [--html page.html]

Reads rollouts files (JSON) and a trainer's dumps (JSONL). Exit 1 when a reward differs: the environment has changed, or
it is not a function of its seed and the actions.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from game_registry import Failed, GameSpec, Reply, Turn, play
from pipeline.files import InputError, check, parse_json, read_jsonl, read_text, run_cli, write_json, write_text
from pipeline.remote_game import resolve_game
from pipeline.rollout_schema import RewardInfo
from train.rollout import EnvironmentPool

TOLERANCE = 1e-9
CUT = "Error: the message was cut at the token limit"  # what the episode loop answers to a cut turn


class _Function(BaseModel):
    name: str
    arguments: str


class _Call(BaseModel):
    function: _Function


class _Message(BaseModel):
    """What a replay reads of a message; the rest stays as it is."""

    role: str
    raw_content: str | None = None
    tool_calls: list[_Call] | None = None


class ReplayEntry(BaseModel):
    """The part of a rollout entry that a replay needs. ``task_id`` is the environment's seed."""

    model_config = ConfigDict(extra="ignore")
    task_id: str = Field(pattern=r"^[0-9]{1,18}$")
    sample_idx: int = 0
    game: str | None = None
    outcome: Literal["scored", "error"]
    reward_info: RewardInfo | None = None
    finish_reason: str = ""
    hinted: bool = False
    turns: int = 0
    adapter: str | None = None
    messages: list[dict[str, Any]]

    @field_validator("task_id", mode="before")
    @classmethod
    def _id_as_text(cls, value: Any) -> Any:
        return f"{value:d}" if type(value) is int and abs(value) < 10**18 else value

    @field_validator("messages")
    @classmethod
    def _readable(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for message in messages:
            _Message.model_validate(message)
        return messages

    @property
    def reward(self) -> float | None:
        return self.reward_info.reward if self.reward_info is not None else None


@dataclasses.dataclass(frozen=True)
class Replayed:
    """One entry with its recorded and its recomputed reward (None: no reward now, see ``detail``)."""

    entry: ReplayEntry
    recorded: float
    recomputed: float | None
    detail: str = ""

    @property
    def equal(self) -> bool:
        return self.recomputed is not None and abs(self.recorded - self.recomputed) <= TOLERANCE


def read_entries(path: Path) -> Iterator[ReplayEntry]:
    """Entries of a rollouts file or of a dump, one at a time.

    Raises:
        InputError: neither of them, or an entry without what a replay needs.
    """
    if path.suffix == ".jsonl":
        rows: Sequence[Any] | Iterator[Any] = read_jsonl(path, "rollouts", torn_tail_ok=True)
    else:
        data = parse_json(read_text(path, "rollouts file"), f"rollouts file {path}")
        if not isinstance(data, dict) or not isinstance(data.get("simulations"), list):
            raise InputError(
                f'rollouts file {path}: expected an object with "simulations"; give a collected file or a dump'
            )
        rows = data["simulations"]
    number = -1
    for number, row in enumerate(rows):
        if isinstance(row, dict) and set(row) == {"header"}:  # first line of an unfinished collection
            continue
        entry = check(ReplayEntry, row, f"rollouts {path}: entry {number}")
        if entry.outcome == "scored" and entry.reward is None:
            raise InputError(f"rollouts {path}: entry {number}: scored, but it has no reward")
        yield entry
    if number < 0:
        raise InputError(f"rollouts {path}: no entries; expected a collected file or a dump; collect rollouts first")


def recorded_replies(entry: ReplayEntry, n_given: int) -> list[Reply]:
    """What the policy said, turn by turn. ``n_given``: messages that the environment had before the first turn."""
    said = entry.messages[n_given:]
    if not said:  # the recording ends before the first turn
        return []
    after = [*said[1:], {}]
    return [_reply(m, str(n.get("content"))) for m, n in zip(said, after, strict=True) if m.get("role") == "assistant"]


def _reply(message: Mapping[str, Any], answer: str) -> Reply:
    """The reply behind one assistant message: its text as sampled, else the calls that a server gave."""
    content, calls = str(message.get("content") or ""), message.get("tool_calls") or []
    if message.get("raw_content"):
        return Reply(text=str(message["raw_content"]))
    if not calls:
        return Reply(text=content, finish_reason="length" if answer.startswith(CUT) else "stop")
    names = [c["function"]["name"] for c in calls]
    arguments = [parse_json(c["function"]["arguments"], "tool call") for c in calls]
    return Reply(content, actions=tuple({"name": n, "arguments": a} for n, a in zip(names, arguments, strict=True)))


async def replay_entry(spec: GameSpec, pool: EnvironmentPool, entry: ReplayEntry) -> Replayed:
    """Recompute the reward of one scored entry."""
    recorded = entry.reward
    assert recorded is not None
    said: list[Reply] | None = None

    async def agent(turn: Turn) -> Reply:
        nonlocal said
        if said is None:
            if turn.messages != entry.messages[: len(turn.messages)]:
                raise _Differs("the environment opens with other messages than the recorded ones")
            said = recorded_replies(entry, len(turn.messages))
        if turn.index >= len(said):
            return Reply(finish_reason="context")  # the recorded episode ended here
        return said[turn.index]

    game = pool.take()
    try:
        result = await play(spec, game, agent, int(entry.task_id), hinted=entry.hinted)
    except _Differs as error:
        return Replayed(entry, recorded, None, str(error))
    if isinstance(result.outcome, Failed):
        return Replayed(entry, recorded, None, f"{result.outcome.kind}: {result.outcome.detail}")
    pool.give_back(game)
    pairs = enumerate(zip(result.messages, entry.messages, strict=False))
    at = next((i for i, (now, then) in pairs if now.get("content") != then.get("content")), None)
    if at is None and len(result.messages) != len(entry.messages):
        at = min(len(result.messages), len(entry.messages))
    detail = "" if at is None else f"(the conversation differs from message {at} on)"
    return Replayed(entry, recorded, result.outcome.reward, detail)


class _Differs(RuntimeError):
    pass


async def replay_all(entries: Sequence[ReplayEntry], specs: Mapping[str, GameSpec]) -> list[Replayed]:
    pools = {name: EnvironmentPool(spec) for name, spec in specs.items()}
    return [await replay_entry(specs[e.game or ""], pools[e.game or ""], e) for e in entries if e.outcome == "scored"]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="rollouts files (.json) or dumps (.jsonl)")
    parser.add_argument("--env", help="environment, when the entries do not name theirs")
    parser.add_argument("--root", type=Path, help="folder with capability_*_game.py files [the project's]")
    parser.add_argument("--json-output", type=Path, help="every entry with both rewards")
    parser.add_argument("--html", type=Path, help="the episodes as a page")
    parser.add_argument("--limit", type=int, default=200, help="episodes on the page [%(default)s]")
    args = parser.parse_args()
    entries = [e.model_copy(update={"game": args.env or e.game}) for path in args.files for e in read_entries(path)]
    if not entries:
        raise InputError(f"rollouts {args.files[0]}: no entries; collect rollouts first")
    if any(e.game is None for e in entries):
        raise InputError("the entries do not name their environment; give --env")
    specs = {name: resolve_game(name, args.root) for name in dict.fromkeys(e.game for e in entries) if name is not None}
    if needs := [s.name for s in specs.values() if s.needs_user_llm]:
        raise InputError(f"{needs[0]} has a user simulator that answers anew each time, so it cannot be replayed")
    replayed = asyncio.run(replay_all(entries, specs))
    if args.json_output:
        write_json(args.json_output, _report(replayed, len(entries)))
    if args.html:
        from train.replay_page import render_page

        write_text(args.html, render_page(replayed[: args.limit]))
    different = [r for r in replayed if not r.equal]
    for r in different[:20]:
        now = "none" if r.recomputed is None else f"{r.recomputed:.6f}"
        where = f"{r.entry.game} seed {r.entry.task_id} sample {r.entry.sample_idx}"
        sys.stdout.write(f"{where}: recorded {r.recorded:.6f}, now {now} {r.detail}\n")
    errors = len(entries) - len(replayed)
    otherwise = sum(r.equal and bool(r.detail) for r in replayed)
    print(
        f"{len(replayed)} episodes replayed, {len(different)} rewards differ, {otherwise} more conversations differ, "
        f"{errors} without a reward skipped"
    )
    return 1 if different else 0


def _report(replayed: Sequence[Replayed], n_entries: int) -> dict[str, Any]:
    rows = [
        {
            "env": r.entry.game,
            "task_id": r.entry.task_id,
            "sample_idx": r.entry.sample_idx,
            "hinted": r.entry.hinted,
            "recorded": r.recorded,
            "recomputed": r.recomputed,
            "equal": r.equal,
            "detail": r.detail,
        }
        for r in replayed
    ]
    different = sum(not r.equal for r in replayed)
    return {"schema_version": 1, "entries": n_entries, "replayed": len(rows), "different": different, "episodes": rows}


if __name__ == "__main__":
    run_cli(main)
