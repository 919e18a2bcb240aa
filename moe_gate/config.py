"""``configs/moe_gate.yaml`` as one typed object: what every command around the gate reads."""

from __future__ import annotations

import difflib
import os
from typing import Any, Literal

from pydantic import Field, model_validator

from moe_gate.routing import RoutingGranularity, RoutingMode, RoutingScope
from pipeline.files import InputError, SettingsModel, check, read_yaml


class VllmSection(SettingsModel):
    """How the trained model is served; arguments after the model's folder."""

    serve_args: list[str] = Field(default_factory=list)
    base_urls: list[str] = Field(default_factory=list)


class GrpoSection(SettingsModel):
    """GRPO of the gates (``train.grpo_gater``); names and defaults as in ``python -m train`` where both have them.

    Args:
        games: registered environments with weights, ``a:2,b:1``.
        init_gate: the gates to start from; null = those that ``train_router_sft`` wrote to ``output_dir``.
        output_dir: null = ``<output_dir>_grpo``.
        lr: of the gates, on raw hidden states.
    """

    games: str = ""
    init_gate: str | None = None
    output_dir: str | None = None
    max_iters: int = Field(default=40, ge=1)
    group_size: int = Field(default=16, ge=2)
    groups_per_batch: int = Field(default=8, ge=1)
    dynamic_sampling_max_batches: int = Field(default=3, ge=1)
    lr: float = Field(default=1e-4, ge=0)
    temperature: float = Field(default=1.0, gt=0)
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.28, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    max_new_tokens: int | None = Field(default=None, ge=1)
    max_seq_length: int = Field(default=16_384, ge=8)
    episode_deadline_s: float = Field(default=600.0, gt=0)
    concurrency: int = Field(default=256, ge=1)
    pack_tokens: int = Field(default=1024, ge=1)
    save_every: int = Field(default=5, ge=1)


class GateConfig(SettingsModel):
    """The gate's configuration. Paths are relative to the working directory.

    Args:
        adapter_names: capabilities in slot order; each is ``<adapter_dir>/<name>/`` or
            ``<adapter_dir>/<name>.safetensors``.
        target_modules: when given, must agree with what the adapters touch.
        total_steps: optimiser steps per round; 0 = three passes over the data.
        batch_size: episodes per optimiser step, times ``gradient_accumulation``.
        lr: of the gate weights, on features divided by their root mean square (folded into the weights afterwards).
        bias_lr: of the gate biases; a bias of 5 has to be overcome in a few hundred steps.
        sft_data: JSONL of ``{"prompt", "capability_name"}``; null = none.
        grpo_data_glob: rollout files whose successful episodes are labelled with their ``adapter``; null = none.
        min_reward: an episode counts as successful from this reward on.
        label_tokens: ``all`` (prompt tokens too: their keys and values depend on their route) or ``action``.
        on_policy_rounds: further rounds on the hidden states that the gate's own routes produce.
        on_policy_tokens: such a round takes every k-th episode, so that about this many training tokens are run.
        max_length: longer episodes are cut at the end.
        max_tokens_in_memory: token features kept for training, per layer; episodes beyond it are left out (and
            counted).
    """

    run_name: str = "gate"
    output_dir: str
    base_model: str
    adapter_dir: str
    adapter_names: list[str] = Field(min_length=1)
    routing_scope: RoutingScope = "per_layer"
    routing_granularity: RoutingGranularity = "token"
    routing_mode: RoutingMode = "top1"
    global_layer: int = Field(default=0, ge=0)
    target_modules: list[str] | None = None
    include_base_slot: bool = True
    base_bias: float = 5.0
    dtype: Literal["bfloat16", "float32", "float16", "auto"] = "auto"
    seed: int = Field(default=0, ge=0, le=2**31)

    optimizer: Literal["adamw"] = "adamw"
    lr: float = Field(default=5e-4, gt=0)
    bias_lr: float = Field(default=5e-2, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    total_steps: int = Field(default=0, ge=0)
    batch_size: int = Field(default=16, ge=1)
    gradient_accumulation: int = Field(default=1, ge=1)
    load_balance_coef: float = Field(default=0.001, ge=0)

    sft_data: str | None = None
    grpo_data_glob: str | None = None
    min_reward: float = 1.0
    label_tokens: Literal["all", "action"] = "all"
    on_policy_rounds: int = Field(default=1, ge=0)
    on_policy_tokens: int = Field(default=10_000, ge=100)
    val_fraction: float = Field(default=0.2, gt=0, lt=0.9)
    eval_every: int = Field(default=10, ge=1)
    patience: int = Field(default=5, ge=1)
    max_length: int = Field(default=4096, ge=8)
    max_tokens_in_memory: int = Field(default=50_000, ge=100)
    forward_batch_size: int = Field(default=16, ge=1)
    vllm: VllmSection = VllmSection()
    grpo: GrpoSection = GrpoSection()

    @model_validator(mode="after")
    def _names_are_distinct(self) -> GateConfig:
        if len(set(self.adapter_names)) < len(self.adapter_names) or "base" in self.adapter_names:
            raise ValueError("adapter_names must be distinct and none may be 'base'")
        return self


def load_gate_config(path: str | os.PathLike[str], overrides: dict[str, Any] | None = None) -> GateConfig:
    """Read and check a gate configuration; ``overrides`` replace top-level keys.

    Raises:
        InputError: missing file, not YAML, an unknown key (the nearest known one is named) or a wrong value.
    """
    data = read_yaml(path) | (overrides or {})
    for key in data:
        if key not in GateConfig.model_fields:
            near = difflib.get_close_matches(str(key), GateConfig.model_fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"configuration {path}: unknown key {key}{hint}")
    return check(GateConfig, data, f"configuration {path}")
