"""Model folders of a few kilobytes with a real tokenizer and chat template: random weights, built offline.

``tiny_model_folder(path)`` writes one that ``python -m train --model path`` takes like any other. Text is tokenised
byte by byte, so whatever a random model samples can be decoded and every prompt can be encoded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = ("llama", "qwen3", "qwen3_moe", "qwen3_5")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and three special tokens, ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([PAD, START, END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, additional_special_tokens=[START, END]
    )
    fast.chat_template = TEMPLATE
    return fast


def tiny_model(family: str = "llama", seed: int = 0, **extra: Any) -> Any:
    """A random causal LM in fp32. ``extra`` goes into its config."""
    import transformers

    vocabulary = 259
    shape: dict[str, Any] = dict(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    if family == "qwen3_moe":
        shape |= {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    if family == "qwen3_5":
        shape |= {
            "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4,
        }  # fmt: skip
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    }[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class(config_class(**shape | extra)).eval()


def tiny_model_folder(folder: Path, family: str = "llama", seed: int = 0, **extra: Any) -> Path:
    """Write model, tokenizer and chat template to ``folder``."""
    tiny_model(family, seed, **extra).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
