"""Phase 3: thin wrappers over the synthesis, with the selection's description and the run's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import phase3_synthesis as phase3
import pytest
import swe_phase_helpers as helpers
from run_settings import RunSettings, load_settings
from scripted_server import ScriptedServer
from steps import Step
from swe_phase_helpers import PHASES, Run, ScriptedAnswers

from pipeline.files import InputError
from pipeline.scenarios import load_scenarios, save_scenarios, scenario_path

DEEP = "deep_call_graph_traversal"
SCRIPT = f"phase3_synth_{DEEP}.py"
SELECTION = [
    {"skill": DEEP, "description": "Follow every call to its end.", "mean_delta": 0.5, "status": "PENDING"},
    {"skill": "another_fine_skill", "description": "d", "mean_delta": 0.4, "status": "PENDING"},
]


def make_run(tmp: Path, url: str = "http://127.0.0.1:9", **sections: Any) -> Run:
    run = Run(tmp, url, **sections)
    helpers.write(run.folder.selected, SELECTION)
    return run


def main() -> int:
    """The wrapper's command."""
    return phase3.main_for(DEEP, "")


def arguments(run: Run, *flags: str, capability: str | None = DEEP) -> tuple[Any, Any, RunSettings]:
    where = ["--config", str(run.config), "--run-dir", str(run.folder.root)]
    return phase3.parse_arguments(capability, "", [*where, *flags]), run.folder, load_settings(run.config)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(model=helpers.MODEL) as running:
        answers = ScriptedAnswers()
        running.chat = lambda messages, body: answers.chat(messages, body) or ""
        yield running


# --------------------------------------------------------------------------- wrappers


def test_the_wrappers_are_thin_and_differ_in_the_name_only() -> None:
    texts = {path.name: path.read_text() for path in PHASES.glob("phase3_synth_*.py")}
    assert set(texts) == {SCRIPT, "phase3_synth_semantic_logic_precision.py"}
    bodies = set()
    for name, text in texts.items():
        capability = name.removeprefix("phase3_synth_").removesuffix(".py")
        assert len(text.splitlines()) < 40 and f'main_for("{capability}"' in text
        bodies.add(text.replace(capability, "X"))
    assert len(bodies) == 1


def test_scenarios_ship_for_every_wrapper() -> None:
    for path in PHASES.glob("phase3_synth_*.py"):
        assert len(load_scenarios(scenario_path(path.stem.removeprefix("phase3_synth_")))) >= 5


# --------------------------------------------------------------------------- really run


def test_written_solved_and_calibrated(tmp_path: Path, server: ScriptedServer) -> None:
    run = make_run(tmp_path, server.url)
    done = run.phase(SCRIPT)
    assert done.returncode == 0, done.stderr
    (scenario,) = load_scenarios(run.folder.scenarios(DEEP))
    assert scenario.pass_rate == pytest.approx(1 / 3) and scenario.n_rollouts == 3
    asked = [str(body["messages"]) for body in server.calls("/v1/chat/completions")]
    assert "Follow every call to its end." in asked[0]  # the description of phase 2's selection
    requests = len(asked)
    again = run.phase(SCRIPT)
    assert again.returncode == 0 and "done before" in again.stdout
    assert len(server.calls("/v1/chat/completions")) == requests


def test_used_up_tries_are_exit_1_and_no_error(tmp_path: Path, server: ScriptedServer) -> None:
    run = make_run(tmp_path, server.url, synthesis={"max_tries": 2, "revisions": 0})
    server.chat = lambda messages, body: "no scenario"
    done = run.phase(SCRIPT)
    assert done.returncode == 1 and "error" not in done.stderr
    assert "0 of 1 calibrated" in done.stdout


# --------------------------------------------------------------------------- the command it gives


def test_the_published_numbers_reach_the_synthesis(tmp_path: Path) -> None:
    args, _, _ = arguments(make_run(tmp_path))
    flags = phase3.command(args, load_settings(), Path("about.json"), Path("out.json"), 10)
    pairs = dict(zip(flags[2::2], flags[3::2], strict=False))
    assert (pairs["--accept"], pairs["--max-tries"], pairs["--rollouts"]) == ("10", "60", "10")
    assert (pairs["--max-pass-rate"], pairs["--mutations"], pairs["--temperature"]) == ("0.5", "5", "1.0")
    assert pairs["--solver-model"] == pairs["--model"] == "Qwen/Qwen3.6-27B"


def test_another_model_may_write_but_the_runs_own_solves(tmp_path: Path) -> None:
    run = make_run(tmp_path, synthesis={"writer_model": "strong", "writer_base_url": "http://writer:1"})
    args, _, settings = arguments(run)
    flags = phase3.command(args, settings, Path("a"), Path("o"), 1)
    pairs = dict(zip(flags[2::2], flags[3::2], strict=False))
    assert (pairs["--model"], pairs["--base-url"]) == ("strong", "http://writer:1")
    assert (pairs["--solver-model"], pairs["--solver-base-url"]) == (helpers.MODEL, "http://127.0.0.1:9")


def fake_steps(monkeypatch: pytest.MonkeyPatch, measured: int, code: int = 0) -> list[Step]:
    """Record the steps; the step of the shipped scenarios 'measures' as many as given."""
    seen: list[Step] = []

    def run(_folder: Path, steps: list[Step]) -> int:
        for step in steps:
            seen.append(step)
            output = Path(step.command[step.command.index("-o") + 1])
            if step.name == "1_shipped" and measured:
                save_scenarios(output, load_scenarios(scenario_path(DEEP))[:measured])
        return code

    monkeypatch.setattr(phase3, "run_steps", run)
    return seen


def test_shipped_scenarios_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake_steps(monkeypatch, 3)
    run = make_run(tmp_path, synthesis={"accept": 10})
    assert phase3.run(*arguments(run)) == 1
    assert [step.name for step in seen] == ["2_written"] and not run.folder.scenarios(DEEP).exists()


@pytest.mark.parametrize("kept", [0, 3])
def test_shipped_scenarios_are_measured_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    seen = fake_steps(monkeypatch, kept)
    run = make_run(tmp_path, synthesis={"accept": 10})
    for _ in range(2):  # also when it goes on after a kill
        assert phase3.run(*arguments(run, "--use-shipped")) == 1
    written = next(step for step in seen if step.name == "2_written")
    assert written.command[written.command.index("--accept") + 1] == str(10 - kept)
    if kept:
        assert len(load_scenarios(run.folder.scenarios(DEEP))) == kept
    assert "--candidates" in seen[0].command and str(scenario_path(DEEP)) in seen[0].command


def test_enough_shipped_ones_need_no_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake_steps(monkeypatch, 4)
    run = make_run(tmp_path, synthesis={"accept": 2})
    assert phase3.run(*arguments(run, "--use-shipped")) == 0
    assert [step.name for step in seen] == ["1_shipped"]
    assert len(load_scenarios(run.folder.scenarios(DEEP))) == 2


def test_a_dead_server_while_measuring_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_steps(monkeypatch, 0, code=2)
    assert phase3.run(*arguments(make_run(tmp_path), "--use-shipped")) == 2


# --------------------------------------------------------------------------- faults


def test_without_phase_2_the_command_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, "http://127.0.0.1:9")
    done = run.here(main)
    assert done.returncode == 2 and "phase2_capability_mining.py --run-dir" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not run.folder.root.exists()


def test_a_capability_that_was_not_selected(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(InputError, match=r"another_fine_skill.*--description"):
        phase3.describe(*arguments(run, "--capability", "no_such_skill", capability=None))
    given = arguments(run, "--capability", "no_such_skill", "--description", "text", capability=None)
    assert phase3.describe(*given) == "text"


@pytest.mark.parametrize("name", ["../evil", "Upper_Case", "a b", ""])
def test_a_capability_name_becomes_a_folder_so_it_is_checked(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="snake_case"):
        arguments(make_run(tmp_path), "--capability", name, capability=None)


def test_dry_run(tmp_path: Path, server: ScriptedServer) -> None:
    run = make_run(tmp_path, server.url, synthesis={"writer_model": "strong"})
    done = run.here(main, "--dry-run", "--use-shipped")
    lines = {line[6:].split(":")[0]: line[:4].strip() for line in done.stdout.splitlines()}
    assert lines == {
        "capability": "OK", "solving server": "OK", "writing server": "FAIL", "sandbox": "OK",
        "shipped scenarios": "OK", "disk": "OK",
    }  # fmt: skip
    assert done.returncode == 2 and f"serves {helpers.MODEL}, not strong" in done.stdout
    assert not run.folder.phase3.exists()
