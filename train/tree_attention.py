"""Attention over a pack: every token attends to its ancestors in the tree, nothing else is computed.

The mask is ``k <= q < subtree_end[k]`` (``train.packing``). On a GPU it goes to FlexAttention as a block mask that is
derived from the subtree ends block by block, so no [T, T] matrix exists anywhere. On a CPU the rows are cut into tiles,
and each tile meets only those keys that one of its rows may see. A pack that is one chain is ordinary causal attention
on both.

What the suffixes of a group see of their prompt is a full rectangle, which cuDNN computes faster than FlexAttention:
5 % of an update of Qwen3-4B. But cuDNN makes a plan for every shape, 100 ms for both passes of each on an H200
(variant ``attention`` of ``benchmarks/bench_grpo_step.py``), and every update has shapes of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

FLEX_BLOCK = 128  # packs have a multiple of it on a GPU: kernels that need not look for the end take a fifth less
CPU_TILE = 96  # rows; measured flat between 64 and 128
KEPT_WEIGHTS = 2**23  # of the softmax, per layer: 16 MiB in bf16

_flex = torch.compile(flex_attention)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows [start, end) of a pack, the keys [K] that they may see and the mask [groups * rows, K] (0 or -inf, fp32)."""

    start: int
    end: int
    keys: torch.Tensor
    bias: torch.Tensor


@dataclasses.dataclass(frozen=True)
class TreeMask:
    """Who attends to whom, in the form that the device's attention takes; nothing set: causal."""

    block_mask: BlockMask | None = None
    tiles: tuple[Tile, ...] = ()


def tree_mask(
    subtree_end: torch.Tensor, device: torch.device, query_groups: int, tile: int = CPU_TILE
) -> TreeMask:
    """The mask of a pack.

    Args:
        subtree_end: [T] on the CPU. query_groups: query heads per key head.
    """
    # on a GPU the kernels of ordinary causal attention add up in any order too, FlexAttention's do not
    exact = device.type == "cuda" and torch.are_deterministic_algorithms_enabled()
    if not exact and bool((subtree_end == len(subtree_end)).all()):
        return TreeMask()
    if device.type == "cuda":
        return TreeMask(block_mask=block_mask(subtree_end, device))
    return TreeMask(tiles=_tiles(subtree_end, query_groups, tile))


# ---------------------------------------------------------------------- GPU


def block_mask(subtree_end: torch.Tensor, device: torch.device, block: int = FLEX_BLOCK) -> BlockMask:
    """FlexAttention's block mask: which [block, block] squares are empty, full or mixed, from [T] subtree ends on the
    CPU."""
    n = len(subtree_end)
    n_blocks = -(-n // block)
    last = torch.full((n_blocks * block,), n)  # keys beyond the end: never the reason to skip or to fill a block
    last[:n] = subtree_end
    longest, shortest = last.view(n_blocks, block).amax(1), last.view(n_blocks, block).amin(1)
    first_row = torch.arange(n_blocks) * block
    end_row = torch.clamp(first_row + block, max=n)
    index = torch.arange(n_blocks)
    before = index[:, None] > index
    full = before & (shortest >= end_row[:, None])
    mixed = (index[:, None] == index) | (before & (longest > first_row[:, None]) & ~full)
    ends = subtree_end.to(device=device, dtype=torch.int32)

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < ends[key])

    return BlockMask.from_kv_blocks(
        *_block_lists(mixed, device), *_block_lists(full, device), BLOCK_SIZE=block, mask_mod=sees, seq_lengths=(n, n)
    )


def _block_lists(blocks: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of marked key blocks per row block [1, 1, B] and their indices, marked ones first [1, 1, B, B]."""
    counts = blocks.sum(1, dtype=torch.int32)
    order = torch.argsort(blocks.int(), dim=1, descending=True, stable=True).int()
    return counts[None, None].to(device), order[None, None].to(device)


# ---------------------------------------------------------------------- CPU


def _tiles(subtree_end: torch.Tensor, groups: int, size: int) -> tuple[Tile, ...]:
    n = len(subtree_end)
    tiles = []
    for start in range(0, n, size):
        end = min(start + size, n)
        keys = torch.cat([torch.nonzero(subtree_end[:start] > start)[:, 0], torch.arange(start, end)])
        rows = torch.arange(start, end)[:, None]
        seen = (keys <= rows) & (rows < subtree_end[keys])
        bias = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        tiles.append(Tile(start, end, keys, bias.repeat(groups, 1)))
    return tuple(tiles)


class _TiledAttention(torch.autograd.Function):
    """softmax attention tile by tile; query heads that share a key head are folded into the rows, so keys are never
    repeated.

    The softmax weights are kept for backward while they are small, else computed again.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiles: tuple[Tile, ...], scale: float
    ) -> torch.Tensor:
        out = torch.empty_like(query)
        keep = query.shape[1] * sum((t.end - t.start) * len(t.keys) for t in tiles) <= KEPT_WEIGHTS
        kept = []
        for tile in tiles:
            weights = _weights(query, key, tile, scale)
            out[tile.start : tile.end] = _unfold(torch.bmm(weights, _pick(value, tile)), tile)
            if keep:
                kept.append(weights)
        ctx.tiles, ctx.scale = tiles, scale
        ctx.save_for_backward(query, key, value, out, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, *kept = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros_like(key, dtype=torch.float32)
        grad_value = torch.zeros_like(grad_key)
        mean = (grad.float() * out.float()).sum(-1, keepdim=True)  # = sum over keys of weight * its derivative
        for index, tile in enumerate(ctx.tiles):
            weights = kept[index] if kept else _weights(query, key, tile, ctx.scale)
            upstream = _fold(grad, tile, key.shape[1])
            grad_weights = torch.bmm(upstream, _pick(value, tile).transpose(1, 2)).float()
            grad_scores = (
                grad_weights.sub_(_fold(mean, tile, key.shape[1])).mul_(weights).mul_(ctx.scale).to(query.dtype)
            )
            grad_query[tile.start : tile.end] = _unfold(torch.bmm(grad_scores, _pick(key, tile)), tile)
            of_key = torch.bmm(grad_scores.transpose(1, 2), _fold(query, tile, key.shape[1]))
            grad_key.index_add_(0, tile.keys, of_key.transpose(0, 1).float())
            grad_value.index_add_(0, tile.keys, torch.bmm(weights.transpose(1, 2), upstream).transpose(0, 1).float())
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _weights(query: torch.Tensor, key: torch.Tensor, tile: Tile, scale: float) -> torch.Tensor:
    """Softmax weights [kv_heads, groups * rows, K] of a tile, in the dtype of ``query``."""
    scores = torch.bmm(_fold(query, tile, key.shape[1]), _pick(key, tile).transpose(1, 2)).float()
    return torch.softmax(scores.mul_(scale).add_(tile.bias), dim=-1).to(query.dtype)


def _fold(x: torch.Tensor, tile: Tile, kv_heads: int) -> torch.Tensor:
    """[T, heads, dim] -> [kv_heads, groups * rows, dim] of the tile's rows."""
    rows = x[tile.start : tile.end].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    return rows.reshape(kv_heads, -1, x.shape[-1])


def _unfold(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The inverse of ``_fold``: [rows, heads, dim]."""
    return x.unflatten(1, (-1, tile.end - tile.start)).permute(2, 0, 1, 3).flatten(1, 2)


def _pick(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """[T, kv_heads, dim] -> [kv_heads, K, dim] of the tile's keys."""
    return x[tile.keys].transpose(0, 1)


# ---------------------------------------------------------------------- both


def tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: TreeMask, scale: float
) -> torch.Tensor:
    """softmax(query key^T * scale + mask) value for query [T, heads, dim], key and value [T, kv_heads, dim]; like
    query."""
    if mask.tiles:
        result: torch.Tensor = _TiledAttention.apply(query, key, value, mask.tiles, scale)
        return result
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    if mask.block_mask is not None:
        # what a compiler that knows no lengths cannot find out
        options: Any = {"IS_DIVISIBLE": len(query) % FLEX_BLOCK == 0}
        out = _flex(q, k, v, block_mask=mask.block_mask, scale=scale, enable_gqa=grouped, kernel_options=options)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)
