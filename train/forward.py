"""The trainer's forward pass: a pack of episodes in, log-probs of its action tokens out."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from pipeline.files import InputError
from train.checkpointing import layers_to_checkpoint
from train.fast_lora import UnsupportedLayer
from train.logprobs import pair_logprobs
from train.packing import Pack, TokenSequence, build_pack, pack_episodes
from train.tree_attention import FLEX_BLOCK, tree_mask
from train.tree_decoder import decode, structure_refusal

# Model types on which tests/test_train_architectures.py shows that tree-packed gradients equal those of separate
# sequences.
TREE_MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3", "qwen3_moe"})


def base_model(model: Any) -> Any:
    """The transformers causal LM inside a peft model (its LoRA layers stay active)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_weight(model: Any) -> torch.Tensor:
    """The LM head's weight [vocab, d].

    Raises:
        InputError: the head has a bias, a logit cap or a trainable part, which the chunked log-probs do not know.
    """
    base = base_model(model)
    head = base.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise InputError(
            f"model head {type(head).__name__}: expected a frozen linear layer without bias; do not target lm_head"
        )
    if getattr(base.config.get_text_config(), "final_logit_softcapping", None):
        raise InputError(f"model type {base.config.model_type}: a logit cap on the head is not supported")
    return head.weight


def can_pack(model: Any) -> bool:
    """May episodes of this model share one tree-packed sequence?"""
    config = base_model(model).config
    full = all(kind == "full_attention" for kind in getattr(config.get_text_config(), "layer_types", None) or [])
    return full and config.model_type in TREE_MODEL_TYPES


def make_packs(model: Any, sequences: list[TokenSequence], max_tokens: int, at_least: int = 1) -> list[Pack]:
    """Tree packs (``pack_episodes``), or one pack per episode where the model class does not allow a tree."""
    if can_pack(model):
        return pack_episodes(sequences, max_tokens, at_least)
    return [build_pack(sequences, [e]) for e in range(len(sequences))]


def action_logprobs(
    model: Any, pack: Pack, temperature: float, chunk: int = 1024, *, checkpoint: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the action tokens of ``pack``, episode after episode, each [sum of lengths], fp32.

    The order is that of ``torch.cat(pack.pair_of_action)``. Sampling temperature 0 is scored at temperature 1.

    Args:
        pack: on the CPU.
        checkpoint: ``none``, ``all`` or ``auto`` = as many layers as the device's memory asks for.

    Raises:
        InputError: the pack is a tree and the model class is not one whose trees are exact.
    """
    base = base_model(model)
    if not pack.is_chain and not can_pack(model):
        raise InputError(
            f"model type {base.config.model_type}: episodes cannot share a sequence; expected one episode per pack"
        )
    rows, place = torch.unique_consecutive(pack.pair_row, return_inverse=True)
    hidden = _hidden_of_rows(base, pack, rows.to(base.device), checkpoint)
    logprobs, entropy = pair_logprobs(
        hidden, head_weight(model), place, pack.pair_target, temperature=temperature or 1.0, chunk=chunk
    )
    index = torch.cat(pack.pair_of_action).to(logprobs.device)
    return logprobs[index], entropy[index]


def _laid_out(pack: Pack, device: torch.device) -> Pack:
    """``pack`` in the length that the device's attention likes best."""
    return pack.padded(FLEX_BLOCK) if device.type == "cuda" and not pack.is_chain else pack


def _hidden_of_rows(base: Any, pack: Pack, rows: torch.Tensor, checkpoint: str) -> torch.Tensor:
    """Final hidden states [R, d] of ``rows``: through the fast decoder, or the model's own forward where that one
    refuses."""
    device = base.device
    if structure_refusal(base) is None:
        laid = _laid_out(pack, device)
        config = base.config.get_text_config()
        groups = config.num_attention_heads // config.num_key_value_heads
        mask = tree_mask(laid.subtree_end, device, groups)
        layers = layers_to_checkpoint(base, laid.n_tokens, checkpoint) if torch.is_grad_enabled() else 0
        # an unusual adapter: the same numbers, slower, from the model itself
        with contextlib.suppress(UnsupportedLayer):
            return decode(base, laid.input_ids.to(device), laid.position_ids.to(device), mask, rows, layers)
    input_ids, position_ids = pack.input_ids.to(device), pack.position_ids.to(device)
    dense = None if pack.is_chain else pack.attention_mask().to(device)
    states = base.get_decoder()(
        input_ids=input_ids[None], attention_mask=dense, position_ids=position_ids[None], use_cache=False
    ).last_hidden_state[0]
    chosen: torch.Tensor = states[rows]
    return chosen
