"""Packs: every token once, who sees whom, which token predicts which action."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train.packing import Pack, TokenSequence, build_pack, common_prefix, pack_episodes, tree_size


def episode(tokens: Sequence[int], actions: Sequence[int] = ()) -> TokenSequence:
    return TokenSequence(list(tokens), [i in actions for i in range(len(tokens))])


def paths(pack: Pack) -> list[tuple[int, ...]]:
    """The tokens that each token sees, in order: its prefix."""
    mask = pack.attention_mask()[0, 0]
    return [tuple(pack.input_ids[row].tolist()) for row in mask]


episodes_strategy = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=9).flatmap(
        lambda tokens: st.tuples(
            st.just(tokens),
            st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)).map(lambda m: [False, *m[1:]]),
        )
    ),
    min_size=1,
    max_size=7,
)


@given(episodes_strategy, st.integers(1, 30))
def test_every_prefix_stands_once_and_sees_itself(raw: list[tuple[list[int], list[bool]]], budget: int) -> None:
    sequences = [TokenSequence(tokens, mask) for tokens, mask in raw]
    packs = pack_episodes(sequences, budget)
    assert sorted(e for p in packs for e in p.episodes) == list(range(len(sequences)))
    for pack in packs:
        prefixes = {
            tuple(sequences[e].token_ids[: i + 1]) for e in pack.episodes for i in range(len(sequences[e].token_ids))
        }
        found = paths(pack)
        assert len(found) == len(set(found)) and set(found) == prefixes
        assert pack.position_ids.tolist() == [len(prefix) - 1 for prefix in found]
        assert pack.n_tokens == tree_size([sequences[e].token_ids for e in pack.episodes])
        assert pack.n_tokens <= budget + max(len(s.token_ids) for s in sequences)
        for e, of_action in zip(pack.episodes, pack.pair_of_action, strict=True):
            tokens, mask = sequences[e].token_ids, sequences[e].action_mask
            expected = [(tuple(tokens[:i]), tokens[i]) for i, m in enumerate(mask) if m]
            rows, targets = pack.pair_row[of_action].tolist(), pack.pair_target[of_action].tolist()
            assert [(found[r], t) for r, t in zip(rows, targets, strict=True)] == expected


@given(episodes_strategy)
def test_pairs_stand_once_and_in_the_order_of_their_rows(raw: list[tuple[list[int], list[bool]]]) -> None:
    pack = build_pack([TokenSequence(t, m) for t, m in raw], range(len(raw)))
    pairs = list(zip(pack.pair_row.tolist(), pack.pair_target.tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    used = {int(i) for p in pack.pair_of_action for i in p}
    assert used == set(range(len(pairs)))


def test_a_group_costs_its_prompt_once() -> None:
    prompt = list(range(100, 164))
    group = [episode([*prompt, k, 1, 2], [64, 65, 66]) for k in range(8)]
    pack = build_pack(group, range(8))
    assert pack.n_tokens == 64 + 8 * 3
    assert not pack.is_chain
    first = [int(p[0]) for p in pack.pair_of_action]
    assert len(set(first)) == 8 and {int(pack.pair_row[i]) for i in first} == {63}, "one row predicts eight tokens"


def test_one_episode_is_a_chain() -> None:
    pack = build_pack([episode([5, 6, 7], [2])], [0])
    assert pack.is_chain and pack.subtree_end.tolist() == [3, 3, 3]
    assert torch.equal(pack.attention_mask()[0, 0], torch.ones(3, 3).tril().bool())


def test_a_prefix_of_another_episode_adds_no_token() -> None:
    pack = build_pack([episode([5, 6, 7, 8], [3]), episode([5, 6], [1])], [0, 1])
    assert pack.n_tokens == 4 and pack.is_chain
    assert pack.pair_target[pack.pair_of_action[1]].tolist() == [6]


def test_equal_episodes_share_their_pairs() -> None:
    pack = build_pack([episode([5, 6, 7], [1, 2])] * 3, [0, 1, 2])
    assert len(pack.pair_row) == 2 and all(torch.equal(p, pack.pair_of_action[0]) for p in pack.pair_of_action)


def test_an_action_without_a_predecessor_is_an_error() -> None:
    with pytest.raises(ValueError, match="episode 1: its first token is an action"):
        build_pack([episode([5, 6], [1]), episode([5, 6], [0])], [0, 1])


def test_large_token_ids_survive_the_pair_keys() -> None:
    high = 2**31 - 1
    pack = build_pack([episode([1, high], [1]), episode([1, high - 1], [1])], [0, 1])
    assert sorted(pack.pair_target.tolist()) == [high - 1, high]


def test_episodes_with_a_long_common_prefix_meet_in_one_pack() -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(1000) for _ in range(50)] for _ in range(4)]
    episodes = [episode([*prompts[i % 4], i, i + 1], [50, 51]) for i in range(16)]
    packs = pack_episodes(episodes, 8)
    assert len(packs) == 4
    assert all(len({e % 4 for e in p.episodes}) == 1 for p in packs)
    assert sum(p.n_tokens for p in packs) == 4 * 50 + 16 * 2


def test_a_prompt_over_the_budget_stands_once_for_many_suffixes() -> None:
    rng = random.Random(2)
    prompt = [rng.randrange(1000) for _ in range(400)]
    episodes = [episode([*prompt, *(rng.randrange(1000) for _ in range(20))]) for _ in range(16)]
    assert [p.n_tokens for p in pack_episodes(episodes, 160)] == [580, 540], "not 16 of 420"
    assert [len(p.episodes) for p in pack_episodes([episode(range(20)), episode([30, 2])], 1)] == [1, 1]


def test_packs_are_of_one_size() -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(1000) for _ in range(60)] for _ in range(5)]
    episodes = [episode([*p, *(rng.randrange(1000) for _ in range(40))]) for p in prompts for _ in range(4)]
    assert [p.n_tokens for p in pack_episodes(episodes, 1000)] == [1100]
    sizes = [p.n_tokens for p in pack_episodes(episodes, 999)]
    assert len(sizes) == 2 and max(sizes) <= 640, "not 1,060 and 100"
    for at_least in (2, 3, 7, 19, 20):
        sizes = [p.n_tokens for p in pack_episodes(episodes, 10_000, at_least)]
        assert len(sizes) == at_least and max(sizes) - min(sizes) <= 100
    assert len(pack_episodes(episodes, 10_000, 50)) == 20, "an episode is not cut"
    assert pack_episodes([], 100, 2) == []


@given(episodes_strategy, st.integers(1, 30), st.integers(1, 9))
def test_every_rank_gets_a_pack(raw: list[tuple[list[int], list[bool]]], budget: int, at_least: int) -> None:
    sequences = [TokenSequence(tokens, mask) for tokens, mask in raw]
    packs = pack_episodes(sequences, budget, at_least)
    assert sorted(e for p in packs for e in p.episodes) == list(range(len(sequences)))
    assert len(packs) >= min(at_least, len(sequences))
    assert all(p.n_tokens <= budget + max(len(s.token_ids) for s in sequences) for p in packs)


def test_moving_a_pack_keeps_everything() -> None:
    pack = build_pack([episode([1, 2, 3], [2]), episode([1, 4], [1])], [0, 1])
    moved = pack.to("cpu")
    assert moved.episodes == pack.episodes and torch.equal(moved.subtree_end, pack.subtree_end)
    assert all(torch.equal(a, b) for a, b in zip(moved.pair_of_action, pack.pair_of_action, strict=True))


@given(episodes_strategy, st.integers(1, 9))
def test_padding_sees_itself_and_is_not_seen(raw: list[tuple[list[int], list[bool]]], multiple: int) -> None:
    pack = build_pack([TokenSequence(tokens, mask) for tokens, mask in raw], range(len(raw)))
    padded, n = pack.padded(multiple), pack.n_tokens
    assert padded.n_tokens % multiple == 0 and padded.n_tokens - n < multiple
    mask = padded.attention_mask()[0, 0]
    assert torch.equal(mask[:n, :n], pack.attention_mask()[0, 0])
    assert not mask[:n, n:].any() and not mask[n:, :n].any()
    assert torch.equal(mask[n:, n:], torch.eye(padded.n_tokens - n, dtype=torch.bool))
    assert torch.equal(padded.pair_row, pack.pair_row) and padded.episodes == pack.episodes


@given(st.lists(st.integers(0, 1), max_size=8), st.lists(st.integers(0, 1), max_size=8))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(np.array(a, np.int64), np.array(b, np.int64))
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])
