"""Digests of weights: what was trained again or exchanged is never taken for what it was."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from train_helpers import tiny_learners

from pipeline.files import InputError
from train.identity import base_identity, weights_digest
from train.lora import save_adapter
from train.rollout_log import RolloutLog
from train.systems import Plan, ResultStore, System


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


def collect_settings(model: Path, *flags: str) -> dict[str, object]:
    import tiny_game

    from train.collect_rollouts import build_parser, settings_of
    from train.engines import engine_options

    args = build_parser().parse_args(["--env", "capability_tiny", "--model", str(model), "-o", "x.json", *flags])
    return settings_of(args, engine_options(args, {}), tiny_game.SPEC)


def test_unfinished_rollouts_of_another_base_are_refused(model_folder: Path, tmp_path: Path) -> None:
    """The same name and path, other weights: nothing is mixed, and the message says what differs."""
    model = tmp_path / "model"
    shutil.copytree(model_folder, model, copy_function=shutil.copy2)
    first = collect_settings(model)
    log = RolloutLog(tmp_path / "r.json", first)
    log.add({"task_id": "1", "sample_idx": 0, "outcome": "scored"})
    log.close()
    assert len(RolloutLog(tmp_path / "r.json", collect_settings(model)).entries) == 1
    os.utime(model / "model.safetensors", ns=(1, 1))
    with pytest.raises(InputError, match=r"was begun with base = '\w+', now it is '\w+'; use --no-resume"):
        RolloutLog(tmp_path / "r.json", collect_settings(model))


def test_results_of_another_base_are_not_reused(model_folder: Path, tmp_path: Path) -> None:
    import tiny_game

    plan = Plan(range(2), 1, ("greedy",), 4, 64, 60.0, 0, 2)
    base = System("base", "base")
    store = ResultStore(tmp_path, plan, "m", base_identity(str(model_folder)))
    for seed in plan.seeds:
        store.log(base, tiny_game.SPEC, "greedy").add({"task_id": str(seed), "sample_idx": 0, "outcome": "scored"})
    assert store.missing(base, tiny_game.SPEC, "greedy") == []
    store.close()
    same = ResultStore(tmp_path, plan, "m", base_identity(str(model_folder)))
    assert same.missing(base, tiny_game.SPEC, "greedy") == []
    other = ResultStore(tmp_path, plan, "m", "another")
    assert len(other.missing(base, tiny_game.SPEC, "greedy")) == 2


def test_a_negative_sampling_seed_is_refused(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        collect_settings(model_folder, "--seed", "-1")
    assert exit_.value.code == 2 and "--seed" in capsys.readouterr().err
