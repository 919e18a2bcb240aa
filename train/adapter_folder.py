"""An adapter as a PEFT folder, which is what engines load; the one-file form is unpacked into one.

``pipeline/adapters/<capability>/`` and ``pipeline/adapters/<capability>.safetensors`` hold the same tensors; the file
has the PEFT configuration in its metadata.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, Field, StrictInt, StrictStr

from pipeline.files import InputError, check, parse_json, read_json, write_json

CONFIG_KEYS = ("peft_config", "adapter_config", "config")


class _PeftConfig(BaseModel):
    """What is read of ``adapter_config.json`` here; ``target_modules`` may be a pattern or "all-linear"."""

    r: StrictInt | None = Field(None, ge=1)
    target_modules: list[StrictStr] | StrictStr | None = None


def check_folder(folder: Path) -> Path:
    """``folder`` when it is a PEFT LoRA folder.

    Raises:
        InputError: files missing, or not a LoRA configuration.
    """
    config = read_json(folder / "adapter_config.json", "adapter config")
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise InputError(f"adapter {folder}: expected a PEFT LoRA adapter_config.json; train one with python -m train")
    check(_PeftConfig, config, f"adapter config {folder / 'adapter_config.json'}")
    if not (folder / "adapter_model.safetensors").is_file():
        raise InputError(f"adapter {folder}: adapter_model.safetensors is missing; export the adapter again")
    return folder


def unpack_file(file: Path, folder: Path) -> Path:
    """Write the one-file form ``file`` as a PEFT folder.

    Raises:
        InputError: not safetensors, or no PEFT configuration in its metadata.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as tensors:
            metadata = tensors.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise InputError(f"adapter {file}: not a safetensors file ({error}); export the adapter again") from None
    text = next((metadata[key] for key in CONFIG_KEYS if key in metadata), None)
    if text is None:
        raise InputError(f"adapter {file}: its metadata has no {CONFIG_KEYS[0]}; give the PEFT folder instead")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, folder / "adapter_model.safetensors")  # extra metadata does not disturb peft or vLLM
    write_json(folder / "adapter_config.json", parse_json(text, f"adapter {file}: peft_config"))
    return check_folder(folder)


@contextlib.contextmanager
def as_folders(adapters: dict[str, str]) -> Iterator[dict[str, str]]:
    """Name -> PEFT folder for adapters given in either form; unpacked files live until the block ends."""
    with tempfile.TemporaryDirectory(prefix="trace_adapters_") as work:
        folders = {}
        for name, given in adapters.items():
            path = Path(given)
            if path.is_dir():
                folders[name] = str(check_folder(path))
            elif path.is_file():
                folders[name] = str(unpack_file(path, Path(work) / name))
            else:
                raise InputError(f"adapter {given}: not found; expected a PEFT folder or a .safetensors file")
        yield folders


def parse_adapters(text: str) -> dict[str, str]:
    """``PATH,NAME=PATH,...`` -> name -> path; the default name is that of the folder or file.

    Raises:
        InputError: a name twice.
    """
    adapters: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, found, path = part.partition("=")
        if not found:
            path = part
            name = Path(part.rstrip("/")).name.removesuffix(".safetensors")
        if name in adapters:
            raise InputError(f"adapter name {name!r} appears twice; write NAME=PATH to tell them apart")
        adapters[name] = path
    return adapters


def describe(folder: str) -> str:
    """Rank and targets in a few words, for progress output."""
    path = Path(folder) / "adapter_config.json"
    config = check(_PeftConfig, read_json(path, "adapter config"), f"adapter config {path}")
    targets = config.target_modules
    named = f"targets {targets}" if isinstance(targets, str) else f"{len(targets or ())} target kinds"
    return f"rank {config.r}, {named}"
