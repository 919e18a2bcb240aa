"""Settings of phases 2-5, and the sizes and assumptions behind the table of memory and time: sections of the one
configuration file (``run_settings.RunSettings``). Defaults are the published method's numbers."""

from __future__ import annotations

import re
import urllib.parse
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from pipeline.command_line import rational
from pipeline.files import InputError, SettingsModel

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
ADDRESS = re.compile(r"[!-~]+")  # printable ASCII without spaces: http.client refuses the rest in the middle of a run


def server_url(value: str) -> str:
    """``value`` as it is, if it is the address of a server: ``http://HOST:PORT``, with or without ``/v1``.

    Raises:
        ValueError: it is none.
    """
    parts = urllib.parse.urlsplit(value)
    _ = parts.port  # its ValueError says what is wrong with the port
    if not ADDRESS.fullmatch(value) or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected http://HOST:PORT or https://HOST")
    if parts.query or parts.fragment:
        raise ValueError("expected an address without ? and #")
    return value


def server_url_or_none(value: str | None) -> str | None:
    """``server_url`` of what may be left out."""
    return None if value is None else server_url(value)


class MiningSettings(SettingsModel):
    """Phase 2. ``rho`` and ``delta`` are exact: write them as text or as decimals of few digits."""

    n_runs: Count = 10
    n_candidates: Count = 10
    k: Count = 8
    rho: str = "0.10"
    delta: str = "0.20"
    base_url: str | None = None  # of the model that labels; null = the run's own server
    model: str | None = None  # null = the run's own model
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.7
    max_tokens: Count = 4096
    chunk_chars: Count = 24_000
    discovery_batches: Count = 4
    max_content_chars: Count = 1500
    max_tool_chars: Count = 800
    concurrency: Count = 16
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    seed: NonNegative = 0

    _url = field_validator("base_url")(server_url_or_none)

    @field_validator("rho", "delta", mode="before")
    @classmethod
    def _exact(cls, value: Any) -> str:
        try:
            rational(str(value))
        except InputError as error:
            raise ValueError(str(error)) from None
        return str(value)

    @model_validator(mode="after")
    def _consistent(self) -> MiningSettings:
        if self.k > self.n_runs:
            raise ValueError(f"k is {self.k} but n_runs is {self.n_runs}")
        return self


class SynthesisSettings(SettingsModel):
    """Phase 3. The run's own model solves; ``writer_*`` names another one that writes."""

    accept: Count = 10
    max_tries: Count = 60
    rollouts: Count = 10
    max_pass_rate: Share = 0.5
    revisions: NonNegative = 2
    mutations: NonNegative = 5
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    writer_base_url: str | None = None
    writer_model: str | None = None
    write_max_tokens: Count = 16_384
    solve_max_tokens: Count = 8192
    concurrency: Count = 10
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    seed: NonNegative = 0

    _url = field_validator("writer_base_url")(server_url_or_none)


class ValidationSettings(SettingsModel):
    """Phase 4. ``min_confirmed`` of a capability's scenarios must keep 0 < pass rate <= ``max_pass_rate`` on rollouts
    that nothing was chosen by; those that do not are left out of training."""

    rollouts: Count = 10
    max_pass_rate: Share = 0.5
    min_confirmed: Count = 5
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    floor: Annotated[float, Field(ge=0, le=1)] = 0.2
    max_new_tokens: Count = 8192
    max_seq_length: Count = 32_768
    concurrency: Count = 64
    seed: NonNegative = 1_000_003  # of sampling; far from phase 3's
    engine: str = "vllm"  # local: the model in this process


class TrainingSettings(SettingsModel):
    """Phase 5. ``grpo`` and ``gate`` hold settings of ``python -m train`` and of the gate's configuration, by their
    names there; paths, model and capabilities come from the run."""

    base_model: str | None = None  # folder or hub name; null = the run's own model
    processes: Count = 1  # of torchrun; 1 = plain python
    master_port: Annotated[int, Field(ge=1, le=65535)] = 29501
    grpo: dict[str, Any] = Field(default_factory=dict)
    gate_rollouts_per_scenario: Count = 16
    gate_tasks: Count = 64  # seeds of a capability whose environment is not a scenario set
    gate: dict[str, Any] = Field(default_factory=dict)
    engine: str = "vllm"

    @field_validator("engine")
    @classmethod
    def _engine(cls, value: str) -> str:
        if value not in ("vllm", "local"):
            raise ValueError(f"expected vllm or local, found {value!r}")
        return value


class Shape(SettingsModel):
    """Sizes of a decoder whose layers are full attention or gated linear attention, as in the model's config.json."""

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    vocab_size: Count
    tie_word_embeddings: bool = False
    full_attention_interval: Count = 1  # every n-th layer has full attention; 1: all of them
    attn_output_gate: bool = False  # q_proj also gives a gate of its own size
    qk_norm: bool = True
    linear_num_key_heads: NonNegative = 0
    linear_num_value_heads: NonNegative = 0
    linear_key_head_dim: NonNegative = 0
    linear_value_head_dim: NonNegative = 0
    linear_conv_kernel_dim: NonNegative = 0


class PlanSettings(SettingsModel):
    """The hardware, and what is assumed about the work because no setting of the run fixes it."""

    gpu_memory_gib: float = Field(141.0, gt=0)
    peak_tflops: float = Field(989.0, gt=0)  # bf16, dense, one GPU
    memory_tb_per_s: float = Field(4.8, gt=0)
    compute_efficiency: float = Field(0.4, gt=0, le=1)
    bandwidth_efficiency: float = Field(0.5, gt=0, le=1)
    batch: Count = 16  # sequences decoded together
    steps: float = Field(60.0, gt=0)  # of an instance, on average
    step_tokens: float = Field(400.0, gt=0)  # sampled in a step
    observation_tokens: float = Field(600.0, gt=0)
    command_s: float = Field(5.0, ge=0)  # of a step, outside the model
    grade_s: float = Field(120.0, ge=0)  # of an instance in the official harness
    instance_disk_gib: float = Field(1.0, ge=0)  # of one image beyond shared layers; an assumption (README)
    trajectory_tokens: float = Field(12_000.0, gt=0)  # of a trajectory as the labeller reads it
    answer_tokens: float = Field(600.0, gt=0)
    capabilities: Count = 2
    writer_tokens: float = Field(4000.0, gt=0)
    solver_tokens: float = Field(1500.0, gt=0)
    episode_tokens: float = Field(4000.0, gt=0)  # prompt and answers
    pack_tokens: Count = 16_384
    logit_chunk: Count = 1024
