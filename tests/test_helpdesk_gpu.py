"""The evidence run: its plan (every command must parse, budgets must be fair), candidates and state files.
The runner is in test_helpdesk_scheduler.py, the table in test_helpdesk_table.py."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import candidate_checks
import freeze
import other_candidates
import plan
import pytest
import state
import with_server
from helpdesk_runs import FOLDER, NAMES, ROOT, select
from scheduler import Stage, pending, record_of
from sizes import SIZES, Size

from pipeline.files import InputError, ServerError, read_json, write_json


def every_stage(run: Path, size: str = "gpu") -> list[Stage]:
    select(run)
    (run / "gates" / "grpo").mkdir(parents=True, exist_ok=True)
    (run / "gates" / "grpo" / "gate.safetensors").touch()
    return plan.all_stages(run, "m", SIZES[size], True)


# ------------------------------------------------------------------ plan


def parsers() -> dict[str, Callable[[list[str]], Any]]:
    from pipeline import _summarize, aggregate_capabilities, calibrate_environment, label_capabilities
    from pipeline import validate_environment as validate
    from train import collect_rollouts, config, evaluate

    return {
        "train.evaluate": evaluate.build_parser().parse_args,
        "train.collect_rollouts": collect_rollouts.build_parser().parse_args,
        "train": config.build_parser().parse_args,
        "pipeline/_summarize.py": _summarize.parse_arguments,
        "pipeline/aggregate_capabilities.py": aggregate_capabilities.parse_arguments,
        "pipeline/label_capabilities.py": label_capabilities.parse_arguments,
        "pipeline/validate_environment.py": validate._parser().parse_args,
        "pipeline/calibrate_environment.py": calibrate_environment._parser().parse_args,
    }


@pytest.mark.parametrize("size", SIZES)
def test_every_command_parses_and_no_stage_appears_twice(tmp_path: Path, size: str) -> None:
    known, parsed = parsers(), set()
    stages = every_stage(tmp_path, size)
    assert len({s.name for s in stages}) == len(stages)
    for stage in stages:
        command = list(stage.command[1:])
        name = command[1] if command[0] == "-m" else command[0]
        arguments = command[2:] if command[0] == "-m" else command[1:]
        if name in known:
            known[name](arguments)
            parsed.add(name)
        else:
            others = (
                "train.train_router_sft",
                "train.grpo_gater",
                "moe_gate.export",
                str(FOLDER),
                str(plan.QUICKSTART),
            )
            assert name.startswith(others)
    assert parsed == set(known)


def flag(stage: plan.Stage, name: str) -> str:
    return stage.command[stage.command.index(name) + 1]


def test_every_need_comes_before_and_is_known(tmp_path: Path) -> None:
    stages = every_stage(tmp_path)
    assert pending(stages, tmp_path) == {s.name for s in stages} - {"04_selection_a"}
    with pytest.raises(InputError, match="does not come before"):
        pending(stages[::-1], tmp_path)


def test_before_the_selection_only_mining_and_validation_are_known(tmp_path: Path) -> None:
    names = [s.name for s in plan.all_stages(tmp_path, "m", SIZES["gpu"], True)]
    assert {n[:2] for n in names} == {"01", "02", "03", "04", "05"} and len(names) == 8 + len(plan.ALL_CANDIDATES)


def test_every_method_gets_the_same_number_of_rollouts(tmp_path: Path) -> None:
    stages = {s.name: s for s in every_stage(tmp_path)}
    last = SIZES["gpu"].budgets[-1]
    four = stages["07_train_train"]
    assert len(flag(four, "--capabilities").split(",")) * int(flag(four, "--max-iters")) == 4 * last
    assert len(flag(stages["07_train_others"], "--capabilities").split(",")) == 4
    for rival in ("direct", "joint"):
        one = stages[f"07_train_{rival}"]
        assert int(flag(one, "--max-iters")) == 4 * last
        for name in ("--group-size", "--groups-per-batch", "--lr", "--lora-rank", "--lora-alpha"):
            assert flag(one, name) == flag(four, name)
        assert flag(stages[f"08_adapters_{rival}"], "--iterations") == "24,48,96"
    assert flag(stages["08_adapters_train"], "--iterations") == "6,12,24" == ",".join(map(str, SIZES["gpu"].budgets))


def test_every_budget_is_a_checkpoint_that_is_kept(tmp_path: Path) -> None:
    for name, size in SIZES.items():
        (four,) = [s for s in every_stage(tmp_path, name) if s.name == "07_train_train"]
        every = int(flag(four, "--save-every"))
        assert all(budget % every == 0 for budget in size.budgets) and int(flag(four, "--keep-checkpoints")) > 100


def test_the_training_settings_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from train.config import build_parser, load_config

    monkeypatch.chdir(ROOT)
    adapters = set()
    for found in every_stage(tmp_path):
        if found.command[1:3] == ("-m", "train"):
            config = load_config(vars(build_parser().parse_args(list(found.command[3:]))), {})
            adapters |= config.adapter_games().keys()
            assert config.resume and config.rollout_log == (len(config.adapter_games()) > 1)
    assert adapters == {*plan.ALL_CANDIDATES, "direct", "joint"}


@pytest.mark.parametrize("size", SIZES)
def test_direct_trains_on_the_mined_tasks_and_no_other_run_does(
    tmp_path: Path, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train.__main__ import train_seeds
    from train.config import build_parser, load_config

    monkeypatch.chdir(ROOT)
    stages = {s.name: s for s in every_stage(tmp_path, size)}
    mined = stages["01_rollouts_a"]
    first, number = int(flag(mined, "--seed-start")), int(flag(mined, "--num-seeds"))
    for key in ("train", "direct", "joint", "others"):
        arguments = list(stages[f"07_train_{key}"].command[3:])
        seeds = train_seeds(load_config(vars(build_parser().parse_args(arguments)), {}))  # refuses too few tasks
        assert seeds == (range(first, first + number) if key == "direct" else range(0))


def test_the_gate_after_grpo_is_scored_when_there_is_one(tmp_path: Path) -> None:
    with_it = {s.name for s in every_stage(tmp_path)}
    (tmp_path / "gates" / "grpo" / "gate.safetensors").unlink()
    without = {s.name for s in plan.all_stages(tmp_path, "m", SIZES["gpu"], True)}
    assert with_it - without == {"11_score_routed_grpo"}


def test_scored_seeds_are_never_mined_or_trained_on() -> None:
    from train.config import FIRST_TRAIN_SEED

    for size in SIZES.values():
        first, end = map(int, size.score_seeds.split(":"))
        mined = [(start, start + size.mine_seeds) for start in (0, 20_000)]
        assert all(stop <= first or start >= end for start, stop in mined) and end <= FIRST_TRAIN_SEED
        assert size.calibrate_seeds <= first


def test_every_budget_leaves_the_gate_rollouts_of_the_adapters() -> None:
    """The first iteration samples from the base, so one iteration is too few for the gate."""
    for size in SIZES.values():
        assert min(size.budgets) >= 2
        for budgets in [(1,), (), (1, 4), (4, 2)]:
            with pytest.raises(InputError, match="at least 2 iterations"):
                dataclasses.replace(size, budgets=budgets)


def test_comparisons_cover_every_number_the_rejected_and_random_candidates() -> None:
    found = plan.gate_members(NAMES, SIZES["gpu"])
    assert [found[f"first_{k}"] for k in (1, 2, 3)] == [tuple(NAMES[:k]) for k in (1, 2, 3)]
    assert set(found["rejected"]) == set(other_candidates.NAMES)
    draws = [frozenset(m) for g, m in found.items() if g.startswith("random_")]
    assert len(draws) == len(set(draws)) == SIZES["gpu"].draws and all(len(d) == 4 for d in draws)
    assert not {frozenset(NAMES), frozenset(found["rejected"])} & set(draws)
    assert found == plan.gate_members(NAMES, SIZES["gpu"])  # a later start must not draw others


def test_gates_wait_for_the_adapters_of_their_members() -> None:
    assert plan.adapters_of(NAMES, NAMES) == ("08_adapters_train",)
    assert plan.adapters_of(other_candidates.NAMES, NAMES) == ("08_adapters_others",)
    assert len(plan.adapters_of([NAMES[0], other_candidates.NAMES[0]], NAMES)) == 2


def test_every_system_of_the_table_has_a_stage_that_samples_it(tmp_path: Path) -> None:
    stages = {s.name: s for s in every_stage(tmp_path)}
    plain = " ".join(stages["11_score_plain"].command)
    for name, kind in plan.systems(NAMES, SIZES["gpu"]).items():
        if kind == "routed":
            assert f"11_score_{name}" in stages
        elif kind in ("adapter", "other"):
            assert f"/{name}," in f"{plain} ,".replace(" ", ",") or f"{name}=" in plain


# ------------------------------------------------------------------ candidates


@pytest.mark.parametrize("game", other_candidates.GAMES, ids=lambda g: g.name)
def test_other_candidates_are_solvable_seeded_and_not_won_by_one_answer(game: type) -> None:
    env, requests, first = game(), set(), 0.0
    for seed in range(200):
        env.reset(seed)
        messages = env.get_messages()
        env.reset(seed)
        assert env.get_messages() == messages
        requests.add(messages[-1]["content"])
        (action,) = env.solution()
        env.step(json.dumps(action))
        assert env.done and env.reward() == 1.0
        env.reset(seed)  # the same tool always, on the first number of the request
        number = next(int(w.strip(".,?")) for w in messages[-1]["content"].split() if w.strip(".,?").isdigit())
        env.step(json.dumps({"name": "track", "arguments": {"id": number}}))
        first += env.reward()
    assert len(requests) > 150 and first / 200 <= 0.4


def test_helpdesk_needs_none_of_the_other_candidates() -> None:
    from games.helpdesk import HelpdeskGame, capability_checks

    env = HelpdeskGame()
    for seed in range(20):
        env.reset(seed)
        for action in env.solution():
            env.step(json.dumps(action))
        labels = candidate_checks.capability_checks(seed, env.get_messages())
        assert {labels[n] for n in other_candidates.NAMES} == {"NA"}
        assert {n: labels[n] for n in NAMES} == capability_checks(seed, env.get_messages())
    assert labels.keys() == {c["name"] for c in candidate_checks.CANDIDATES} == set(plan.ALL_CANDIDATES)


# ------------------------------------------------------------------ adapters at a budget, state


def test_the_checkpoint_of_a_budget_is_the_newest_that_is_no_younger(tmp_path: Path) -> None:
    for iteration in (3, 6, 9):
        write_json(tmp_path / f"iter_{iteration:06d}" / "state.json", {})
    assert freeze.checkpoint_at(tmp_path, 6).name == "iter_000006"
    assert freeze.checkpoint_at(tmp_path, 40).name == "iter_000009"  # a run that was solved earlier
    with pytest.raises(InputError, match="no checkpoint up to iteration 2"):
        freeze.checkpoint_at(tmp_path, 2)


def test_a_frozen_adapter_is_the_checkpoint_in_bf16(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from train.adapter_folder import check_folder

    state_ = {"base_model.model.q.lora_A.weight": torch.tensor([[1.001, 2.0]])}
    for iteration in (2, 4):
        folder = tmp_path / "t" / "checkpoints" / "a" / f"iter_{iteration:06d}"
        write_json(folder / "state.json", {})
        save_file({k: v * iteration for k, v in state_.items()}, str(folder / "adapter.safetensors"))
    write_json(tmp_path / "final" / "a" / "adapter_config.json", {"peft_type": "LORA", "r": 1, "target_modules": ["q"]})
    freeze.freeze(tmp_path / "t", tmp_path / "final", "a", 3, tmp_path / "out")
    found = load_file(str(check_folder(tmp_path / "out" / "a") / "adapter_model.safetensors"))
    (tensor,) = found.values()
    assert found.keys() == state_.keys() and tensor.dtype == torch.bfloat16
    assert torch.equal(tensor, (2 * state_["base_model.model.q.lora_A.weight"]).to(torch.bfloat16))
    (tmp_path / "t" / "checkpoints" / "a" / "iter_000002" / "adapter.safetensors").write_bytes(b"x")
    with pytest.raises(InputError, match="damaged"):
        freeze.freeze(tmp_path / "t", tmp_path / "final", "a", 3, tmp_path / "out")


def test_a_gate_of_a_budget_learns_from_the_iterations_before_it(tmp_path: Path) -> None:
    import yaml

    logs = tmp_path / "run" / "training" / "train" / "rollouts"
    logs.mkdir(parents=True)
    for iteration in range(1, 9):
        (logs / f"a_{iteration:06d}.jsonl").write_text(f"{iteration}\n")
    (logs / "a_b_000002.jsonl").write_text("another capability\n")
    run = tmp_path / "run"
    command = [
        sys.executable,
        str(plan.QUICKSTART / "gate_config.py"),
        "--run",
        str(run),
        "--model",
        "m",
        "--names",
        "a",
    ]
    command += ["--rollouts", str(logs), "--until", "6", "--gate", "gates/g", "--config", str(run / "gates" / "g.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((run / "gates" / "g.yaml").read_text())
    assert config["output_dir"] == str(run / "gates" / "g")
    moved = tmp_path / "moved"
    run.rename(moved)  # the links must not point to where the run was
    assert sorted(p.read_text() for p in (moved / "gates" / "g_rollouts").iterdir()) == ["3\n", "4\n", "5\n", "6\n"]


def fill(run: Path, size: Size) -> list[Stage]:
    """A run after its trainings: everything up to the adapters is done."""
    stages = every_stage(run, "tiny")
    for stage in stages:
        if stage.name[:2] <= "08":
            write_json(record_of(run, stage.name), {"seconds": 1.0, "peak_bytes": 1, "command": []})
            for made in stage.makes:
                if made.suffix == ".json":
                    write_json(made, {"candidates": []}) if not made.exists() else None
                else:
                    made.mkdir(parents=True, exist_ok=True)
                    (made / "adapter_model.safetensors").write_bytes(os.urandom(3000))
    for key, adapters in (("train", NAMES), ("others", other_candidates.NAMES)):
        logs = run / "training" / key / "rollouts"
        logs.mkdir(parents=True)
        for name in adapters:
            for iteration in (1, 2, 3):
                (logs / f"{name}_{iteration:06d}.jsonl").write_text("{}\n")
        (run / "training" / key / "metrics.jsonl").write_text("{}\n")
    recent = run / "gates" / "routed_rollouts"
    recent.mkdir()
    (recent / "a.jsonl").symlink_to("../../training/train/rollouts/" + f"{NAMES[0]}_000003.jsonl")
    return stages


def packs(run: Path, stages: list[Stage], out: Path, limit_mib: float) -> list[Path]:
    return state.pack(run, SIZES["tiny"], stages, out, 0.01, limit_mib)


def test_a_packed_run_goes_on_elsewhere_with_nothing_to_repeat(tmp_path: Path) -> None:
    run, size = tmp_path / "run", SIZES["tiny"]
    stages = fill(run, size)
    assert packs(run, stages, tmp_path / "out", 60.0) == []
    parts = list((tmp_path / "out").iterdir())
    assert len(parts) > 2 and all(p.stat().st_size <= 0.01 * state.MIB and state.PART.fullmatch(p.name) for p in parts)
    todo = pending(stages, run)
    before = tmp_path / "before"
    run.rename(before)
    state.unpack(run, [tmp_path / "out"])
    assert pending(every_stage(run, "tiny"), run) == todo  # same place, so the same plan: nothing is lost
    log = f"training/others/rollouts/{plan.ALL_CANDIDATES[0]}_000003.jsonl"
    for path in (f"adapters_3/{NAMES[0]}/adapter_model.safetensors", log):
        assert (run / path).read_bytes() == (before / path).read_bytes()
    assert (run / "gates" / "routed_rollouts" / "a.jsonl").read_text() == "{}\n"
    assert not list(run.glob("training/*/checkpoints/*"))  # too large, and nobody needs them any more


def test_what_does_not_fit_is_said_and_comes_with_the_next_pack(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stages = fill(run, SIZES["tiny"])
    text = 0.012  # MiB: a little more than the text of this run
    left = packs(run, stages, tmp_path / "one", text + 0.03)
    assert left and all(p.suffix == ".safetensors" for p in left)
    again = packs(run, stages, tmp_path / "two", 60.0)
    assert again == []
    run.rename(tmp_path / "before")
    state.unpack(run, [tmp_path / "two"])
    assert [p for p in left if not p.exists()] == []
    assert len(list(run.glob("adapters_3/*/*.safetensors"))) < 10  # what the first pack has is not in the second
    state.unpack(run, [tmp_path / "one", tmp_path / "two"])
    assert len(list(run.glob("adapters_3/*/*.safetensors"))) == 10


def test_a_third_machine_gets_the_packs_of_two(tmp_path: Path) -> None:
    run = tmp_path / "run"
    packs(run, fill(run, SIZES["tiny"]), tmp_path / "one", 60.0)
    run.rename(tmp_path / "first")
    state.unpack(run, [tmp_path / "one"])
    write_json(record_of(run, "09_config_routed"), {"seconds": 7.0, "peak_bytes": 1, "command": []})
    assert packs(run, every_stage(run, "tiny"), tmp_path / "two", 60.0) == []
    assert {p.name[:6] for p in (tmp_path / "two").iterdir()} == {"pack02"}  # never a number that is taken
    assert sum(p.stat().st_size for p in (tmp_path / "two").glob("*.weights.tar.*")) <= 10240  # an empty tar
    run.rename(tmp_path / "second")
    for order in (["one", "two"], ["two", "one"]):
        state.unpack(run, [tmp_path / name for name in order])
        assert read_json(record_of(run, "09_config_routed"), "record")["seconds"] == 7.0
        weights = f"adapters_3/{NAMES[0]}/adapter_model.safetensors"
        assert (run / weights).read_bytes() == (tmp_path / "first" / weights).read_bytes()
        run.rename(tmp_path / "-".join(order))


def test_an_unfinished_training_is_not_carried_half(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stages = fill(run, SIZES["tiny"])
    record_of(run, "07_train_train").unlink()
    files = state.text_files(run, pending(stages, run))
    assert run / "training" / "others" / "metrics.jsonl" in files
    assert run / "training" / "train" / "metrics.jsonl" not in files


def test_products_that_did_not_travel_are_made_again_only_when_needed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stages = fill(run, SIZES["tiny"])
    for name in NAMES:
        (run / "adapters_2" / name / "adapter_model.safetensors").unlink()
        (run / "adapters_2" / name).rmdir()
    assert "08_adapters_train" in pending(stages, run) and "07_train_train" not in pending(stages, run)
    for stage in stages:
        if stage.name[:2] > "08":
            write_json(record_of(run, stage.name), {"seconds": 1.0, "peak_bytes": 1, "command": []})
    assert pending(stages, run) == set()


def test_the_command_packs_and_unpacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    fill(run, SIZES["tiny"])
    for arguments in (["pack", "--size", "tiny", "--out", str(out)], ["unpack", str(out), str(out)]):
        action, *rest = arguments
        monkeypatch.setattr(sys, "argv", ["state", action, "--run", str(run), *rest])  # as benchmarks/gpu/helpdesk.sh
        assert state.main() == 0
        if action == "pack":
            run.rename(tmp_path / "before")
    assert (run / "mine_a" / "selected_capabilities.report.json").exists()


@pytest.mark.parametrize("damage", ["missing", "torn", "empty"])
def test_a_damaged_pack_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    run = tmp_path / "run"
    packs(run, fill(run, SIZES["tiny"]), tmp_path / "out", 60.0)
    parts = sorted((tmp_path / "out").glob("*.weights.tar.*"))
    if damage == "missing":
        parts[0].unlink()
    elif damage == "torn":
        for part in (tmp_path / "out").glob("*.text.tar.xz.00"):
            part.write_bytes(part.read_bytes()[:200])
    else:
        for part in (tmp_path / "out").iterdir():
            part.unlink()
    with pytest.raises(InputError, match=r"expected|damaged"):
        state.unpack(tmp_path / "new", [tmp_path / "out"])


# ------------------------------------------------------------------ the server of the routed model


def test_a_server_finds_the_plugin_where_the_project_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_server, "entry_points", lambda group: ())
    places = with_server.plugin_path(tmp_path / "p")
    code = "from importlib.metadata import entry_points\n"
    code += f"found = entry_points(group={with_server.PLUGIN_GROUP!r})\n"
    code += "print([e.load().__name__ for e in found if e.dist.name == 'trace-plugin'])"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.stdout.strip() == "['register']", done.stderr


def test_an_installed_plugin_is_not_registered_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.EntryPoint("x", with_server.PLUGIN, with_server.PLUGIN_GROUP)
    monkeypatch.setattr(with_server, "entry_points", lambda group: (found,))
    assert with_server.plugin_path(tmp_path / "p") == [] and not (tmp_path / "p").exists()


def test_a_server_that_ends_at_once_is_told_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "vllm"  # shadows a real one, which would take a while to say that the flag is unknown
    broken.mkdir()
    (broken / "__init__.py").write_text("raise SystemExit('no vLLM here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        pytest.raises(ServerError, match=r"exited with 1: .*no vLLM here"),
        with_server.server(str(tmp_path / "none"), []),
    ):
        raise AssertionError("it is up")


def test_what_the_next_stages_name_is_packed_first(tmp_path: Path) -> None:
    """Of adapters those of the largest budget: a pack that is cut off must not hold only the small ones."""
    run, size = tmp_path / "run", SIZES["tiny"]
    stages = fill(run, size)
    files = state.needed_files(run, stages, pending(stages, run), size)
    folders = [str(p.relative_to(run).parts[0]) for p in files if p.suffix == ".safetensors"]
    last, least = (f"adapters_{budget}" for budget in (size.budgets[-1], size.budgets[0]))
    assert folders[: len(NAMES)] == [last] * len(NAMES)
    named = {f"{least}/direct", f"{least}/joint"}  # the plain score reads these two, gates that are to come the others
    early = {str(p.parent.relative_to(run)) for p in files if p.suffix == ".safetensors" and least in p.parts}
    assert named <= early
    position = {str(p.parent.relative_to(run)): i for i, p in enumerate(files)}
    assert all(position[f"{last}/{name}"] < position[f"{least}/{name}"] for name in NAMES)
