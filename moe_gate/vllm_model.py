"""Routed models for stock vLLM: per-layer, token-level gates over stacked adapters, as in transformers.

The parent's constructor builds vLLM's own model. Then every decoder layer with adapters gets a subclass whose forward
first computes the layer's row masks from its input, and every adapted linear gets a linear method that adds

    delta = B (mask * (A x))

to what the original method returns, before any gather or all-reduce. No sort and no data-dependent shape, so CUDA
graphs and torch.compile need nothing more; the gate sees one token's hidden state, so prefix caching and chunked
prefill stay exact.

Tensor parallel: a column-parallel linear has A whole and its rows of B; a row-parallel one its columns of A and B whole
(the all-reduce that follows sums the deltas too). Gates are replicated on replicated hidden states.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.utils import PPMissingLayer

from moe_gate.exported import CONFIG_KEY, ExportSpec, vllm_refusal
from moe_gate.routing import RowLayout, row_table
from pipeline.files import check

# vLLM's fused linears: the checkpoint's linears in order, and how many of vLLM's output parts each of them covers.
FUSED: dict[str, dict[str, int]] = {
    "qkv_proj": {"q_proj": 1, "k_proj": 1, "v_proj": 1},
    "gate_up_proj": {"gate_proj": 1, "up_proj": 1},
    "in_proj_qkvz": {"in_proj_qkv": 3, "in_proj_z": 1},  # linear attention of Qwen3.5
    "in_proj_ba": {"in_proj_b": 1, "in_proj_a": 1},
}
Rows = tuple[tuple[int, float], ...]  # (slot, scale) of each row of a stacked A
SCANNED_SLOTS = 17  # more slots: the gate's product is worth a kernel of its own
ROW_ALIGNMENT = 16  # of the rows of a matrix: what fast kernels of half precision ask for


class RouteHolder:
    """The row masks of one decoder layer while its forward runs."""

    def __init__(self) -> None:
        self.masks: list[Tensor] = []


def scanned_argmax(hidden_states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``argmax(hidden_states weight^T + bias)`` as one sum per slot, ``[T, H]`` -> ``[T]``; ties go to the lower slot.

    Written so that torch.compile can compute it within the kernel of the norm that follows, which sums over the same
    tensor: a product with a matrix of a few rows would cost a cast, the product and the argmax, three more kernels
    for each layer of a decode step, whose time is that of its kernels' launches.
    """
    stream = hidden_states.float()
    best = (stream * weight[0]).sum(-1) + bias[0]
    slot = torch.zeros_like(best, dtype=torch.long)
    for index in range(1, weight.shape[0]):
        value = (stream * weight[index]).sum(-1) + bias[index]
        better = value > best
        best, slot = torch.where(better, value, best), torch.where(better, index, slot)
    return slot


class CapabilityRoute(nn.Module):
    """Gate and row layouts of one decoder layer. ``weight [S, H]``, ``bias [S]`` fp32; None when another layer
    decides."""

    def __init__(self, hidden_size: int, num_slots: int, has_gate: bool, soft: bool, device: torch.device) -> None:
        super().__init__()
        self.num_slots, self.soft = num_slots, soft
        self.gater: Any = None
        if has_gate:
            self.gater = nn.Module()
            weight = torch.zeros(num_slots, hidden_size, dtype=torch.float32, device=device)
            self.gater.weight = nn.Parameter(weight, requires_grad=False)
            bias = torch.zeros(num_slots, dtype=torch.float32, device=device)
            self.gater.bias = nn.Parameter(bias, requires_grad=False)
        self.layouts: list[Rows] = []

    def layout_index(self, rows: Rows, device: torch.device, dtype: torch.dtype) -> int:
        """The number of a row layout; its mask of every slot is kept as a buffer ``[S, R]``."""
        if rows not in self.layouts:
            layout = RowLayout(tuple(slot for slot, _ in rows), tuple(scale for _, scale in rows))
            table = row_table(layout, self.num_slots).to(device, torch.float32 if self.soft else dtype)
            self.register_buffer(f"table_{len(self.layouts)}", table, persistent=False)
            self.layouts.append(rows)
        return self.layouts.index(rows)

    def decide(self, hidden_states: Tensor) -> Tensor:
        """``[T, H]`` -> the slot of each token ``[T]``, or (soft) the weights of the slots, fp32 ``[T, S]``."""
        assert self.gater is not None
        if hidden_states.is_cuda and not self.soft and self.num_slots <= SCANNED_SLOTS:
            return scanned_argmax(hidden_states, self.gater.weight, self.gater.bias)
        logits = F.linear(hidden_states.float(), self.gater.weight, self.gater.bias)
        return logits.softmax(-1) if self.soft else logits.argmax(-1)

    def masks(self, route: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """One ``[T, R]`` mask per row layout; a lookup, or (soft) the weighted mean of the slots' masks."""
        tables: list[Tensor] = [getattr(self, f"table_{i}") for i in range(len(self.layouts))]
        if self.soft:
            return [(route @ table).to(dtype) for table in tables]
        return [table.index_select(0, route) for table in tables]


class RoutedLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """The linear method of an adapted linear: the original's result plus the routed delta.

    Where the base's weight is not quantized the rows of A stand below it, so that one product gives ``W x`` and
    ``A x``.
    """

    def __init__(self, inner: Any, holder: RouteHolder, layout_index: int, part_rows: Sequence[int]) -> None:
        self.inner, self.holder, self.layout_index = inner, holder, layout_index
        self.part_rows = list(part_rows)
        self.base_rows: int | None = None  # of the weight that holds A too

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.inner.create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        if type(self.inner) is UnquantizedLinearMethod and self.base_rows is None:
            weight, rows = layer.weight.data, layer.lora_A.data
            if layer.bias is None and weight.dtype == rows.dtype:
                self.base_rows = weight.shape[0]
                padding = rows.new_zeros(-(weight.shape[0] + rows.shape[0]) % ROW_ALIGNMENT, rows.shape[1])
                layer.weight.data = torch.cat([weight, rows, padding])
                layer.lora_A.data = rows.new_empty(0)  # a view would hold what a server on CPUs packs and frees
        self.inner.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x [T, in]`` -> ``[T, out]`` (of this rank)."""
        output: Tensor = self.inner.apply(layer, x, bias)
        if self.base_rows is not None:
            rows = sum(self.part_rows)
            output, low = output[..., : self.base_rows], output[..., self.base_rows : self.base_rows + rows]
        if not self.holder.masks:  # a global gate above this layer: the base
            return output.contiguous()
        if self.base_rows is None:
            low = F.linear(x, layer.lora_A)
        pieces = torch.split(low * self.holder.masks[self.layout_index], self.part_rows, -1)
        deltas = [F.linear(piece, b) for piece, b in zip(pieces, layer.lora_B, strict=True)]
        return output + (deltas[0] if len(deltas) == 1 else torch.cat(deltas, dim=-1))

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


def _routed_layer_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a vLLM decoder layer that decides the route of its input before the parent's forward."""
    names = [name for name in inspect.signature(kind.forward).parameters if name != "self"]
    hidden_at, residual_at = names.index("hidden_states"), names.index("residual")

    class RoutedDecoderLayer(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[hidden_at]
            residual = kwargs["residual"] if "residual" in kwargs else args[residual_at]
            stream = hidden if residual is None else hidden + residual
            route: CapabilityRoute = self.capability_route
            holder: RouteHolder = self.capability_holder
            if route.gater is not None:
                decided = route.decide(stream)
                self.capability_shared.masks = [decided]
            elif self.capability_shared.masks:
                decided = self.capability_shared.masks[0]
            else:
                decided = None
            holder.masks = [] if decided is None else route.masks(decided, stream.dtype)
            output = super().forward(*args, **kwargs)
            holder.masks = []
            if self.capability_is_last:
                self.capability_shared.masks = []
            return output

    RoutedDecoderLayer.__name__ = RoutedDecoderLayer.__qualname__ = kind.__name__
    return RoutedDecoderLayer


class _Builder:
    """Adds the routing modules to a vLLM model and knows how to fill them from the checkpoint's tensors."""

    def __init__(self, model: nn.Module, spec: ExportSpec, hidden_size: int) -> None:
        if refusal := vllm_refusal(spec):
            raise ValueError(refusal)
        self.model, self.spec, self.hidden_size = model, spec, hidden_size
        self.first_slot = len(spec.slot_names) - len(spec.adapters)
        self.loaders: dict[str, Callable[[Tensor], None]] = {}
        self.names: dict[str, str] = {}  # checkpoint name -> parameter name, for vLLM's check of what was loaded
        self.elsewhere: set[str] = set()  # layers of other pipeline stages
        self.methods: list[RoutedLinearMethod] = []

    def build(self) -> None:
        layers: dict[str, dict[str, Any]] = {}
        for path, ranks in self.spec.table.items():
            prefix, number, inner = _split_path(path)
            layers.setdefault(f"{prefix}.{number}", {})[inner] = ranks
        shared = RouteHolder()
        present: list[Any] = []
        for path in sorted(layers, key=lambda p: int(p.rsplit(".", 1)[1])):
            layer = self.model.get_submodule(path)
            if isinstance(layer, PPMissingLayer):
                self.elsewhere.add(path)
                continue
            self._route_layer(layer, path, layers[path], shared)
            present.append(layer)
        if self.elsewhere and self.spec.routing_scope == "global":
            raise ValueError("routing_scope global cannot be split over pipeline stages; use tensor parallelism")
        for layer in present:
            layer.capability_is_last = layer is present[-1]

    def _route_layer(self, layer: Any, path: str, inner: dict[str, Any], shared: RouteHolder) -> None:
        device = next(layer.parameters()).device
        index = int(path.rsplit(".", 1)[1])
        has_gate = self.spec.routing_scope == "per_layer" or index == self.spec.global_layer
        soft = self.spec.routing_mode == "soft"
        route = CapabilityRoute(self.hidden_size, len(self.spec.slot_names), has_gate, soft, device)
        layer.capability_route, layer.capability_holder, layer.capability_shared = route, RouteHolder(), shared
        if route.gater is not None:
            for key in ("weight", "bias"):
                name = f"{path}.capability_route.gater.{key}"
                self._expect(name, name, getattr(route.gater, key).data.copy_)
        groups: dict[tuple[str, str], dict[str, Any]] = {}
        for name, ranks in inner.items():
            parent, _, last = name.rpartition(".")
            fused = next((key for key, parts in FUSED.items() if last in parts), last)
            groups.setdefault((parent, fused), {})[last] = ranks
        for (parent, fused), parts in groups.items():
            linear = self.model.get_submodule(f"{path}.{parent}.{fused}")
            self._route_linear(linear, f"{path}.{parent}", fused, parts, route, layer.capability_holder)
        layer.__class__ = _routed_layer_class(type(layer))

    def _route_linear(
        self, linear: Any, parent: str, fused: str, parts: dict[str, Any], route: CapabilityRoute, holder: RouteHolder
    ) -> None:
        covers = FUSED.get(fused, {fused: 1})
        order = list(covers)
        rows: list[tuple[int, float]] = []
        counts, device, dtype = [], linear.weight.device, linear.params_dtype
        for name in order:
            ranks = parts.get(name) or []
            mine = [(self.first_slot + i, e[1]) for i, e in enumerate(ranks) if e is not None for _ in range(e[0])]
            counts.append(len(mine))
            rows += mine
        in_size = linear.input_size_per_partition if isinstance(linear, RowParallelLinear) else linear.input_size
        linear.lora_A = nn.Parameter(torch.zeros(len(rows), in_size, dtype=dtype, device=device), requires_grad=False)
        pieces = _split_like(_part_slices(linear), list(covers.values()))
        linear.lora_B = nn.ParameterList(
            nn.Parameter(torch.zeros(_width(piece), count, dtype=dtype, device=device), requires_grad=False)
            for piece, count in zip(pieces, counts, strict=True)
        )
        start = 0
        for part, (name, count) in enumerate(zip(order, counts, strict=True)):
            if count:
                a_rows = linear.lora_A.data[start : start + count]
                self._expect(f"{parent}.{name}.lora_A", f"{parent}.{fused}.lora_A", _a_loader(linear, a_rows))
                b = linear.lora_B[part].data
                self._expect(f"{parent}.{name}.lora_B", f"{parent}.{fused}.lora_B.{part}", _b_loader(pieces[part], b))
            else:
                self.names[f"(empty) {parent}.{name}"] = f"{parent}.{fused}.lora_B.{part}"
            start += count
        layout = route.layout_index(tuple(rows), device, dtype)
        linear.quant_method = RoutedLinearMethod(linear.quant_method, holder, layout, counts)
        self.methods.append(linear.quant_method)

    def _expect(self, name: str, parameter: str, load: Callable[[Tensor], Any]) -> None:
        self.loaders[name] = load
        self.names[name] = parameter


def _split_path(path: str) -> tuple[str, int, str]:
    prefix, _, rest = path.partition(".layers.")
    number, _, inner = rest.partition(".")
    return f"{prefix}.layers", int(number), inner


@dataclasses.dataclass(frozen=True)
class PartSlice:
    """The rows of one output part that this rank holds: ``width`` of ``full``, from ``start``."""

    full: int
    start: int
    width: int


def _part_slices(linear: Any) -> list[PartSlice]:
    """What this rank holds of each output part of a linear, in vLLM's order."""
    if isinstance(linear, QKVParallelLinear):
        head, replicas = linear.head_size, linear.num_kv_head_replicas
        q, kv = linear.num_heads * head, linear.num_kv_heads * head
        kv_slice = PartSlice(kv * max(1, linear.tp_size // replicas), linear.tp_rank // replicas * kv, kv)
        return [PartSlice(q * linear.tp_size, linear.tp_rank * q, q), kv_slice, kv_slice]
    if isinstance(linear, MergedColumnParallelLinear):
        widths = [size // linear.tp_size for size in linear.output_sizes]
        return [PartSlice(w * linear.tp_size, linear.tp_rank * w, w) for w in widths]
    if isinstance(linear, RowParallelLinear):
        return [PartSlice(linear.output_size, 0, linear.output_size)]
    width = getattr(linear, "output_size_per_partition", linear.output_size)
    return [PartSlice(linear.output_size, linear.tp_rank * width if width < linear.output_size else 0, width)]


def _split_like(slices: Sequence[PartSlice], counts: Sequence[int]) -> list[list[PartSlice]]:
    """The parts of each checkpoint linear: the first ``counts[0]``, the next ``counts[1]``, ..."""
    assert sum(counts) == len(slices), "the fused linear has other parts in this vLLM version"
    rest = iter(slices)
    return [[next(rest) for _ in range(count)] for count in counts]


def _width(parts: Sequence[PartSlice]) -> int:
    return sum(part.width for part in parts)


def _a_loader(linear: Any, rows: Tensor) -> Callable[[Tensor], None]:
    def load(tensor: Tensor) -> None:
        if isinstance(linear, RowParallelLinear):
            tensor = tensor.narrow(1, linear.tp_rank * rows.shape[1], rows.shape[1])
        rows.copy_(tensor)

    return load


def _b_loader(parts: Sequence[PartSlice], target: Tensor) -> Callable[[Tensor], None]:
    def load(tensor: Tensor) -> None:
        if tensor.shape[0] != sum(part.full for part in parts):
            raise ValueError(
                f"a lora_B has {tensor.shape[0]} rows, its linear {sum(part.full for part in parts)}; export again"
            )
        top, row = 0, 0
        for part in parts:
            target[row : row + part.width].copy_(tensor[top + part.start : top + part.start + part.width])
            top, row = top + part.full, row + part.width

    return load


class _Routed:
    """Mixed in before a vLLM model class: builds the routing after it, and loads the routing's tensors itself."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # type: ignore[call-arg]
        model = vllm_config.model_config
        spec = check(ExportSpec, getattr(model.hf_config, CONFIG_KEY), f"{model.model} {CONFIG_KEY}")
        self._routing = _Builder(self, spec, model.hf_text_config.hidden_size)  # type: ignore[arg-type]
        self._routing.build()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the base through the parent and the routing here.

        Raises:
            ValueError: a routing tensor is missing from the checkpoint, or has no place in the model; or the model has
                its weights already, in a form that takes no others.
        """
        builder, seen = self._routing, set()
        if any(method.base_rows is not None for method in builder.methods):
            raise ValueError("a routed model takes no new weights while it is served; restart the server")

        def base_weights() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name in builder.loaders:
                    builder.loaders[name](tensor)
                    seen.add(name)
                elif "capability_route" in name or name.endswith((".lora_A", ".lora_B")):
                    if not any(name.startswith(f"{path}.") for path in builder.elsewhere):
                        raise ValueError(f"routing tensor {name} has no place in the model; export the folder again")
                else:
                    yield name, tensor

        loaded: set[str] = super().load_weights(base_weights())  # type: ignore[misc]
        if missing := set(builder.loaders) - seen:
            raise ValueError(
                f"{len(missing)} routing tensors are missing, first {min(missing)}; export the folder again"
            )
        return set(loaded) | set(builder.names.values())


class TraceRoutedLlamaForCausalLM(_Routed, LlamaForCausalLM):  # type: ignore[misc]
    """Routed Llama (SmolLM2 too)."""


class TraceRoutedQwen3ForCausalLM(_Routed, Qwen3ForCausalLM):  # type: ignore[misc]
    """Routed Qwen3."""


class TraceRoutedQwen3MoeForCausalLM(_Routed, Qwen3MoeForCausalLM):  # type: ignore[misc]
    """Routed Qwen3-MoE: adapters of the attention."""
