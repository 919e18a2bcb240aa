"""One episode as one token stream: the loop of ``game_registry.play`` with a token engine as its agent.

Collect, calibrate, train and evaluate all sample through ``run_episode``; nothing is ever re-tokenised.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from game_registry import EpisodeResult, Game, GameSpec, Reply, Scored, Turn, play
from train.chat import ChatCodec
from train.engine import Engine, Sample, SamplingParams


@dataclasses.dataclass(frozen=True)
class EpisodeParams:
    """How episodes are sampled.

    Args:
        max_new_tokens: per turn; None = the environment's ``max_gen_tokens``.
        max_seq_length: tokens of the whole episode; a turn that has no room ends it (``finish_reason="context"``).
        temperature: 0 = greedy.
        deadline_s: wall-clock seconds per episode; past it the outcome is a failure, never a reward.
        seed: with it every turn gets its own sampling seed, derived from (seed, game, episode seed, sample_idx, turn).
    """

    max_new_tokens: int | None = None
    max_seq_length: int = 16384
    temperature: float = 1.0
    deadline_s: float | None = 600.0
    seed: int | None = None


@dataclasses.dataclass
class Episode:
    """Tokens and outcome of one episode.

    ``action_mask[i]`` is True where the policy sampled ``token_ids[i]``; ``logprobs[i]`` is its log-prob there and 0.0
    elsewhere. ``token_ids[:prompt_len]`` is the context before the first turn, equal for every episode of a group.
    """

    game: str
    seed: int
    sample_idx: int
    adapter: str | None
    hinted: bool
    temperature: float
    token_ids: list[int]
    action_mask: list[bool]
    logprobs: list[float]
    prompt_len: int
    result: EpisodeResult

    @property
    def scored(self) -> bool:
        return isinstance(self.result.outcome, Scored)

    @property
    def reward(self) -> float:
        """The reward of a scored episode.

        Raises:
            ValueError: the episode failed; it has no reward.
        """
        if not isinstance(self.result.outcome, Scored):
            raise ValueError(f"episode {self.game}:{self.seed} has no reward ({self.result.outcome})")
        return self.result.outcome.reward

    @property
    def n_action_tokens(self) -> int:
        return sum(self.action_mask)


class TokenAgent:
    """An agent for ``game_registry.play`` that keeps the episode's token stream."""

    def __init__(
        self, engine: Engine, codec: ChatCodec, spec: GameSpec, params: EpisodeParams, adapter: str | None, key: str
    ) -> None:
        self.engine, self.codec, self.spec, self.params = engine, codec, spec, params
        self.adapter, self.key = adapter, key
        self.token_ids: list[int] = []
        self.action_mask: list[bool] = []
        self.logprobs: list[float] = []
        self.prompt_len = 0
        self._closed = True

    async def __call__(self, turn: Turn) -> Reply:
        if turn.index == 0:
            tools = turn.tools if self.spec.tools_in == "chat_template" else None
            self._add_context(self.codec.prompt_ids(turn.messages, tools))
            self.prompt_len = len(self.token_ids)
        else:
            self._add_context(self.codec.suffix_ids(turn.new_messages, turn_closed=self._closed))
        room = self.params.max_seq_length - len(self.token_ids)
        if room < 1:
            return Reply(finish_reason="context")
        limit = min(self.params.max_new_tokens or self.spec.max_gen_tokens, room)
        seed = None if self.params.seed is None else _derive_seed(self.params.seed, self.key, turn.index)
        sampling = SamplingParams(limit, self.params.temperature, self.spec.stop_sequences, seed)
        sample = await self.engine.sample(list(self.token_ids), sampling, self.adapter)
        self._add_sample(sample)
        return Reply(text=self.codec.decode(sample.token_ids), finish_reason=sample.finish_reason)

    def _add_context(self, ids: list[int]) -> None:
        self.token_ids += ids
        self.action_mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def _add_sample(self, sample: Sample) -> None:
        self.token_ids += sample.token_ids
        self.action_mask += [True] * len(sample.token_ids)
        self.logprobs += sample.logprobs
        self._closed = bool(sample.token_ids) and sample.token_ids[-1] == self.codec.end_of_turn


def _derive_seed(*parts: object) -> int:
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # 63 bits: servers take signed 64-bit seeds


async def run_episode(
    spec: GameSpec,
    env: Game,
    engine: Engine,
    codec: ChatCodec,
    seed: int,
    params: EpisodeParams,
    *,
    adapter: str | None = None,
    sample_idx: int = 0,
    hinted: bool = False,
) -> Episode:
    """Play one episode of ``spec`` on ``env`` (reset here) and return its token stream and outcome."""
    agent = TokenAgent(engine, codec, spec, params, adapter, f"{spec.name}/{seed}/{sample_idx}")
    result = await play(spec, env, agent, seed, hinted=hinted, deadline_s=params.deadline_s)
    return Episode(
        game=spec.name,
        seed=seed,
        sample_idx=sample_idx,
        adapter=adapter,
        hinted=hinted,
        temperature=params.temperature,
        token_ids=agent.token_ids,
        action_mask=agent.action_mask,
        logprobs=agent.logprobs,
        prompt_len=agent.prompt_len,
        result=result,
    )


def to_simulation(episode: Episode, model: str, *, tokens: bool = False) -> dict[str, Any]:
    """The entry of ``episode`` in a rollouts file (schema: README, "Rollouts").

    Args:
        tokens: also write ``token_ids``, ``action_mask`` and ``logprobs``, so that a trainer can use the episode
            verbatim.
    """
    result = episode.result
    entry: dict[str, Any] = {
        "task_id": str(episode.seed),
        "sample_idx": episode.sample_idx,
        "game": episode.game,
        "outcome": "scored" if episode.scored else "error",
        "reward_info": {"reward": episode.reward} if episode.scored else None,
        "finish_reason": result.finish_reason,
        "turns": result.turns,
        "invalid_calls": result.invalid_calls,
        "truncated_turns": result.truncated_turns,
        "summary": result.summary,
        "hinted": episode.hinted,
        "temperature": episode.temperature,
        "adapter": episode.adapter,
        "model": model,
        "n_prompt_tokens": episode.prompt_len,
        "n_action_tokens": episode.n_action_tokens,
        "n_tokens": len(episode.token_ids),
        "tools": result.tools,
        "messages": result.messages,
    }
    if not isinstance(result.outcome, Scored):
        entry["error_kind"] = result.outcome.kind
        entry["error"] = result.outcome.detail
    if tokens:
        entry["token_ids"] = episode.token_ids
        entry["action_mask"] = [int(m) for m in episode.action_mask]
        entry["logprobs"] = [round(x, 6) for x in episode.logprobs]
    return entry
