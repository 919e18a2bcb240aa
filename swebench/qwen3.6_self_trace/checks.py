"""Checks that several phases make in their dry run: the server and its model, free disk, keys, capability names."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from run_folder import RunFolder, phase_parser, server_from_environment
from run_server import require_served
from run_settings import RunSettings

from pipeline.files import InputError, read_json
from pipeline.labels import NAME
from pipeline.selection_export import read_entries

GIB = 1024**3


def require_model(settings: RunSettings, base_url: str | None = None, model: str | None = None) -> str:
    """Refuse a model name that the server does not serve, before hours are spent; the text says what was found.

    Args:
        base_url: of another server than the run's own. model: another model than the run's own.

    Raises:
        InputError: not a URL. ServerError: no answer, or other names are served.
    """
    place = settings.model.model_copy(
        update={"base_url": base_url or settings.model.base_url, "name": model or settings.model.name}
    )
    if not place.base_url.startswith(("http://", "https://")):
        raise InputError(f"base_url: expected http://HOST:PORT, found {place.base_url!r}")
    require_served(settings.model_copy(update={"model": place}), place.name)
    return f"{place.name} at {place.base_url}"


def attached() -> bool:
    """Whether a server is named that is there already; ``run_all.sh`` starts one otherwise."""
    return server_from_environment() is not None


def export_key(settings: RunSettings) -> None:
    """Commands of the stages read the key from VLLM_API_KEY; it goes to them as a variable, never into a file."""
    if key := os.environ.get(settings.model.api_key_env, ""):
        os.environ["VLLM_API_KEY"] = key


def require_disk(folder: Path, wanted_gib: float) -> str:
    """Free space where ``folder`` is, or will be.

    Raises:
        InputError: less than ``wanted_gib``.
    """
    place = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(place).free / GIB
    if free < wanted_gib:
        raise InputError(f"{place}: {free:.1f} GiB are free, {wanted_gib:.1f} are needed; make room or set output_root")
    return f"{free:.0f} GiB free at {place}"


def require_file(path: Path, what: str, command: str) -> Path:
    """A file or folder of an earlier phase.

    Raises:
        InputError: it is missing; the text names the command that makes it.
    """
    if not path.exists():
        raise InputError(f"{what} {path}: not found; run {command}")
    return path


def capability_name(text: str) -> str:
    """``text``, when it can be a capability's name (it becomes a folder).

    Raises:
        InputError: it cannot.
    """
    if not NAME.fullmatch(text):
        raise InputError(f"capability {text!r}: expected snake_case of 2-5 words, as in selected_capabilities.json")
    return text


def names_of(text: str | None) -> list[str] | None:
    """A comma list of capability names, None when it was not given."""
    if text is None:
        return None
    names = [capability_name(part.strip()) for part in text.split(",") if part.strip()]
    if not names or len(set(names)) != len(names):
        raise InputError(f"--capabilities {text!r}: expected different names with commas between")
    return names


def capabilities_arguments(description: str | None, default: str, arguments: list[str] | None) -> argparse.Namespace:
    """The flags of phases 4 and 5. ``default``: which sets they take without ``--capabilities``."""
    parser = phase_parser(description)
    parser.add_argument("--capabilities", help=f"comma list (default: {default})")
    return parser.parse_args(arguments)


def selected_skills(folder: RunFolder) -> list[str]:
    """Names in the selection of phase 2, best first."""
    return [entry.skill for entry in read_entries(folder.selected)]


def read_object(path: Path, what: str) -> dict[str, Any]:
    """A JSON object of an earlier phase.

    Raises:
        InputError: it is something else.
    """
    data = read_json(path, what)
    if not isinstance(data, dict):
        raise InputError(f"{what} {path}: expected an object, found {str(data)[:40]!r}")
    return data
