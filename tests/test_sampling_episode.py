"""One token stream per episode: verbatim tokens, the action mask, cut turns, invalid calls, typed outcomes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_game
from scripted_engine import ScriptedEngine, right_answer

from game_registry import AgentError, Failed, Scored
from train.chat import ChatCodec
from train.engine import Sample, SamplingParams
from train.episode import Episode, EpisodeParams, run_episode, to_simulation

PARAMS = EpisodeParams(max_seq_length=1024)


@pytest.fixture(scope="module")
def codec(smollm2: Path) -> ChatCodec:
    return ChatCodec.from_model(str(smollm2))


def play(engine: Any, codec: ChatCodec, seed: int = 3, params: EpisodeParams = PARAMS, **options: Any) -> Episode:
    return asyncio.run(run_episode(tiny_game.SPEC, tiny_game.TinyGame(), engine, codec, seed, params, **options))


def answers(*texts: str | list[int]) -> Any:
    queue = list(texts)
    return lambda prompt, params: queue.pop(0)


def call(value: Any) -> str:
    return json.dumps({"name": "answer", "arguments": {"value": value}})


def test_right_answer_in_one_turn(codec: ChatCodec) -> None:
    episode = play(ScriptedEngine(codec, right_answer), codec)
    assert episode.reward == 1.0 and episode.result.turns == 1 and episode.result.finish_reason == "done"
    sampled = [t for t, m in zip(episode.token_ids, episode.action_mask, strict=True) if m]
    assert codec.decode(sampled) == call(3) and sampled[-1] == codec.end_of_turn
    assert episode.n_action_tokens == len(sampled) == sum(p != 0.0 for p in episode.logprobs)


def test_prompt_of_each_turn_is_the_stream_so_far(codec: ChatCodec) -> None:
    """Nothing is re-tokenised: turn k's prompt starts with turn k-1's prompt and the tokens sampled there."""
    odd = [*codec._encode("ans"), *codec._encode("wer"), *codec._encode(" it"), codec.end_of_turn]
    assert codec._encode(codec.decode(odd)) != odd[:-1], "the split must not be what a tokenizer would choose"
    engine = ScriptedEngine(codec, answers(odd, call(0), call(3)))
    episode = play(engine, codec)
    assert episode.reward == 0.5 and episode.result.turns == 3
    first, second, third = engine.prompts
    assert second[: len(first) + len(odd)] == [*first, *odd]
    assert third[: len(second)] == second
    assert episode.token_ids[: len(third)] == third and episode.prompt_len == len(first)


def test_action_mask_is_exactly_what_was_sampled(codec: ChatCodec) -> None:
    engine = ScriptedEngine(codec, answers("What?", call(9), call(3)))
    episode = play(engine, codec)
    spans, current = [], []
    for token, sampled in zip(episode.token_ids, episode.action_mask, strict=True):
        if sampled:
            current.append(token)
        elif current:
            spans.append(current)
            current = []
    spans.append(current)
    assert [codec.decode(s) for s in spans] == ["What?", call(9), call(3)]
    assert all(s[-1] == codec.end_of_turn for s in spans), "the end-of-turn token was sampled, so it is trained"
    context = codec.tokenizer.decode([t for t, m in zip(episode.token_ids, episode.action_mask, strict=True) if not m])
    assert "Use the tool." in context and "wrong, try again" in context


def test_stream_equals_the_template_for_canonical_text(codec: ChatCodec) -> None:
    engine = ScriptedEngine(codec, answers("What?", call(9), call(3)))
    episode = play(engine, codec)
    messages = [
        {"role": m["role"], "content": m.get("raw_content") or m["content"]} for m in episode.result.messages[:-1]
    ]
    for message, text in zip(
        [m for m in messages if m["role"] == "assistant"], ("What?", call(9), call(3)), strict=True
    ):
        message["content"] = text
    whole = codec._encode(codec._render(messages, None, generate=False))
    newline = whole[len(episode.token_ids) :]
    assert whole[: len(episode.token_ids)] == episode.token_ids and codec.decode(newline) == "\n"


def test_cut_turn_is_seen_counted_and_closed_as_context(codec: ChatCodec) -> None:
    engine = ScriptedEngine(codec, answers("word " * 200, call(3)))
    episode = play(engine, codec)
    assert episode.result.truncated_turns == 1 and episode.result.invalid_calls == 1
    assert episode.reward == 1.0, "the cut turn took no action, so the answer after it was the first"
    at = episode.prompt_len + tiny_game.SPEC.max_gen_tokens
    assert episode.token_ids[at] == codec.end_of_turn and not episode.action_mask[at]
    assert "cut at the token limit" in codec.tokenizer.decode(episode.token_ids[at:])


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ('{"name": "answer", "arguments": {"value": }}', "not valid JSON"),
        ("<tool_call>\n{}\n</tool_call>", 'no "name"'),
        ("<tool_call>\n" + call(3), "not closed"),
        ("<think>so", "<think> was not closed"),
    ],
)
def test_invalid_call_is_an_observation_and_a_metric(codec: ChatCodec, said: str, shown: str) -> None:
    engine = ScriptedEngine(codec, answers(said, call(3)))
    episode = play(engine, codec)
    assert episode.result.invalid_calls == 1 and isinstance(episode.result.outcome, Scored)
    assert shown in codec.tokenizer.decode(engine.prompts[1][len(engine.prompts[0]) :])


def test_full_context_ends_the_episode_with_its_reward(codec: ChatCodec) -> None:
    engine = ScriptedEngine(codec, answers(*["No. " * 5] * 3))
    first = play(ScriptedEngine(codec, answers(*["No. " * 5] * 3)), codec)
    params = EpisodeParams(max_seq_length=first.prompt_len + 10)
    episode = play(engine, codec, params=params)
    assert episode.result.finish_reason == "context" and episode.reward == 0.0
    assert len(engine.asked) == 1 and engine.asked[0][1].max_new_tokens == 10


def test_every_failure_is_typed_and_has_no_reward(codec: ChatCodec) -> None:
    """A dead server, a broken environment, a missing reward: never a reward of zero."""

    def dead(prompt: str, params: SamplingParams) -> str:
        raise AgentError("server", "gone")

    cases = [
        (play(ScriptedEngine(codec, dead), codec), "server"),
        (play(ScriptedEngine(codec, right_answer), codec, tiny_game.RAISES), "environment"),
        (play(ScriptedEngine(codec, right_answer), codec, tiny_game.NAN_REWARD), "environment"),
        (play(ScriptedEngine(codec, right_answer, 5.0), codec, params=EpisodeParams(deadline_s=0.05)), "timeout"),
    ]
    for episode, kind in cases:
        assert isinstance(episode.result.outcome, Failed) and episode.result.outcome.kind == kind
        with pytest.raises(ValueError, match="has no reward"):
            _ = episode.reward
        entry = to_simulation(episode, "m")
        assert entry["outcome"] == "error" and entry["error_kind"] == kind and entry["reward_info"] is None


def test_turn_seeds_differ_by_episode_sample_and_turn_and_repeat(codec: ChatCodec) -> None:
    def seeds(seed: int, sample_idx: int) -> list[int | None]:
        engine = ScriptedEngine(codec, answers("a", "b", "c"))
        play(engine, codec, seed, EpisodeParams(seed=1), sample_idx=sample_idx)
        return [params.seed for _, params in engine.asked]

    drawn = [s for seed in (3, 4) for sample in (0, 1) for s in seeds(seed, sample)]
    assert len(set(drawn)) == len(drawn) == 12 and all(s is not None and 0 <= s < 2**63 for s in drawn)
    assert seeds(3, 0) == drawn[:3]


def test_hint_is_in_the_prompt_of_hinted_episodes_only(codec: ChatCodec) -> None:
    for hinted in (True, False):
        engine = ScriptedEngine(codec, right_answer)
        episode = play(engine, codec, hinted=hinted)
        assert ("Hint: copy" in codec.tokenizer.decode(engine.prompts[0])) is hinted
        assert to_simulation(episode, "m")["hinted"] is hinted


def test_simulation_carries_tokens_only_when_asked(codec: ChatCodec) -> None:
    episode = play(ScriptedEngine(codec, right_answer), codec, adapter=None)
    entry = to_simulation(episode, "m", tokens=True)
    assert entry["token_ids"] == episode.token_ids and entry["action_mask"] == [int(m) for m in episode.action_mask]
    assert "token_ids" not in to_simulation(episode, "m")
    json.dumps(entry, allow_nan=False)


def test_stop_string_turn_is_closed_as_context(codec: ChatCodec) -> None:
    """A turn ended by a stop string has no end-of-turn token of its own."""

    class StopStringEngine(ScriptedEngine):
        async def sample(self, prompt_ids: list[int], params: SamplingParams, adapter: str | None = None) -> Sample:
            sample = await super().sample(prompt_ids, params, adapter)
            return Sample(sample.token_ids[:-1], sample.logprobs[:-1], "stop")

    engine = StopStringEngine(codec, answers("Stop here", call(3)))
    episode = play(engine, codec)
    assert episode.reward == 0.5
    said = codec._encode("Stop here")
    at = episode.prompt_len + len(said)
    assert episode.token_ids[at] == codec.end_of_turn and not episode.action_mask[at]
