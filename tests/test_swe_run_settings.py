"""The settings of a SWE-bench run: what is published, what is refused, what decides its identity."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import run_agent_config
import run_folder
import yaml
from pydantic import ValidationError
from run_settings import RunSettings, digest, load_settings
from swe_run_helpers import (
    ROOT,
    settings_data,
    write_config,
)

from pipeline.files import InputError


def test_the_published_configuration() -> None:
    settings = load_settings()
    assert settings.model.name == "Qwen/Qwen3.6-27B" and settings.dataset.expected_instances == 500
    assert settings.agent.step_limit == 150 and settings.agent.backend == "docker"
    sampling = settings.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.95, 20)
    assert 24_000 <= sampling.max_tokens <= 24_576
    flags = shlex.split(settings.server.args)
    assert flags[flags.index("--tensor-parallel-size") + 1] == "4"
    assert flags[flags.index("--tool-call-parser") + 1] == "qwen3_xml"
    assert 65_536 <= int(flags[flags.index("--max-model-len") + 1]) <= 131_072
    assert settings.grading.backend == "harness"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"agent": {"step_limt": 3}}, "unknown key 'step_limt'; did you mean 'step_limit'"),
        ({"sampling": {"temperature": 3}}, "temperature"),
        ({"sampling": {"max_tokens": True}}, "expected an integer"),
        ({"mine_score": "40"}, "MINE:SCORE"),
        ({"run_name": "../x"}, "run_name"),
        ({"agent": {"backend": "podman"}}, "backend"),
        ({"agent": {"workers": 0}}, "workers"),
    ],
)
def test_wrong_settings_are_one_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = write_config(tmp_path, settings_data(**change))
    with pytest.raises(InputError) as error:
        load_settings(path)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_key_of_the_server_is_never_in_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret-key")
    settings = load_settings()
    config = run_agent_config.instance_config(
        {"agent": {"instance_template": ""}, "model": {"model_kwargs": {}}, "environment": {}},
        settings,
        "m",
        "a__b-1",
        Path("/w"),
    )
    assert "secret-key" not in json.dumps(settings.model_dump(mode="json")) + json.dumps(config)
    assert "secret-key" not in json.dumps(run_agent_config.agent_environment())


def test_the_environment_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_config(tmp_path, settings_data())
    monkeypatch.setenv("VLLM_BASE_URL", "http://other:1")
    monkeypatch.setenv("VLLM_MODEL", "other")
    args = run_folder.phase_parser("").parse_args(["--config", str(path), "--run-dir", str(tmp_path / "r")])
    settings, folder = run_folder.open_phase(args)
    assert (settings.model.base_url, settings.model.name) == ("http://other:1", "other")
    assert folder.root == tmp_path / "r"


def test_digest_ignores_order_only() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1})
    assert digest({"a": [1, 2]}) != digest({"a": [2, 1]}) and digest({"a": 1}) != digest({"a": "1"})


def test_both_configurations_are_read() -> None:
    for name in ("swebench_qwen36_vllm.yaml", "swebench_miniature.yaml"):
        load_settings(ROOT / "configs" / name)
    small = yaml.safe_load((ROOT / "configs" / "swebench_small_agent.yaml").read_text())
    assert set(small) == {"agent", "model", "environment"}


def test_settings_are_immune_to_typos_in_code() -> None:
    with pytest.raises(ValidationError):
        RunSettings.model_validate({"run_name": "x", "model": {"name": "m", "nmae": 1}})
