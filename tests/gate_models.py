"""Tiny models and adapters for the gate's tests: random weights, every family in a few milliseconds."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_gate import gater_parameters

VOCAB = 64
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


def llama(**extra: Any) -> Any:
    return _seeded(LlamaForCausalLM, LlamaConfig(**SHAPE | extra))


def qwen3(**extra: Any) -> Any:
    return _seeded(Qwen3ForCausalLM, Qwen3Config(**SHAPE | {"head_dim": 8} | extra))


def qwen3_moe(**extra: Any) -> Any:
    moe = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    return _seeded(Qwen3MoeForCausalLM, Qwen3MoeConfig(**SHAPE | moe | extra))


def qwen3_5(**extra: Any) -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    linear = {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    return _seeded(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**SHAPE | linear | extra))


FAMILIES = {"llama": llama, "qwen3": qwen3, "qwen3_moe": qwen3_moe, "qwen3_5": qwen3_5}


def _seeded(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return kind(config).eval()


def write_adapter(base: Any, folder: Path, *, seed: int = 0, **settings: Any) -> Any:
    """Save a random LoRA adapter of ``base`` (left unchanged) to ``folder``; returns the peft model for comparison."""
    torch.manual_seed(100 + seed)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False} | settings
    model = get_peft_model(copy.deepcopy(base), LoraConfig(**settings)).eval()
    model.save_pretrained(folder)
    return model


def two_adapters(base: Any, folder: Path, **settings: Any) -> dict[str, str]:
    """Two adapters, named ``alpha`` and ``beta``, of ranks 4 and 6."""
    write_adapter(base, folder / "alpha", seed=1, **settings)
    write_adapter(base, folder / "beta", seed=2, **{"r": 6, "lora_alpha": 9} | settings)
    return {"alpha": str(folder / "alpha"), "beta": str(folder / "beta")}


def random_gates(model: Any, seed: int = 0, scale: float = 1.0) -> None:
    """Gates that use every slot: random weights, no base bias."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in gater_parameters(model):
            if parameter.ndim == 2:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.zero_()


def tokens(batch: int = 2, length: int = 9, seed: int = 0) -> torch.Tensor:
    """Token ids without the padding id."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<s> ' + m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"
)


def write_base(folder: Path, **extra: Any) -> Any:
    """A tiny Llama with a tokenizer (words ``w7`` .. ``w63``) and a chat template, saved to ``folder``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", "system", "user", "assistant", *(f"w{i}" for i in range(7, VOCAB))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    base = llama(**extra)
    base.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return base
