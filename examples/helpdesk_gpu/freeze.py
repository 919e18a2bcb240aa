"""The adapters of a training run as they were after some iterations, as bf16 PEFT folders: what a bf16 server serves.

    python examples/helpdesk_gpu/freeze.py --train runs/t --adapters runs/f --names a,b --iterations 6,12 --out F6 F12

They are taken from the checkpoints. A run that ended earlier (solved) gives its last state.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.files import InputError, read_json, run_cli


def checkpoint_at(folder: Path, iterations: int) -> Path:
    """The newest checkpoint that is no younger than ``iterations``.

    Raises:
        InputError: there is none.
    """
    from train.run_log import list_checkpoints

    found = [p for p in list_checkpoints(folder) if int(p.name.removeprefix("iter_")) <= iterations]
    if not found:
        raise InputError(f"{folder}: no checkpoint up to iteration {iterations}; train again")
    return found[-1]


def freeze(train: Path, adapters: Path, name: str, iterations: int, out: Path) -> Path:
    """Write ``out/name``; returns the checkpoint it is from.

    Raises:
        InputError: checkpoint or exported adapter missing or damaged.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from train.lora import write_peft_folder

    source = checkpoint_at(train / "checkpoints" / name, iterations)
    config = read_json(adapters / name / "adapter_config.json", "adapter config")
    file = source / "adapter.safetensors"
    try:
        state = load_file(str(file))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: damaged ({error}); train again") from None
    write_peft_folder(out / name, {k: v.to(torch.bfloat16) for k, v in state.items()}, config)
    return source


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="output folder of python -m train")
    parser.add_argument("--adapters", type=Path, required=True, help="its adapter folder (for the PEFT configuration)")
    parser.add_argument("--names", required=True, help="comma list of adapters")
    parser.add_argument("--iterations", required=True, help="comma list")
    parser.add_argument("--out", type=Path, nargs="+", required=True, help="folders of the adapters, one each")
    args = parser.parse_args()
    numbers = [int(n) if n.isdigit() else 0 for n in args.iterations.split(",")]
    if min(numbers) < 1 or len(numbers) != len(args.out):
        raise InputError(f"--iterations {args.iterations}: expected numbers >= 1, as many as --out has folders")
    for iterations, out in zip(numbers, args.out, strict=True):
        for name in filter(None, args.names.split(",")):
            print(f"{out / name}: {freeze(args.train, args.adapters, name, iterations, out)}")
    return 0


if __name__ == "__main__":
    run_cli(main)
