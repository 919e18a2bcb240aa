"""A model folder of a published shape without its weights, for speed measurements on a machine without a hub.

    python benchmarks/shape_model.py --shape qwen3-4b --out models/shape-qwen3-4b
    python benchmarks/bench_rollouts.py --start-server --model models/shape-qwen3-4b --size gpu --delivery \\
        --server-flags '--load-format dummy --max-model-len 8192'

The folder has a configuration, a ChatML tokenizer built here (bytes, then filler entries up to the vocabulary's size)
and no weights: servers take random ones with ``--load-format dummy``, transformers with ``from_config``. Where a server
and a trainer must agree on the weights, ``--weights`` writes random ones.
"""

from __future__ import annotations

import argparse
import itertools
import string
from pathlib import Path

from pipeline.files import InputError, atomic_path, run_cli, write_json

# Layers, hidden, intermediate, heads, key/value heads, head size: the published configurations.
SHAPES = {
    "tiny": (2, 64, 128, 4, 2, 32),  # vLLM on a CPU has no smaller heads
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128),
    "qwen3-4b-2layers": (2, 2560, 9728, 32, 8, 128),  # the layers of the 4B model, few enough for a CPU
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128),
    "qwen3-8b": (36, 4096, 12288, 32, 8, 128),
}
VOCABULARY = 151936
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, size: int) -> int:
    """A byte-level tokenizer of ``size`` entries, each of which decodes. Returns the eos id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_lowercase
    filler = ("".join(t) for n in itertools.count(3) for t in itertools.product(letters, repeat=n))
    entries = [*alphabet, *itertools.islice(filler, size - len(alphabet) - len(special))]
    core = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return size - 1


def write_folder(folder: Path, shape: str, vocabulary: int = VOCABULARY) -> None:
    """Configuration and tokenizer of ``shape``.

    Raises:
        InputError: unknown shape, or the folder is in use.
    """
    if shape not in SHAPES:
        raise InputError(f"--shape {shape!r}: expected one of {', '.join(SHAPES)}")
    if folder.exists() and any(folder.iterdir()) and not (folder / "shape.json").exists():
        raise InputError(f"--out {folder}: holds other files; choose an empty or new folder")
    from transformers import Qwen3Config

    layers, hidden, intermediate, heads, kv_heads, head_dim = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    eos = write_tokenizer(folder, vocabulary)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=40960,
        tie_word_embeddings=shape != "qwen3-8b",
        eos_token_id=eos,
        bos_token_id=eos - 2,
        pad_token_id=eos - 2,
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(folder)
    write_json(
        folder / "generation_config.json", {"eos_token_id": eos, "bos_token_id": eos - 2, "pad_token_id": eos - 2}
    )
    write_json(folder / "shape.json", {"schema_version": 1, "shape": shape, "weights": "none"})


def write_weights(folder: Path, seed: int = 0) -> None:
    """Random weights for ``folder`` as one bf16 safetensors file, made on the GPU where there is one."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    tied = model.config.tie_word_embeddings
    state = {k: v.cpu() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    with atomic_path(folder / "model.safetensors") as temporary:
        save_file(state, str(temporary), metadata={"format": "pt"})
    write_json(folder / "shape.json", {"schema_version": 1, "weights": "random", "seed": seed})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help=", ".join(SHAPES))
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="[%(default)s]")
    parser.add_argument("--weights", action="store_true", help="write random weights too")
    args = parser.parse_args()
    if not 512 <= args.vocabulary <= VOCABULARY:
        raise InputError(f"--vocabulary {args.vocabulary}: expected 512 to {VOCABULARY}")
    write_folder(args.out, args.shape, args.vocabulary)
    if args.weights:
        write_weights(args.out)
    print(f"{args.out}: shape {args.shape}, {'random' if args.weights else 'no'} weights")
    return 0


if __name__ == "__main__":
    run_cli(main)
