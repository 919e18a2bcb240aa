"""Which systems an evaluation compares: the flags, and the list that they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import cast

from pipeline.files import InputError
from train.merge_methods import DENSITY, METHODS, MergeMethod
from train.systems import System

UNION = "union"
MERGE_NAMES: dict[MergeMethod, str] = {m: "merge" if m == "linear" else m for m in METHODS}
RESERVED = ("base", "routed", "soft", "chosen", UNION, *MERGE_NAMES.values())


def add_system_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that ``systems_from`` reads."""
    group = parser.add_argument_group("systems (the base is always one)")
    group.add_argument("--adapters", help="single adapters: comma list of PATH or NAME=PATH")
    group.add_argument(
        "--other-adapters",
        help="adapters to show that are no part of the composition (trained on everything, say); NAME=PATH,...",
    )
    group.add_argument(
        "--merge",
        nargs="?",
        const="linear",
        metavar="METHODS",
        help=f"merges of the adapters: comma list of {', '.join(METHODS)} [--merge alone: linear, 1/N each]",
    )
    group.add_argument("--merge-density", type=float, default=DENSITY, help="kept by TIES, DARE [%(default)s]")
    group.add_argument("--merge-max-rank", type=int, help="truncate merges to a rank that the server allows")
    group.add_argument(
        "--choose", metavar="FILE", help="the base picks one adapter per task by the descriptions in this selection"
    )
    group.add_argument("--gate", help="routed mixtures in this process: FOLDER or NAME=FOLDER,...")
    group.add_argument(
        "--soft-gate", help="the same gates as soft mixtures (softmax in place of argmax); as --gate"
    )
    group.add_argument(
        "--routed-base-url", help="servers of exported routed models: URL or NAME=URL, comma list"
    )
    group.add_argument("--routed-model", help="the served name there [the only one there]")


LISTS = ("adapters", "other_adapters", "merge", "choose", "gate", "soft_gate", "routed_base_url")


def refuse_empty(args: argparse.Namespace) -> None:
    """A flag of ``add_system_flags`` whose value is empty: a variable that is not set, and a table without its row.

    Raises:
        InputError: there is one.
    """
    for name in LISTS:
        value = getattr(args, name)
        if value is not None and not value.strip(" ,"):
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} {value!r}: expected something to evaluate; give it, or leave the flag out")


def systems_from(args: argparse.Namespace, folders: Mapping[str, str], others: Mapping[str, str]) -> list[System]:
    """Base first, then adapters, others, merges, chosen, soft and routed. Merges are written here.

    Raises:
        InputError: a reserved or repeated name, or a system whose parts are not given.
    """
    for name in (*folders, *others):
        if name in RESERVED or "/" in name:
            raise InputError(f"adapter name {name!r} is reserved or holds '/'; write NAME=PATH with another name")
    systems = [System("base", "base"), *(System(name, "adapter", folder) for name, folder in folders.items())]
    systems += [System(name, "other", folder) for name, folder in others.items()]
    systems += _merges(args, folders)
    if args.choose:
        from train.evaluation_choice import options_from

        systems.append(System("chosen", "chosen", options=options_from(folders, args.choose)))
    for name, gate in _named(args.soft_gate, "soft", "--soft-gate"):
        systems.append(System(name, "routed", gate=gate, routing_mode="soft"))
    for name, gate in _named(args.gate, "routed", "--gate"):
        systems.append(System(name, "routed", gate=gate))
    for name, url in _named(args.routed_base_url, "routed", "--routed-base-url"):
        systems.append(System(name, "routed", base_url=url, served_model=args.routed_model))
    names = [s.name for s in systems]
    if repeated := sorted({n for n in names if names.count(n) > 1}):
        raise InputError(f"system {repeated[0]!r} appears twice; write NAME=PATH to tell them apart")
    for system in systems:
        _check_gate(system.gate)
    return systems


def _merges(args: argparse.Namespace, folders: Mapping[str, str]) -> list[System]:
    methods = list(dict.fromkeys(filter(None, (m.strip() for m in (args.merge or "").split(",")))))
    if unknown := [m for m in methods if m not in METHODS]:
        raise InputError(f"--merge {unknown[0]!r}: expected a comma list of {', '.join(METHODS)}")
    if not methods:
        return []
    from train.merge import merge_adapters

    systems = []
    for method in cast("list[MergeMethod]", methods):
        target = args.out_dir / MERGE_NAMES[method]
        merge_adapters(
            folders, target, max_rank=args.merge_max_rank, method=method, density=args.merge_density, seed=args.seed
        )
        systems.append(System(MERGE_NAMES[method], "merge", str(target)))
    return systems


def _named(text: str | None, default: str, flag: str) -> list[tuple[str, str]]:
    """``PLACE`` or ``NAME=PLACE,...`` as pairs; the name may be left out once."""
    pairs = []
    for part in filter(None, (p.strip() for p in (text or "").split(","))):
        name, found, place = part.partition("=")
        if found and "/" not in name:
            pairs.append((name, place))
        else:
            pairs.append((default, part))
    for name, place in pairs:
        if not name or not place or name in ("base", UNION, "chosen", *MERGE_NAMES.values()):
            raise InputError(f"{flag} {name}={place}: expected NAME=PLACE with a name of its own, for example a=runs/a")
    return pairs


def _check_gate(gate: str | None) -> None:
    """Read it here and not when its turn has come: everything else may have been sampled for hours by then."""
    if gate is not None:
        from moe_gate.checkpoint import read_gate
        from moe_gate.config import load_gate_config

        read_gate(load_gate_config(gate).output_dir if gate.endswith((".yaml", ".yml")) else gate)
