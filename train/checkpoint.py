"""Atomic checkpoints of a learner: adapter, optimiser, counters, curriculum. ``--resume`` goes on bit for bit.

A checkpoint is a folder ``iter_<n>`` with ``adapter.safetensors`` (fp32), ``optimizer.safetensors`` and ``state.json``;
it is built under a temporary name and renamed, so an interrupted one is never seen.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, StrictBool, StrictInt
from safetensors import SafetensorError
from safetensors.torch import load_file

from pipeline.files import InputError, check, read_json, sync_folder, write_json
from train.learner import Learner
from train.lora import copying, save_tensors
from train.run_log import list_checkpoints

SCHEMA_VERSION = 1
_LATER_COUNTERS = ("solved", "empty_iterations", "nonfinite_iterations")  # checkpoints of version 0.1.0 lack them


class _Counters(BaseModel):
    """``Learner.counters`` on disk."""

    version: StrictInt
    iteration: StrictInt
    next_seed: dict[str, StrictInt]
    mix: dict[str, float]
    best_reward: float | None = None
    solved: StrictBool = False
    empty_iterations: StrictInt = Field(0, ge=0)
    nonfinite_iterations: StrictInt = Field(0, ge=0)


class _State(BaseModel):
    """``state.json``."""

    adapter: str
    counters: _Counters
    settings: dict[str, Any]


def save_checkpoint(
    folder: Path, learner: Learner, counters: dict[str, Any], settings: dict[str, Any], keep: int
) -> Path:
    """Write ``folder/iter_<n>`` and delete all but the newest ``keep``.

    Args:
        counters: of ``Learner.counters`` at the point to go on from.
        settings: must be equal when it is loaded.
    """
    target = folder / f"iter_{int(counters['iteration']):06d}"
    if target in list_checkpoints(folder):  # an iteration of a run has one state; there is no moment without it
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".iter_*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=folder))
    except OSError as error:
        raise InputError(f"checkpoint {target}: cannot be written ({error.strerror})") from None
    try:
        save_tensors(work / "adapter.safetensors", learner.weights())
        save_tensors(work / "optimizer.safetensors", _optimizer_tensors(learner))
        write_json(
            work / "state.json",
            {"schema_version": SCHEMA_VERSION, "adapter": learner.name, "counters": counters, "settings": settings},
        )
        sync_folder(work)
        if target.exists():  # not a complete checkpoint
            shutil.rmtree(target)
        work.rename(target)
        sync_folder(folder)
    except OSError as error:
        raise InputError(
            f"checkpoint {target}: cannot be written ({error.strerror}); free space, then --resume"
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load_checkpoint(path: Path, learner: Learner, settings: dict[str, Any]) -> list[str]:
    """Restore ``learner`` from a checkpoint folder.

    Returns:
        The counters that it does not have, being of an earlier version of this program; they start anew.

    Raises:
        InputError: damaged, of another adapter, or made with other settings.
    """
    data = read_json(path / "state.json", "checkpoint")
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        raise InputError(
            f"checkpoint {path}: expected schema_version {SCHEMA_VERSION}; it is from another version of this program"
        )
    state = check(_State, data, f"checkpoint {path / 'state.json'}")
    if state.adapter != learner.name:
        raise InputError(f"checkpoint {path}: is of adapter {state.adapter!r}, expected {learner.name!r}")
    for key, value in settings.items():
        found = state.settings.get(key)
        if found != value:
            raise InputError(
                f"checkpoint {path}: made with {key}={found!r}, now {value!r}; use the same or another --output-dir"
            )
    learner.restore_weights(_load_tensors(path / "adapter.safetensors"))
    _restore_optimizer(learner, _load_tensors(path / "optimizer.safetensors"))
    learner.restore_counters(state.counters.model_dump())
    return [name for name in _LATER_COUNTERS if name not in state.counters.model_fields_set]


def _optimizer_tensors(learner: Learner) -> dict[str, torch.Tensor]:
    tensors = {}
    with copying(learner.device):
        for name, parameter in learner.parameters.items():
            for key, value in learner.optimizer.state.get(parameter, {}).items():
                tensors[f"{name}|{key}"] = value.detach().to("cpu").contiguous()
    return tensors


def _restore_optimizer(learner: Learner, tensors: dict[str, torch.Tensor]) -> None:
    learner.optimizer.state.clear()
    for full, value in tensors.items():
        name, _, key = full.rpartition("|")
        if name not in learner.parameters:
            raise InputError(f"checkpoint optimizer state: unknown parameter {name!r}; the adapter has other targets")
        parameter = learner.parameters[name]
        stays = key == "step" and not learner.optimizer.defaults["fused"]  # a plain optimiser counts on the CPU
        moved = value if stays else value.to(parameter.device)
        learner.optimizer.state[parameter][key] = moved


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(str(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(
            f"checkpoint file {path}: missing or damaged ({error}); delete this checkpoint to use the one before"
        ) from None
