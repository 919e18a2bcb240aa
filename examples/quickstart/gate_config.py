"""Write the gate's configuration for a quickstart run: its adapters, and the rollouts of the last training iterations.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from pipeline.files import InputError, run_cli, write_text

LAST = 4  # iterations whose rollouts the gate learns from: the adapters are nearly what they will be


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--model", required=True)
    parser.add_argument("--names", nargs="+", required=True, help="capabilities in slot order")
    args = parser.parse_args()
    recent = args.run / "gate_rollouts"
    recent.mkdir(parents=True, exist_ok=True)
    for old in recent.iterdir():
        old.unlink()
    for name in args.names:
        logs = sorted((args.run / "train" / "rollouts").glob(f"{name}_[0-9]*.jsonl"))
        if not logs:
            raise InputError(f"{args.run}/train/rollouts: no rollout log of {name}; train with rollout_log: true")
        for log in logs[-LAST:]:
            (recent / log.name).symlink_to(log.resolve())
    config = {
        "run_name": "quickstart",
        "output_dir": str(args.run / "gate"),
        "base_model": args.model,
        "adapter_dir": str(args.run / "adapters"),
        "adapter_names": args.names,
        "grpo_data_glob": str(recent / "*.jsonl"),
        "total_steps": 200,  # three passes over so few episodes leave the gates at their base bias
        "eval_every": 50,
    }
    write_text(args.run / "moe_gate.yaml", yaml.safe_dump(config, sort_keys=False))
    return 0


if __name__ == "__main__":
    run_cli(main)
