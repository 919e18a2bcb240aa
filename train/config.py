"""Every setting of ``python -m train`` in one typed object: YAML first, flags over it, saved with the run."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from pipeline.files import InputError, SettingsModel, check, read_yaml
from train.losses import LossConfig

ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FIRST_TRAIN_SEED = 1_000_000  # below: rollouts, calibration, held-out evaluation


class TrainConfig(SettingsModel):
    """Settings of one training run. Defaults follow the published method where its sources agree (README, "GRPO")."""

    model_config = ConfigDict(frozen=True)

    model: str
    capabilities: tuple[str, ...] = ()  # one adapter each
    games: str = ""  # one adapter on a weighted mix: "a:2,b:1"
    name: str = ""  # of the adapter of a mix
    group_size: int = Field(16, ge=2)
    groups_per_batch: int = Field(8, ge=1)
    lora_rank: int = Field(32, ge=1)
    lora_alpha: int = Field(32, ge=1)
    target_modules: tuple[str, ...] = ALL_LINEARS
    lr: float = Field(1e-5, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    epochs: int = Field(1, ge=1)
    mini_batch_size: int = Field(0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    loss: Literal["grpo", "dr_grpo", "dapo", "gspo"] = "grpo"
    use_clipping: bool = True
    clip_low: float = Field(0.2, ge=0)
    clip_eps: float = Field(0.28, ge=0)
    kl_coef: float = Field(0.0, ge=0)
    is_cap: float = Field(2.0, ge=0)
    normalize_by_len: bool = True
    normalize_advantages: bool = True
    filter_constant_groups: bool = True
    dynamic_sampling_max_batches: int = Field(3, ge=1)
    dynamic_sampling_min_groups: int = Field(0, ge=0)
    min_group_share: float = Field(0.5, gt=0, le=1)
    temperature: float = Field(1.0, gt=0)
    max_new_tokens: int = Field(0, ge=0)
    max_seq_length: int = Field(16384, ge=16)
    episode_deadline_s: float = Field(600.0, gt=0)
    concurrency: int = Field(256, ge=1)
    hint_ratio: float = Field(0.0, ge=0, lt=1)
    pack_tokens: int = Field(0, ge=0)
    logit_chunk: int = Field(1024, ge=1)
    max_iters: int = Field(40, ge=0)
    save_every: int = Field(5, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    eval_every: int = Field(0, ge=0)
    solved_reward: float = Field(0.9, ge=0, le=1)
    eval_seeds: str = "10000:10032"
    train_seeds: str = ""
    seed: int = Field(0, ge=0, le=2**31)
    engine: Literal["auto", "vllm", "local"] = "auto"
    shard_base: bool = False
    deterministic: bool = False
    dtype: str = "auto"
    device: str = "auto"
    root: str = ""
    output_dir: str = Field("runs/train", min_length=1)
    adapter_dir: str = Field("pipeline/adapters", min_length=1)
    rollout_log: bool = False
    resume: bool = False
    user_llm_url: str = ""
    user_llm_model: str = ""
    user_llm_temperature: float = 0.0
    user_llm_max_tokens: int = 512
    report_to: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if bool(self.capabilities) == bool(self.games):
            raise ValueError("give either --game/--capabilities or --games (one adapter on a mix)")
        if len(set(self.capabilities)) != len(self.capabilities):
            raise ValueError("a capability is named twice")
        if len({adapter_name(game) for game in self.capabilities}) != len(self.capabilities):
            raise ValueError("two capabilities would share one adapter name; rename one of them")
        if self.name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", self.name):
            raise ValueError(f"name {self.name!r}: expected letters, digits, _ and -")
        return self

    def loss_config(self) -> LossConfig:
        kind = self.loss if self.normalize_by_len or self.loss != "grpo" else "dr_grpo"
        return LossConfig(
            kind=kind,
            clip_low=self.clip_low,
            clip_high=self.clip_eps,
            clipping=self.use_clipping,
            kl_coef=self.kl_coef,
            is_cap=self.is_cap or None,
            max_length=self.max_seq_length,
        )

    def adapter_games(self) -> dict[str, str]:
        """Adapter name -> its game mix."""
        if self.games:
            first = self.games.split(",")[0].split(":")[0].strip()
            return {self.name or f"{adapter_name(first)}_mix": self.games}
        return {adapter_name(game): game for game in self.capabilities}


def adapter_name(game: str) -> str:
    """``capability_<name>`` -> ``<name>``."""
    return game.removeprefix("capability_")


def seed_range(text: str, flag: str) -> range:
    """``a:b`` as range(a, b).

    Raises:
        InputError: not two integers with a < b.
    """
    low, _, high = text.partition(":")
    try:
        seeds = range(int(low), int(high))
    except ValueError:
        raise InputError(f"{flag} {text!r}: expected FIRST:END, for example 10000:10128") from None
    if len(seeds) == 0 or seeds.start < 0:
        raise InputError(f"{flag} {text!r}: expected 0 <= FIRST < END")
    return seeds


_HELP = {
    "capabilities": "comma list; one adapter each, all trained at once on one base",
    "games": "one adapter on a mix NAME:WEIGHT,NAME:WEIGHT",
    "name": "name of the adapter of a mix",
    "group_size": "rollouts per seed",
    "groups_per_batch": "seeds per iteration",
    "epochs": "passes over an iteration's rollouts",
    "mini_batch_size": "groups per optimiser step; 0 = all, one step",
    "clip_low": "lower clip of the ratio",
    "clip_eps": "upper clip of the ratio",
    "is_cap": "truncation of sampler-to-trainer importance weights; 0 = off",
    "normalize_by_len": "divide by the episode's action tokens; off = by --max-seq-length (Dr. GRPO)",
    "normalize_advantages": "divide advantages by the group's std",
    "dynamic_sampling_max_batches": "collect at most this many batches to replace constant groups",
    "dynamic_sampling_min_groups": "informative groups wanted per iteration; 0 = groups per batch",
    "min_group_share": "a group closes with this share of scored rollouts",
    "max_new_tokens": "per turn; 0 = the environment's max_gen_tokens",
    "max_seq_length": "tokens per episode",
    "concurrency": "episodes in flight per adapter",
    "hint_ratio": "share of a group that sees the environment's hint",
    "pack_tokens": "tokens of a training pass beside its longest episode; 0 = 1024 on a CPU, by free memory on a GPU",
    "logit_chunk": "rows of logits held at a time",
    "solved_reward": "without an informative group for some iterations: done from this reward on, below it a fault",
    "eval_every": "held-out greedy evaluation every n iterations, best adapter kept; 0 = never",
    "eval_seeds": "FIRST:END",
    "train_seeds": "FIRST:END, a fixed set of tasks in a shuffled order, over and over; without it every group is new",
    "engine": "auto = vllm when VLLM_BASE_URLS is set, else local",
    "shard_base": "the frozen base sharded over all ranks of torchrun (FSDP2), when it does not fit into one GPU",
    "deterministic": "the same bits every time and on every rank, where episodes share a pass; slower on a GPU",
    "root": "folder of capability_*_game.py files",
    "output_dir": "run folder: config, metrics, checkpoints, rollouts",
    "adapter_dir": "where finished adapters go",
    "rollout_log": "write every rollout with its tokens",
    "resume": "go on from the newest checkpoint in the run folder",
    "report_to": "comma list of tensorboard, trackio, wandb",
}


def build_parser() -> argparse.ArgumentParser:
    """Flags of ``python -m train``, one per field of ``TrainConfig``."""
    parser = argparse.ArgumentParser(
        prog="train", description="GRPO: one LoRA per capability on a frozen base.", argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--config", metavar="FILE", help="YAML with any of these settings; flags win")
    parser.add_argument("--game", help="one capability game (same as --capabilities with one name)")
    for name, field in TrainConfig.model_fields.items():
        flag = "--" + name.replace("_", "-")
        default = "required" if field.is_required() else field.default
        shown = ",".join(default) if isinstance(default, tuple) else default
        text = f"{_HELP.get(name, name.replace('_', ' '))} [{shown}]"
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        elif isinstance(default, tuple):
            parser.add_argument(flag, type=lambda s: tuple(p.strip() for p in s.split(",") if p.strip()), help=text)
        elif isinstance(default, int | float):
            parser.add_argument(flag, type=type(default), help=text)
        else:
            parser.add_argument(flag, help=text)
    parser.add_argument("--no-clipping", dest="use_clipping", action="store_false", help="same as --no-use-clipping")
    return parser


def load_config(arguments: dict[str, Any], environment: dict[str, str]) -> TrainConfig:
    """Merge ``--config`` and flags; the model may come from ``VLLM_MODEL``.

    Raises:
        InputError: unknown key (the nearest known one is named), wrong type, nothing to train.
    """
    values: dict[str, Any] = {}
    if "config" in arguments:
        values.update(read_yaml(arguments["config"], "config"))
    values.update({k: v for k, v in arguments.items() if k != "config"})
    if "game" in values:
        if values.get("capabilities"):
            raise InputError("give --game or --capabilities, not both; --capabilities takes a comma list")
        values["capabilities"] = (values.pop("game"),)
    if "model" not in values and environment.get("VLLM_MODEL"):
        values["model"] = environment["VLLM_MODEL"]
    for key in values:
        if key not in TrainConfig.model_fields:
            near = difflib.get_close_matches(str(key), TrainConfig.model_fields, n=1)
            raise InputError(f"config: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if not values.get("model"):
        raise InputError("no model: give --model FOLDER_OR_NAME or set VLLM_MODEL")
    return check(TrainConfig, values, "settings")
