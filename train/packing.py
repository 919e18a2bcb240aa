"""Many episodes as one tree of tokens, so that no token is computed twice.

Episodes of a group share their prompt, episodes of a game share the system prompt and the examples, and rollouts that
begin alike share sampled tokens too. A pack is the radix tree of its episodes, laid out depth first as one sequence:
a token attends to its ancestors only, at its own position, so hidden states, log-probs and gradients equal those of
separate sequences. Depth first means that the tokens below a node stand together: token k is an ancestor of token q
(or q itself) exactly when
``k <= q < subtree_end[k]``, so the whole mask is one integer per token.
Exact for models in which tokens meet in full attention only; ``train.forward`` refuses the others.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class TokenSequence:
    """One episode for the learner. ``action_mask[i]``: token i was sampled by the policy (never true at i = 0)."""

    token_ids: Sequence[int]
    action_mask: Sequence[bool]


@dataclasses.dataclass
class Pack:
    """A tree of T tokens with the action tokens of its episodes.

    input_ids, position_ids, subtree_end: [T]. subtree_end[k]: end of the tokens below (and in) the node of token k.
    pair_row: [K], ascending: index of the token whose hidden state predicts; pair_target: [K] predicted token id. A
    pair that several episodes share stands once. pair_of_action[e]: for each action token of episode e, in order, its
    pair.
    episodes: indices of the episodes, as given to ``build_pack``.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    subtree_end: torch.Tensor
    pair_row: torch.Tensor
    pair_target: torch.Tensor
    pair_of_action: list[torch.Tensor]
    episodes: list[int]

    @property
    def n_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def is_chain(self) -> bool:
        """Every token is an ancestor of all later ones: ordinary causal attention."""
        return bool((self.subtree_end == self.n_tokens).all())

    def attention_mask(self) -> torch.Tensor:
        """[1, 1, T, T] bool: query q sees key k when k <= q < subtree_end[k]."""
        index = torch.arange(self.n_tokens, device=self.subtree_end.device)
        return ((index[:, None] >= index) & (index[:, None] < self.subtree_end))[None, None]

    def padded(self, multiple: int) -> Pack:
        """With tokens at the end that see themselves only and that nobody sees, up to a multiple of ``multiple``."""
        n, more = self.n_tokens, -self.n_tokens % multiple
        fill = self.input_ids.new_zeros(more)
        alone = torch.arange(n + 1, n + more + 1, device=self.subtree_end.device)
        return dataclasses.replace(
            self,
            input_ids=torch.cat([self.input_ids, fill]),
            position_ids=torch.cat([self.position_ids, fill]),
            subtree_end=torch.cat([self.subtree_end, alone]),
        )

    def to(self, device: torch.device | str) -> Pack:
        moved = {
            f.name: getattr(self, f.name).to(device)
            for f in dataclasses.fields(self)
            if isinstance(getattr(self, f.name), torch.Tensor)
        }
        return dataclasses.replace(self, **moved, pair_of_action=[p.to(device) for p in self.pair_of_action])


class _Tree:
    """Radix tree under construction: nodes hold a run of tokens, children start with different tokens."""

    def __init__(self) -> None:
        self.tokens: list[Ints] = [np.empty(0, np.int64)]
        self.children: list[dict[int, int]] = [{}]

    def _new(self, tokens: Ints) -> int:
        self.tokens.append(tokens)
        self.children.append({})
        return len(self.tokens) - 1

    def insert(self, sequence: Ints) -> None:
        node, at = 0, 0
        while at < len(sequence):
            child = self.children[node].get(int(sequence[at]))
            if child is None:
                self.children[node][int(sequence[at])] = self._new(sequence[at:])
                return
            n = common_prefix(self.tokens[child], sequence[at:])
            if n < len(self.tokens[child]):
                self._cut(child, n)
            node, at = child, at + n

    def _cut(self, node: int, n: int) -> None:
        """Shorten ``node`` to n tokens; the rest becomes its only child and inherits the children."""
        rest = self._new(self.tokens[node][n:])
        self.children[rest] = self.children[node]
        self.tokens[node] = self.tokens[node][:n]
        self.children[node] = {int(self.tokens[rest][0]): rest}


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Depth-first order of nodes; per node: offset in the sequence, depth in tokens, end of its subtree."""

    order: list[int]
    start: list[int]
    depth: list[int]
    end: list[int]


def _layout(tree: _Tree) -> _Layout:
    n_nodes = len(tree.tokens)
    start, depth, end = [0] * n_nodes, [0] * n_nodes, [0] * n_nodes
    order, stack, offset = [], [0], 0
    while stack:
        node = stack.pop()
        order.append(node)
        start[node] = offset
        offset += len(tree.tokens[node])
        for child in reversed(tree.children[node].values()):
            depth[child] = depth[node] + len(tree.tokens[node])
            stack.append(child)
    for node in reversed(order):  # children come after their parent, the last one ends where the subtree ends
        below = [end[child] for child in tree.children[node].values()]
        end[node] = max(below, default=start[node] + len(tree.tokens[node]))
    return _Layout(order, start, depth, end)


def _places(tree: _Tree, start: list[int], sequence: Ints) -> Ints:
    """Index in the packed sequence of every token of ``sequence``."""
    parts, node, at = [np.empty(0, np.int64)], 0, 0
    while at < len(sequence):
        node = tree.children[node][int(sequence[at])]
        n = min(len(tree.tokens[node]), len(sequence) - at)
        parts.append(np.arange(start[node], start[node] + n))
        at += n
    return np.concatenate(parts)


def build_pack(sequences: Sequence[TokenSequence], episodes: Sequence[int]) -> Pack:
    """The pack of ``sequences[e]`` for e in ``episodes``.

    Raises:
        ValueError: the first token of an episode is an action.
    """
    tokens = {e: np.asarray(sequences[e].token_ids, np.int64) for e in episodes}
    tree = _Tree()
    for e in episodes:
        tree.insert(tokens[e])
    layout = _layout(tree)
    nodes = [n for n in layout.order if len(tree.tokens[n])]
    lengths = [len(tree.tokens[n]) for n in nodes]
    positions = [np.arange(layout.depth[n], layout.depth[n] + len(tree.tokens[n])) for n in nodes]
    ends = np.repeat(np.array([layout.end[n] for n in nodes], np.int64), lengths)
    rows, targets = [], []
    for e in episodes:
        actions = np.flatnonzero(np.asarray(sequences[e].action_mask, bool))
        if len(actions) and actions[0] == 0:
            raise ValueError(f"episode {e}: its first token is an action; there is nothing to predict it from")
        rows.append(_places(tree, layout.start, tokens[e])[actions - 1])
        targets.append(tokens[e][actions])
    keys = (np.concatenate(rows) << 32) | np.concatenate(targets)  # one integer per pair, ascending in the row
    pairs, inverse = np.unique(keys, return_inverse=True)
    cuts = np.cumsum([len(r) for r in rows])[:-1]
    return Pack(
        torch.from_numpy(np.concatenate([tree.tokens[n] for n in nodes])),
        torch.from_numpy(np.concatenate(positions)),
        torch.from_numpy(ends),
        torch.from_numpy(pairs >> 32),
        torch.from_numpy(pairs & 0xFFFFFFFF),
        [torch.from_numpy(p.copy()) for p in np.split(inverse.reshape(-1), cuts)],
        list(episodes),
    )


def pack_episodes(sequences: Sequence[TokenSequence], max_tokens: int, at_least: int = 1) -> list[Pack]:
    """Trees of about equal size, none with more than ``max_tokens`` tokens beside the longest episode.

    Episodes are taken in the order of their tokens, so that those with a long common prefix meet in one pack.

    Args:
        max_tokens: not in all, since a prompt that fills it would stand in as many packs as it has episodes.
        at_least: packs, where there are so many episodes: every rank wants one.
    """
    tokens = [np.asarray(s.token_ids, np.int64) for s in sequences]
    order = sorted(range(len(sequences)), key=lambda e: tuple(sequences[e].token_ids))
    # what each episode adds to a pack that has the one before it
    added = [
        len(tokens[e]) - (common_prefix(tokens[order[i - 1]], tokens[e]) if i else 0) for i, e in enumerate(order)
    ]
    full = [len(tokens[e]) for e in order]
    max_tokens += max(full, default=0)
    fewest = _cuts(added, full, max_tokens, 1)
    n_packs = max(len(fewest), min(at_least, len(order)))
    cuts = _cuts(added, full, max_tokens, n_packs)
    if len(cuts) > n_packs == len(fewest):  # parts of one size have more prompts twice
        cuts = fewest
    return [build_pack(sequences, order[start:end]) for start, end in itertools.pairwise([*cuts, len(order)])]


def _cuts(added: Sequence[int], full: Sequence[int], max_tokens: int, n_packs: int) -> list[int]:
    """Where each pack begins: about ``n_packs`` of one size that have few tokens twice, none above ``max_tokens``."""
    cuts: list[int] = []
    begin, n = 0, len(added)
    while begin < n:
        cuts.append(begin)
        left = n_packs - len(cuts)  # packs after this one
        aim = sum(added[begin:]) / (left + 1) if left > 0 else math.inf
        size, end, least = full[begin], begin + 1, math.inf
        for at in range(begin + 1, max(begin + 1, n - max(0, left)) + 1):  # where this pack might end
            twice = full[at] - added[at] if at < n else 0
            cost = abs(size - aim) + twice if left > 0 else -at
            if cost < least:
                end, least = at, cost
            if at == n or size + added[at] > max_tokens:
                break
            size += added[at]
        begin = end
    return cuts


def common_prefix(a: Ints, b: Ints) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n


def tree_size(sequences: Sequence[Sequence[int]]) -> int:
    """Distinct prefixes among ``sequences`` = tokens of their pack."""
    size, previous = 0, np.empty(0, np.int64)
    for sequence in sorted(map(tuple, sequences)):
        tokens = np.asarray(sequence, np.int64)
        size += len(tokens) - common_prefix(previous, tokens)
        previous = tokens
    return size
