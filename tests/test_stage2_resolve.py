"""Model-written environments behind the trainer's own seam: in the sandbox, with the same token stream as here."""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stage2_helpers import ISOLATION

import game_registry
from game_registry import _REGISTRY as registry
from game_registry import GameError, Scored, load_game_file
from pipeline import sandbox
from pipeline.files import InputError
from pipeline.remote_game import RemoteGame, SandboxedEnvironment, resolve_game

ROOT = Path(__file__).resolve().parents[1]
GOOD = ROOT / "tests" / "fixtures" / "environments" / "capability_ledger_game.py"
NAME = "capability_ledger"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder with a model-written environment, and one that must never be imported."""
    (tmp_path / GOOD.name).write_text(GOOD.read_text())
    (tmp_path / "capability_trap_game.py").write_text(
        "import sys\nsys.modules['trap_was_imported'] = sys\n" + GOOD.read_text().replace(NAME, "capability_trap")
    )
    return tmp_path


def test_written_files_go_to_the_sandbox(written: Path) -> None:
    spec = resolve_game(NAME, written, ISOLATION.kind)
    assert isinstance(spec.make_env(), RemoteGame) and "trap_was_imported" not in sys.modules


def test_the_name_decides_and_not_the_file(written: Path) -> None:
    (written / GOOD.name).rename(written / "capability_another_game.py")
    assert resolve_game(NAME, written, ISOLATION.kind).name == NAME


def test_shipped_environments_are_imported_and_written_ones_beside_them_are_not(written: Path) -> None:
    spec = resolve_game("helpdesk", written, ISOLATION.kind)
    assert not isinstance(spec.make_env(), RemoteGame) and "trap_was_imported" not in sys.modules


def test_unknown_names_are_named(written: Path) -> None:
    with pytest.raises(GameError, match="unknown game"):
        resolve_game("capability_nothing_of_the_kind", written, ISOLATION.kind)


def test_the_variable_chooses(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE_ISOLATION", "process")
    env = resolve_game(NAME, written).make_env()
    assert isinstance(env, RemoteGame) and env._owner.isolation.kind == "process"
    monkeypatch.setenv("TRACE_ISOLATION", "nonsense")
    with pytest.raises(InputError, match="expected auto, bwrap or process"):
        resolve_game(NAME, written)


def test_refused_where_there_is_no_sandbox(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_probe_bwrap", lambda: (None, "bubblewrap (bwrap) is not installed"))
    with pytest.raises(InputError, match="no sandbox"):
        resolve_game(NAME, written)
    assert resolve_game("helpdesk", written).name == "helpdesk", "shipped ones need none"


def test_none_means_that_written_files_are_trusted(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (written / "capability_trap_game.py").unlink()
    for table in ("_REGISTRY", "_ORIGIN", "_FAILED_IMPORTS"):  # other tests of this process load the same fixture
        monkeypatch.setattr(game_registry, table, {})
    monkeypatch.setattr(game_registry, "_DISCOVERED", set())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec = resolve_game(NAME, written, "none")
    assert not isinstance(spec.make_env(), RemoteGame)


# --------------------------------------------------------------------------- the trainer's episodes


@pytest.fixture(scope="module")
def environment() -> Iterator[SandboxedEnvironment]:
    with SandboxedEnvironment(GOOD, isolation=ISOLATION.kind, workers=2) as started:
        yield started


def test_the_same_token_stream_through_the_sandbox(environment: SandboxedEnvironment, smollm2: Path) -> None:
    """The trainer's runner cannot tell: token ids, action mask and outcome are those of the game in this process."""
    from scripted_engine import ScriptedEngine

    from game_registry import _ORIGIN
    from train.chat import ChatCodec
    from train.episode import EpisodeParams, run_episode

    registry.pop(NAME, None)
    _ORIGIN.pop(NAME, None)
    load_game_file(GOOD)
    local = registry.pop(NAME)
    _ORIGIN.pop(NAME)
    codec = ChatCodec.from_model(str(smollm2))

    def policy(prompt: str, params: Any) -> str:
        if '"balance"' in prompt.rpartition("state its balance")[2]:
            return '{"name": "close_record", "arguments": {"record_id": "1", "balance": 3}}'
        return '{"name": "get_record", "arguments": {"record_id": "' + prompt.partition("Records:\n")[2][:4] + '"}}'

    async def play_both() -> list[Any]:
        engine = ScriptedEngine(codec, policy)
        params = EpisodeParams(max_seq_length=1024)
        runs = [(local, local.make_env()), (environment.spec, environment.spec.make_env())]
        return [await run_episode(spec, env, engine, codec, 4, params) for spec, env in runs]

    here, there = asyncio.run(play_both())
    assert list(here.token_ids) == list(there.token_ids) and list(here.action_mask) == list(there.action_mask)
    assert isinstance(here.result.outcome, Scored) and here.result == there.result
