"""Attention over a pack: every token attends to its ancestors in the tree, nothing else is computed.

The mask is ``k <= q < subtree_end[k]`` (``train.packing``). On a GPU it goes to FlexAttention as a block mask that is
derived from the subtree ends block by block, so no [T, T] matrix exists anywhere; what the tokens below a long node
see of it
(the suffixes of a group and their prompt) is a full rectangle, which cuDNN computes faster, and the two are merged by
their log-sum-exps. On a CPU the rows are cut into tiles, and each tile meets only those keys that one of its rows may
see.
A pack that is one chain is ordinary causal attention on both.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from train.kernels import fused_on_gpu

FLEX_BLOCK = 128
USE_RECTANGLES = True  # cuDNN for large rectangles: 5 % of an update on H200 (benchmarks/results/bench_grpo_step.json)
RECTANGLE_PAIRS = 2**21  # smaller rectangles stay with FlexAttention: a launch and a merge must pay
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
class Rectangle:
    """All rows [first_row, end_row) see all keys [first_key, first_row): a node's tokens and everything below the
    node."""

    first_key: int
    first_row: int
    end_row: int


@dataclasses.dataclass(frozen=True)
class TreeMask:
    """Who attends to whom, in the form that the device's attention takes; nothing set: causal.

    ``block_mask`` covers what ``rectangles`` leave.
    """

    block_mask: BlockMask | None = None
    rectangles: tuple[Rectangle, ...] = ()
    tiles: tuple[Tile, ...] = ()


def tree_mask(
    subtree_end: torch.Tensor, device: torch.device, query_groups: int, tile: int = CPU_TILE, rectangles: bool = False
) -> TreeMask:
    """The mask of a pack.

    Args:
        subtree_end: [T] on the CPU. query_groups: query heads per key head.
        rectangles: the model's heads suit cuDNN (``suits_cudnn``).
    """
    # on a GPU the kernels of ordinary causal attention add up in any order too, FlexAttention's do not
    exact = device.type == "cuda" and torch.are_deterministic_algorithms_enabled()
    if not exact and bool((subtree_end == len(subtree_end)).all()):
        return TreeMask()
    if device.type == "cuda":
        found, rest = split_rectangles(subtree_end, RECTANGLE_PAIRS) if rectangles else ((), subtree_end)
        return TreeMask(block_mask=block_mask(rest, device), rectangles=found)
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


def suits_cudnn(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Shall cuDNN's attention compute large rectangles here, and can it?"""
    return (
        USE_RECTANGLES
        and not torch.are_deterministic_algorithms_enabled()  # its backward adds up in any order
        and device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim <= 128
        and head_dim % 8 == 0
        and torch.backends.cuda.cudnn_sdp_enabled()
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def split_rectangles(subtree_end: torch.Tensor, min_pairs: int) -> tuple[tuple[Rectangle, ...], torch.Tensor]:
    """Rectangles of at least ``min_pairs`` pairs, outer ones first, and the subtree ends [T] that are left without
    them.

    Neighbouring tokens with one subtree end form a node (or a chain of nodes), of which everything below sees
    everything.
    """
    changes = (torch.nonzero(subtree_end[1:] != subtree_end[:-1])[:, 0] + 1).tolist()
    rest, found = subtree_end.clone(), []
    for start, stop in itertools.pairwise([0, *changes, len(subtree_end)]):
        end = int(subtree_end[start])
        if (stop - start) * (end - stop) >= min_pairs:
            found.append(Rectangle(start, stop, end))
            rest[start:stop] = stop
    return tuple(found), rest


Seeds = tuple[torch.Tensor, torch.Tensor]  # the kernel's random state, unused without dropout but part of its interface


def _rectangle(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, Seeds]:
    """cuDNN's attention without a mask: output [1, heads, rows, dim] and log-sum-exp [1, heads, rows]."""
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, scale=scale)
    return result[0], result[1].reshape(query.shape[:3]), (result[6], result[7])


def _rectangle_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, seeds: Seeds, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of query, key, value where softmax is normalised by ``lse`` and the output was ``out``."""
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, out, lse[..., None].contiguous(), *seeds, None, None, None, query.shape[2],
            key.shape[2], 0.0, False, scale=scale,
        )
    )  # fmt: skip
    return result


class _AddRectangles(torch.autograd.Function):
    """Merge attention over some keys with cuDNN's over further rectangles.

    With l the log-sum-exp of every part, the whole is ``sum_p exp(l_p - l) o_p``, ``l = log sum_p exp(l_p)``. The
    gradient of a rectangle is its kernel's gradient at the whole's output and log-sum-exp; the rest gets
    ``do_1 = w_1 do`` and ``dl_1 = w_1 do . (o_1 - o)``, w_1 = exp(l_1 - l).
    """

    @staticmethod
    def forward(
        ctx: Any, rest: torch.Tensor, rest_lse: torch.Tensor, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, rectangles: tuple[Rectangle, ...], scale: float,
    ) -> torch.Tensor:  # fmt: skip
        out, lse = rest.clone(), rest_lse.clone()
        ctx.rectangles, ctx.scale, ctx.seeds = rectangles, scale, []
        for r in rectangles:
            rows, keys = slice(r.first_row, r.end_row), slice(r.first_key, r.first_row)
            part, part_lse, seeds = _rectangle(query[:, :, rows], key[:, :, keys], value[:, :, keys], scale)
            ctx.seeds.append(seeds)
            _merge_into(out[:, :, rows], lse[:, :, rows], part, part_lse)
        ctx.save_for_backward(rest, rest_lse, out, lse, query, key, value)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rest, rest_lse, out, lse, query, key, value = ctx.saved_tensors
        grad_rest, grad_lse = _merge_backward(grad, rest, rest_lse, out, lse)
        grads = [torch.zeros_like(x) for x in (query, key, value)]
        for r, seeds in zip(ctx.rectangles, ctx.seeds, strict=True):
            rows, keys = slice(r.first_row, r.end_row), slice(r.first_key, r.first_row)
            parts = _rectangle_backward(
                grad[:, :, rows], query[:, :, rows], key[:, :, keys], value[:, :, keys], out[:, :, rows],
                lse[:, :, rows], seeds, ctx.scale,
            )  # fmt: skip
            for whole, part, where in zip(grads, parts, (rows, keys, keys), strict=True):
                whole[:, :, where] += part
        return grad_rest, grad_lse, *grads, None, None


@fused_on_gpu
def _merge_into(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add a part to (out, lse) in place. out, part: [1, heads, rows, dim]; lse, part_lse: [1, heads, rows] fp32."""
    total = torch.logaddexp(lse, part_lse)
    old, new = torch.exp(lse - total)[..., None], torch.exp(part_lse - total)[..., None]
    out.copy_(out.float() * old + part.float() * new)
    lse.copy_(total)


@fused_on_gpu
def _merge_backward(
    grad: torch.Tensor, rest: torch.Tensor, rest_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the part that is not a rectangle, and of its log-sum-exp."""
    weight = torch.exp(rest_lse - lse)
    inner = (grad.float() * (rest.float() - out.float())).sum(-1)
    return (grad.float() * weight[..., None]).to(grad.dtype), weight * inner


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
    if mask.rectangles:
        asked: Any = AuxRequest(lse=True)  # not in the compiled function's annotation
        rest, aux = _flex(q, k, v, block_mask=mask.block_mask, scale=scale, enable_gqa=grouped, return_aux=asked)
        out = _AddRectangles.apply(rest, aux.lse, q, k, v, mask.rectangles, scale)
    elif mask.block_mask is not None:
        out = _flex(q, k, v, block_mask=mask.block_mask, scale=scale, enable_gqa=grouped)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)
