"""Write the gate's configuration for a run: its adapters, and the rollouts of the last training iterations.

    python examples/quickstart/gate_config.py --run runs/quickstart --model models/smollm2 --names a b
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import yaml

from pipeline.files import InputError, run_cli, write_text

LAST = 4  # iterations whose rollouts the gate learns from: the adapters are nearly what they will be


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--model", required=True)
    parser.add_argument("--names", nargs="+", required=True, help="capabilities in slot order")
    parser.add_argument("--rollouts", type=Path, nargs="+", help="folders of rollout logs [RUN/train/rollouts]")
    parser.add_argument("--until", type=int, default=10**6, help="last iteration whose rollouts are used [the last]")
    parser.add_argument("--adapters", type=Path, help="folder of the adapters [RUN/adapters]")
    parser.add_argument("--gate", default="gate", help="the gate goes to RUN/NAME [%(default)s]")
    parser.add_argument("--config", type=Path, help="file to write [RUN/moe_NAME.yaml]")
    parser.add_argument("--steps", type=int, default=200, help="optimiser steps [%(default)s]")
    parser.add_argument("--min-reward", type=float, default=1.0, help="of a rollout that teaches [%(default)s]")
    args = parser.parse_args()
    recent = args.run / f"{args.gate}_rollouts"
    recent.mkdir(parents=True, exist_ok=True)
    for old in recent.iterdir():
        old.unlink()
    folders = args.rollouts or [args.run / "train" / "rollouts"]
    for name in args.names:
        found = [log for folder in folders for log in folder.glob(f"{name}_[0-9]*.jsonl")]
        logs = sorted(log for log in found if int(log.stem.rpartition("_")[2]) <= args.until)
        if not logs:
            places = ", ".join(map(str, folders))
            raise InputError(f"{places}: no rollout log of {name}; train with rollout_log: true")
        for log in logs[-LAST:]:
            link = recent / log.name
            link.symlink_to(os.path.relpath(log.resolve(), recent.resolve()))  # the run folder may move
    config = {
        "run_name": args.run.name,
        "output_dir": str(args.run / args.gate),
        "base_model": args.model,
        "adapter_dir": str(args.adapters or args.run / "adapters"),
        "adapter_names": args.names,
        "grpo_data_glob": str(recent / "*.jsonl"),
        "total_steps": args.steps,  # three passes over so few episodes leave the gates at their base bias
        "eval_every": max(1, args.steps // 4),
        "min_reward": args.min_reward,
    }
    write_text(args.config or args.run / f"moe_{args.gate}.yaml", yaml.safe_dump(config, sort_keys=False))
    return 0


if __name__ == "__main__":
    run_cli(main)
