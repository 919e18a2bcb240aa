"""What ``--checkpoint`` names: an adapter folder, a whole model's folder, or a name that the server knows already."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import run_server
from run_settings import RunSettings

from pipeline.files import InputError, ServerError, resolved

LOAD_TIMEOUT_S = 300.0  # an adapter on a network disk
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
NAME_DIGITS = 10
CHUNK = 1 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")  # a folder beside comparison.json, and a cell of its table


def checked_name(name: str) -> str:
    """``name``, once it is sure that it can be a folder's.

    Raises:
        InputError: it cannot.
    """
    if NAME.fullmatch(name) is None or name.lower().endswith((".json", ".md")):
        raise InputError(
            f"--name {name[:60]!r}: expected 1 to 100 of A-Z a-z 0-9 . _ @ -, beginning with a letter or digit, and no "
            "end in .json or .md; choose another with --name"
        )
    return name


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """``served_name``: what to ask the server for. It holds a digest of an adapter's files: another version of the
    adapter is another name, so no cache can mix the two up."""

    kind: Literal["adapter", "model", "served"]
    name: str
    served_name: str
    path: Path | None = None


def read_checkpoint(text: str, settings: RunSettings, name: str | None = None) -> Checkpoint:
    """The checkpoint that ``text`` names.

    Raises:
        InputError: a folder that is neither an adapter nor a model, a path that is not there, or a name that cannot
            be a folder's.
    """
    if name is not None:
        checked_name(name)
    path = resolved(text, "--checkpoint")
    if not path.exists():
        if "/" in text.removeprefix(settings.model.name) and text.startswith((".", "/", "runs/")):
            raise InputError(f"--checkpoint {text}: not found; give an adapter's folder, a model's, or a served name")
        return Checkpoint("served", name or checked_name(text.replace("/", "__")), text)
    if not path.is_dir():
        raise InputError(f"--checkpoint {text}: expected a folder, found a file")
    if all((path / file).is_file() for file in ADAPTER_FILES):
        label = name or checked_name(path.name)
        return Checkpoint("adapter", label, f"{settings.run_name}.{label}.{_digest(path)}", path)
    if (path / "config.json").is_file():
        return Checkpoint("model", name or checked_name(path.name), str(path), path)
    raise InputError(f"--checkpoint {text}: holds neither {ADAPTER_FILES[0]} with its weights nor config.json")


def _digest(folder: Path) -> str:
    total = hashlib.sha256()
    for name in ADAPTER_FILES:
        with open(folder / name, "rb") as file:
            while chunk := file.read(CHUNK):
                total.update(chunk)
    return total.hexdigest()[:NAME_DIGITS]


@contextlib.contextmanager
def available(checkpoint: Checkpoint, settings: RunSettings) -> Iterator[str]:
    """The name by which the server offers the checkpoint, for as long as the block runs.

    An adapter is loaded, and unloaded at the end; the server must serve the base model that it was trained on. A
    model's folder must be what the server was started with.

    Raises:
        ServerError: the server does not offer it, serves another base model, or refuses the adapter.
    """
    models = run_server.served(settings)
    if checkpoint.kind == "served":
        run_server.require_served(settings, checkpoint.served_name)
        yield checkpoint.served_name
        return
    if checkpoint.kind == "model":
        yield _name_of_model(checkpoint, models)
        return
    run_server.require_served(settings, settings.model.name)
    if checkpoint.served_name not in models:
        run_server.request(
            settings,
            "/v1/load_lora_adapter",
            {"lora_name": checkpoint.served_name, "lora_path": str(checkpoint.path)},
            LOAD_TIMEOUT_S,
        )
    try:
        yield checkpoint.served_name
    finally:
        with contextlib.suppress(ServerError):  # it may be what failed
            run_server.request(settings, "/v1/unload_lora_adapter", {"lora_name": checkpoint.served_name})


def _name_of_model(checkpoint: Checkpoint, models: dict[str, dict[str, object]]) -> str:
    for name, entry in models.items():
        root = entry.get("root")
        if name == checkpoint.served_name or (isinstance(root, str) and Path(root).absolute() == checkpoint.path):
            return name
    offered = ", ".join(sorted(models)) or "nothing"
    raise ServerError(f"the server serves {offered}, not {checkpoint.path}; start it with that model, or add --serve")
