"""Many episodes as one tree of tokens, so that no token is computed twice.

Episodes of a group share their prompt, episodes of a game share the system prompt and the examples, and rollouts that
begin alike share sampled tokens too. A pack is the radix tree of its episodes, laid out as one sequence: a token attends to
its ancestors only, at its own position, so hidden states, log-probs and gradients equal those of separate sequences.
Exact for models in which tokens meet in full attention only; ``train.forward`` refuses the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True)
class TokenSequence:
    """One episode for the learner. ``action_mask[i]``: token i was sampled by the policy (never true at i = 0)."""

    token_ids: Sequence[int]
    action_mask: Sequence[bool]


@dataclasses.dataclass
class Pack:
    """A tree of T tokens with the action tokens of its episodes.

    input_ids, position_ids, node_ids: [T]. ancestors: [nodes, nodes] bool, row = node, column = node that it may see (itself too).
    pair_row: [K] index of the token whose hidden state predicts; pair_target: [K] predicted token id. A pair that several
    episodes share stands once. pair_of_action[e]: for each action token of episode e, in order, its pair.
    episodes: indices of the episodes, as given to ``pack``.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    node_ids: torch.Tensor
    ancestors: torch.Tensor
    pair_row: torch.Tensor
    pair_target: torch.Tensor
    pair_of_action: list[torch.Tensor]
    episodes: list[int]

    @property
    def n_tokens(self) -> int:
        return len(self.input_ids)

    def attention_mask(self) -> torch.Tensor:
        """[1, 1, T, T] bool: query i sees key j when j's node is an ancestor of i's and stands at an earlier or the same position."""
        sees = self.ancestors[self.node_ids][:, self.node_ids]
        order = self.position_ids[:, None] >= self.position_ids[None, :]
        return (sees & order)[None, None]

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
        self.tokens: list[list[int]] = [[]]
        self.parent: list[int] = [-1]
        self.children: list[dict[int, int]] = [{}]

    def _new(self, tokens: list[int], parent: int) -> int:
        self.tokens.append(tokens)
        self.parent.append(parent)
        self.children.append({})
        return len(self.tokens) - 1

    def insert(self, sequence: Sequence[int]) -> None:
        node, at = 0, 0
        while at < len(sequence):
            child = self.children[node].get(sequence[at])
            if child is None:
                self.children[node][sequence[at]] = self._new(list(sequence[at:]), node)
                return
            run = self.tokens[child]
            n = 0
            while n < len(run) and at + n < len(sequence) and run[n] == sequence[at + n]:
                n += 1
            if n < len(run):
                self._cut(child, n)
            node, at = child, at + n

    def _cut(self, node: int, n: int) -> None:
        """Shorten ``node`` to n tokens; the rest becomes its only child and inherits the children."""
        rest = self._new(self.tokens[node][n:], node)
        self.children[rest] = self.children[node]
        for child in self.children[rest].values():
            self.parent[child] = rest
        self.tokens[node] = self.tokens[node][:n]
        self.children[node] = {self.tokens[rest][0]: rest}


def tree_size(sequences: Sequence[Sequence[int]]) -> int:
    """Distinct prefixes among ``sequences`` = tokens of their pack."""
    size, previous = 0, ()  # type: tuple[int, Sequence[int]]
    for sequence in sorted(map(tuple, sequences)):
        shared = 0
        for a, b in zip(previous, sequence, strict=False):
            if a != b:
                break
            shared += 1
        size += len(sequence) - shared
        previous = sequence
    return size


def build_pack(sequences: Sequence[TokenSequence], episodes: Sequence[int]) -> Pack:
    """The pack of ``sequences[e]`` for e in ``episodes``."""
    tree = _Tree()
    for e in episodes:
        tree.insert(sequences[e].token_ids)
    start, depth, order = _layout(tree)
    n_nodes = len(tree.tokens)
    input_ids = [t for node in order for t in tree.tokens[node]]
    node_ids = [node for node in order for _ in tree.tokens[node]]
    position_ids = [depth[node] + i for node in order for i in range(len(tree.tokens[node]))]
    ancestors = torch.zeros(n_nodes, n_nodes, dtype=torch.bool)
    for node in order:  # parents come before children
        if tree.parent[node] >= 0:
            ancestors[node] = ancestors[tree.parent[node]]
        ancestors[node, node] = True
    pairs: dict[tuple[int, int], int] = {}
    of_action = []
    for e in episodes:
        places = _places(tree, start, sequences[e].token_ids)
        mine = []
        for i, sampled in enumerate(sequences[e].action_mask):
            if sampled:
                if i == 0:
                    raise ValueError(f"episode {e}: its first token is an action; there is nothing to predict it from")
                mine.append(pairs.setdefault((places[i - 1], int(sequences[e].token_ids[i])), len(pairs)))
        of_action.append(torch.tensor(mine, dtype=torch.long))
    rows = torch.tensor([p[0] for p in pairs], dtype=torch.long)
    targets = torch.tensor([p[1] for p in pairs], dtype=torch.long)
    as_tensor = [torch.tensor(x, dtype=torch.long) for x in (input_ids, position_ids, node_ids)]
    return Pack(*as_tensor, ancestors, rows, targets, of_action, list(episodes))


def _layout(tree: _Tree) -> tuple[list[int], list[int], list[int]]:
    """Depth-first order of nodes, the offset of each node in the sequence and its depth in tokens."""
    start, depth = [0] * len(tree.tokens), [0] * len(tree.tokens)
    order, stack, offset = [], [0], 0
    while stack:
        node = stack.pop()
        order.append(node)
        start[node] = offset
        offset += len(tree.tokens[node])
        for child in reversed(tree.children[node].values()):
            depth[child] = depth[node] + len(tree.tokens[node])
            stack.append(child)
    return start, depth, order


def _places(tree: _Tree, start: list[int], sequence: Sequence[int]) -> list[int]:
    """Index in the packed sequence of every token of ``sequence``."""
    places: list[int] = []
    node = 0
    while len(places) < len(sequence):
        node = tree.children[node][sequence[len(places)]]
        n = min(len(tree.tokens[node]), len(sequence) - len(places))
        places.extend(range(start[node], start[node] + n))
    return places


def pack_episodes(sequences: Sequence[TokenSequence], max_tokens: int) -> list[Pack]:
    """Trees of at most ``max_tokens`` tokens (an episode that is longer by itself gets a pack of its own).

    Episodes are taken in the order of their tokens, so that those with a long common prefix meet in one pack.
    """
    order = sorted(range(len(sequences)), key=lambda e: tuple(sequences[e].token_ids))
    packs: list[Pack] = []
    current: list[int] = []
    size = 0
    previous: Sequence[int] = ()
    for e in order:
        tokens = sequences[e].token_ids
        added = len(tokens) - _common(previous, tokens) if current else len(tokens)
        if current and size + added > max_tokens:
            packs.append(build_pack(sequences, current))
            current, size, added = [], 0, len(tokens)
        current.append(e)
        size += added
        previous = tokens
    if current:
        packs.append(build_pack(sequences, current))
    return packs


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
