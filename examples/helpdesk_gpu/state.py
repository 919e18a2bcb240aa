"""Carry a run folder from one machine to the next: what is worth keeping, in few files of limited size.

    python examples/helpdesk_gpu/state.py pack --run runs/helpdesk_gpu --size gpu --out OUT
    python examples/helpdesk_gpu/state.py unpack --run runs/helpdesk_gpu FOLDER...

A pack has all records, episodes, gates and metrics, and of the weights and rollout logs those that unfinished stages
need, most valuable stage first, up to a limit. Weights that an earlier pack of the same folder has are not packed
again, so ``unpack`` wants all packs of a run. Checkpoints of unfinished trainings are too large: such a training starts
anew on the other machine, a finished one does not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent))

import plan
from scheduler import Stage, pending
from sizes import SIZES, Size

from pipeline.files import InputError, run_cli, write_json

MIB = 2**20
PART = re.compile(r"pack(\d+)\.(text\.tar\.xz|weights\.tar)\.(\d\d)")
SMALL = ("done", "logs", "mine_a", "mine_b", "environments", "score", "score_vllm", "transfer", "results")
PACKED = "packed.json"  # what the packs so far have: path -> size, mtime in ns, number of the pack
LEFT = ("report.html", "state.safetensors")  # made again from the rest


def text_files(run: Path, todo: Iterable[str]) -> list[Path]:
    """Records, episodes, gates and metrics: small when compressed."""
    found = [p for name in SMALL for p in (run / name).rglob("*") if p.is_file() and p.suffix != ".safetensors"]
    found += [run / name for name in ("machine.json", "pieces.jsonl") if (run / name).exists()]
    found += [p for p in (run / "gates").rglob("*") if p.is_symlink() or p.is_file()]
    for metrics in (run / "training").glob("*/metrics.jsonl"):
        if f"07_train_{metrics.parent.name}" not in todo:
            found.append(metrics)
    if "10_gate_grpo" not in todo:
        found = [p for p in found if not p.is_relative_to(run / "gates" / "grpo" / "checkpoints")]
    return sorted(p for p in found if p.name not in LEFT and not p.name.endswith(".tmp"))


def needed_files(run: Path, stages: Sequence[Stage], todo: set[str], size: Size) -> list[Path]:
    """Weights and rollout logs that stages still to do read: what their commands name, then the rest of what they need
    (a gate's file names its adapters), each in order of the stages; of adapters those of the largest budget first."""
    by_name = {stage.name: stage for stage in stages}
    named: dict[Path, None] = {}
    others: dict[Path, None] = {}
    for stage in (s for s in stages if s.name in todo):
        words = set(re.split(r"[,=]|\0", "\0".join(stage.command)))
        for need in (by_name[n] for n in stage.needs if n not in todo):
            for path in reversed(need.makes):
                if path.is_relative_to(run / "training") or path == run / "routed":
                    continue  # checkpoints; an export is made again
                found = named if {str(path), str(path.parent)} & words else others
                found |= dict.fromkeys(_files(path))
        if stage.name.startswith(("09_config_", "09_gate_")):
            named |= dict.fromkeys(_logs(run, size))
    return list(named | others)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from sorted(p for p in path.rglob("*") if p.is_file())


def _logs(run: Path, size: Size) -> list[Path]:
    """Rollout logs of the iterations that gates learn from: the last ones before every budget."""
    last = {i for budget in size.budgets for i in range(budget - plan.GATE_ITERATIONS + 1, budget + 1)}
    logs = sorted((run / "training").glob("*/rollouts/*.jsonl"))
    return [p for p in logs if int(p.stem.rpartition("_")[2]) in last]


def pack(run: Path, size: Size, stages: Sequence[Stage], out: Path, part_mib: float, limit_mib: float) -> list[Path]:
    """Write a pack to ``out``; returns the files that did not fit.

    Raises:
        InputError: the text alone is over the limit.
    """
    todo = pending(stages, run)
    record = run / PACKED
    before: dict[str, list[int]] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    number = 1 + max((pack for *_, pack in before.values()), default=0)
    out.mkdir(parents=True, exist_ok=True)
    needed = needed_files(run, stages, todo, size)
    logs = [p for p in needed if p.suffix == ".jsonl"]
    text = out / f"pack{number:02d}.text.tar.xz"
    write_tar(text, run, [*text_files(run, todo), *logs], compress=True)
    room, left, chosen = int(limit_mib * MIB) - text.stat().st_size, [], []
    if room < 0:
        raise InputError(f"{text}: {text.stat().st_size / MIB:.1f} MiB, more than --limit-mib {limit_mib:g}; raise it")
    taken = {str(text.relative_to(out)): [0, 0, number]}
    for path in (p for p in needed if p.suffix != ".jsonl"):
        stat, key = path.stat(), str(path.relative_to(run))
        if before.get(key, [])[:2] == [stat.st_size, stat.st_mtime_ns]:
            continue
        if stat.st_size + 4096 > room:
            left.append(path)
            continue
        room -= stat.st_size + 4096
        chosen.append(path)
        taken[key] = [stat.st_size, stat.st_mtime_ns, number]
    weights = out / f"pack{number:02d}.weights.tar"
    write_tar(weights, run, chosen, compress=False)
    for file in (text, weights):
        split(file, int(part_mib * MIB))
    write_json(record, before | taken)
    return left


def write_tar(file: Path, run: Path, members: Iterable[Path], *, compress: bool) -> None:
    with open(file, "wb") as sink:
        if not compress:
            _fill(sink, run, members)
            return
        process = subprocess.Popen(["xz", "-T0", "-3", "-c"], stdin=subprocess.PIPE, stdout=sink)
        assert process.stdin is not None
        with process.stdin as pipe:
            _fill(pipe, run, members)
        if process.wait():
            raise InputError(f"{file}: xz ended with {process.returncode}")


def _fill(sink: IO[bytes], run: Path, members: Iterable[Path]) -> None:
    with tarfile.open(fileobj=sink, mode="w|") as tar:
        for path in members:
            tar.add(path, arcname=str(path.relative_to(run)), recursive=False)


def split(file: Path, size: int) -> list[Path]:
    """``file.00``, ``file.01``, .. of at most ``size`` bytes in place of ``file``."""
    parts: list[Path] = []
    with open(file, "rb") as source:
        while chunk := source.read(size):
            part = file.with_name(f"{file.name}.{len(parts):02d}")
            part.write_bytes(chunk)
            parts.append(part)
    file.unlink()
    return parts


def unpack(run: Path, folders: Sequence[Path]) -> list[str]:
    """Put all packs in ``folders`` into ``run``, the oldest first; returns their names.

    The run knows then what they have, so that its next pack has the next number and none of their weights.

    Raises:
        InputError: no pack there, or a part is missing or damaged.
    """
    found: dict[tuple[int, str], dict[int, Path]] = {}
    for path in (p for folder in folders for p in folder.iterdir()):
        if match := PART.fullmatch(path.name):
            found.setdefault((int(match[1]), match[2]), {})[int(match[3])] = path
    if not found:
        raise InputError(f"{', '.join(map(str, folders))}: no pack there; expected files like pack01.text.tar.xz.00")
    run.mkdir(parents=True, exist_ok=True)
    taken: dict[str, list[int]] = {}
    for (number, kind), parts in sorted(found.items()):
        if sorted(parts) != list(range(len(parts))):
            raise InputError(
                f"pack {number}, {kind}: parts {sorted(parts)}, expected 0 to {max(parts)}; fetch them all"
            )
        whole = run / f".pack{number:02d}.{kind}"
        with open(whole, "wb") as sink:
            for index in sorted(parts):
                sink.write(parts[index].read_bytes())
        try:
            with tarfile.open(whole) as tar:
                members = tar.getnames()
                tar.extractall(run, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise InputError(f"pack {number}, {kind}: damaged ({error}); fetch its parts again") from None
        finally:
            whole.unlink()
        taken[f"pack{number:02d}.{kind}"] = [0, 0, number]
        for name in members:
            stat = (run / name).lstat()
            taken[name] = [stat.st_size, stat.st_mtime_ns, number]
    write_json(run / PACKED, taken)
    return [f"pack{number:02d}.{kind}" for number, kind in sorted(found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("folders", type=Path, nargs="*", help="unpack: where the parts are")
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--size", choices=SIZES, default="gpu", help="[%(default)s]")
    parser.add_argument("--model", default="models/smollm2", help="of the run [%(default)s]")
    parser.add_argument("--out", type=Path, help="pack: folder for the parts")
    parser.add_argument("--part-mib", type=float, default=15.0, help="size of a part [%(default)s]")
    parser.add_argument("--limit-mib", type=float, default=60.0, help="size of a pack [%(default)s]")
    args = parser.parse_intermixed_args()  # the folders may come last
    if args.action == "unpack":
        if not args.folders:
            raise InputError("unpack: expected the folders that hold the parts")
        print(f"{args.run}: {', '.join(unpack(args.run, args.folders))}")
        return 0
    if args.out is None:
        raise InputError("pack: expected --out FOLDER")
    plugin = importlib.util.find_spec("vllm") is not None
    stages = plan.all_stages(args.run, args.model, SIZES[args.size], plugin)
    left = pack(args.run, SIZES[args.size], stages, args.out, args.part_mib, args.limit_mib)
    for path in sorted(args.out.iterdir()):
        print(f"{path}: {path.stat().st_size / MIB:.1f} MiB")
    if left:
        print(f"left out ({len(left)} files; the next pack has them): {', '.join(str(p) for p in left[:8])}")
    return 0


if __name__ == "__main__":
    run_cli(main)
