"""LoRA adapters from disk, strictly: every tensor is understood and used, every setting is honoured, or loading fails.

Two forms of one adapter (both written by ``python -m train``): a PEFT folder with ``adapter_config.json`` and
``adapter_model.safetensors``, or one ``.safetensors`` file with the PEFT configuration as JSON under the metadata key
``peft_config``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_gate.factors import LoraFactors
from pipeline.files import InputError, check, parse_json, read_json

METADATA_KEYS = ("peft_config", "adapter_config", "config")  # the first is ours, the others are met in the wild
_TENSOR_NAME = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight$")
# Settings that change nothing at inference, or only how the adapter was initialised, found or trained.
_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "init_lora_weights",
        "task_type",
        "peft_version",
        "lora_dropout",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "megatron_core",
        "loftq_config",
        "qalora_group_size",
        "corda_config",
        "eva_config",
        "lora_ga_config",
        "ensure_weight_tying",
        "runtime_config",
        "monteclora_config",
    }
)


class PeftSettings(BaseModel):
    """The part of a PEFT LoRA configuration that decides what the tensors mean."""

    model_config = ConfigDict(extra="allow")

    peft_type: str
    r: int = Field(ge=1)
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    bias: str = "none"
    base_model_name_or_path: str | None = None
    revision: str | None = None

    def refuse_unsupported(self, where: str) -> None:
        """Raise ``InputError`` for a setting that this loader would have to ignore (DoRA, trained biases, ...)."""
        if self.peft_type != "LORA":
            raise InputError(f"{where}: expected peft_type LORA, found {self.peft_type}; train a LoRA adapter")
        if self.bias != "none":
            raise InputError(f"{where}: trained biases (bias={self.bias!r}) are not supported; train with bias='none'")
        for key, value in (self.model_extra or {}).items():
            if key not in _HARMLESS and value:
                raise InputError(f"{where}: setting {key}={value!r:.60} is not supported; train the adapter without it")

    def rank(self, module: str) -> int:
        """r of ``module``: the first matching ``rank_pattern``, else ``r`` (peft's rule)."""
        return int(_first_match(self.rank_pattern, module, self.r))

    def scaling(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA; patterns count."""
        alpha, rank = float(_first_match(self.alpha_pattern, module, self.lora_alpha)), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _first_match(patterns: Mapping[str, float], module: str, default: float) -> float:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


@dataclasses.dataclass(frozen=True)
class LoraAdapter:
    """All factors of one adapter, by the path of the adapted module in the base model.

    A peft wrapper around a fused parameter keeps its peft name here (``...experts`` or ``...experts.base_layer``):
    which parameter it adapts follows from its shape and is settled against the model (``moe_gate.experts``).
    """

    name: str
    factors: Mapping[str, LoraFactors]
    settings: PeftSettings
    sha256: str = ""
    path: str = ""


def load_adapter(path: str | os.PathLike[str], name: str | None = None) -> LoraAdapter:
    """Read either form of an adapter.

    Raises:
        InputError: missing or damaged file, no configuration, unsupported setting, a tensor that is no LoRA factor,
            half a pair, a rank that contradicts the configuration, or a value that is not finite.
    """
    source = Path(path)
    if source.is_dir():
        weights = source / "adapter_model.safetensors"
        if not weights.exists() and (source / "adapter_model.bin").exists():
            raise InputError(f"adapter {source}: holds a pickle (adapter_model.bin); save it as safetensors")
        config = read_json(source / "adapter_config.json", "adapter configuration")
        tensors, _ = _read_safetensors(weights)
    else:
        weights = source
        tensors, metadata = _read_safetensors(source)
        config = _config_from_metadata(metadata, source)
    name = name or (source.name if source.is_dir() else source.stem)
    settings = check(PeftSettings, config, f"adapter {source}")
    settings.refuse_unsupported(f"adapter {source}")
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    factors = dict(_pairs(tensors, settings, f"adapter {source}"))
    return LoraAdapter(name, factors, settings, digest, str(source))


def find_adapter(folder: str | os.PathLike[str], name: str) -> Path:
    """``<folder>/<name>/`` or ``<folder>/<name>.safetensors``, whichever is there (the folder first)."""
    base = Path(folder)
    for candidate in (base / name, base / f"{name}.safetensors"):
        if candidate.exists():
            return candidate
    there = sorted({entry.stem for entry in base.glob("*") if entry.is_dir() or entry.suffix == ".safetensors"})
    raise InputError(f"adapter {name}: not found in {base}; there is: {', '.join(there) or 'nothing'}")


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise InputError(f"adapter weights {path}: not found; check the path")
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"adapter weights {path}: not a whole safetensors file ({error}); copy it again") from None


def _config_from_metadata(metadata: Mapping[str, str], path: Path) -> Any:
    for key in METADATA_KEYS:
        if key in metadata:
            return parse_json(metadata[key], f"adapter {path} metadata {key}")
    raise InputError(
        f"adapter {path}: no PEFT configuration in the metadata (looked for {', '.join(METADATA_KEYS)}); use the folder"
    )


def _pairs(tensors: Mapping[str, Tensor], settings: PeftSettings, where: str) -> Iterator[tuple[str, LoraFactors]]:
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _TENSOR_NAME.match(key)
        if match is None:
            raise InputError(
                f"{where}: tensor {key} is not a LoRA factor; nothing may be ignored, remove or support it"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{where}: tensor {key} holds NaN or infinity; train the adapter again")
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    if not sides:
        raise InputError(f"{where}: holds no tensors; train the adapter again")
    for module, pair in sides.items():
        if set(pair) != {"A", "B"}:
            raise InputError(
                f"{where}: {module} has lora_{'/'.join(sorted(pair))} only; a pair is needed, copy it again"
            )
        a, b = pair["A"], pair["B"]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise InputError(
                f"{where}: {module} has A {tuple(a.shape)} and B {tuple(b.shape)}; expected [r, in], [out, r]"
            )
        is_fused = re.search(r"\.experts(\.base_layer)*$", module) is not None
        if not is_fused and a.shape[0] != settings.rank(module):
            raise InputError(f"{where}: {module} has rank {a.shape[0]}, its configuration says {settings.rank(module)}")
        yield module, LoraFactors(a, b, settings.scaling(module))


def save_adapter_file(adapter_folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """The single-file form of a PEFT folder: the same tensors, the configuration under ``peft_config``."""
    from safetensors.torch import save_file

    from pipeline.files import atomic_path

    folder = Path(adapter_folder)
    tensors, _ = _read_safetensors(folder / "adapter_model.safetensors")
    config = read_json(folder / "adapter_config.json", "adapter configuration")
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", "peft_config": json.dumps(config, sort_keys=True)})


def save_adapter_folder(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """The PEFT folder of an adapter given in either form (peft and vLLM load it as it is)."""
    from pipeline.files import write_json

    path, target = Path(source), Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        config, weights = (
            read_json(path / "adapter_config.json", "adapter configuration"),
            path / "adapter_model.safetensors",
        )
    else:
        config, weights = _config_from_metadata(_read_safetensors(path)[1], path), path
    shutil.copyfile(weights, target / "adapter_model.safetensors")
    write_json(target / "adapter_config.json", config)
