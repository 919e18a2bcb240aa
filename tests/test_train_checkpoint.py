"""Checkpoints: complete or absent, restored bit for bit, refused when they do not fit. Adapter files in both forms."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_train_learner import items_for
from tiny_models import tiny_model
from train_helpers import adapter_copy, largest_change, tiny_learners, update_config

from pipeline.files import InputError
from train.checkpoint import load_checkpoint, save_checkpoint
from train.learner import Learner
from train.lora import (
    attach_adapter,
    copy_adapter,
    load_adapter_files,
    lora_config,
    restore_adapter,
    save_adapter,
    save_tensors,
    write_adapter_folder,
)
from train.run_log import list_checkpoints

SETTINGS = {"model": "tiny", "games": {"first": "capability_first"}, "lora_rank": 4}


def save(folder: Path, learner: Learner, keep: int = 2) -> Path:
    return save_checkpoint(folder, learner, learner.counters(), SETTINGS, keep)


def trained(steps: int = 2) -> tuple[Any, Learner]:
    model, learner = tiny_learners("first")
    for _ in range(steps):
        learner.next_jobs(3)
        learner.update(items_for(model), update_config())
        learner.iteration += 1
    return model, learner


def test_a_restored_learner_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, learner = trained()
    learner.best_reward = 0.75
    path = save(tmp_path, learner)
    other_model, other = tiny_learners("first", spread=0.3)
    load_checkpoint(path, other, SETTINGS)
    assert other.counters() == learner.counters() and other.version == 2 and other.best_reward == 0.75
    assert other.next_jobs(5) == learner.next_jobs(5)
    for m, one in ((model, learner), (other_model, other)):
        one.update(items_for(m), update_config())
    assert largest_change(adapter_copy(learner), adapter_copy(other)) == 0.0
    mine, restored = (one.optimizer.state_dict()["state"] for one in (learner, other))
    assert set(mine) == set(restored) and set(mine[0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(value, restored[i][key]) for i, entry in mine.items() for key, value in entry.items())


def test_a_checkpoint_before_the_first_step(tmp_path: Path) -> None:
    _, learner = tiny_learners("first")
    _, other = tiny_learners("first", spread=0.3)
    load_checkpoint(save(tmp_path, learner), other, SETTINGS)
    assert largest_change(adapter_copy(learner), adapter_copy(other)) == 0.0 and not other.optimizer.state


def test_the_newest_are_kept_and_torn_ones_are_not_seen(tmp_path: Path) -> None:
    _, learner = tiny_learners("first")
    for learner.iteration in (1, 5, 10):
        save(tmp_path, learner)
    (tmp_path / "iter_000099").mkdir()  # without a state: somebody else's, or cut
    (tmp_path / ".iter_000011.x.tmp").mkdir()  # what a kill leaves
    assert [p.name for p in list_checkpoints(tmp_path)] == ["iter_000005", "iter_000010"]
    learner.iteration = 11
    save(tmp_path, learner)
    assert not (tmp_path / ".iter_000011.x.tmp").exists()
    assert list_checkpoints(tmp_path / "nothing") == []


def test_saving_an_iteration_again_leaves_it_alone(tmp_path: Path) -> None:
    """There is no moment at which the only checkpoint is gone."""
    _, learner = tiny_learners("first")
    path = save(tmp_path, learner, keep=1)
    before = path.stat().st_ino
    assert save(tmp_path, learner, keep=1) == path and path.stat().st_ino == before


def test_a_fault_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, learner = tiny_learners("first")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("train.checkpoint.write_json", full)
    with pytest.raises(InputError, match=r"iter_000000: cannot be written \(No space left on device\); free space"):
        save(tmp_path, learner)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "fault", ["adapter", "optimizer", "state", "counters", "schema", "other adapter", "shape", "extra"]
)
def test_damaged_checkpoints_are_refused(fault: str, tmp_path: Path) -> None:
    _, learner = trained(1)
    path = save(tmp_path, learner)
    state = json.loads((path / "state.json").read_text())
    says = "damaged"
    if fault in ("adapter", "optimizer"):
        file = path / f"{fault}.safetensors"
        file.write_bytes(file.read_bytes()[:-10])
    elif fault == "state":
        (path / "state.json").write_text('{"schema_version": 1')
        says = "not valid JSON"
    elif fault == "counters":
        del state["counters"]["next_seed"]
    elif fault == "schema":
        state["schema_version"], says = 99, "schema_version"
    elif fault == "other adapter":
        state["adapter"], says = "second", "is of adapter 'second', expected 'first'"
    else:
        tensors = load_file(path / "adapter.safetensors")
        key = sorted(tensors)[0]
        if fault == "shape":
            tensors[key], says = tensors[key][:1].clone(), "has shape"
        else:
            tensors["more"], says = torch.zeros(1), "do not match"
        save_file(tensors, path / "adapter.safetensors")
    if fault in ("counters", "schema", "other adapter"):
        (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match=says):
        load_checkpoint(path, tiny_learners("first")[1], SETTINGS)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    _, learner = tiny_learners("first")
    path = save(tmp_path, learner)
    with pytest.raises(InputError, match="made with lora_rank=4, now 8; use the same or another --output-dir"):
        load_checkpoint(path, learner, SETTINGS | {"lora_rank": 8})


# ------------------------------------------------------------------------ adapter files


def test_both_forms_hold_the_same(tmp_path: Path) -> None:
    model, learner = trained(1)
    save_adapter(model, "first", tmp_path / "a")
    folder, single = load_adapter_files(tmp_path / "a"), load_adapter_files(tmp_path / "a.safetensors")
    assert folder[1] == single[1] and folder[1]["r"] == 4 and folder[1]["inference_mode"] is True
    assert set(folder[0]) == set(single[0]) and all(torch.equal(v, single[0][k]) for k, v in folder[0].items())
    with safe_open(str(tmp_path / "a.safetensors"), "pt") as file:
        assert json.loads(file.metadata()["peft_config"])["target_modules"] == sorted(folder[1]["target_modules"])
    _, other = tiny_learners("first", spread=0.3)
    restore_adapter(other.model, "first", single[0])
    assert largest_change(adapter_copy(learner), adapter_copy(other)) == 0.0


def test_writing_over_an_adapter_replaces_it_whole(tmp_path: Path) -> None:
    model, _ = trained(1)
    save_adapter(model, "first", tmp_path / "a")
    (tmp_path / "a" / "stale.bin").write_text("old")
    write_adapter_folder(model, "first", tmp_path / "a", dtype=torch.bfloat16)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert {t.dtype for t in load_adapter_files(tmp_path / "a")[0].values()} == {torch.bfloat16}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "a.safetensors"]  # no temporary is left


def test_every_adapter_names_the_base_that_it_rests_on(tmp_path: Path) -> None:
    """peft notes the base in the first adapter of a model only; phase 6 and other loaders ask each."""
    model = tiny_model()
    model.name_or_path = "org/base"
    for name in ("first", "second", "third"):
        model = attach_adapter(model, name, lora_config(2, 4), seed=0)
    for name in ("first", "second", "third"):
        save_adapter(model, name, tmp_path / name)
        for form in (tmp_path / name, tmp_path / f"{name}.safetensors"):
            assert load_adapter_files(form)[1]["base_model_name_or_path"] == "org/base"


def test_copies_are_complete(tmp_path: Path) -> None:
    model, _ = trained(1)
    save_adapter(model, "first", tmp_path / "a")
    copy_adapter(tmp_path / "a", tmp_path / "deep" / "b")
    for form in ("b", "b.safetensors"):
        assert load_adapter_files(tmp_path / "deep" / form)[1] == load_adapter_files(tmp_path / "a")[1]


def test_adapter_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not found; expected a PEFT folder"):
        load_adapter_files(tmp_path / "a")
    save_file({"x": torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(InputError, match="no peft_config in its metadata"):
        load_adapter_files(tmp_path / "b.safetensors")
    (tmp_path / "c.safetensors").write_text("text")
    with pytest.raises(InputError, match="damaged or not safetensors"):
        load_adapter_files(tmp_path / "c.safetensors")
    model, _ = tiny_learners("first")
    save_adapter(model, "first", tmp_path / "d")
    shutil.move(tmp_path / "d" / "adapter_model.safetensors", tmp_path / "moved")
    with pytest.raises(InputError, match="safetensors: not found"):
        load_adapter_files(tmp_path / "d")


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    model, learner = tiny_learners("first")
    with pytest.raises(InputError, match="cannot be written"):
        save_adapter(model, "first", tmp_path / "file" / "a")
    with pytest.raises(InputError, match="cannot be written"):
        save(tmp_path / "file" / "checkpoints", learner)
    with pytest.raises(InputError, match="cannot be written"):
        save_tensors(tmp_path / "file" / "x.safetensors", {"x": torch.zeros(1)})
