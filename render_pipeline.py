"""Fill the prompt of a stage for a coding agent from its configuration.

    python render_pipeline.py configs/capability_selection.yaml --stage capability
    python render_pipeline.py configs/environment_generation.yaml --stage environment

Writes prompts/rendered/<run_name>_<stage>.md and lists what was filled. An unknown key, a missing value and a
variable of the template without a value are errors. Numbers are written as they stand in the configuration: 0.10
stays 0.10.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr, model_validator

from pipeline.command_line import Parser
from pipeline.files import InputError, UniqueKeyLoader, check, read_yaml, run_cli, write_text
from pipeline.templates import PROMPTS, render


def _exact(value: Any) -> Any:
    """A number as it was written; floats never come from our YAML loader, so none is rounded here."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal | str):
        raise ValueError("expected a number")
    try:
        number = Decimal(value)
    except InvalidOperation:
        raise ValueError("expected a number such as 0.20") from None
    if not number.is_finite():
        raise ValueError("expected a finite number")
    return number


Exact = Annotated[Decimal, BeforeValidator(_exact)]
Line = Annotated[StrictStr, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f]+$")]  # one line: it goes into commands
Benchmark = Literal["general", "tau-bench", "swebench"]
RunName = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # part of a file name


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CapabilityConfig(_Config):
    """``configs/capability_selection.yaml``."""

    model: Line
    run_name: RunName = "run"
    file_prefix: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9._-]*$")] = ""
    output_dir: Line = "pipeline"
    eval_results: Line | None = None
    eval_labels: Line | None = None
    n_runs: Annotated[StrictInt, Field(ge=1)] = 10
    n_candidates: Annotated[StrictInt, Field(ge=1)] = 10
    k_consistency: Annotated[StrictInt, Field(ge=1)] = 8
    rho: Exact = Decimal("0.10")
    delta: Exact = Decimal("0.20")
    benchmark: Benchmark = "general"
    split: Annotated[StrictStr, Field(pattern=r"^[0-9.]+:[0-9.]+$")] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CapabilityConfig:
        if self.k_consistency > self.n_runs:
            raise ValueError(f"k_consistency is {self.k_consistency} but n_runs is {self.n_runs}")
        if not 0 <= self.rho <= 1:
            raise ValueError(f"rho must be in [0, 1], found {self.rho}")
        if not -1 <= self.delta <= 1:
            raise ValueError(f"delta must be in [-1, 1], found {self.delta}")
        return self


class VllmConfig(_Config):
    conda_env: Line | None = None
    env: dict[StrictStr, StrictStr | StrictInt] = {}
    serve_args: Line | list[StrictStr] | None = None


class EnvironmentConfig(_Config):
    """``configs/environment_generation.yaml``."""

    model: Line
    run_name: RunName = "run"
    capabilities_file: Line = "pipeline/selected_capabilities.json"
    output_dir: Line = "pipeline"
    eval_results: Line | None = None
    gpu_device: StrictInt | Line = 0
    port: Annotated[StrictInt, Field(ge=1, le=65535)] = 5050
    group_size: Annotated[StrictInt, Field(ge=2)] = 16
    num_seeds: Annotated[StrictInt, Field(ge=1)] = 100
    hint_ratio: Annotated[StrictStr, Field(pattern=r"^[0-9.]+-[0-9.]+$")] = "0.25-0.5"
    temperature: Exact = Decimal("1.0")
    reward_threshold: Exact = Decimal("1.0")
    benchmark: Benchmark = "general"
    vllm: VllmConfig = VllmConfig()

    @model_validator(mode="after")
    def _consistent(self) -> EnvironmentConfig:
        low, high = (Fraction(x) for x in self.hint_ratio.split("-"))
        if not 0 <= low <= high <= 1:
            raise ValueError(f"hint_ratio must be LOW-HIGH in [0, 1], found {self.hint_ratio}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, found {self.temperature}")
        if not 0 < self.reward_threshold <= 1:
            raise ValueError(f"reward_threshold must be in (0, 1], found {self.reward_threshold}")
        return self


STAGES: dict[str, tuple[type[CapabilityConfig] | type[EnvironmentConfig], str]] = {
    "capability": (CapabilityConfig, "general/capability_selection.md"),
    "environment": (EnvironmentConfig, "general/environment_generation.md"),
}


class _ExactLoader(UniqueKeyLoader):
    """YAML whose floats are decimals with every digit kept."""


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    text = str(loader.construct_scalar(node)).replace("_", "")
    try:
        return Decimal(text)
    except InvalidOperation:
        raise yaml.MarkedYAMLError(problem=f"{text!r} is not a finite number", problem_mark=node.start_mark) from None


_ExactLoader.add_constructor("tag:yaml.org,2002:float", _decimal)


def refuse_unknown_keys(model: type[BaseModel], data: dict[str, Any], where: str) -> None:
    """Raise ``InputError`` for a key that ``model`` does not have, with the nearest known one; looks inside."""
    known = list(model.model_fields)
    for key, value in data.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise InputError(f"{where}: unknown key {key!r}; the nearest known key is {near!r}")
        inner = model.model_fields[key].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and isinstance(value, dict):
            refuse_unknown_keys(inner, {str(k): v for k, v in value.items()}, f"{where}: {key}")


def load_config(path: Path, stage: str) -> CapabilityConfig | EnvironmentConfig:
    """The typed configuration of a stage."""
    model, _ = STAGES[stage]
    data = read_yaml(path, loader=_ExactLoader)
    where = f"configuration {path}"
    refuse_unknown_keys(model, data, where)
    return check(model, data, where)


def context_of(config: BaseModel) -> dict[str, Any]:
    """Template variables: every field with a value. A None is left out, so that using it is an error."""
    found: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            found[name] = context_of(value)
        elif value is not None:
            found[name] = value
    return found


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("config", help="YAML configuration")
    parser.add_argument("--stage", choices=sorted(STAGES), required=True, help="which prompt to fill")
    parser.add_argument("--output", help="file to write (default: prompts/rendered/<run_name>_<stage>.md)")
    parser.add_argument("--template", help="template under prompts/ (default: the stage's in prompts/general)")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse_arguments()
    config = load_config(Path(args.config), args.stage)
    context = context_of(config)
    text, used = render(args.template or STAGES[args.stage][1], context)
    output = Path(args.output) if args.output else PROMPTS / "rendered" / f"{config.run_name}_{args.stage}.md"
    write_text(output, text)
    for name in used:
        sys.stdout.write(f"{name} = {context[name]}\n")
    unused = sorted(context.keys() - set(used))
    if unused:
        sys.stdout.write(f"not used by the template: {', '.join(unused)}\n")
    sys.stdout.write(f"-> {output}\n")
    return 0


if __name__ == "__main__":
    run_cli(main)
