"""The vLLM plugin: ``vllm serve <exported folder>`` finds our architectures through the entry point
``vllm.general_plugins``."""

from __future__ import annotations

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


def register() -> None:
    """Register the routed architectures by name; the classes are imported when a model needs them."""
    from vllm import ModelRegistry

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(f"TraceRouted{architecture}", f"moe_gate.vllm_model:TraceRouted{architecture}")
