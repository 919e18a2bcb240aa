"""What phase 6's dry run finds out about a checkpoint and its server before hours are spent on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import phase6_final_eval as phase6
import pytest
import run_checkpoint
import run_checks
import run_dataset
import run_server
from run_settings import RunSettings, load_settings, server_flag
from scripted_server import ScriptedServer
from swe_phase_helpers import Run
from swe_run_helpers import ROOT, settings_data, write_config

from pipeline.files import InputError
from pipeline.ports import free_port


def settings(url: str = "http://127.0.0.1:9", args: str = "", **sections: Any) -> RunSettings:
    port = url.rpartition(":")[2]
    return RunSettings.model_validate(settings_data(url, server={"args": f"--port {port} {args}"}, **sections))


def adapter(folder: Path, **config: Any) -> run_checkpoint.Checkpoint:
    folder.mkdir(parents=True, exist_ok=True)
    good = {"base_model_name_or_path": "scripted", "r": 4, "peft_type": "LORA", "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(good | config))
    (folder / "adapter_model.safetensors").write_text("w")
    return run_checkpoint.read_checkpoint(str(folder), settings())


# ---------------------------------------------------------------------- adapters


@pytest.mark.parametrize(
    ("config", "args", "words"),
    [
        ({"base_model_name_or_path": "Qwen/Qwen3-8B"}, "", "rests on Qwen/Qwen3-8B, the run is about scripted"),
        ({"base_model_name_or_path": None}, "", "names no base model"),
        ({"r": 64}, "--enable-lora --max-lora-rank 32", "rank 64, the server takes 32"),
        ({"r": 64}, "--enable-lora --max-lora-rank=32", "rank 64, the server takes 32"),
        ({"r": 17}, "--enable-lora", "rank 17, the server takes 16"),
        ({"rank_pattern": {"q_proj": 48}}, "--enable-lora --max-lora-rank 32", "rank 48, the server takes 32"),
        ({"use_dora": True}, "", "has DoRA, which vLLM does not load"),
        ({"modules_to_save": ["lm_head"]}, "", "modules_to_save lm_head, which vLLM does not load"),
    ],
)
def test_an_adapter_that_the_server_cannot_serve(tmp_path: Path, config: dict[str, Any], args: str, words: str) -> None:
    checkpoint = adapter(tmp_path / "a", **config)
    with pytest.raises(InputError) as error:
        run_checkpoint.fits(checkpoint, settings(args=args), {})
    assert words in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_an_adapter_that_fits(tmp_path: Path) -> None:
    checkpoint = adapter(tmp_path / "a", r=32, rank_pattern={"q_proj": 8})
    full = settings(args="--enable-lora --max-lora-rank 32")
    assert run_checkpoint.fits(checkpoint, full, {}) == "rank 32 of 32 over scripted"
    assert run_checkpoint.fits(checkpoint, settings(), {}) == "rank 32 over scripted", "the flags say no limit"


def test_one_model_under_several_names(tmp_path: Path) -> None:
    """The folder that the server was started with, or the one that was declared to be the same model."""
    checkpoint = adapter(tmp_path / "a", base_model_name_or_path="/data/models/base")
    root = {"scripted": {"root": "/data/models/base"}}
    assert "over /data/models/base" in run_checkpoint.fits(checkpoint, settings(), root)
    declared = settings(training={"base_model": "/data/models/base"})
    assert "over /data/models/base" in run_checkpoint.fits(checkpoint, declared, {})
    relative = adapter(tmp_path / "b", base_model_name_or_path=str(ROOT / "configs"))
    assert run_checkpoint.fits(relative, settings(training={"base_model": "configs"}), {}), "the same folder"
    other = {"another": {"root": "/data/models/base"}, "scripted": {"root": "/data/models/new"}}
    with pytest.raises(InputError, match="rests on"):
        run_checkpoint.fits(checkpoint, settings(training={"base_model": None}), other)


def routed(folder: Path, **spec: Any) -> run_checkpoint.Checkpoint:
    good = {
        "slot_names": ["base", "a"], "routing_scope": "per_layer", "routing_granularity": "token",
        "routing_mode": "top1", "global_layer": 0, "base_architecture": "LlamaForCausalLM", "base_model": "scripted",
        "base_included": True, "adapters": [], "table": {},
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"trace_gate": good | spec} if spec or spec == {} else {}))
    return run_checkpoint.read_checkpoint(str(folder), settings())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"base_model": "Qwen/Qwen3-8B"}, "rests on Qwen/Qwen3-8B"),
        ({"routing_granularity": "trajectory"}, "vLLM serves token granularity only"),
        ({"base_architecture": "GPT2LMHeadModel"}, "vLLM cannot serve a routed GPT2LMHeadModel"),
    ],
)
def test_a_routed_folder_that_vllm_cannot_serve(tmp_path: Path, spec: dict[str, Any], words: str) -> None:
    assert run_checkpoint.fits(routed(tmp_path / "good"), settings(), {}) == "0 adapters over scripted"
    with pytest.raises(InputError) as error:
        run_checkpoint.fits(routed(tmp_path / "bad", **spec), settings(), {})
    assert words in str(error.value)


def test_a_plain_model_rests_on_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    checkpoint = run_checkpoint.read_checkpoint(str(tmp_path), settings())
    assert run_checkpoint.fits(checkpoint, settings(), {}) == ""
    assert run_checkpoint.fits(run_checkpoint.read_checkpoint("served", settings()), settings(), {}) == ""


def test_the_dry_run_says_what_an_adapter_rests_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase6, "check_evaluation", lambda *_, **__: None)
    run = Run(tmp_path, "http://127.0.0.1:9")
    for base, line in (("scripted", "OK    checkpoint: adapter"), ("Qwen/Qwen3-8B", "FAIL  checkpoint: ")):
        adapter(tmp_path / "a", base_model_name_or_path=base)
        done = run.here(phase6.main, "--dry-run", "--checkpoint", tmp_path / "a")
        assert done.stdout.startswith(line) and base in done.stdout.splitlines()[0]


def test_the_dry_run_asks_for_the_adapters_base(tmp_path: Path) -> None:
    """A server of another model is found before the adapter is loaded into it."""
    adapter(tmp_path / "a")
    with ScriptedServer(model="another") as server:
        run = Run(tmp_path, server.url, agent={"python": "/no/such/python"})
        done = run.here(phase6.main, "--dry-run", "--checkpoint", tmp_path / "a")
        assert "FAIL  model name: " in done.stdout and "serves another, not scripted" in done.stdout
        assert not server.calls("/v1/load_lora_adapter")


# ---------------------------------------------------------------------- a server of our own


def test_the_port_of_the_flags_is_that_of_the_address() -> None:
    """Else the server would start, and be waited for at another place for half an hour."""
    assert run_server.port_of(settings("http://127.0.0.1:8011")) == 8011
    assert run_server.port_of(load_settings()) == 8000
    wrong = RunSettings.model_validate(settings_data("http://127.0.0.1:8012", server={"args": "--port 8011"}))
    with pytest.raises(InputError, match=r"listen on port 8011, model\.base_url is http://127\.0\.0\.1:8012"):
        run_server.port_of(wrong)
    with pytest.raises(InputError, match="listen on port 8011"):
        run_checks.startable(wrong, ["true"])
    without = RunSettings.model_validate(settings_data("http://127.0.0.1:8012", server={"args": "--dtype bfloat16"}))
    with pytest.raises(InputError, match="listen on port 8000"):
        run_server.port_of(without)
    other = without.model_copy(update={"server": without.server.model_copy(update={"command": ("my-server",)})})
    assert run_server.port_of(other), "another program's own default is not known"


@pytest.mark.parametrize("taken", [False, True])
def test_phase_6s_server_beside_the_one_that_is_named(
    taken: bool, monkeypatch: pytest.MonkeyPatch, scripted_server: ScriptedServer
) -> None:
    """VLLM_BASE_URL names phases 1-5's server; phase 6's listens at the configuration's address, or beside it."""
    monkeypatch.setenv("VLLM_BASE_URL", scripted_server.url)
    monkeypatch.delenv("VLLM_BASE_URLS", raising=False)
    url = scripted_server.url if taken else f"http://127.0.0.1:{free_port()}"
    configured = settings(url, "--dtype bfloat16")
    named = configured.model_copy(
        update={"model": configured.model.model_copy(update={"base_url": scripted_server.url})}
    )
    own = run_server.beside(named, configured)
    assert own.model.base_url != scripted_server.url and (own.model.base_url == url) == (not taken)
    assert run_server.port_of(own) == int(own.model.base_url.rpartition(":")[2])
    assert own.model.name == named.model.name and "--dtype bfloat16" in own.server.args
    assert not run_server.alive(own)


def test_without_a_named_server_a_taken_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, scripted_server: ScriptedServer
) -> None:
    """Nobody said that the server there may be left running; two on the same GPUs would run out of memory."""
    for name in ("VLLM_BASE_URL", "VLLM_BASE_URLS"):
        monkeypatch.delenv(name, raising=False)
    own = run_server.beside(settings(scripted_server.url), settings(scripted_server.url))
    with pytest.raises(InputError, match="is taken"):
        run_checks.startable(own, ["true"])


@pytest.mark.parametrize(("args", "value"), [("--a 1 --n 5", 5), ("--n=5", 5), ("--n 4 --x --n 5", 5), ("--nn 5", 7)])
def test_the_last_flag_counts(args: str, value: int) -> None:
    assert server_flag(RunSettings.model_validate(settings_data(server={"args": args})), "--n", 7) == value


@pytest.mark.parametrize("args", ["--n", "--n x", "--n 0", "--n --m 3", "--n="])
def test_a_flag_without_its_number(args: str) -> None:
    with pytest.raises(InputError, match="expected an integer after --n"):
        server_flag(RunSettings.model_validate(settings_data(server={"args": args})), "--n", 7)


# ---------------------------------------------------------------------- instances


def test_instances_are_made_once_for_all_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(run_checks, "freeze", lambda *_: made.append(1) or [])
    for _, look in run_checks.without_server(settings(), run_checks.RunFolder(tmp_path))[2:]:
        look()
    assert made == [1]


def test_a_data_set_that_fails_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute of the hub's own retries, and not three times."""
    made = []

    def fail(*_: Any) -> Any:
        made.append(1)
        raise InputError("no network")

    monkeypatch.setattr(run_checks, "freeze", fail)
    problems = []
    for _, look in run_checks.without_server(settings(), run_checks.RunFolder(tmp_path))[2:]:
        with pytest.raises(InputError) as error:
            look()
        problems.append(str(error.value))
    assert made == [1] and problems == ["no network", *["needs the data set, which failed above"] * 2]


def test_without_the_network_the_remedy_is_no_other_name(tmp_path: Path) -> None:
    """The agents' Python is a stand-in that fails as the hub's client does."""
    python = tmp_path / "python"
    for words, remedy in (
        ("ConnectionError: Couldn't reach 'a/b' on the Hub", "it needs the network once"),
        ("DatasetNotFoundError: Dataset 'a/b' doesn't exist", "check the name"),
    ):
        python.write_text(f'#!/bin/sh\necho "{words}" >&2\nexit 1\n')
        python.chmod(0o755)
        data = settings_data(dataset={"name": "a/b"}, agent={"python": str(python)})
        with pytest.raises(InputError, match=remedy):
            run_dataset.source_rows(RunSettings.model_validate(data), run_checks.RunFolder(tmp_path))


def test_a_repository_of_the_same_declaration_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import run_declared

    declared = run_declared.read_declared(ROOT / "swebench" / "qwen3.6_self_trace" / "miniature")[0]
    commit = run_declared.make_repository(declared, tmp_path / "r")
    monkeypatch.setattr(run_declared, "git", None)  # none is called
    assert run_declared.make_repository(declared, tmp_path / "r") == commit
    monkeypatch.undo()
    other = declared.model_copy(update={"files": declared.files | {"new.py": "x = 1\n"}})
    assert run_declared.make_repository(other, tmp_path / "r") != commit and (tmp_path / "r" / "new.py").exists()


def test_configurations_on_disk_have_the_same_port_twice(tmp_path: Path) -> None:
    for name in ("swebench_qwen36_vllm.yaml", "swebench_miniature.yaml"):
        run_server.port_of(load_settings(ROOT / "configs" / name))
    assert load_settings(write_config(tmp_path, settings_data())).server.start_timeout_s == 600
