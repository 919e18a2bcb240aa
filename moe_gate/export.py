"""Write a routed model as one folder that transformers and stock vLLM load.

    python -m moe_gate.export --gate runs/gate --out runs/routed
    vllm serve runs/routed                                   # with this package installed (it brings the plugin)
    AutoModelForCausalLM.from_pretrained("runs/routed", trust_remote_code=True)     # without it: self-contained module

The folder: the base's weight files (linked or copied; or by reference), ``model-routing.safetensors`` (stacked adapters
and gates), ``config.json`` with the key ``trace_gate``, the tokenizer, ``modeling_trace_routed.py``, the adapters as
PEFT folders, and a model card.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from moe_gate import attach, experts, exported, factors, linear, routing
from moe_gate.adapters import save_adapter_folder
from moe_gate.checkpoint import GateMetadata, load_routed, read_gate
from moe_gate.exported import CONFIG_KEY, ExportSpec, rank_table, read_spec, vllm_refusal
from pipeline.files import InputError, read_json, run_cli, write_json
from pipeline.folders import replace_folder

ROUTING_FILE = "model-routing.safetensors"
MODULE_FILE = "modeling_trace_routed"
_SKIPPED = {"config.json", "model.safetensors.index.json", "README.md", ".gitattributes", "trace_source.json"}


def export(
    gate: str, out: str | os.PathLike[str], *, include_base: bool = True, adapter_dir: str | None = None
) -> Path:
    """Export the routed model of a gate run to the folder ``out``.

    Raises:
        InputError: gate, adapters or base missing; ``out`` exists and is not an exported folder.
    """
    target = Path(out)
    if target.exists() and any(target.iterdir()) and not _is_exported(target):
        raise InputError(f"--out {target}: holds other files; choose an empty or new folder")
    metadata, _ = read_gate(gate)
    model = load_routed(gate, adapter_dir=adapter_dir)
    base = base_folder(metadata.base_model, metadata.base_revision)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_folder(work, model, base, metadata, include_base, adapter_dir)
        work.chmod(0o755)
        replace_folder(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _is_exported(folder: Path) -> bool:
    try:
        return CONFIG_KEY in read_json(folder / "config.json")
    except InputError:
        return False


def base_folder(base_model: str, revision: str | None) -> Path:
    """The local folder of a base model; a hub name is resolved through the hub's cache."""
    if Path(base_model).is_dir():
        return Path(base_model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(base_model, revision=revision, ignore_patterns=["*.bin", "*.pth", "*.gguf"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(f"base model {base_model}: neither a folder nor on the hub ({str(error)[:120]})") from None


def _write_folder(
    work: Path, model: Any, base: Path, metadata: GateMetadata, include_base: bool, adapter_dir: str | None
) -> None:
    architecture = type(model).__name__
    spec = ExportSpec(
        slot_names=metadata.slot_names, routing_scope=metadata.routing_scope,
        routing_granularity=metadata.routing_granularity, routing_mode=metadata.routing_mode,
        global_layer=metadata.global_layer, base_architecture=architecture, base_model=metadata.base_model,
        base_revision=metadata.base_revision, base_included=include_base, adapters=metadata.adapters,
        table=rank_table(model),
    )  # fmt: skip
    routing_tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if _is_routing(name)}
    save_file(routing_tensors, work / ROUTING_FILE, metadata={"format": "pt"})
    if include_base:
        _link_base(base, work, list(routing_tensors))
    config = read_json(base / "config.json", "base configuration")
    config |= {
        "architectures": [f"TraceRouted{architecture}"],
        "auto_map": {"AutoModelForCausalLM": f"{MODULE_FILE}.TraceRouted{architecture}"},
        CONFIG_KEY: spec.model_dump(),
    }
    write_json(work / "config.json", config)
    (work / f"{MODULE_FILE}.py").write_text(self_contained_module(architecture), encoding="utf-8")
    for file in base.iterdir():
        small = file.suffix in {".json", ".jinja", ".txt", ".model"}
        if file.is_file() and small and file.name not in _SKIPPED:
            shutil.copyfile(file, work / file.name)
    for record in metadata.adapters:
        source = Path(adapter_dir) / record.name if adapter_dir else Path(record.path)
        save_adapter_folder(
            source if source.exists() else source.with_suffix(".safetensors"), work / "adapters" / record.name
        )
    (work / "README.md").write_text(model_card(spec, metadata), encoding="utf-8")


def _is_routing(name: str) -> bool:
    last = name.rsplit(".", 1)[1]
    return "capability_rout" in name or last.startswith("lora_")


def _link_base(base: Path, work: Path, routing_names: list[str]) -> None:
    """The base's safetensors files under their names (a single file gets another, or transformers would read no
    index)."""
    files = sorted(base.glob("*.safetensors"))
    if not files:
        raise InputError(f"base model {base}: has no safetensors files; convert it first")
    weight_map: dict[str, str] = {}
    for file in files:
        name = "model-base.safetensors" if file.name == "model.safetensors" else file.name
        with safe_open(file, framework="pt") as opened:
            weight_map |= dict.fromkeys(opened.keys(), name)
        try:
            os.link(file.resolve(), work / name)
        except OSError:  # another disk
            shutil.copyfile(file, work / name)
    weight_map |= dict.fromkeys(routing_names, ROUTING_FILE)
    total = sum(file.stat().st_size for file in work.glob("*.safetensors"))
    write_json(work / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def self_contained_module(architecture: str) -> str:
    """Source of ``modeling_trace_routed.py``: the routing code of this package in one file, for transformers' remote
    code."""
    sources = [_bare_source(module) for module in (factors, routing, linear, experts, attach)]
    sources.append(_functions(exported, "empty_factors", "attach_from_spec"))
    return f'''"""Routed {architecture}: token-level gates over stacked LoRA adapters. Written by moe_gate.export; needs
    torch and transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import {architecture}


class InputError(ValueError):
    """The model and the routing do not fit."""


{chr(10).join(sources)}

class TraceRouted{architecture}({architecture}):
    """{architecture} with the routing that ``config.{CONFIG_KEY}`` describes."""

    _keep_in_fp32_modules_strict = {sorted(exported.FP32_MODULES)!r}

    def __init__(self, config):
        super().__init__(config)
        attach_from_spec(self, config.{CONFIG_KEY})
'''


def _bare_source(module: ModuleType) -> str:
    """The module without its docstring and imports."""
    source = inspect.getsource(module)
    tree, lines = ast.parse(source), source.splitlines()
    for node in tree.body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if docstring or typing_only or isinstance(node, ast.Import | ast.ImportFrom):
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(lines).strip() + "\n\n"


def _functions(module: ModuleType, *names: str) -> str:
    return "\n\n".join(inspect.getsource(getattr(module, name)) for name in names) + "\n\n"


def model_card(spec: ExportSpec, metadata: GateMetadata) -> str:
    """README of the exported folder: what is in it, routing statistics and evaluation numbers of the gate's
    training."""
    revision = f" (revision {spec.base_revision})" if spec.base_revision else ""
    lines = [
        "---", "library_name: transformers", f"base_model: {spec.base_model}", "tags: [lora, mixture, routing]", "---",
        f"# {spec.base_architecture} with {len(spec.adapters)} routed capability adapters", "",
        f"Base: `{spec.base_model}`{revision}. Routing: {spec.routing_scope}, {spec.routing_granularity},"
        f" {spec.routing_mode}; the gate of a layer sends each token to one slot.", "",
        "| slot | capability | rank | alpha | sha256 of the adapter |", "|---|---|---|---|---|",
    ]  # fmt: skip
    first = len(spec.slot_names) - len(spec.adapters)
    if first:
        lines.append("| 0 | base (no adapter) | | | |")
    for slot, record in enumerate(spec.adapters, first):
        lines.append(f"| {slot} | {record.name} | {record.r} | {record.lora_alpha:g} | `{record.sha256[:16]}` |")
    lines += ["", "Load: `vllm serve <this folder>` or `AutoModelForCausalLM.from_pretrained(<this folder>,"
              " trust_remote_code=True)`. Without remote code transformers loads the base alone.", ""]  # fmt: skip
    if metadata.training:
        lines += ["## Gate training", "", "```json", json.dumps(metadata.training, indent=2), "```", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gate", required=True, help="folder of a gate run, its gate.safetensors, or moe_gate.yaml's output_dir"
    )
    parser.add_argument("--out", required=True, help="folder to write; an older export there is replaced")
    parser.add_argument("--adapter-dir", help="where the adapters are, when they moved since the gate was trained")
    parser.add_argument(
        "--base",
        choices=["include", "reference"],
        default="include",
        help="the base's weights, or only its name [%(default)s]",
    )
    args = parser.parse_args()
    target = export(args.gate, args.out, include_base=args.base == "include", adapter_dir=args.adapter_dir)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors")) / 2**20
    print(
        f"{target}: {size:.1f} MiB of weights, {(target / ROUTING_FILE).stat().st_size / 2**20:.1f} MiB of it routing"
    )
    if refusal := vllm_refusal(read_spec(target)):
        sys.stderr.write(f"notice: {refusal}\n")
    return 0


if __name__ == "__main__":
    run_cli(main)
