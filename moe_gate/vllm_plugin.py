"""The vLLM plugin: ``vllm serve <exported folder>`` finds our architectures through the entry point
``vllm.general_plugins``."""

from __future__ import annotations

ARCHITECTURES = {
    "LlamaForCausalLM": "moe_gate.vllm_model",
    "Qwen3ForCausalLM": "moe_gate.vllm_model",
    "Qwen3MoeForCausalLM": "moe_gate.vllm_model",
    "Qwen3_5ForCausalLM": "moe_gate.vllm_qwen3_5",
}


def register() -> None:
    """Register the routed architectures by name; the classes are imported when a model needs them.

    vLLM adjusts the configuration of some architectures by name (cache types of Qwen3.5); ours get their base's.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    for architecture, module in ARCHITECTURES.items():
        routed = f"TraceRouted{architecture}"
        ModelRegistry.register_model(routed, f"{module}:{routed}")
        if architecture in MODELS_CONFIG_MAP:
            MODELS_CONFIG_MAP[routed] = MODELS_CONFIG_MAP[architecture]
