"""Which weights a rollout came from: digests that tell retrained adapters and exchanged base models apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from pipeline.files import InputError, PathLike, read_json

_SCALING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules")
_CONFIGS = ("config.json", "generation_config.json", "*.index.json")
_WEIGHTS = ("*.safetensors", "*.bin")


def weights_digest(places: Iterable[PathLike]) -> str:
    """Hash of adapters or gates, so that rollouts of weights that were trained again are never taken for these.

    Args:
        places: PEFT folders, gate folders or ``.safetensors`` files.

    Raises:
        InputError: nothing there, or an adapter's configuration is damaged.
    """
    digest = hashlib.sha256()
    for place in map(Path, places):
        files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
        if not files or not all(file.is_file() for file in files):
            raise InputError(f"adapter {place}: not found; expected a PEFT folder or a .safetensors file")
        for file in files:
            with open(file, "rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        if (place / "adapter_config.json").is_file():
            config = read_json(place / "adapter_config.json", "adapter config")
            if not isinstance(config, dict):
                raise InputError(f"adapter {place}: adapter_config.json: expected an object; export it again")
            digest.update(json.dumps([config.get(key) for key in _SCALING], sort_keys=True).encode())
    return digest.hexdigest()[:16]


def base_identity(model: str) -> str:
    """Cheap identity of a base model: its configuration, and names, sizes and times of its weight files.

    A hub name stands for its snapshot in the local cache. Where no file is here (a server elsewhere has the model), the
    name is all there is.
    """
    folder = Path(model) if Path(model).is_dir() else _cached_snapshot(model)
    if folder is None:
        return f"name:{model}"
    digest = hashlib.sha256()
    for pattern in _CONFIGS:
        for file in sorted(folder.glob(pattern)):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    for pattern in _WEIGHTS:
        for file in sorted(folder.glob(pattern)):
            status = file.stat()
            digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def _cached_snapshot(model: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # no hub name
        return None
    return Path(found).parent if isinstance(found, str) else None
