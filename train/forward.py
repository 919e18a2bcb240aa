"""The trainer's forward pass: a pack of episodes in, log-probs of its action tokens out."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.files import InputError
from train.logprobs import pair_logprobs
from train.packing import Pack, TokenSequence, build_pack, pack_episodes

# Model types on which tests/test_train_forward.py shows that tree-packed gradients equal those of separate sequences.
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
    return base_model(model).config.model_type in TREE_MODEL_TYPES


def make_packs(model: Any, sequences: list[TokenSequence], max_tokens: int) -> list[Pack]:
    """Tree packs, or one pack per episode where the model class does not allow a tree."""
    if can_pack(model):
        return pack_episodes(sequences, max_tokens)
    return [build_pack(sequences, [e]) for e in range(len(sequences))]


def action_logprobs(model: Any, pack: Pack, temperature: float, chunk: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the action tokens of ``pack``, episode after episode, each [sum of lengths], fp32.

    The order is that of ``torch.cat(pack.pair_of_action)``. Sampling temperature 0 is scored at temperature 1.
    """
    base = base_model(model)
    pack = pack.to(base.device)
    mask = None if len(pack.episodes) == 1 else pack.attention_mask()  # one episode: plain causal attention
    hidden = base.get_decoder()(
        input_ids=pack.input_ids[None], attention_mask=mask, position_ids=pack.position_ids[None], use_cache=False
    ).last_hidden_state[0]
    logprobs, entropy = pair_logprobs(
        hidden, head_weight(model), pack.pair_row, pack.pair_target, temperature=temperature or 1.0, chunk=chunk
    )
    index = torch.cat(pack.pair_of_action)
    return logprobs[index], entropy[index]
