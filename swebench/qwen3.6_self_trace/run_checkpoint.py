"""What ``--checkpoint`` names: an adapter folder, a whole model's folder, or a name that the server knows already."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import run_server
from pydantic import BaseModel, ConfigDict, StrictStr
from run_settings import ROOT, RunSettings, server_flag

from pipeline.files import InputError, ServerError, check, read_json, resolved

LOAD_TIMEOUT_S = 300.0  # an adapter on a network disk
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
NAME_DIGITS = 10
CHUNK = 1 << 20
VLLM_MAX_LORA_RANK = 16  # without the flag
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


class AdapterConfig(BaseModel):
    """What is needed of PEFT's ``adapter_config.json``."""

    model_config = ConfigDict(extra="ignore")
    base_model_name_or_path: StrictStr | None = None
    r: int = 8  # as in PEFT
    rank_pattern: dict[str, int] = {}
    use_dora: bool = False
    modules_to_save: list[str] | None = None

    @property
    def rank(self) -> int:
        """The largest rank of any of its layers, which is what a server must have room for."""
        return max([self.r, *self.rank_pattern.values()])


def fits(checkpoint: Checkpoint, settings: RunSettings, models: Mapping[str, Mapping[str, Any]]) -> str:
    """What an adapter or a routed folder rests on, once it is sure that this is the run's base model, and that the
    server of the configuration has room for the adapter's rank; "" for what rests on nothing.

    Args:
        models: what the server offers, as ``run_server.served`` has it; empty when there is none yet.

    Raises:
        InputError: another base model, too large a rank, or a kind of adapter that vLLM does not load.
    """
    if checkpoint.path is None:
        return ""
    if checkpoint.kind == "model":
        return _routed_fits(checkpoint.path, settings, models)
    path = checkpoint.path / ADAPTER_FILES[0]
    config = check(AdapterConfig, read_json(path, "adapter configuration"), f"adapter configuration {path}")
    if config.use_dora or config.modules_to_save:
        what = "DoRA" if config.use_dora else f"modules_to_save {', '.join(config.modules_to_save or [])}"
        raise InputError(f"{path}: has {what}, which vLLM does not load; merge it into a model's folder")
    _require_base(config.base_model_name_or_path, str(path), settings, models)
    limit = _rank_limit(settings)
    if limit is not None and config.rank > limit:
        raise InputError(f"{path}: rank {config.rank}, the server takes {limit}; raise --max-lora-rank in server.args")
    return f"rank {config.rank}{f' of {limit}' if limit else ''} over {config.base_model_name_or_path}"


def _routed_fits(path: Path, settings: RunSettings, models: Mapping[str, Mapping[str, Any]]) -> str:
    """A folder of ``moe_gate.export``; any other model's folder rests on nothing."""
    config = read_json(path / "config.json", "model configuration")
    if not isinstance(config, dict):
        raise InputError(f"{path / 'config.json'}: expected an object, found {type(config).__name__}; export it again")
    spec = config.get("trace_gate")
    if not isinstance(spec, dict):
        return ""
    from moe_gate.exported import ExportSpec, vllm_refusal

    checked = check(ExportSpec, spec, f"{path / 'config.json'}: trace_gate")
    if why := vllm_refusal(checked):
        raise InputError(f"--checkpoint {path}: {why}")
    _require_base(checked.base_model, str(path), settings, models)
    return f"{len(checked.adapters)} adapters over {checked.base_model}"


def _require_base(base: str | None, where: str, settings: RunSettings, models: Mapping[str, Mapping[str, Any]]) -> None:
    known = {settings.model.name, settings.training.base_model, models.get(settings.model.name, {}).get("root")}
    if base is None:
        raise InputError(f"{where}: names no base model; add base_model_name_or_path")
    if not any(_same_model(base, name) for name in known if isinstance(name, str)):
        raise InputError(
            f"{where}: rests on {base}, the run is about {settings.model.name}; serve that base, or name it in "
            "training.base_model if it is the same model"
        )


def _same_model(one: str, other: str) -> bool:
    """The same name, or the same folder."""
    return one == other or ((ROOT / one).is_dir() and (ROOT / one).resolve() == (ROOT / other).resolve())


def _rank_limit(settings: RunSettings) -> int | None:
    """The largest rank that a server with the configuration's flags takes; None when they do not say."""
    if "--enable-lora" not in shlex.split(settings.server.args):
        return None
    return server_flag(settings, "--max-lora-rank", VLLM_MAX_LORA_RANK)


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
        InputError: it rests on another base model, or its rank is too large.
        ServerError: the server does not offer it, serves another base model, or refuses the adapter.
    """
    models = run_server.served(settings)
    fits(checkpoint, settings, models)
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
