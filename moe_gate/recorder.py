"""What the gates decided: the route of every token in every layer, and its statistics.

with RoutingRecorder(model) as recorder:
    model.generate(...)
recorder.statistics().share_of_slot        # {"base": 0.1, "tool_calling_precision": 0.9}
"""

from __future__ import annotations

import dataclasses
import math
from types import TracebackType

import torch
from torch import Tensor, nn

from moe_gate.routing import RoutingState, routing_state


class RoutingCall:
    """One forward: per layer the slots ``[B, T]``, optionally hidden states ``[B, T, H]`` and logits ``[B, T, S]``."""

    def __init__(self, num_slots: int, keep_hidden: bool, keep_logits: bool) -> None:
        self.routes: dict[int, Tensor] = {}
        self.hidden: dict[int, Tensor] = {}
        self.logits: dict[int, Tensor] = {}
        self.token_mask: Tensor | None = None
        self.continues = False
        self.num_slots, self._keep_hidden, self._keep_logits = num_slots, keep_hidden, keep_logits

    def add(self, layer: int, hidden_states: Tensor, route: Tensor | None, logits: Tensor | None) -> None:
        """Called by the layers; a layer recomputed in the backward was recorded before and is left out.

        Args:
            route: slots ``[B, T]`` int64, weights of the slots ``[B, T, S]`` fp32, or None for the base everywhere.
        """
        if layer in self.routes:
            return
        if route is None:
            self.routes[layer] = torch.zeros(hidden_states.shape[:-1], dtype=torch.uint8, device=hidden_states.device)
        else:
            slots = route if route.dtype == torch.long else route.detach().argmax(-1)
            self.routes[layer] = slots.to(torch.uint8)
        if self._keep_hidden:
            self.hidden[layer] = hidden_states.detach()
        if self._keep_logits and logits is not None:
            self.logits[layer] = logits

    def routes_LBT(self) -> Tensor:
        """All layers of this forward, on the CPU: ``[L, B, T]`` uint8."""
        return torch.stack([self.routes[layer].cpu() for layer in sorted(self.routes)])


@dataclasses.dataclass(frozen=True)
class RoutingStatistics:
    """Counts over real tokens and layers.

    ``share_of_slot``: fraction of (token, layer) decisions; ``entropy_bits``: of those shares, 0 .. log2(slots);
    ``switches_per_100_tokens``: changes of slot between neighbouring tokens of a sequence, mean over layers;
    ``layer_shares``: ``[L][S]`` for a heat map; ``layers``: decoder layer of each row; ``tokens``: real tokens seen.
    """

    share_of_slot: dict[str, float]
    entropy_bits: float
    switches_per_100_tokens: float
    layer_shares: list[list[float]]
    layers: list[int]
    tokens: int

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)


class RoutingRecorder:
    """Context manager that collects the routes of every forward of ``model`` inside it.

    Args:
        model: a routed model.
        keep_hidden: also keep the input of every adapted decoder layer (for gate training).
        keep_logits: also keep the gates' logits, with their gradient.
    """

    def __init__(self, model: nn.Module, keep_hidden: bool = False, keep_logits: bool = False) -> None:
        self.state: RoutingState = routing_state(model)
        self.keep_hidden, self.keep_logits = keep_hidden, keep_logits
        self.calls: list[RoutingCall] = []
        self._before: RoutingRecorder | None = None

    def __enter__(self) -> RoutingRecorder:
        self._before, self.state.recorder = self.state.recorder, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.state.recorder = self._before

    def new_call(self, token_mask: Tensor | None, continues: bool) -> RoutingCall:
        """Called by the decoder at the start of a forward."""
        call = RoutingCall(self.state.num_slots, self.keep_hidden, self.keep_logits)
        call.token_mask, call.continues = token_mask, continues
        self.calls.append(call)
        return call

    def statistics(self) -> RoutingStatistics:
        """Statistics over everything recorded so far.

        Raises:
            ValueError: nothing was recorded.
        """
        counts, pairs, switches, tokens = None, 0, 0, 0
        last: Tensor | None = None
        for call in self.calls:
            routes = call.routes_LBT()
            mask = _token_mask(call, routes)
            one_hot = torch.nn.functional.one_hot(routes.long(), self.state.num_slots) * mask[None, :, :, None]
            counts = one_hot.sum((1, 2)) if counts is None else counts + one_hot.sum((1, 2))
            tokens += int(mask.sum())
            if call.continues and last is not None and last.shape[1] == routes.shape[1]:
                routes = torch.cat([last, routes], dim=2)  # the step before belongs to the same sequences
                mask = torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1)
            both = mask[:, 1:] & mask[:, :-1]
            pairs += int(both.sum()) * routes.shape[0]
            switches += int(((routes[:, :, 1:] != routes[:, :, :-1]) & both).sum())
            last = routes[:, :, -1:]
        if counts is None or tokens == 0:
            raise ValueError("nothing was recorded: run the model inside the recorder")
        return _statistics(counts, pairs, switches, tokens, sorted(self.calls[0].routes), self.state.slot_names)


def _token_mask(call: RoutingCall, routes_LBT: Tensor) -> Tensor:
    batch, tokens = routes_LBT.shape[1:]
    if call.token_mask is None:
        return torch.ones(batch, tokens, dtype=torch.bool)
    return call.token_mask[:, -tokens:].cpu().expand(batch, tokens)


def _statistics(
    counts_LS: Tensor, pairs: int, switches: int, tokens: int, layers: list[int], names: tuple[str, ...]
) -> RoutingStatistics:
    total = counts_LS.sum(0).double()
    shares = (total / total.sum()).tolist()
    entropy = sum(-share * math.log2(share) for share in shares if share > 0)
    per_layer = (counts_LS.double() / counts_LS.sum(1, keepdim=True)).tolist()
    rate = 100.0 * switches / pairs if pairs else 0.0
    return RoutingStatistics(dict(zip(names, shares, strict=True)), entropy, rate, per_layer, layers, tokens)


@torch.no_grad()
def trace_routes(model: nn.Module, token_ids: list[int]) -> Tensor:
    """The route of each token of one sequence in each adapted layer: ``[L, T]`` uint8, by one forward of the decoder.

    By causality these are the routes that the sequence had while it was sampled (token granularity, top1).
    """
    device = next(model.parameters()).device
    decoder = getattr(model, "capability_decoder")  # noqa: B009 - set by the builder, unknown to the type
    with RoutingRecorder(model) as recorder:
        decoder(input_ids=torch.tensor([token_ids], device=device), use_cache=False)
    return recorder.calls[0].routes_LBT()[:, 0]
