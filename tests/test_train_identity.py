"""Digests of weights: what was trained again or exchanged is never taken for what it was."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from tiny_models import tiny_model_folder
from train_helpers import tiny_learners

from pipeline.files import InputError
from train.identity import base_identity, weights_digest
from train.lora import save_adapter
from train.systems import System


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny")


def test_an_adapter_is_its_tensors_and_its_scale(tmp_path: Path) -> None:
    model, learner = tiny_learners("first", spread=0.1)
    for name in ("a", "b"):
        save_adapter(model, "first", tmp_path / name)
    first = weights_digest([tmp_path / "a"])
    assert weights_digest([tmp_path / "b"]) == first, "the same weights in another place"
    assert weights_digest([tmp_path / "a", tmp_path / "b"]) != first and weights_digest([]) != first
    path = tmp_path / "b/adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"base_model_name_or_path": "elsewhere"}))
    assert weights_digest([tmp_path / "b"]) == first
    path.write_text(json.dumps(config | {"lora_alpha": 99}))
    assert weights_digest([tmp_path / "b"]) != first
    next(iter(learner.parameters.values())).data += 1.0
    save_adapter(model, "first", tmp_path / "c")
    assert weights_digest([tmp_path / "c"]) != first
    file = weights_digest([tmp_path / "a.safetensors"])
    assert file != weights_digest([tmp_path / "c.safetensors"])
    save_adapter(model, "first", tmp_path / "a")
    assert weights_digest([tmp_path / "a.safetensors"]) != file, "written again, of other weights"


def test_systems_and_collected_rollouts_use_the_same_digest(tmp_path: Path) -> None:
    """A retrained adapter changes the fingerprint of every system that it is part of."""
    model, learner = tiny_learners("first", spread=0.1)
    save_adapter(model, "first", tmp_path / "a")
    system = System("a", "adapter", str(tmp_path / "a"))
    before = system.fingerprint()
    assert before == system.fingerprint() != System("base", "base").fingerprint()
    next(iter(learner.parameters.values())).data += 1.0
    save_adapter(model, "first", tmp_path / "a")
    assert system.fingerprint() != before
    with pytest.raises(InputError, match="not found"):
        System("a", "adapter", str(tmp_path / "gone")).fingerprint()


def test_damaged_adapters_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not found; expected a PEFT folder"):
        weights_digest([tmp_path])
    (tmp_path / "x.safetensors").write_bytes(b"1")
    (tmp_path / "adapter_config.json").write_text("[1]")
    with pytest.raises(InputError, match=r"adapter_config\.json: expected an object"):
        weights_digest([tmp_path])


def test_an_exchanged_base_is_another_model(model_folder: Path, tmp_path: Path) -> None:
    """Configuration, index, sizes and times of the weight files; not the tokenizer's files, and not the path."""
    folder = tmp_path / "copy"
    shutil.copytree(model_folder, folder, copy_function=shutil.copy2)
    first = base_identity(str(folder))
    assert base_identity(str(model_folder)) == first
    weights = folder / "model.safetensors"
    status = weights.stat()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))
    retrained = base_identity(str(folder))
    assert retrained != first
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps"', '"rms_norm_eps" '))
    assert base_identity(str(folder)) not in (first, retrained)
    shutil.copy2(weights, folder / "model-00002.safetensors")
    assert len({base_identity(str(folder)), first, retrained}) == 3


def test_a_model_that_is_not_here_is_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert base_identity("nobody/has-this-model") == "name:nobody/has-this-model"
    assert base_identity("not a hub name/at/all") == "name:not a hub name/at/all"
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(snapshot / "config.json"))
    assert base_identity("some/model") == base_identity(str(snapshot))
