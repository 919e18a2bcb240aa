"""The hidden states that the gates see, computed once by the frozen backbone and kept in the model's dtype.

What the gate of layer l sees depends on the routes below it. Two choices of those routes are used here:

* teacher-forced: every token is on its labelled slot in every layer. This is the fixed point of a correct gate: if all
  gates decide as labelled, the hidden states are exactly these.
* on-policy: the routes are the gates' own, mistakes included (the label stays), which teaches the gates to come back to
  the labelled slot from states that only a mistake produces.

Tokens that episodes of different labels have in common (system prompt, tools, examples) cannot tell which capability
follows: a causal gate sees the same past in both. They are labelled base, so that teacher forcing, training and
inference have the same keys and values there. With the episode's label instead, equal states would carry contradicting
labels, the gate would send the whole prefix to one adapter, and every later token would see states that training never
saw.

The longest common prefix is computed once, and its features count as often as there are episodes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_gate import RoutingRecorder, force_route, routing_state
from moe_gate.builder import named_gater_parameters
from train.gate_data import LabelledEpisode

MIN_SHARED_PREFIX = 16  # below this the bookkeeping costs more than the tokens


@dataclasses.dataclass
class FeatureSet:
    """Features of N tokens in L gated layers.

    ``hidden`` [L, N, H] in the model's dtype; ``label`` [N] slot; ``weight`` [N] how many episodes share the token (0 =
    not trained on); ``episode`` [N] index of its episode, -1 for a token of a shared prefix; ``route`` [L, N] the slot
    that was active; ``target`` [N, S] a distribution over slots to train towards, None = the labels.
    """

    hidden: Tensor
    label: Tensor
    weight: Tensor
    episode: Tensor
    route: Tensor
    target: Tensor | None = None


def gated_layers(model: Any) -> list[int]:
    """Decoder layers with a gate of their own, in order."""
    names = [name for name, _ in named_gater_parameters(model) if name.endswith("weight")]
    return [int(name.split(".layers.")[1].split(".")[0]) for name in names]


@torch.no_grad()
def collect_features(
    model: Any,
    episodes: Sequence[LabelledEpisode],
    *,
    forced: bool,
    label_tokens: str = "all",
    batch_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureSet:
    """Run the backbone over ``episodes``; with ``forced`` on their labelled slots, else on the gates' own routes.

    With trajectory granularity there is one feature per episode: the mean over its prompt, which is what the gate sees.
    """
    layers = gated_layers(model)
    state = routing_state(model)
    pooled = state.granularity == "trajectory"
    base = 0 if state.has_base_slot else None
    labels = [token_labels(episode, base, whole=pooled) for episode in episodes]
    total = sum(len(episode.token_ids) for episode in episodes)
    pieces: list[_Piece] = []
    done = 0
    for piece, tokens in _pieces(model, episodes, labels if forced else None, layers, batch_size, share=not pooled):
        pieces.append(piece.pooled(episodes) if pooled else piece)
        done += tokens
        if progress is not None:
            progress(done, total)
    return _join(pieces, episodes, labels, label_tokens, pooled)


UNDECIDED = -1  # a token that is not trained on


def token_labels(episode: LabelledEpisode, base: int | None, whole: bool = False) -> list[int]:
    """The slot of every token: ``base`` (``UNDECIDED`` where there is no base slot) while the past is also that of an
    episode with another label, then the episode's. ``whole``: one decision per episode, so its label everywhere.
    """
    common = 0 if whole else episode.undecided
    return [UNDECIDED if base is None else base] * common + [episode.slot] * (len(episode.token_ids) - common)


@dataclasses.dataclass
class _Piece:
    """Features of some tokens: ``hidden`` [L, n, H], ``route`` [L, n], and for each its episode, position and
    multiplicity."""

    hidden: Tensor
    route: Tensor
    episode: list[int]
    position: list[int]
    weight: list[float]
    shared: bool = False

    def pooled(self, episodes: Sequence[LabelledEpisode]) -> _Piece:
        """One mean feature per episode over its prompt tokens."""
        owners = sorted(set(self.episode))
        rows = [
            [
                i
                for i, (e, p) in enumerate(zip(self.episode, self.position, strict=True))
                if e == owner and p < episodes[e].prompt_length
            ]
            for owner in owners
        ]
        hidden = torch.stack([self.hidden[:, row].float().mean(1).to(self.hidden.dtype) for row in rows], dim=1)
        route = torch.stack([self.route[:, row[-1]] for row in rows], dim=1)
        return _Piece(hidden, route, owners, [0] * len(owners), [1.0] * len(owners))


def _pieces(
    model: Any,
    episodes: Sequence[LabelledEpisode],
    labels: Sequence[Sequence[int]] | None,
    layers: Sequence[int],
    batch_size: int,
    share: bool,
) -> Iterator[tuple[_Piece, int]]:
    """Features piece by piece, with the number of tokens that each stands for; ``labels`` is the forced route."""
    members = range(len(episodes))
    prefix = common_prefix([e.token_ids for e in episodes]) if share else 0
    prefix = prefix if prefix >= MIN_SHARED_PREFIX and len(members) > 1 else 0
    cache = None
    if prefix:
        cache = _new_cache(model)
        route = [labels[0][:prefix]] if labels is not None else None
        piece = _forward(model, [list(episodes[0].token_ids[:prefix])], route, layers, cache, 0)
        piece.episode, piece.weight, piece.shared = [0] * prefix, [float(len(members))] * prefix, True
        yield piece, prefix * len(members)
    order = sorted(members, key=lambda i: len(episodes[i].token_ids))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        rows = [list(episodes[i].token_ids[prefix:]) for i in batch]
        routes = [labels[i][prefix:] for i in batch] if labels is not None else None
        piece = _forward(model, rows, routes, layers, cache, prefix)
        piece.episode = [batch[row] for row in piece.episode]
        yield piece, sum(map(len, rows))


def common_prefix(sequences: Sequence[tuple[int, ...]]) -> int:
    """Length of the longest common prefix that leaves every sequence at least one token."""
    shortest, longest = min(sequences), max(sequences)  # in lexicographic order the extremes differ first
    limit = min(map(len, sequences)) - 1
    return next((i for i in range(limit) if shortest[i] != longest[i]), max(limit, 0))


def _new_cache(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _forward(
    model: Any,
    rows: list[list[int]],
    routes: Sequence[Sequence[int]] | None,
    layers: Sequence[int],
    cache: Any,
    past: int,
) -> _Piece:
    """One forward of the decoder over right-padded ``rows`` behind ``past`` cached tokens; an empty cache is filled.

    Args:
        routes: the slot of every token of ``rows``, or None for the gates' own.
    """
    device = next(model.parameters()).device
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), past + width, dtype=torch.long)
    mask[:, :past] = 1
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, past : past + len(tokens)] = 1
    positions = torch.arange(past, past + width).expand(len(rows), -1)
    if past:
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(len(rows))
    forced: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if routes is not None:
        slots = torch.zeros(len(rows), width, dtype=torch.long)
        for row, route_of_row in enumerate(routes):
            slots[row, : len(route_of_row)] = torch.tensor(route_of_row).clamp_min(0)
        forced = force_route(model, slots.to(device))
    with forced, RoutingRecorder(model, keep_hidden=True) as recorder:
        model.capability_decoder(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=positions.to(device),
            past_key_values=cache,
            use_cache=cache is not None,
        )
    call = recorder.calls[-1]
    real = mask[:, past:].bool().to(device)
    hidden = torch.stack([call.hidden[layer][real].cpu() for layer in layers])
    route = torch.stack([call.routes[layer][real].cpu() for layer in layers])
    episode = [row for row, tokens in enumerate(rows) for _ in tokens]
    position = [past + i for tokens in rows for i in range(len(tokens))]
    return _Piece(hidden, route, episode, position, [1.0] * len(episode))


def _join(
    pieces: list[_Piece],
    episodes: Sequence[LabelledEpisode],
    labels: Sequence[Sequence[int]],
    label_tokens: str,
    pooled: bool,
) -> FeatureSet:
    episode = torch.tensor([e for piece in pieces for e in piece.episode])
    position = torch.tensor([p for piece in pieces for p in piece.position])
    weight = torch.tensor([w for piece in pieces for w in piece.weight])
    if label_tokens == "action" and not pooled:
        emitted = [episodes[e].action_mask[p] for e, p in zip(episode.tolist(), position.tolist(), strict=True)]
        weight = weight * torch.tensor(emitted)
    total, (layers, _, size) = len(episode), pieces[0].hidden.shape
    hidden = torch.empty(layers, total, size, dtype=pieces[0].hidden.dtype)
    start = 0
    for piece in pieces:  # into one block, piece by piece: no second copy of everything
        stop = start + piece.hidden.shape[1]
        hidden[:, start:stop] = piece.hidden
        piece.hidden = piece.hidden[:, :0]
        start = stop
    route = torch.cat([piece.route for piece in pieces], dim=1)
    label = torch.tensor([labels[e][p] for e, p in zip(episode.tolist(), position.tolist(), strict=True)])
    weight = weight * (label != UNDECIDED)
    label = label.clamp_min(0)
    shared = torch.tensor([piece.shared for piece in pieces for _ in piece.episode])
    target = _targets(episodes, episode, position) if any(e.target is not None for e in episodes) else None
    return FeatureSet(hidden, label, weight, episode.masked_fill(shared, -1), route, target)


def _targets(episodes: Sequence[LabelledEpisode], episode: Tensor, position: Tensor) -> Tensor:
    """``[N, S]``: the episode's target distribution, the base for tokens whose past other labels share."""
    slots = max(len(e.target) for e in episodes if e.target is not None)
    rows = torch.zeros(len(episode), slots)
    for row, (e, p) in enumerate(zip(episode.tolist(), position.tolist(), strict=True)):
        target, slot = episodes[e].target, episodes[e].slot
        if p < episodes[e].undecided:
            rows[row, 0] = 1.0
        elif target is None:
            rows[row, slot] = 1.0
        else:
            rows[row] = torch.tensor(target)
    return rows
