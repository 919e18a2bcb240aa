"""Stage 4: compose capability adapters on one frozen base with a token-level gate in every layer.

from moe_gate import build_capability_model, load_routed
"""

from moe_gate.adapters import LoraAdapter, find_adapter, load_adapter, save_adapter_file
from moe_gate.builder import assert_frozen, build_capability_model, gater_parameters, named_gater_parameters
from moe_gate.checkpoint import load_gate, load_routed, save_gate
from moe_gate.linear import MultiLoRAGatedLinear
from moe_gate.recorder import RoutingRecorder, RoutingStatistics, trace_routes
from moe_gate.routing import LayerCapabilityGater, TrajectoryGlobalRouter, force_route, prompt_lengths, routing_state

__all__ = [
    "LayerCapabilityGater",
    "LoraAdapter",
    "MultiLoRAGatedLinear",
    "RoutingRecorder",
    "RoutingStatistics",
    "TrajectoryGlobalRouter",
    "assert_frozen",
    "build_capability_model",
    "find_adapter",
    "force_route",
    "gater_parameters",
    "load_adapter",
    "load_gate",
    "load_routed",
    "named_gater_parameters",
    "prompt_lengths",
    "routing_state",
    "save_adapter_file",
    "save_gate",
    "trace_routes",
]
