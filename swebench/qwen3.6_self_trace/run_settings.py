"""Settings of a run: one YAML file, checked strictly, read by every phase.

The published configuration is ``configs/swebench_qwen36_vllm.yaml``; ``configs/swebench_miniature.yaml`` runs the same
phases on eight small local repositories.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import shlex
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from phase_settings import (
    MiningSettings,
    PlanSettings,
    Shape,
    SynthesisSettings,
    TrainingSettings,
    ValidationSettings,
    server_url,
)
from pydantic import Field, field_validator

from pipeline.files import InputError, SettingsModel, check, read_yaml
from pipeline.split import parse_shares

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CONFIG = ROOT / "configs" / "swebench_qwen36_vllm.yaml"
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # becomes a folder, a container label and a part of served names

MAX_TOKENS = 10**7  # of one reply; no context is as long
SMALLEST_SHARE = Fraction(1, 1000)

Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Backend = Literal["docker", "singularity", "modal", "bubblewrap", "local"]
Grader = Literal["harness", "modal", "local"]


class DatasetSettings(SettingsModel):
    """Which instances. ``name``: a Hugging Face data set, a .json/.jsonl file, or a folder of declared instances as
    ``miniature/`` (paths start at the project). ``repositories``: a folder of Git repositories named by instance id,
    for the backends without images; declared instances bring their own.
    """

    name: str = "SWE-bench/SWE-bench_Verified"
    split: str = "test"
    expected_instances: Positive | None = 500  # a data set of another size is refused; null = any
    instances: list[str] | None = None  # only these ids; null = all
    repositories: str | None = None


class ModelSettings(SettingsModel):
    """The base model and where it is served; ``VLLM_BASE_URL`` and ``VLLM_MODEL`` override this."""

    name: Text
    base_url: str = "http://localhost:8000"
    api_key_env: str = "VLLM_API_KEY"  # the variable's name; keys are never written to files

    _url = field_validator("base_url")(server_url)


class ServerSettings(SettingsModel):
    """How ``launch_phase1.sh`` starts the server. ``args``: flags after --model, as on a command line."""

    command: Annotated[tuple[Text, ...], Field(min_length=1)] = ("python", "-m", "vllm.entrypoints.openai.api_server")
    args: str = ""
    env: dict[str, str] = Field(default_factory=dict)
    start_timeout_s: PositiveFloat = 1800.0

    @field_validator("args")
    @classmethod
    def _as_a_command_line(cls, value: str) -> str:
        shlex.split(value)  # its ValueError says "No closing quotation"
        return value


class SamplingSettings(SettingsModel):
    """Sent with every request. ``top_k`` -1 takes every token, null leaves the server's default."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.7
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    top_k: int | None = 20
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 24_576

    @field_validator("top_k")
    @classmethod
    def _a_count_or_all(cls, value: int | None) -> int | None:
        if value is not None and value < 1 and value != -1:
            raise ValueError("expected an integer >= 1, -1 for every token, or null")
        return value


class AgentSettings(SettingsModel):
    """mini-swe-agent: the package's own templates and runner, with these limits.

    ``base_config`` names one of the package's configurations or a YAML file; ``environment`` is merged into its
    ``environment`` section (``run_args`` of docker, say), over ``run_agent_config.BACKEND_DEFAULTS``; the class of that
    environment follows from ``backend``.
    """

    python: str = ".venv-agents/bin/python"
    backend: Backend = "docker"
    base_config: str = "swebench.yaml"
    model_class: str = "litellm"  # litellm_textbased for models without tool calls
    workers: Positive = 8
    step_limit: Positive = 150
    wall_time_limit_s: Annotated[int, Field(ge=0)] = 0  # 0 = none
    command_timeout_s: Positive = 60
    request_timeout_s: Positive = 1800
    request_attempts: Positive = 10  # of one model call, before the instance counts as an infrastructure error
    max_consecutive_format_errors: Annotated[int, Field(ge=0)] = 3
    infrastructure_retries: Annotated[int, Field(ge=0)] = 1  # of an instance, within one run of the phase
    environment: dict[str, Any] = Field(default_factory=dict)

    @field_validator("environment")
    @classmethod
    def _plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "environment_class" in value:
            raise ValueError("environment_class follows from agent.backend; set that")
        _require_json(value)
        env = value.get("env", {})
        if not isinstance(env, dict) or not all(isinstance(text, str) for text in env.values()):
            raise ValueError("env: expected names with text; quote numbers")
        return value


class GradingSettings(SettingsModel):
    """``harness``: swebench.harness.run_evaluation with docker; ``modal``: the same on Modal; ``local``: in a sandbox
    here, by the harness' own log parser and report code, for small repositories that need no image."""

    backend: Grader = "harness"
    workers: Positive = 8
    timeout_s: Positive = 1800


class RunSettings(SettingsModel):
    """The whole file. ``mine_score``: shares of the instances that are mined for capabilities and scored."""

    run_name: Annotated[str, Field(pattern=RUN_NAME)]
    output_root: str = "runs"
    mine_score: str = "40:60"
    dataset: DatasetSettings = DatasetSettings()
    model: ModelSettings
    server: ServerSettings = ServerSettings()
    sampling: SamplingSettings = SamplingSettings()
    agent: AgentSettings = AgentSettings()
    grading: GradingSettings = GradingSettings()
    mining: MiningSettings = MiningSettings()
    synthesis: SynthesisSettings = SynthesisSettings()
    validation: ValidationSettings = ValidationSettings()
    training: TrainingSettings = TrainingSettings()
    shape: Shape | None = None
    plan: PlanSettings = PlanSettings()

    @field_validator("mine_score")
    @classmethod
    def _two_shares(cls, value: str) -> str:
        try:
            mine = parse_shares(value)
        except InputError as error:
            raise ValueError(str(error)) from None
        if not SMALLEST_SHARE <= mine <= 1 - SMALLEST_SHARE:
            raise ValueError(f"expected MINE:SCORE with both parts at least {SMALLEST_SHARE} of the whole")
        return value


def _require_json(value: Any) -> None:
    """Raises ValueError for what YAML knows and JSON does not: dates, sets, NaN, keys that are no text."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"expected text as a key, found {key!r:.40}")
            _require_json(inner)
    elif isinstance(value, list):
        for inner in value:
            _require_json(inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite number")
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"expected text, a number, true, false or null, found {type(value).__name__}; quote it")


def _refuse_unwritable(value: Any, where: str) -> None:
    """Raises InputError for text with NUL or a lone surrogate, which no file name, command or file can hold."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_unwritable(str(key), f"{where}: a key")
            _refuse_unwritable(inner, f"{where}: {key}")
    elif isinstance(value, list):
        for inner in value:
            _refuse_unwritable(inner, where)
    elif isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
        raise InputError(f"{where}: holds NUL or half a character ({value!r:.60}); remove it")


def load_settings(path: str | Path | None = None, **override: Any) -> RunSettings:
    """The settings of a YAML file; ``override`` replaces top-level values that are not None.

    Raises:
        InputError: unreadable, a wrong value, or an unknown key (the nearest known one is named).
    """
    file = Path(path) if path is not None else DEFAULT_CONFIG
    data = read_yaml(file)
    _refuse_unwritable(data, f"configuration {file}")
    _refuse_unknown(data, RunSettings, f"configuration {file}")
    data |= {key: value for key, value in override.items() if value is not None}
    return check(RunSettings, data, f"configuration {file}")


def _refuse_unknown(data: dict[str, Any], model: type[SettingsModel], where: str) -> None:
    for key, value in data.items():
        if key not in model.model_fields:
            near = difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0)
            raise InputError(f"{where}: unknown key {key!r}; did you mean {near[0]!r}?")
        inner = model.model_fields[key].annotation
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, SettingsModel):
            _refuse_unknown(value, inner, f"{where}: {key}")


def server_flag(settings: RunSettings, flag: str, default: int) -> int:
    """An integer flag of ``server.args``, as ``--flag N`` or ``--flag=N``; the last one counts.

    Raises:
        InputError: it is there without an integer.
    """
    words = [part for word in shlex.split(settings.server.args) for part in _split_flag(word)]
    if flag not in words:
        return default
    value = [*words, ""][len(words) - words[::-1].index(flag)]
    if not value.isdecimal() or int(value) < 1:
        raise InputError(f"server.args: expected an integer after {flag}, found {value!r}")
    return int(value)


def _split_flag(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--") else [word]


def digest(data: Any) -> str:
    """SHA-256 of the canonical JSON (sorted keys, no spaces): equal data, equal digest."""
    text = json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
