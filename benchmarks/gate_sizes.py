"""How much ``bench_gate.py`` and ``gate_engine.py`` measure; without heavy imports."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Size:
    """Forward passes of ``batch x tokens``, ``decode_steps`` single tokens behind them, and vLLM requests."""

    batch: int
    tokens: int
    decode_steps: int
    repetitions: int
    requests: int
    prompt_tokens: int
    output_tokens: int


CHECK_FILE = "check_logprobs.json"  # beside the models: what transformers says about the check's prompts


def check_prompts(vocabulary: int) -> list[list[int]]:
    """Four prompts on which the routed model in vLLM is compared with the one in transformers."""
    entries = min(40_000, vocabulary - 20)
    return [[(13 * i + 29 * j * j) % entries + 10 for j in range(32)] for i in range(4)]


SIZES = {
    "tiny": Size(2, 32, 3, 2, 4, 32, 8),
    "layer": Size(1, 1024, 3, 5, 4, 128, 32),
    "cpu": Size(4, 256, 10, 5, 16, 128, 64),
    "gpu": Size(8, 2048, 10, 5, 96, 512, 256),
}
