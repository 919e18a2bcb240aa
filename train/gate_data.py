"""Labelled episodes for the gate: which capability each token sequence belongs to.

Two sources, both optional: a JSONL of ``{"prompt", "capability_name"}`` records, and rollouts files whose successful
episodes are labelled with the adapter that produced them. ``base`` is a label too (slot 0).
"""

from __future__ import annotations

import dataclasses
import glob
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moe_gate.config import GateConfig
from pipeline.files import InputError, check, read_json, read_jsonl
from train.chat import ChatCodec

SUCCESS_TOLERANCE = 1e-9
FROM_BASE = "sampled from the base"
Bit = Annotated[int, Field(ge=0, le=1)]


@dataclasses.dataclass(frozen=True)
class LabelledEpisode:
    """One token sequence with its slot. ``action_mask[i]`` is True where the policy emits ``token_ids[i]``.

    ``undecided``: how many of its first tokens are also the first tokens of an episode with another slot. ``target``: a
    distribution over slots to train towards in place of the slot alone (warm start).
    """

    token_ids: tuple[int, ...]
    action_mask: tuple[bool, ...]
    slot: int
    source: str
    undecided: int = 0
    target: tuple[float, ...] | None = None

    @property
    def prompt_length(self) -> int:
        """Tokens before the first emitted one (all of them when nothing is emitted)."""
        return self.action_mask.index(True) if True in self.action_mask else len(self.token_ids)


class PromptRecord(BaseModel):
    """A line of ``sft_data``: ``prompt`` is text (one user turn) or chat messages; token ids, when there, are used
    verbatim."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | list[dict[str, Any]] = Field(min_length=1)
    capability_name: str
    tools: list[dict[str, Any]] | None = None
    token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    action_mask: list[Bit] | None = None

    @model_validator(mode="after")
    def _masks_fit(self) -> PromptRecord:
        _check_mask(self.token_ids, self.action_mask)
        return self


class _RewardInfo(BaseModel):
    model_config = ConfigDict(extra="ignore")
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None


class RolloutRecord(BaseModel):
    """What the gate needs of a simulation; everything else in the entry is left alone."""

    model_config = ConfigDict(extra="ignore")

    adapter: str | None = None
    hinted: bool = False
    outcome: Literal["scored", "error"] = "scored"
    reward_info: _RewardInfo | None = None
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    action_mask: list[Bit] | None = None

    @model_validator(mode="after")
    def _masks_fit(self) -> RolloutRecord:
        _check_mask(self.token_ids, self.action_mask)
        return self


def _check_mask(token_ids: list[int] | None, action_mask: list[int] | None) -> None:
    if (token_ids is None) != (action_mask is None) or len(token_ids or ()) != len(action_mask or ()):
        raise ValueError("token_ids and action_mask must come together and have one length")
    if token_ids is not None and not token_ids:
        raise ValueError("token_ids is empty")


@dataclasses.dataclass(frozen=True)
class GateData:
    """Episodes of training and validation, and what was left out, by reason."""

    train: tuple[LabelledEpisode, ...]
    validation: tuple[LabelledEpisode, ...]
    skipped: dict[str, int]


def load_gate_data(config: GateConfig, codec: ChatCodec) -> GateData:
    """Read both sources, cut to ``max_length`` and ``max_tokens_in_memory``, and split by episode within every label.

    Raises:
        InputError: no source, a bad record (file and line named), an unknown capability, or a capability without
            episodes.
    """
    slots = {name: i + int(config.include_base_slot) for i, name in enumerate(config.adapter_names)}
    if config.include_base_slot:
        slots["base"] = 0
    skipped: Counter[str] = Counter()
    episodes = [
        *_from_jsonl(config, codec, slots),
        *_from_rollouts(config, codec, slots, skipped),
    ]
    if config.sft_data is None and config.grpo_data_glob is None:
        raise InputError("no data: set sft_data (JSONL) or grpo_data_glob (rollouts files) in the configuration")
    counts = Counter(episode.slot for episode in episodes)
    for name in config.adapter_names:
        if counts[slots[name]] < 2:
            raise InputError(
                f"capability {name}: {counts[slots[name]]} usable episodes, expected at least 2"
                f" (left out: {listed(skipped)}); {_remedy(skipped)}"
            )
    kept = mark_undecided(_within_budget(episodes, config, skipped))
    train, validation = _split(kept, config)
    return GateData(tuple(train), tuple(validation), dict(skipped))


def listed(skipped: Mapping[str, int]) -> str:
    """Episodes that were left out, by reason, in words."""
    return ", ".join(f"{number} {reason}" for reason, number in skipped.items()) or "none"


def _remedy(skipped: Counter[str]) -> str:
    """What to do about too few episodes."""
    if skipped[FROM_BASE] and skipped.most_common(1)[0][0] == FROM_BASE:
        return (
            "the first iteration of a training run samples from the base, so train at least two iterations "
            "(--max-iters), or collect rollouts with the adapter"
        )
    return "collect more or lower min_reward"


def _from_jsonl(config: GateConfig, codec: ChatCodec, slots: dict[str, int]) -> Iterator[LabelledEpisode]:
    if config.sft_data is None:
        return
    for number, raw in enumerate(read_jsonl(config.sft_data, "sft_data"), 1):
        where = f"sft_data {config.sft_data} record {number}"
        record = check(PromptRecord, raw, where)
        if record.capability_name not in slots:
            raise InputError(f"{where}: unknown capability {record.capability_name!r}; known: {', '.join(slots)}")
        if record.token_ids is not None and record.action_mask is not None:
            ids, mask = record.token_ids, [bool(bit) for bit in record.action_mask]
        else:
            prompt = record.prompt
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids, mask = prompt_tokens(messages, record.tools, codec, where)
        yield _episode(ids, mask, slots[record.capability_name], where, config)


def _from_rollouts(
    config: GateConfig, codec: ChatCodec, slots: dict[str, int], skipped: Counter[str]
) -> Iterator[LabelledEpisode]:
    if config.grpo_data_glob is None:
        return
    paths = sorted(glob.glob(config.grpo_data_glob, recursive=True))
    if not paths:
        raise InputError(f"grpo_data_glob {config.grpo_data_glob}: matches no file; collect rollouts or set it to null")
    for path in paths:
        for number, raw in enumerate(_simulations(path)):
            where = f"rollouts file {path} simulations[{number}]"
            record = check(RolloutRecord, raw, where)
            slot, reason = _slot_of(record, slots, config.min_reward, where)
            if slot is None:
                skipped[reason] += 1
                continue
            if record.token_ids is not None and record.action_mask is not None:
                ids, mask = record.token_ids, [bool(bit) for bit in record.action_mask]
            else:
                ids, mask = tokens_of(record.messages, record.tools, codec, where)
            yield _episode(ids, mask, slot, where, config)


def _simulations(path: str) -> Iterable[Any]:
    """The entries of a rollouts file, or of a trainer's rollout log (JSONL, one entry a line)."""
    if path.endswith(".jsonl"):
        return read_jsonl(path, "rollout log", torn_tail_ok=True)
    data = read_json(path, "rollouts file")
    if not isinstance(data, dict) or not isinstance(data.get("simulations"), list):
        raise InputError(f'rollouts file {path}: expected an object with "simulations"; check grpo_data_glob')
    return list(data["simulations"])


def _slot_of(record: RolloutRecord, slots: dict[str, int], min_reward: float, where: str) -> tuple[int | None, str]:
    """The slot that an entry teaches, or None and why it teaches nothing."""
    if record.outcome == "error":
        return None, "failed by error"
    if record.reward_info is None or record.reward_info.reward is None:
        raise InputError(f"{where}: a scored entry without reward_info.reward; collect it again")
    if record.hinted:
        return None, "hinted"
    if record.adapter is None:
        return None, FROM_BASE
    if record.reward_info.reward < min_reward - SUCCESS_TOLERANCE:
        return None, "reward below min_reward"
    name = adapter_name(record.adapter)
    return (slots[name], "") if name in slots else (None, f"adapter {name} has no slot")


def adapter_name(adapter: str) -> str:
    """``pipeline/adapters/lookup.safetensors``, ``runs/x/lookup/`` and ``lookup@v12`` -> ``lookup``."""
    name = Path(adapter).name.removesuffix(".safetensors")
    return re.sub(r"@v\d+$", "", name)


def prompt_tokens(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, codec: ChatCodec, where: str
) -> tuple[list[int], list[bool]]:
    """Tokens of a prompt up to where the answer begins, as the engine sees it; example turns in it are context.

    With an answer at its end it is a conversation: see ``tokens_of``.
    """
    if not messages or messages[-1].get("role") == "assistant":
        return tokens_of(messages, tools, codec, where)
    if not all(isinstance(m.get("role"), str) for m in messages):
        raise InputError(f"{where}: expected chat messages with roles; found {str(messages)[:60]}")
    ids = codec.prompt_ids(messages, tools)
    return ids, [False] * len(ids)


def tokens_of(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, codec: ChatCodec, where: str
) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation through the chat template; what the assistant said is marked as emitted."""
    if not messages or not all(isinstance(m.get("role"), str) for m in messages):
        raise InputError(f"{where}: expected chat messages with roles; found {str(messages)[:60]}")
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    ids = codec.prompt_ids(messages[:first], tools)
    mask = [False] * len(ids)
    rest = messages[first:]
    while rest:
        following = next((i for i, m in enumerate(rest[1:], 1) if m["role"] == "assistant"), len(rest))
        turn = rest[0].get("raw_content") or rest[0].get("content")
        if not isinstance(turn, str):
            raise InputError(f"{where}: an assistant turn without text; write token_ids and action_mask into the file")
        said = [*codec.tokenizer(turn, add_special_tokens=False)["input_ids"], codec.end_of_turn]
        between = codec.suffix_ids(rest[1:following]) if following < len(rest) else []
        ids, mask = ids + said + between, mask + [True] * len(said) + [False] * len(between)
        rest = rest[following:]
    return ids, mask


def _episode(ids: Sequence[int], mask: Sequence[bool], slot: int, where: str, config: GateConfig) -> LabelledEpisode:
    if not ids:
        raise InputError(f"{where}: no tokens; remove the record")
    return LabelledEpisode(tuple(ids[: config.max_length]), tuple(mask[: config.max_length]), slot, where)


def mark_undecided(episodes: Sequence[LabelledEpisode]) -> list[LabelledEpisode]:
    """``episodes`` with ``undecided`` set: the longest prefix in common with an episode of another slot."""
    order = sorted(range(len(episodes)), key=lambda i: episodes[i].token_ids)
    longest = [0] * len(episodes)
    for walk in (order, order[::-1]):  # an episode's best partner of a slot is its nearest one in lexicographic order
        shared: dict[int, int] = {}  # slot -> common prefix of the current episode with the last one of that slot
        for previous, current in zip([None, *walk[:-1]], walk, strict=True):
            if previous is not None:
                common = _common(episodes[previous].token_ids, episodes[current].token_ids)
                shared = {slot: min(length, common) for slot, length in shared.items()}
                shared[episodes[previous].slot] = common
            others = [length for slot, length in shared.items() if slot != episodes[current].slot]
            longest[current] = max([longest[current], *others])
    return [dataclasses.replace(e, undecided=n) for e, n in zip(episodes, longest, strict=True)]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _within_budget(
    episodes: Iterable[LabelledEpisode], config: GateConfig, skipped: Counter[str]
) -> list[LabelledEpisode]:
    """A random part of the episodes, taking turns between labels, until the token budget is used up.

    A prefix that all episodes share is kept once (``train/gate_features.py``), so it counts once.
    """
    episodes = list(episodes)
    shared = _common(min(e.token_ids for e in episodes), max(e.token_ids for e in episodes)) if episodes else 0
    by_slot: dict[int, list[LabelledEpisode]] = {}
    for episode in episodes:
        by_slot.setdefault(episode.slot, []).append(episode)
    rng = random.Random(config.seed)
    for group in by_slot.values():
        rng.shuffle(group)
    budget, kept, turn = config.max_tokens_in_memory - shared, [], 0
    for turn in range(max(map(len, by_slot.values()), default=0)):
        for slot in sorted(by_slot):
            if turn < len(by_slot[slot]):
                episode = by_slot[slot][turn]
                own = len(episode.token_ids) - shared
                if own <= budget or turn < 2:  # two of each label are needed in any case
                    budget -= own
                    kept.append(episode)
                else:
                    skipped["beyond max_tokens_in_memory"] += 1
    return kept


def _split(
    episodes: Sequence[LabelledEpisode], config: GateConfig
) -> tuple[list[LabelledEpisode], list[LabelledEpisode]]:
    train: list[LabelledEpisode] = []
    validation: list[LabelledEpisode] = []
    for slot in sorted({episode.slot for episode in episodes}):
        group = [episode for episode in episodes if episode.slot == slot]
        held_out = min(max(1, round(config.val_fraction * len(group))), max(len(group) - 1, 0))
        validation += group[:held_out]
        train += group[held_out:]
    return train, validation
