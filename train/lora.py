"""LoRA adapters on one frozen base: create, save in both published forms, load.

Forms (README, "Files"): a PEFT folder ``<name>/`` that peft and vLLM load as it is, and ``<name>.safetensors`` with the
same tensors and the PEFT config in its metadata.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from pipeline.files import InputError, atomic_path, parse_json, read_text, sync_folder
from pipeline.folders import replace_folder
from train.config import ALL_LINEARS
from train.expert_lora import (
    EXPERT_TARGETS,
    add_expert_adapters,
    expert_state,
    fused_experts,
    is_expert_key,
    is_expert_parameter,
    on_cpu,
    restore_experts,
)

LINEAR_ATTENTION = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")  # of Qwen3.5-type hybrids


def lora_config(rank: int, alpha: int, targets: tuple[str, ...] = ALL_LINEARS) -> LoraConfig:
    """A plain LoRA configuration: scale alpha / rank, no dropout, no bias."""
    if rank < 1 or alpha < 1:
        raise InputError(f"--lora-rank {rank} --lora-alpha {alpha}: both must be >= 1")
    return LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=list(targets), lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"
    )


def attach_adapter(model: Any, name: str, config: LoraConfig, seed: int) -> PeftModel:
    """Add a fresh adapter (A random, B zero) with fp32 weights to ``model``; the base stays frozen.

    The default targets mean every linear layer of a decoder layer: on a mixture of experts the fused experts too
    (``train.expert_lora``), on a hybrid the projections of its linear attention. The router and the LM head stay as
    they are.

    Raises:
        InputError: no module of the model matches the targets, or only a part of a fused projection is targeted.
    """
    targets = tuple(sorted(config.target_modules))
    plain, experts = _split_targets(model, targets)
    config = copy.deepcopy(config)  # peft rewrites the targets of some model types in place
    config.target_modules = set(plain)
    # the device of this rank, also where the base is still on the CPU to be sharded; those of other ranks are not ours
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        torch.manual_seed(seed)
        try:
            if isinstance(model, PeftModel):
                first = next(iter(model.peft_config.values()))  # peft names the base in the first adapter only
                config.base_model_name_or_path = first.base_model_name_or_path
                model.add_adapter(name, config)
                peft_model = model
            else:
                peft_model = get_peft_model(model, config, adapter_name=name)
        except ValueError as error:
            raise InputError(f"--target-modules {list(targets)}: {str(error).splitlines()[0]}") from None
        if experts:
            add_expert_adapters(peft_model, name, config.r, config.lora_alpha)
    peft_model.set_adapter(name)
    _layers.pop(peft_model, None)  # it may have wrapped more of them
    activate(peft_model, name)
    return peft_model


def _split_targets(model: Any, targets: tuple[str, ...]) -> tuple[list[str], bool]:
    """Targets for peft, and whether the fused experts of ``model`` are targets."""
    leaves = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    plain = list(targets)
    if set(targets) == set(ALL_LINEARS):
        plain += [name for name in LINEAR_ATTENTION if name in leaves]
    chosen = [name for name in EXPERT_TARGETS if name in targets]
    if not fused_experts(model) or not chosen:
        return plain, False
    if len(chosen) < len(EXPERT_TARGETS):
        raise InputError(
            f"--target-modules {','.join(targets)}: experts take all of {', '.join(EXPERT_TARGETS)} or none of them"
        )
    if leaves & set(EXPERT_TARGETS):
        raise InputError(
            "a model with both dense and expert layers: expected --target-modules q_proj,k_proj,v_proj,o_proj"
        )
    return [name for name in plain if name not in EXPERT_TARGETS], True


_layers: weakref.WeakKeyDictionary[PeftModel, tuple[dict[str, Any], list[Any]]] = weakref.WeakKeyDictionary()


def activate(model: PeftModel, name: str) -> None:
    """Make ``name`` the active, trainable adapter; free when it is that already.

    The walk over the model's modules is made once per set of adapters: it takes longer than the switch itself.

    Raises:
        ValueError: the model has no such adapter.
        RuntimeError: weights of the adapter are not fp32.
    """
    if model.active_adapter == name and _is_active(model, name):
        return
    adapters = dict(model.peft_config)
    known, layers = _layers.get(model, ({}, []))
    # the very configurations: one that was deleted and made anew may lie on other layers
    if name in known and [*map(id, known.values())] == [*map(id, adapters.values())]:
        for layer in layers:
            layer.set_adapter(name)
        model.active_adapter = model.base_model.active_adapter = name
        return
    model.set_adapter(name)
    for parameter_name, parameter in adapter_parameters(model, name).items():
        if parameter.dtype != torch.float32:
            raise RuntimeError(f"{parameter_name}: adapter weights must be fp32, found {parameter.dtype}")
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    if not any(isinstance(layer, AuxiliaryTrainingWrapper) for layer in layers):
        _layers[model] = adapters, layers


def _is_active(model: PeftModel, name: str) -> bool:
    """Does the first layer that holds the adapter use and train it?"""
    for module in model.modules():
        if isinstance(module, LoraLayer) and name in getattr(module, "lora_A", ()):
            return list(module.active_adapters) == [name] and module.lora_A[name].weight.requires_grad
    return False


def adapter_parameters(model: PeftModel, name: str) -> dict[str, torch.nn.Parameter]:
    """The LoRA parameters of one adapter, by their names in the model."""
    ending = re.compile(rf"\.lora_\w+\.{re.escape(name)}(\.|$)")  # the name alone could be that of a module too
    return {n: p for n, p in model.named_parameters() if ending.search(n)}


def adapter_state(model: PeftModel, name: str, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """PEFT's tensors of one adapter (names without the adapter's name), on the CPU.

    On a GPU they travel on a stream of their own, since the update of another adapter that runs in another thread
    would be waited for once per tensor. So the weights must be there: what changes them on a GPU ends with its stream
    synchronised (``Learner.update``).

    Args:
        dtype: to give them; None keeps fp32.
    """
    # not model.state_dict(): its hooks on a sharded base disturb a pass that runs in another thread
    own = adapter_parameters(model, name)
    plain = {k: p for k, p in own.items() if not is_expert_parameter(k)}
    with copying(next(iter(own.values())).device):
        state = {_published(k, name): on_cpu(p, dtype) for k, p in plain.items()}
        if len(plain) < len(own):
            state |= expert_state(model, name, dtype)
    return state


def _published(key: str, name: str) -> str:
    """``....lora_A.<name>.weight`` -> ``....lora_A.weight``."""
    return re.sub(rf"(\.lora_\w+)\.{re.escape(name)}(?=\.|$)", r"\1", key)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def copying(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Inside, work on a GPU ``device`` goes to a stream that no update uses."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return torch.cuda.stream(_streams[device])


def restore_adapter(model: PeftModel, name: str, state: dict[str, torch.Tensor]) -> None:
    """Put ``state`` into the adapter ``name``; every tensor must fit.

    Raises:
        InputError: names or shapes differ from the adapter's.
    """
    expected = adapter_state(model, name)
    if set(state) != set(expected):
        odd = sorted(set(state) ^ set(expected))[0]
        raise InputError(f"adapter {name}: its tensors do not match the model's (first difference: {odd})")
    for key, value in state.items():
        if value.shape != expected[key].shape:
            raise InputError(
                f"adapter {name}: {key} has shape {tuple(value.shape)}, expected {tuple(expected[key].shape)}"
            )
    set_peft_model_state_dict(model, {k: v for k, v in state.items() if not is_expert_key(k)}, adapter_name=name)
    restore_experts(model, name, state)
    device = next(iter(adapter_parameters(model, name).values())).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # as ``adapter_state`` asks for


def save_adapter(
    model: PeftModel, name: str, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> None:
    """Write the PEFT folder ``folder`` and ``<folder>.safetensors``; a reader never sees half of either.

    Args:
        dtype: of the tensors on disk; None keeps fp32.
    """
    target = Path(folder)
    state, config = write_adapter_folder(model, name, target, dtype=dtype)
    _write_single_file(target, state, config)


def copy_adapter(source: Path, target: Path) -> None:
    """Write the adapter ``source`` (either form) in both forms as ``target``.

    Raises:
        InputError: ``source`` is damaged, or ``target`` cannot be written.
    """
    state, config = load_adapter_files(source)
    write_peft_folder(target, state, config)
    _write_single_file(target, state, config)


def _write_single_file(target: Path, state: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    metadata = {"format": "pt", "peft_config": json.dumps(config, sort_keys=True), "adapter": target.name}
    save_tensors(target.with_name(target.name + ".safetensors"), state, metadata)


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Atomic write of a safetensors file.

    Raises:
        InputError: it cannot be written (disk full, no permission).
    """
    with atomic_path(path) as temporary:
        try:
            save_file(tensors, str(temporary), metadata=metadata)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise InputError(f"{path}: cannot be written ({error}); free space or choose another path") from None


def write_adapter_folder(
    model: PeftModel, name: str, folder: Path, *, dtype: torch.dtype | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Write only the PEFT folder. Returns the tensors and the config that were written."""
    state = adapter_state(model, name, dtype)
    config = _config_dict(model, name, any(map(is_expert_key, state)))
    write_peft_folder(folder, state, config)
    return state, config


def write_peft_folder(target: Path, state: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Build the folder under a temporary name, fsync it and rename it into place; a kill leaves the old or the new one.

    Raises:
        InputError: it cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror}); choose another folder") from None
    try:
        save_tensors(work / "adapter_model.safetensors", state, {"format": "pt"})
        with atomic_path(work / "adapter_config.json") as temporary:
            temporary.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
        work.chmod(0o755)  # a server under another user must be able to read it
        sync_folder(work)
        replace_folder(work, target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _config_dict(model: PeftModel, name: str, with_experts: bool) -> dict[str, Any]:
    config = model.peft_config[name].to_dict()
    clean = {k: (sorted(v) if isinstance(v, set) else v) for k, v in config.items()}
    clean["inference_mode"] = True
    if with_experts:
        clean["target_modules"] = sorted({*clean["target_modules"], *EXPERT_TARGETS})
    return {k: getattr(v, "value", v) for k, v in clean.items()}


def load_adapter_files(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and PEFT config of either form.

    Raises:
        InputError: neither form is there, or a file is damaged.
    """
    source = Path(path)
    if source.is_dir():
        config = parse_json(
            read_text(source / "adapter_config.json", "adapter config"), f"{source}/adapter_config.json"
        )
        return _load_tensors(source / "adapter_model.safetensors"), config
    if not source.is_file():
        raise InputError(f"adapter {path}: not found; expected a PEFT folder or a .safetensors file")
    tensors = _load_tensors(source)
    with safe_open(str(source), framework="pt") as file:
        metadata = file.metadata() or {}
    if "peft_config" not in metadata:
        raise InputError(f"adapter {path}: no peft_config in its metadata; give the PEFT folder instead")
    return tensors, parse_json(metadata["peft_config"], f"adapter {path} metadata")


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise InputError(f"adapter file {path}: not found")
    try:
        return load_file(str(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"adapter file {path}: damaged or not safetensors ({error})") from None
