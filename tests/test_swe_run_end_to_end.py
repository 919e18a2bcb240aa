"""Phases 1 and 6 as commands: the real mini-swe-agent in bubblewrap, the official report code, a scripted model.

One test starts it against a real vLLM server of SmolLM2.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import phase1_baseline_eval as phase1
import phase6_final_eval as phase6
import pytest
import run_checkpoint
import run_comparison
import run_evaluation
import run_server
import yaml
from run_accounting import Account
from run_dataset import frozen
from run_declared import read_declared
from run_folder import RunFolder
from run_scripted_model import MAX_MODEL_LEN
from run_scripted_model import scripted_server as scripted_model
from run_settings import RunSettings, load_settings
from scripted_server import ScriptedServer
from stage1_helpers import Done, run_main
from swe_run_helpers import MINIATURE, PHASES, ROOT, environment, needs_agents, phase, read, settings_data, write_config

from pipeline.files import InputError, ServerError
from pipeline.ports import free_port
from pipeline.readers.coding_agents import read_mini

LEDGER, SEMRANGE, FILTER = "mini__ledger-1", "mini__semrange-6", "mini__filterql-8"
IDS = [FILTER, LEDGER, SEMRANGE]


class Base:
    """A finished phase 1 on three instances, and what the server was asked."""

    def __init__(self, tmp: Path, server: ScriptedServer) -> None:
        self.tmp, self.server = tmp, server
        self.data = settings_data(server.url, dataset={"instances": IDS})
        self.config = write_config(tmp, self.data)
        self.folder = RunFolder(tmp / "run")
        self.done = self.run("phase1_baseline_eval.py")
        self.asked = server.calls("/v1/chat/completions")

    def run(self, script: str, *flags: str, config: Path | None = None) -> subprocess.CompletedProcess[str]:
        return phase(script, config or self.config, self.folder.root, *flags)

    def here(self, main: Callable[[], int], *flags: str, config: Path | None = None) -> Done:
        """A refusal, in this process: what the script would print and exit with."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TRACE_"))}
        where = ["--config", config or self.config, "--run-dir", self.folder.root]
        handler = mock.patch.object(run_server, "interrupt_on_term")  # it would stay set
        with mock.patch.dict(os.environ, kept, clear=True), handler:
            return run_main(main, *where, *flags)

    def adapter(self, name: str, weights: str = "w") -> Path:
        folder = self.tmp / "adapters" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "scripted", "r": 4}))
        (folder / "adapter_model.safetensors").write_text(weights)
        return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    with scripted_model() as server:
        yield Base(tmp_path_factory.mktemp("swe_run"), server)


@needs_agents
def test_phase_1_solves_what_the_model_solves(base: Base) -> None:
    assert base.done.returncode == 0, base.done.stderr
    assert "Pass@1 66.7 %" in base.done.stdout and "(2 of 3 instances)" in base.done.stdout
    summary = run_evaluation.read_summary(base.folder.phase1 / "summary.json")
    assert summary.ends == {FILTER: "resolved", LEDGER: "resolved", SEMRANGE: "unresolved"}
    assert summary.harness["resolved_ids"] == [FILTER, LEDGER] and summary.harness["schema_version"] == 2
    report = read(base.folder.phase1 / "report.json")
    assert report[SEMRANGE]["tests_status"]["FAIL_TO_PASS"]["failure"], "half a repair passes half the tests"
    assert read(base.folder.run_json)["split"]["score"] == [LEDGER, SEMRANGE]


@needs_agents
def test_the_agent_was_the_real_one_with_our_settings(base: Base) -> None:
    request = base.asked[0]
    assert {"model": "scripted", "temperature": 0.7, "top_p": 0.95, "top_k": 20, "max_tokens": 128}.items() <= (
        request.items()
    )
    assert request["tools"][0]["function"]["name"] == "bash"
    trajectory = read(base.folder.phase1 / "trajectories" / LEDGER / f"{LEDGER}.traj.json")
    info = trajectory["info"]
    assert info["exit_status"] == "Submitted" and info["mini_version"].startswith("2.")
    assert info["config"]["environment_type"].endswith("BubblewrapEnvironment")
    assert info["config"]["agent"]["step_limit"] == 12
    text = json.dumps(trajectory)
    assert "charge {'total': '0.11'" in text and "refund {'total': '-0.10'" in text, "the commands really ran"
    assert "/testbed (this is the working directory" in text and "`/testbed`" not in text


@needs_agents
def test_the_files_are_those_that_stage_1_reads(base: Base) -> None:
    path = base.folder.phase1 / "trajectories" / LEDGER / f"{LEDGER}.traj.json"
    (record,) = read_mini(path, 1.0)
    assert (record.domain, record.task_id) == ("mini", LEDGER) and len(record.messages) > 10
    preds = read(base.folder.phase1 / "preds.json")
    assert list(preds) == IDS
    assert preds[LEDGER]["model_patch"].startswith("diff --git a/ledger/money.py")
    assert set(preds[LEDGER]) == {"model_name_or_path", "instance_id", "model_patch"}


@needs_agents
def test_phase_1_again_asks_nothing_again(base: Base) -> None:
    before = (base.folder.phase1 / "summary.json").read_bytes()
    asked = len(base.server.calls("/v1/chat/completions"))
    done = base.run("phase1_baseline_eval.py")
    assert done.returncode == 0 and len(base.server.calls("/v1/chat/completions")) == asked
    assert (base.folder.phase1 / "summary.json").read_bytes() == before


@needs_agents
def test_launch_starts_a_server_and_stops_it(base: Base, tmp_path: Path) -> None:
    """The finished run again, with a server of its own: the scripted model in the place of vLLM."""
    port = free_port()
    program = str(PHASES / "run_scripted_model.py")
    server = {"command": ["python", program], "args": f"--port {port}", "start_timeout_s": 60}
    model = base.data["model"] | {"base_url": f"http://127.0.0.1:{port}"}
    config = write_config(tmp_path, base.data | {"server": server, "model": model})
    line = [str(PHASES / "launch_phase1.sh"), "--config", str(config), "--run-dir", str(base.folder.root)]
    env = environment() | {"PYTHON": sys.executable}
    dry = subprocess.run([*line, "--dry-run"], capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)
    assert dry.returncode == 0 and "will be started" in dry.stdout, dry.stdout
    done = subprocess.run(line, capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)
    assert done.returncode == 0 and "starting as process" in done.stdout, done.stderr
    assert "(2 of 3 instances)" in done.stdout
    assert not run_server.alive(load_settings(config))


@needs_agents
def test_other_settings_on_the_same_folder_are_refused(base: Base, tmp_path: Path) -> None:
    config = write_config(tmp_path, base.data | {"agent": base.data["agent"] | {"step_limit": 13}})
    done = base.here(phase1.main, config=config)
    assert done.returncode == 2 and "another agent.config.agent.step_limit" in done.stderr
    config = write_config(tmp_path, base.data | {"dataset": base.data["dataset"] | {"instances": [LEDGER]}})
    done = base.here(phase1.main, config=config)
    assert done.returncode == 2 and "begun with another dataset" in done.stderr


@needs_agents
def test_phase_6_compares_on_the_score_part(base: Base) -> None:
    adapter = base.adapter("trained")
    dry = base.run("phase6_final_eval.py", "--checkpoint", str(adapter), "--dry-run")
    assert dry.returncode == 0 and "2 of 3: the score part, never mined" in dry.stdout, dry.stdout
    done = base.run("phase6_final_eval.py", "--checkpoint", str(adapter))
    assert done.returncode == 0, done.stderr
    table = (base.folder.phase6 / "comparison.md").read_text()
    assert table in done.stdout
    assert "| base | 50.0 [" in table and "| trained | 100.0 [" in table and "+50.0 [" in table and "| 1 / 0 |" in table
    data = read(base.folder.phase6 / "comparison.json")
    assert data["instances"] == [LEDGER, SEMRANGE]
    assert data["systems"][1]["against_base"]["won"] == [SEMRANGE]
    loaded = base.server.calls("/v1/load_lora_adapter")[-1]
    assert loaded["lora_name"].startswith("swebench_miniature.trained.") and not base.server.adapters, "unloaded again"
    assert (base.folder.evaluation("trained") / "report.json").exists()


@needs_agents
def test_a_resolved_instance_made_by_hand_is_found_by_the_official_code(base: Base, tmp_path: Path) -> None:
    """Summary, report and the harness' own file agree, and the tests' output says something else."""
    out = tmp_path / "phase1"
    shutil.copytree(base.folder.phase1, out)
    (raw,) = out.glob(f"grading/logs/run_evaluation/*/*/{SEMRANGE}/report.json")
    for path in (out / "report.json", raw):
        data = read(path)
        data[SEMRANGE]["resolved"] = True
        path.write_text(json.dumps(data))
    summary = run_evaluation.read_summary(out / "summary.json")
    value = Account(summary.ends | {SEMRANGE: "resolved"})
    forged = summary.model_copy(update={"ends": value.ends, "account": value.to_json()})
    (out / "summary.json").write_text(forged.model_dump_json())
    with pytest.raises(InputError, match=f"does not follow from the tests' output for {SEMRANGE}"):
        run_evaluation.verified_summary(out / "summary.json", load_settings(base.config), frozen(base.folder))


@needs_agents
def test_phase_6_refuses_other_conditions(base: Base, tmp_path: Path) -> None:
    adapter = str(base.adapter("trained"))
    config = write_config(tmp_path, base.data | {"sampling": {"temperature": 0.2, "max_tokens": 128}})
    done = base.here(phase6.main, "--checkpoint", adapter, config=config)
    assert done.returncode == 2 and "phase 1 was run with another" in done.stderr and "temperature" in done.stderr
    base.server.max_model_len = 2048
    try:
        done = base.here(phase6.main, "--checkpoint", adapter, "--name", "short")
    finally:
        base.server.max_model_len = MAX_MODEL_LEN
    assert done.returncode == 2 and "server.max_model_len" in done.stderr
    assert not base.server.adapters, "unloaded after the refusal too"
    changed = base.adapter("other", "new weights")
    done = base.here(phase6.main, "--checkpoint", str(changed), "--name", "trained")
    assert done.returncode == 2 and "is an evaluation of swebench_miniature.trained" in done.stderr


@needs_agents
def test_checkpoints_that_cannot_be_evaluated(base: Base) -> None:
    for flags, words in (
        (["--checkpoint", "unserved"], "serves scripted, not unserved"),
        (["--checkpoint", "scripted", "--name", "base"], "that is phase 1"),
        (["--checkpoint", "scripted", "--serve"], "starts a model's folder"),
    ):
        done = base.here(phase6.main, *flags)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("error: ") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("./not/there", "not found"),
        (str(ROOT / "configs"), "holds neither adapter_config.json"),
        (str(ROOT / "README.md"), "expected a folder, found a file"),
    ],
)
def test_checkpoints_that_are_none(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        run_checkpoint.read_checkpoint(text, RunSettings.model_validate(settings_data()))


def test_another_version_of_an_adapter_has_another_name(tmp_path: Path) -> None:
    """The same name for new weights would be answered from the old one's cache."""
    settings = RunSettings.model_validate(settings_data())
    names = []
    for weights in ("a", "b"):
        (tmp_path / "adapter_config.json").write_text("{}")
        (tmp_path / "adapter_model.safetensors").write_text(weights)
        names.append(run_checkpoint.read_checkpoint(str(tmp_path), settings, "x").served_name)
    assert names[0] != names[1] and all(name.startswith("swebench_miniature.x.") for name in names)


def test_a_model_folder_must_be_what_is_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with ScriptedServer(model=str(tmp_path)) as server:
        settings = RunSettings.model_validate(settings_data(server.url))
        checkpoint = run_checkpoint.read_checkpoint(str(tmp_path), settings)
        with run_checkpoint.available(checkpoint, settings) as name:
            assert checkpoint.kind == "model" and name == str(tmp_path)
    with ScriptedServer(model="other") as server:
        settings = RunSettings.model_validate(settings_data(server.url))
        with pytest.raises(ServerError, match="add --serve"), run_checkpoint.available(checkpoint, settings):
            pass


def test_phase_6_needs_phase_1(tmp_path: Path) -> None:
    config = write_config(tmp_path, settings_data())
    with mock.patch.object(run_server, "interrupt_on_term"):
        done = run_main(phase6.main, "--config", config, "--run-dir", tmp_path / "r", "--checkpoint", "x")
    assert done.returncode == 2 and "run that evaluation to its end first" in done.stderr


# ---------------------------------------------------------------------- comparison


def account(**ends: Any) -> Account:
    return Account(dict(ends))


def test_paired_comparison_by_hand() -> None:
    """Ten instances: both 4, only the checkpoint 3, only the base 1, none 2."""
    names = list("abcdefghij")
    base = Account({i: "resolved" if i in "abcdh" else "unresolved" for i in names})
    other = Account({i: "resolved" if i in "abcdefg" else "limit" for i in names})
    value = run_comparison.paired(base, other)
    assert (value.won, value.lost) == (("e", "f", "g"), ("h",))
    assert value.difference.value == pytest.approx(0.2) and value.difference.n == 10
    assert value.difference.low < 0.2 < value.difference.high
    assert value.p_value == pytest.approx(2 * (1 + 4) / 16)  # P[X <= 1] of Binomial(4, 1/2), doubled


def test_paired_intervals_are_narrower_than_unpaired_ones() -> None:
    """Same instances: what both solve and both miss says nothing about the difference."""
    ids = [str(i) for i in range(500)]
    base = Account({i: "resolved" if int(i) < 340 else "unresolved" for i in ids})
    other = Account({i: "resolved" if int(i) < 366 else "unresolved" for i in ids})
    value = run_comparison.paired(base, other).difference
    assert value.value == pytest.approx(0.052) and value.low > 0.03 and value.high < 0.08
    unpaired = 1.96 * (0.68 * 0.32 / 500 + 0.732 * 0.268 / 500) ** 0.5
    assert value.high - value.low < unpaired


@pytest.mark.parametrize(
    ("won", "lost", "p"), [(0, 0, 1.0), (5, 0, 0.0625), (0, 5, 0.0625), (3, 3, 1.0), (26, 0, 2**-25)]
)
def test_mcnemar(won: int, lost: int, p: float) -> None:
    assert run_comparison.mcnemar(won, lost) == pytest.approx(p)


def test_other_instances_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different instances"):
        run_comparison.paired(account(a="resolved"), account(b="resolved"))


@needs_agents
def test_a_summary_that_was_changed_or_an_instance_that_was(base: Base, tmp_path: Path) -> None:
    summary = run_evaluation.read_summary(base.folder.phase1 / "summary.json")
    moved = summary.model_copy(update={"instances": summary.instances | {LEDGER: "0"}, "name": "other"})
    with pytest.raises(InputError, match="is not the same instance"):
        run_comparison.require_comparable(summary, moved)
    more = summary.model_copy(update={"instances": summary.instances | {"new__x-1": "0"}})
    with pytest.raises(InputError, match="was not run on new__x-1"):
        run_comparison.require_comparable(summary, more)
    data = summary.model_dump(mode="json")
    data["protocol"]["sampling"]["temperature"] = 0.0
    (tmp_path / "summary.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match="does not match its digest"):
        run_evaluation.read_summary(tmp_path / "summary.json")


# ---------------------------------------------------------------------- a real model


@needs_agents
@pytest.mark.server
def test_phase_1_with_a_real_server(vllm_server: str, smollm2: Path, tmp_path: Path) -> None:
    """SmolLM2 solves nothing in three steps; the run ends in order, and no end is an error of ours."""
    data = settings_data(
        vllm_server,
        dataset={"instances": [LEDGER]},
        model={"name": str(smollm2)},
        sampling={"max_tokens": 64},
        agent={
            "base_config": "configs/swebench_small_agent.yaml",
            "model_class": "litellm_textbased",
            "step_limit": 3,
        },
    )
    done = phase("phase1_baseline_eval.py", write_config(tmp_path, data), tmp_path / "run")
    assert done.returncode == 0, done.stderr + done.stdout
    summary = run_evaluation.read_summary(tmp_path / "run" / "phase1" / "summary.json")
    assert summary.ends[LEDGER] in ("limit", "format", "empty_patch", "unresolved", "patch_failed")
    assert summary.agents["model_calls"] >= 1 and summary.protocol.server == {"max_model_len": 2048}
    trajectory = read(tmp_path / "run" / "phase1" / "trajectories" / LEDGER / f"{LEDGER}.traj.json")
    assert trajectory["messages"][-1]["role"] == "exit"
    assert read_declared(MINIATURE)[3].problem_statement.splitlines()[0] in json.dumps(trajectory)
    assert yaml.safe_load((ROOT / "configs/swebench_small_agent.yaml").read_text())["agent"]
