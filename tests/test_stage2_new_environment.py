"""The skeleton, the status of capabilities, and a third-party environment in the contract."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from stage2_helpers import ISOLATION, scenario

from game_registry import Scored, play_sync, scripted_agent
from pipeline import environment_status as status
from pipeline.files import InputError
from pipeline.new_environment import main as new_environment
from pipeline.new_environment import skeleton
from pipeline.panel_evidence import Settings
from pipeline.panel_policies import no_op, random_calls
from pipeline.remote_game import SandboxedEnvironment
from pipeline.scenarios import save_scenarios
from pipeline.validate_environment import report, validate

ROOT = Path(__file__).resolve().parents[1]
FIXTURE = ROOT / "tests" / "fixtures" / "environments" / "capability_ledger_game.py"


# --------------------------------------------------------------------------- skeleton


def test_the_skeleton_passes_everything_but_its_oracle(tmp_path: Path) -> None:
    file = tmp_path / "capability_new_skill_game.py"
    assert new_environment(["capability_new_skill", "-o", str(file)]) == 0
    panel = validate(file, Settings(seeds=20), isolation=ISOLATION.kind)
    assert {c.name for c in panel.checks if c.passed is False} == {"oracle"}
    assert panel.name == "capability_new_skill"


def test_the_skeleton_with_its_oracle_passes(tmp_path: Path) -> None:
    file = tmp_path / "capability_new_skill_game.py"
    assert new_environment(["capability_new_skill", "-o", str(file), "--with-oracle"]) == 0
    assert validate(file, Settings(seeds=20), isolation=ISOLATION.kind).passed


def test_the_fixture_is_the_skeleton() -> None:
    """The panel's good environment and the skeleton are one text, so that neither drifts."""
    description = "Read a record before acting on it, and act with exact arguments."
    written = skeleton("capability_ledger", description, "capability_ledger_game.py", with_oracle=True)
    assert written == FIXTURE.read_text()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("mine")
    with pytest.raises(InputError, match="exists"):
        new_environment(["capability_x", "-o", str(file)])
    assert file.read_text() == "mine"


@pytest.mark.parametrize("name", ["refund", "capability_", "capability_A", "capability_a-b", "capability_../x"])
def test_bad_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="snake_case"):
        new_environment([name, "-o", str(tmp_path / "x.py")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("description", ['say "x"', "a\nb", "back\\slash", " "])
def test_bad_descriptions(tmp_path: Path, description: str) -> None:
    with pytest.raises(InputError, match="--description"):
        new_environment(["capability_x", "-o", str(tmp_path / "x.py"), "--description", description])


# --------------------------------------------------------------------------- status


def selection(tmp_path: Path, *entries: tuple[str, float, str]) -> Path:
    path = tmp_path / "selected.json"
    rows = [{"skill": s, "mean_delta": d, "status": t, "description": "D.", "mean_cov": 0.3} for s, d, t in entries]
    path.write_text(json.dumps(rows))
    return path


def test_next_is_the_pending_one_with_the_highest_delta(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = selection(
        tmp_path, ("low", 0.2, "PENDING"), ("done", 0.9, "DONE"), ("b", 0.5, "PENDING"), ("a", 0.5, "PENDING")
    )
    assert status.main(["next", "--capabilities", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "a"
    path = selection(tmp_path, ("done", 0.9, "DONE"))
    assert status.main(["next", "--capabilities", str(path)]) == 1


@pytest.fixture
def evidence(tmp_path: Path) -> dict[str, Path]:
    environment = tmp_path / FIXTURE.name
    environment.write_text(FIXTURE.read_text())
    settings = Settings(seeds=5)
    panel = tmp_path / "panel.json"
    panel.write_text(json.dumps(report(validate(environment, settings, isolation=ISOLATION.kind), settings)))
    calibration = tmp_path / "calibration.json"
    calibration.write_text(
        json.dumps({"verdict": "accept", "info": {"settings": {"env": "capability_ledger"}}, "schema_version": 1})
    )
    return {"environment": environment, "panel": panel, "calibration": calibration}


def done(path: Path, evidence: dict[str, Path], skill: str = "ledger") -> int:
    flags = [f for key, value in evidence.items() for f in (f"--{key}", str(value))]
    return status.main(["done", "--capabilities", str(path), "--skill", skill, "--isolation", ISOLATION.kind, *flags])


def test_done_with_evidence(tmp_path: Path, evidence: dict[str, Path]) -> None:
    path = selection(tmp_path, ("ledger", 0.4, "PENDING"), ("other", 0.3, "PENDING"))
    assert done(path, evidence) == 0
    first, second = json.loads(path.read_text())
    assert first["status"] == "DONE" and first["environment_path"] == str(evidence["environment"])
    assert first["mean_cov"] == 0.3 and second["status"] == "PENDING", "everything else is kept"


def _change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("what", ["panel", "calibration", "source", "other"])
def test_not_done_without(
    tmp_path: Path, evidence: dict[str, Path], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = selection(tmp_path, ("ledger", 0.4, "PENDING"))
    if what == "panel":
        _change(evidence["panel"], verdict="fail")
    elif what == "calibration":
        _change(evidence["calibration"], verdict="reject")
    elif what == "source":
        evidence["environment"].write_text(FIXTURE.read_text() + "\n# changed after the panel\n")
    else:
        _change(evidence["calibration"], info={"settings": {"env": "capability_other"}})
    assert done(path, evidence) == 1
    assert json.loads(path.read_text())[0]["status"] == "PENDING"
    expected = {"panel": "not pass", "calibration": "not accept", "source": "another version", "other": "is about"}
    assert expected[what] in capsys.readouterr().out


def test_scenario_sets_need_measured_scenarios(tmp_path: Path) -> None:
    path = selection(tmp_path, ("swe", 0.4, "PENDING"))
    flags = ["done", "--capabilities", str(path), "--skill", "swe", "--n-scenarios", "2"]
    file = tmp_path / "s.json"
    save_scenarios(
        file, [scenario(pass_rate=0.2), scenario(name="second_one"), scenario(name="third_one", pass_rate=0.9)]
    )
    assert status.main([*flags, "--scenarios", str(file)]) == 1
    save_scenarios(file, [scenario(pass_rate=0.2), scenario(name="second_one", pass_rate=0.5)])
    assert status.main([*flags, "--scenarios", str(file)]) == 0


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '[{"skill": "a"}]', '[{"skill": "a", "status": "MAYBE", "mean_delta": 1}]',
     '[{"skill": "a", "status": "PENDING", "mean_delta": true}]'],
)  # fmt: skip
def test_bad_selection_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "selected.json"
    path.write_text(content)
    with pytest.raises(InputError, match="selection file"):
        status.main(["next", "--capabilities", str(path)])


def test_done_wants_its_flags(tmp_path: Path, evidence: dict[str, Path]) -> None:
    path = selection(tmp_path, ("ledger", 0.4, "PENDING"))
    with pytest.raises(InputError, match="no skill 'x'; expected one of ledger"):
        done(path, evidence, "x")
    with pytest.raises(InputError, match="done needs"):
        status.main(["done", "--capabilities", str(path), "--skill", "ledger", "--panel", str(evidence["panel"])])


# --------------------------------------------------------------------------- third party


@pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="pip install gymnasium")
def test_a_third_party_environment_in_thirty_lines() -> None:
    file = ROOT / "examples" / "third_party" / "frozen_lake_game.py"
    lines = file.read_text().splitlines()
    wrapper = lines[lines.index("class GymGame:") : lines.index("# ---- this environment")]
    assert len("\n".join(wrapper).strip().splitlines()) <= 30
    with SandboxedEnvironment(file, isolation=ISOLATION.kind, packages=True) as environment:
        spec = environment.spec
        assert spec.oracle is not None
        for seed in range(5):
            env = spec.make_env()
            assert play_sync(spec, env, scripted_agent(spec.oracle(seed)), seed).outcome == Scored(1.0)
            assert play_sync(spec, env, no_op(seed), seed).outcome == Scored(0.0)
            walked = play_sync(spec, env, random_calls(seed), seed)
            assert isinstance(walked.outcome, Scored) and walked.outcome.reward < 0.5
