"""Where the route of every token lives: the gates, the row masks that the adapted linears read, and the recorder.

    logits_t = W_l h_t + b_l          W_l: [slots, hidden], fp32; h_t: the input of decoder layer l (residual stream)
    route_t  = argmax logits_t        slot 0 = base (no LoRA), slots 1..N = adapters
    mask_t,j = weight_t[slot(j)] * scale(j)     one entry for each of the R = sum of ranks rows of the stacked A

``weight_t`` is one-hot (top1) or softmax(logits_t) (soft). A gate sees h_t only, so nothing of the future reaches a
route, and prefill and decode agree by construction.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from moe_gate.recorder import RoutingCall, RoutingRecorder

RoutingScope = Literal["per_layer", "global"]
RoutingGranularity = Literal["token", "trajectory"]
RoutingMode = Literal["top1", "soft"]
BASE_SLOT = "base"


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Which slot and scale each row of a stacked A has; linears with the same layout share one mask per layer."""

    slots: tuple[int, ...]
    scales: tuple[float, ...]


def row_table(layout: RowLayout, num_slots: int) -> Tensor:
    """``[S, R]`` fp32: the mask of a token in slot s, that is the scale of the rows of s and 0 elsewhere."""
    table = torch.zeros(num_slots, len(layout.slots), device="cpu")
    table[list(layout.slots), range(len(layout.slots))] = torch.tensor(layout.scales, device="cpu")
    return table


@dataclasses.dataclass
class RoutingState:
    """What all layers of one routed model share, between forwards. Not thread-safe: one forward at a time.

    Args:
        slot_names: capability names in slot order; the base slot is called ``base``.
        forced: a slot for all tokens, or a LongTensor ``[B, T]`` (or broadcastable), instead of the gates' choice.
        prompt_lengths: real prompt tokens of each row ``[B]``, for trajectory decisions on whole sequences.
        kept_weights: the trajectory router's decision ``[B, 1, S]`` for the sequences in the cache.
    """

    slot_names: tuple[str, ...]
    scope: RoutingScope = "per_layer"
    granularity: RoutingGranularity = "token"
    mode: RoutingMode = "top1"
    forced: int | Tensor | None = None
    prompt_lengths: Tensor | None = None
    kept_weights: Tensor | None = None
    recorder: RoutingRecorder | None = None

    @property
    def num_slots(self) -> int:
        return len(self.slot_names)

    @property
    def has_base_slot(self) -> bool:
        return self.slot_names[0] == BASE_SLOT

    def slot_weights(self, logits: Tensor, differentiable: bool) -> Tensor:
        """``[..., S]`` fp32 weights of the slots: softmax (soft), or one-hot of the argmax.

        With ``differentiable`` the one-hot passes the softmax's gradient (straight-through), its value unchanged.
        """
        if self.mode == "soft":
            return logits.softmax(-1)
        one_hot = F.one_hot(logits.argmax(-1), self.num_slots).to(logits.dtype)
        if not differentiable:
            return one_hot
        probs = logits.softmax(-1)
        return one_hot + (probs - probs.detach())


@dataclasses.dataclass
class RoutingContext:
    """What one forward knows about routing. It travels through the decoder's keyword arguments to every layer, so that
    a layer that is recomputed in the backward (gradient checkpointing) sees what it saw in the forward.

    Args:
        input_mask: 2-D mask ``[B, T]`` (True = real token), None when the caller gave none or a 4-D one.
        starts_sequence: the key-value cache was empty: trajectory decisions are made, not looked up.
        shared_weights: slot weights ``[B, T, S]`` or ``[B, 1, S]`` that one place decided for all layers.
    """

    forced: int | Tensor | None = None
    input_mask: Tensor | None = None
    prompt_lengths: Tensor | None = None
    starts_sequence: bool = True
    shared_weights: Tensor | None = None
    call: RoutingCall | None = None

    def prompt_mask(self, batch: int, tokens: int, device: torch.device) -> Tensor:
        """``[B, T]`` True at the prompt tokens: the input mask, cut to ``prompt_lengths`` real tokens where given."""
        if self.input_mask is None:
            mask = torch.ones(batch, tokens, dtype=torch.bool, device=device)
        else:
            mask = self.input_mask.to(device)[:, -tokens:].expand(batch, tokens)
        if self.prompt_lengths is not None:
            mask = mask & (mask.long().cumsum(1) <= self.prompt_lengths.to(device).view(-1, 1))
        return mask


class LayerCapabilityGater(nn.Module):
    """The gate of one decoder layer: ``logits = W h + b`` in fp32, ``W [S, hidden]``, zero at the start.

    ``base_bias`` is the starting logit of slot 0, so that an untrained gate is the base model.
    """

    def __init__(
        self, hidden_size: int, num_slots: int, base_bias: float = 5.0, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_slots, hidden_size, dtype=torch.float32, device=device))
        bias = torch.zeros(num_slots, dtype=torch.float32, device=device)
        bias[0] = base_bias
        self.bias = nn.Parameter(bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``hidden_states [..., hidden]`` in any dtype -> fp32 logits ``[..., S]``."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            return F.linear(hidden_states.float(), self.weight.float(), self.bias.float())


class TrajectoryGlobalRouter(LayerCapabilityGater):
    """One decision per trajectory: the same linear map on the mean of the prompt's hidden states.

    logits_b = W mean_{t in prompt} h_bt + b
    """

    def pooled(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        """``hidden_states [B, T, H]``, ``mask [B, T]`` (True = prompt token) -> fp32 logits ``[B, S]``."""
        weight = mask.to(torch.float32).unsqueeze(-1)
        mean = (hidden_states.float() * weight).sum(1) / weight.sum(1).clamp_min(1.0)
        logits: Tensor = self(mean)
        return logits


class LayerRoute(nn.Module):
    """The route of one decoder layer while its forward runs; the adapted linears of the layer read their mask here.

    ``layouts`` are the distinct row layouts of its linears, each with a mask of its own. ``gater`` is None in a layer
    that follows another place's decision (scope global).
    """

    def __init__(
        self, index: int, state: RoutingState, layouts: Sequence[RowLayout], gater: LayerCapabilityGater | None
    ) -> None:
        super().__init__()
        self.index = index
        self.state = state
        self.gater = gater
        self.layouts = tuple(layouts)
        # Plain tensors, not buffers: they follow from the layouts, so they are neither saved nor cast, and they go to
        # the device of the first input (under a meta device context they are real).
        self._rows = [
            (torch.tensor(layout.slots, device="cpu"), torch.tensor(layout.scales, dtype=torch.float32, device="cpu"))
            for layout in layouts
        ]
        self._tables: list[Tensor] = []
        self._masks: list[Tensor] | None = None
        self._inside = False
        self.kept_weights: Tensor | None = None  # trajectory granularity: this layer's decision [B, 1, S]

    def enter(self, hidden_states: Tensor, context: RoutingContext) -> None:
        """Decide the route of every token of ``hidden_states [B, T, H]`` and set the masks ``[B * T, R_i]``."""
        self._inside = True
        if self._is_hard(context):
            self._enter_hard(hidden_states, context)
            return
        weights, logits = self._decide(hidden_states, context)
        if context.call is not None:
            context.call.add(self.index, hidden_states, weights, logits)
        if weights is None:
            self._masks = None  # the base: no LoRA work at all
            return
        flat = weights.reshape(-1, weights.shape[-1])
        masks = [flat[:, slots] * scales for slots, scales in self._rows_on(flat.device)]
        self._masks = [mask.to(hidden_states.dtype) for mask in masks]

    def _is_hard(self, context: RoutingContext) -> bool:
        """Is the route one slot per token, chosen here, with no gradient to a gate? Then it needs no weights."""
        state = self.state
        per_token = state.scope == "per_layer" and state.granularity == "token" and state.mode == "top1"
        return per_token and self.gater is not None and context.forced is None and not self._differentiable()

    def _enter_hard(self, hidden_states: Tensor, context: RoutingContext) -> None:
        """The same masks by one lookup: a row of the table ``[S, R]`` for every token."""
        assert self.gater is not None
        logits: Tensor = self.gater(hidden_states)
        slots = logits.argmax(-1)
        if context.call is not None:
            context.call.add(self.index, hidden_states, slots, logits)
        tables = self._tables_on(slots.device, hidden_states.dtype)
        self._masks = [table.index_select(0, slots.reshape(-1)) for table in tables]

    def _rows_on(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        if self._rows[0][0].device != device:
            self._rows = [(slots.to(device), scales.to(device)) for slots, scales in self._rows]
        return self._rows

    def _tables_on(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        if not self._tables or self._tables[0].device != device or self._tables[0].dtype != dtype:
            self._tables = [row_table(layout, self.state.num_slots).to(device, dtype) for layout in self.layouts]
        return self._tables

    def leave(self) -> None:
        self._inside, self._masks = False, None

    def mask(self, layout_index: int) -> Tensor | None:
        """``[B * T, R]`` row weights of the running forward; None = every token is on the base.

        Raises:
            RuntimeError: the linear was called outside its decoder layer, where no route is known.
        """
        if not self._inside:
            raise RuntimeError(
                "a routed linear was called outside its decoder layer's forward: no route is known there"
            )
        return None if self._masks is None else self._masks[layout_index]

    def _decide(self, hidden_states: Tensor, context: RoutingContext) -> tuple[Tensor | None, Tensor | None]:
        """Slot weights ``[B, T, S]`` fp32 (None = base everywhere) and the gate's logits where a gate was asked."""
        state, shape = self.state, hidden_states.shape[:-1]
        if context.forced is not None:
            if isinstance(context.forced, int) and context.forced == 0 and state.has_base_slot:
                return None, None
            forced = torch.as_tensor(context.forced, dtype=torch.long, device=hidden_states.device).expand(shape)
            return F.one_hot(forced, state.num_slots).float(), None
        if self.gater is None:
            if context.shared_weights is None:  # global token scope, below the deciding layer
                return None, None
            return context.shared_weights.to(hidden_states.device).expand(*shape, -1), None
        if state.granularity == "trajectory":
            logits = self._pooled_logits(hidden_states, context)
            weights = kept_rows(self.kept_weights, shape[0]).expand(*shape, -1)
        else:
            logits = self.gater(hidden_states)
            weights = state.slot_weights(logits, self._differentiable())
        if state.scope == "global":
            context.shared_weights = weights
        return weights, logits

    def _differentiable(self) -> bool:
        return self.training and torch.is_grad_enabled() and self.gater is not None and self.gater.weight.requires_grad

    def _pooled_logits(self, hidden_states: Tensor, context: RoutingContext) -> Tensor | None:
        """Per-layer trajectory routing: the mean of the gate's logits over the prompt decides once per sequence."""
        if not context.starts_sequence or self.gater is None:
            return None
        batch, tokens = hidden_states.shape[:2]
        mask = context.prompt_mask(batch, tokens, hidden_states.device).float().unsqueeze(-1)
        count = mask.sum(1, keepdim=True).clamp_min(1.0)
        logits: Tensor = (self.gater(hidden_states) * mask).sum(1, keepdim=True) / count
        self.kept_weights = self.state.slot_weights(logits, self._differentiable())
        return logits.expand(batch, tokens, -1)


def kept_rows(kept: Tensor | None, batch: int) -> Tensor:
    """The kept decision for ``batch`` rows; a cache that was repeated k times repeats its decisions.

    Raises:
        RuntimeError: nothing was decided yet, or the rows are not a multiple of what was decided.
    """
    if kept is None:
        raise RuntimeError(
            "trajectory routing: the cache was filled without this model; run the prompt through it first"
        )
    if batch % kept.shape[0]:
        raise RuntimeError(
            f"trajectory routing: decided for {kept.shape[0]} rows, asked for {batch}; wrap the call in "
            "force_route(model, slots) when rows of a batch come and go"
        )
    return kept.repeat_interleave(batch // kept.shape[0], 0)


def routing_state(model: nn.Module) -> RoutingState:
    """The shared state of a routed model.

    Raises:
        TypeError: ``model`` was not made by ``build_capability_model``.
    """
    state = getattr(model, "capability_routing", None)
    if not isinstance(state, RoutingState):
        raise TypeError(f"{type(model).__name__} is not a routed model; make one with moe_gate.build_capability_model")
    return state


@contextlib.contextmanager
def force_route(model: nn.Module, route: int | str | Tensor) -> Iterator[None]:
    """Send tokens to given slots: a number, a capability name (``base`` = slot 0), or a LongTensor ``[B, T]``, ``[B,
    1]``.

    With slot 0 the model is the base, with slot i it is adapter i: one model in memory serves every comparison.
    """
    state = routing_state(model)
    if isinstance(route, str):
        if route not in state.slot_names:
            raise ValueError(f"no slot {route!r}; there is: {', '.join(state.slot_names)}")
        route = state.slot_names.index(route)
    if isinstance(route, int) and not 0 <= route < state.num_slots:
        raise ValueError(f"slot {route} is not in 0..{state.num_slots - 1}")
    before, state.forced = state.forced, route
    try:
        yield
    finally:
        state.forced = before


@contextlib.contextmanager
def prompt_lengths(model: nn.Module, lengths: Tensor) -> Iterator[None]:
    """Trajectory granularity without a cache: how many real tokens of each row ``[B]`` are the prompt that decides."""
    state = routing_state(model)
    before, state.prompt_lengths = state.prompt_lengths, lengths
    try:
        yield
    finally:
        state.prompt_lengths = before
