"""How many tokens one pass takes, and how many decoder layers must forget their activations so that it fits into the
device's memory.

A layer of ``train.tree_decoder`` keeps, per token and in the base's dtype: its input and its middle (2 d), queries
and keys before and after rotation and values (2 q + 3 k), the attention's output (q), and gate and up (2 f). A
checkpointed layer keeps d.
"""

from __future__ import annotations

from typing import Any

import torch

RESERVE = 0.15  # of the free memory, for workspaces, logits and fragmentation
# Tokens of a pack. A small pass takes as long as its kernels take to launch (Qwen3-0.6B on an H200: 17,000 tokens in
# one pack 0.24 s, in two 0.34 s); beyond the upper bound that time no longer counts.
PACK_TOKENS_CPU, PACK_TOKENS_LEAST, PACK_TOKENS_MOST = 1024, 16_384, 65_536
PACK_SHARE = 0.5  # of the free memory, for a pack's activations: nothing is recomputed, and others may still grow


def bytes_per_token(config: Any, item: int) -> tuple[int, int]:
    """Bytes that one layer keeps per token: as it is, and checkpointed."""
    hidden = config.hidden_size
    dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    query, key = config.num_attention_heads * dim, config.num_key_value_heads * dim
    per_expert = getattr(config, "moe_intermediate_size", None)
    inner = config.intermediate_size
    if per_expert:
        inner = (per_expert + hidden) * config.num_experts_per_tok
    return item * (2 * hidden + 3 * query + 3 * key + 2 * inner), item * hidden


def pack_budget(base: Any, free_bytes: int | None = None) -> int:
    """Tokens of a training pass that suit the device: on a GPU the largest power of two within the bounds above whose
    activations ``PACK_SHARE`` of its free memory holds; the lower bound where runs must repeat bit for bit, whatever
    else is on the device.

    Args:
        base: the causal LM, on its device. free_bytes: None = what the device says is free.
    """
    if free_bytes is None:
        if base.device.type != "cuda":
            return PACK_TOKENS_CPU
        free_bytes = _free_bytes(base.device)
    if torch.are_deterministic_algorithms_enabled():
        return PACK_TOKENS_LEAST
    config = base.config.get_text_config()
    kept, _ = bytes_per_token(config, base.dtype.itemsize)
    fitting = int(free_bytes * PACK_SHARE / (kept * config.num_hidden_layers))
    return min(max(2 ** (fitting.bit_length() - 1) if fitting else 0, PACK_TOKENS_LEAST), PACK_TOKENS_MOST)


def layers_to_checkpoint(base: Any, n_tokens: int, policy: str, free_bytes: int | None = None) -> int:
    """The number of layers to run with recomputation.

    Args:
        policy: ``none``, ``all`` or ``auto``. ``auto`` keeps everything on a CPU.
        free_bytes: memory that the pass may use; None = what the device says is free.

    Raises:
        ValueError: an unknown policy.
    """
    config = base.config.get_text_config()
    if policy == "none":
        return 0
    if policy == "all":
        return int(config.num_hidden_layers)
    if policy != "auto":
        raise ValueError(f"checkpoint policy {policy!r}: expected none, all or auto")
    if free_bytes is None:
        if base.device.type != "cuda":
            return 0
        free_bytes = _free_bytes(base.device)
    kept, bare = (n_tokens * b for b in bytes_per_token(config, base.dtype.itemsize))
    n_layers = int(config.num_hidden_layers)
    excess = n_layers * kept - int(free_bytes * (1 - RESERVE))
    if excess <= 0:
        return 0
    return min(n_layers, -(-(excess + kept) // (kept - bare)))  # + kept: the layer that is being recomputed


def _free_bytes(device: torch.device) -> int:
    """What the device has free, with what this process's allocator holds without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
