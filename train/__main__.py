"""Train one LoRA per capability with GRPO.

torchrun --nproc_per_node=4 -m train --game capability_lookup --model Qwen/Qwen3-8B   # with VLLM_BASE_URLS set
python -m train --capabilities a,b,c --model models/smollm2                         # no server: samples in this process
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from game_registry import GameMix
from pipeline.files import InputError
from pipeline.remote_game import resolve_game
from train.config import FIRST_TRAIN_SEED, TrainConfig, build_parser, load_config, seed_range
from train.distributed import held_folder, run_ranks, said_once
from train.run_log import list_checkpoints


def main() -> int:
    arguments = vars(build_parser().parse_args())
    warnings.filterwarnings("ignore", message=".*should not be contained in the prefix.*", module="peft")
    with said_once():
        config = load_config(arguments, dict(os.environ))
        tasks = train_seeds(config)
        mixes = {name: GameMix.parse(text) for name, text in config.adapter_games().items()}
        specs = {game: resolve_game(game, config.root or None) for mix in mixes.values() for game in mix.weights}
    with held_folder(config.output_dir):
        with said_once():
            resume = resume_points(config, list(mixes))
        from train.run import run  # transformers and peft take seconds: what is wrong above is said before

        return run(config, mixes, specs, tasks, resume)


def train_seeds(config: TrainConfig) -> range:
    """The seeds to train on, empty for ever new ones. Nothing that is trained on is evaluated."""
    evaluated = seed_range(config.eval_seeds, "--eval-seeds")
    if not config.train_seeds:
        if evaluated.stop > FIRST_TRAIN_SEED:
            raise InputError(
                f"--eval-seeds {config.eval_seeds}: seeds from {FIRST_TRAIN_SEED} on are trained on; use lower ones"
            )
        return range(0)
    seeds = seed_range(config.train_seeds, "--train-seeds")
    if config.eval_every and seeds.start < evaluated.stop and evaluated.start < seeds.stop:
        raise InputError(f"--train-seeds {config.train_seeds}: overlaps --eval-seeds {config.eval_seeds}")
    most = config.groups_per_batch * config.dynamic_sampling_max_batches
    if len(seeds) < most:
        raise InputError(
            f"--train-seeds {config.train_seeds}: an iteration may need {most} different tasks (--groups-per-batch x "
            f"--dynamic-sampling-max-batches), found {len(seeds)}; give more, or lower one of the two"
        )
    return seeds


def resume_points(config: TrainConfig, names: list[str]) -> dict[str, Path]:
    """Newest checkpoint per adapter; refuses to overwrite a run that was not meant to be resumed."""
    folder = Path(config.output_dir)
    found = {n: c[-1] for n in names if (c := list_checkpoints(folder / "checkpoints" / n))}
    if found and not config.resume:
        raise InputError(
            f"--output-dir {folder}: holds checkpoints of {', '.join(found)}; add --resume, or choose another folder"
        )
    metrics = folder / "metrics.jsonl"
    if not config.resume and metrics.is_file() and metrics.read_bytes().strip():
        raise InputError(f"--output-dir {folder}: holds the metrics of a run; add --resume, or choose another folder")
    return found


if __name__ == "__main__":
    run_ranks(main)
