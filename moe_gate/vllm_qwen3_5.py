"""Routed Qwen3.5 (text) for stock vLLM: attention, linear attention and MLP. Apart from ``moe_gate.vllm_model``, since
older versions of vLLM do not have the model."""

from __future__ import annotations

from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

from moe_gate.vllm_model import _Routed


class TraceRoutedQwen3_5ForCausalLM(_Routed, Qwen3_5ForCausalLM):  # type: ignore[misc]
    """Routed Qwen3.5."""
