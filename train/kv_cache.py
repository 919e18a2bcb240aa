"""Key/value cache and attention for batched sampling in this process.

Rows that sample from the same prompt read one copy of its keys and values (``SharedPromptLayer``), and what a row adds
goes into a buffer that is written in place; a row can be split in two where what is sampled differs for the first time.
Compared with repeating a ``DynamicCache`` per row this removes the copy of the whole cache at every step, and the
prompt is read once per group instead of once per row. Results are the same up to rounding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "trace_sdpa"


@dataclasses.dataclass
class RowMap:
    """Which prompt each row continues. ``slots`` [U, G] lists the rows of every prompt, padded with row 0.

    ``place`` [N] is the position of each row in the flattened ``slots``; ``keep`` [U, P] marks the real prompt keys
    (None = all).
    """

    slots: torch.Tensor
    place: torch.Tensor
    keep: torch.Tensor | None

    @classmethod
    def build(cls, prompt_of_row: torch.Tensor, n_prompts: int, keep: torch.Tensor | None) -> RowMap:
        counts = torch.bincount(prompt_of_row, minlength=n_prompts)
        width = int(counts.max())
        order = torch.argsort(prompt_of_row, stable=True)
        starts = torch.cumsum(counts, 0) - counts
        within = torch.empty_like(prompt_of_row)
        within[order] = torch.arange(len(order), device=order.device) - starts[prompt_of_row[order]]
        place = prompt_of_row * width + within
        slots = torch.zeros(n_prompts * width, dtype=torch.long, device=order.device)
        slots[place] = torch.arange(len(place), device=order.device)
        return cls(slots.view(n_prompts, width), place, keep)


@dataclasses.dataclass
class SharedKeys:
    """What ``SharedPromptLayer.update`` hands to the attention function in place of a key or value tensor."""

    prompt: torch.Tensor  # [U, kv_heads, P, dim]
    own: torch.Tensor  # [N, kv_heads, S, dim]
    rows: RowMap

    @property
    def shape(self) -> torch.Size:
        n, heads, own, dim = self.own.shape
        return torch.Size((n, heads, self.prompt.shape[2] + own, dim))


class SharedPromptLayer(DynamicLayer):
    """A layer that runs prompts as ``DynamicLayer`` does, then serves rows that branch off them."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: RowMap | None = None
        self._length = 0

    def branch(self, rows: RowMap, capacity: int, max_rows: int) -> None:
        """From now on rows, not prompts, are decoded: at most ``capacity`` tokens each, at most ``max_rows`` rows."""
        self.rows = rows
        self._own_keys, self._own_values = (
            cached.new_empty((max_rows, cached.shape[1], capacity, cached.shape[3]))
            for cached in (self.keys, self.values)
        )

    def split(self, rows: RowMap, parents: torch.Tensor) -> None:
        """Append one row per entry of ``parents``: a copy of that row, which goes its own way from here."""
        old, self.rows = len(self._rows().place), rows
        for own in (self._own_keys, self._own_values):
            own[old : old + len(parents), :, : self._length] = own[parents, :, : self._length]

    def drop(self, rows: RowMap, prompts: torch.Tensor | None, alive: torch.Tensor) -> None:
        """Keep only the rows ``alive`` and, when given, the prompts ``prompts``."""
        self.rows = rows
        for own in (self._own_keys, self._own_values):
            own[: len(alive), :, : self._length] = own[alive, :, : self._length]
        if prompts is not None:
            self.keys, self.values = self.keys.index_select(0, prompts), self.values.index_select(0, prompts)

    def _rows(self) -> RowMap:
        if self.rows is None:
            raise RuntimeError("this cache has no rows yet; call branch first")
        return self.rows

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.rows is None:
            return super().update(key_states, value_states, *args, **kwargs)
        n, end = len(self.rows.place), self._length + 1
        self._own_keys[:n, :, self._length : end] = key_states
        self._own_values[:n, :, self._length : end] = value_states
        self._length = end
        return (
            SharedKeys(self.keys, self._own_keys[:n, :, :end], self.rows),
            SharedKeys(self.values, self._own_values[:n, :, :end], self.rows),
        )

    def get_seq_length(self) -> int:
        return int(super().get_seq_length()) + self._length


def branching_attention(query: torch.Tensor, key: SharedKeys, value: SharedKeys, scaling: float | None) -> torch.Tensor:
    """One decode step: softmax(q [K_prompt, K_own]^T * scale) [V_prompt; V_own], the prompt part batched per prompt.

    Args:
        query: [N, heads, 1, dim]. Returns [N, 1, heads, dim].
    """
    n, heads, _, dim = query.shape
    rows, kv_heads = key.rows, key.own.shape[1]
    group = heads // kv_heads
    n_prompts, width = rows.slots.shape
    scale = dim**-0.5 if scaling is None else scaling
    q = query.reshape(n, kv_heads, group, dim)
    per_prompt = q[rows.slots.view(-1)].view(n_prompts, width, kv_heads, group, dim).transpose(1, 2)
    per_prompt = per_prompt.reshape(n_prompts, kv_heads, width * group, dim)
    scores = torch.matmul(per_prompt, key.prompt.transpose(-1, -2)).float()
    if rows.keep is not None:
        scores = scores.masked_fill(~rows.keep[:, None, None, :], float("-inf"))
    length = scores.shape[-1]
    scores = scores.view(n_prompts, kv_heads, width, group, length).transpose(1, 2)
    scores = scores.reshape(n_prompts * width, kv_heads, group, length)[rows.place]
    own = torch.matmul(q, key.own.transpose(-1, -2)).float()  # [N, kv_heads, group, S]
    weights = torch.softmax(torch.cat([scores, own], dim=-1) * scale, dim=-1).to(value.own.dtype)
    spread = weights[..., :length][rows.slots.view(-1)].view(n_prompts, width, kv_heads, group, length).transpose(1, 2)
    out = torch.matmul(spread.reshape(n_prompts, kv_heads, width * group, length), value.prompt)
    out = out.view(n_prompts, kv_heads, width, group, -1).transpose(1, 2)
    out = out.reshape(n_prompts * width, kv_heads, group, -1)[rows.place]
    out = out + torch.matmul(weights[..., length:], value.own)
    return out.reshape(n, 1, heads, -1)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | SharedKeys,
    value: torch.Tensor | SharedKeys,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA, except for a decode step over shared prompts. Shapes as in transformers' attention interface."""
    if isinstance(key, SharedKeys) and isinstance(value, SharedKeys):
        return branching_attention(query, key, value, scaling), None
    out, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return out, None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# Model types whose attention does more with a cached key or value than multiply by it.
OWN_ATTENTION = frozenset({"diffllama", "doge", "minimax"})


def has_only_full_attention(model: PreTrainedModel) -> bool:
    """True when padding can be masked out and prompts can share rows.

    Not with linear attention, a sliding window, or a cache that holds something else than keys and values (the latent
    of multi-head latent attention). Such models run prompts of one length together, each row with its own cache.
    """
    config = model.config
    if config.model_type in OWN_ATTENTION or getattr(config, "kv_lora_rank", None) is not None:
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


# Hybrids whose layers continue a recurrent state over several tokens exactly; transformers' Jamba and Bamba do not.
CONTINUES_EXACTLY = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "lfm2"})


def can_share_prefix(model: PreTrainedModel) -> bool:
    """True when a prompt may be run in two parts, the second continuing the cache of the first."""
    return has_only_full_attention(model) or model.config.model_type in CONTINUES_EXACTLY


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache for ``model``: shared prompts where every layer attends fully, else the model's own layers."""
    cache = DynamicCache(config=model.config)
    if has_only_full_attention(model):
        cache.layers = [SharedPromptLayer() for _ in cache.layers]
    return cache
