"""The state of a gate training between two evaluations: enough to go on bit for bit, in one safetensors file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.files import InputError, atomic_path
from train.gate_fit import GateFit

_KEY = "trace_gate_state"


@dataclasses.dataclass(frozen=True)
class RouterState:
    """What was read: the round, the gates that it began with (its features depend on them), and the optimiser."""

    round: int
    counters: dict[str, float]
    tensors: dict[str, Tensor]

    @property
    def start_weight(self) -> Tensor:
        return self.tensors["start_weight"]

    @property
    def start_bias(self) -> Tensor:
        return self.tensors["start_bias"]

    def restore(self, fit: GateFit) -> None:
        """Put parameters, optimiser moments, counters and the best weights into ``fit``."""
        with torch.no_grad():
            fit.scaled_weight.copy_(self.tensors["scaled_weight"])
            fit.bias.copy_(self.tensors["bias"])
        for name, parameter in (("scaled_weight", fit.scaled_weight), ("bias", fit.bias)):
            fit.optimizer.state[parameter] = {
                key: self.tensors[f"{name}.{key}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")
            }
        fit.best = self.tensors["best_weight"], self.tensors["best_bias"]
        fit.step, fit.best_loss = int(self.counters["step"]), self.counters["best_loss"]
        fit.evals_without_gain = int(self.counters["evals_without_gain"])


def save_state(
    path: Path, identity: str, round_index: int, fit: GateFit, start_weight: Tensor, start_bias: Tensor
) -> None:
    """Write the state atomically."""
    tensors = {
        "start_weight": start_weight,
        "start_bias": start_bias,
        "scaled_weight": fit.scaled_weight.detach(),
        "bias": fit.bias.detach(),
        "best_weight": fit.best[0],
        "best_bias": fit.best[1],
    }
    for name, parameter in (("scaled_weight", fit.scaled_weight), ("bias", fit.bias)):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            tensors[f"{name}.{key}"] = fit.optimizer.state[parameter][key]
    about = {
        "identity": identity,
        "round": round_index,
        "counters": {"step": fit.step, "best_loss": fit.best_loss, "evals_without_gain": fit.evals_without_gain},
    }
    with atomic_path(path) as temporary:
        save_file({k: v.contiguous() for k, v in tensors.items()}, temporary, metadata={_KEY: json.dumps(about)})


def load_state(path: Path, identity: str) -> RouterState | None:
    """The state at ``path``, None when there is none.

    Raises:
        InputError: damaged, or of a run with other settings or data.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(_KEY, "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"state {path}: damaged ({error}); remove it or run without --resume") from None
    if about.get("identity") != identity:
        raise InputError(f"state {path}: of a run with other settings or data; run without --resume to start anew")
    return RouterState(about["round"], about["counters"], tensors)
