"""Phase 2: what is mined, what never reaches a labeller, and what survives a kill."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agent_mining
import phase2_capability_mining as phase2
import pytest
import swe_phase_helpers as helpers
from run_folder import RunFolder
from run_settings import load_settings
from scripted_server import ScriptedServer
from swe_phase_helpers import ROOT, Run, ScriptedAnswers, fill_phase1

from pipeline.files import InputError
from pipeline.records import read_summaries
from pipeline.split import part_of

SCRIPT = "phase2_capability_mining.py"
INSTANCES = ScriptedAnswers().instances
PARTS = {name: part_of("mini", name, phase2.parse_shares("50:50")) for name in INSTANCES}
MINE = sorted(name for name, part in PARTS.items() if part == "mine")
SCORE = sorted(name for name, part in PARTS.items() if part == "score")


@dataclasses.dataclass
class Mined:
    """A run after phase 2, and the bodies of all requests that the labelling server saw."""

    run: Run
    done: subprocess.CompletedProcess[str]
    requests: list[dict[str, Any]]


def fill(run: Run) -> None:
    """Phase 1's output, and beside it what phase 1 also leaves: the data set with every gold patch."""
    fill_phase1(run)
    rows = [{k: v for k, v in data.items() if k != "files"} for data in INSTANCES.values()]
    run.folder.dataset.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def mined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mined]:
    with ScriptedServer(model=helpers.MODEL) as server:
        answers = ScriptedAnswers()
        server.chat = lambda messages, body: answers.chat(messages, body) or ""
        run = Run(tmp_path_factory.mktemp("phase2"), server.url)
        fill(run)
        done = run.phase(SCRIPT)
        yield Mined(run, done, server.calls("/v1/chat/completions"))


# --------------------------------------------------------------------------- the whole phase


def test_the_selection_is_what_the_labels_say(mined: Mined) -> None:
    assert mined.done.returncode == 0, mined.done.stderr
    selected = mined.run.read("phase2", "selected_capabilities.json")
    assert [entry["skill"] for entry in selected] == ["deep_call_graph_traversal", "semantic_logic_precision"]
    failed = [name for name in MINE if "trained" in INSTANCES[name]["plays"]]
    deep = [name for name in failed if INSTANCES[name]["capability"] == "deep_call_graph_traversal"]
    assert selected[0]["mean_cov"] == pytest.approx(len(deep) / len(failed))
    assert all(entry["status"] == "PENDING" and entry["n_runs_total"] == 3 for entry in selected)
    assert set(selected[0]["example_failed_cases"]) == set(deep)


def test_every_artefact_is_there(mined: Mined) -> None:
    names = {path.name for path in mined.run.folder.phase2.iterdir()}
    wanted = {"summaries.json", "blind.json", "candidate_capabilities.json", "selected_capabilities.json"}
    assert wanted | {"run_01.json", "run_02.json", "run_03.json", "selection_report.html"} <= names


def test_only_the_mine_part_is_summarized(mined: Mined) -> None:
    records = list(read_summaries(mined.run.folder.phase2 / "summaries.json"))
    assert sorted(r.id for r in records) == MINE and {r.split for r in records} == {"mine"}
    assert mined.run.read("run.json")["split"]["mine"] == MINE


def test_no_score_id_and_no_gold_patch_reaches_the_labelling_server(mined: Mined) -> None:
    sent = "\n".join(json.dumps(body, ensure_ascii=False) for body in mined.requests)
    assert all(name in sent for name in MINE)  # the search below would find what is there
    for name in SCORE:
        assert name not in sent
        package = name.partition("__")[2].rpartition("-")[0]
        assert f"in {package}." not in sent and f"cat {package}" not in sent
    for data in INSTANCES.values():
        added = [line[1:].strip() for line in data["patch"].splitlines() if line.startswith("+") and len(line) > 20]
        assert added
        for line in [*added, data["patch"]]:
            assert json.dumps(line)[1:-1] not in sent


def test_labellers_see_no_outcome(mined: Mined) -> None:
    labelling = [b for b in mined.requests if "<trajectory>" in str(b["messages"])]
    assert len(labelling) == 3 * len(MINE)
    for body in labelling:
        text = json.dumps(body["messages"])
        assert "resolved" not in text and "This trajectory" not in text and "why it failed" not in text


def test_the_same_command_does_nothing_again(mined: Mined) -> None:
    before = {p: p.stat().st_mtime_ns for p in mined.run.folder.phase2.glob("*.json")}
    done = mined.run.phase(SCRIPT)
    assert done.returncode == 0 and done.stdout.count("done before") == 4
    assert {p: p.stat().st_mtime_ns for p in mined.run.folder.phase2.glob("*.json")} == before


def test_a_done_capability_stays_done(mined: Mined) -> None:
    path = mined.run.folder.selected
    text = path.read_text()
    try:
        path.write_text(text.replace("PENDING", "DONE", 1))
        assert mined.run.phase(SCRIPT).returncode == 0
        assert path.read_text().count("DONE") == 1
    finally:
        path.write_text(text)


def test_dry_run_says_what_it_found(mined: Mined) -> None:
    done = mined.run.here(phase2.main, "--dry-run")
    assert done.returncode == 0, done.stdout
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "OK    run folder",
        "OK    trajectories to mine",
        "OK    labelling server",
        "OK    disk",
    ]
    assert f"{len(MINE)} instances to mine, {len(SCORE)} to score" in done.stdout


# --------------------------------------------------------------------------- faults


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[tuple[Run, ScriptedServer]]:
    with ScriptedServer(model=helpers.MODEL) as server:
        answers = ScriptedAnswers()
        server.chat = lambda messages, body: answers.chat(messages, body) or ""
        run = Run(tmp_path, server.url)
        fill(run)
        yield run, server


def test_a_wrong_model_name_is_refused_with_the_served_ones(fresh: tuple[Run, ScriptedServer]) -> None:
    run, server = fresh
    server.model = "another-model"
    done = run.here(phase2.main, "--dry-run")
    assert done.returncode == 2
    line = next(text for text in done.stdout.splitlines() if text.startswith("FAIL"))
    assert "another-model" in line and helpers.MODEL in line
    assert not run.folder.phase2.exists()


def test_a_killed_run_goes_on_and_asks_nothing_twice(fresh: tuple[Run, ScriptedServer]) -> None:
    run, server = fresh
    answers, seen = ScriptedAnswers(), 0
    process: subprocess.Popen[bytes] | None = None

    def chat(messages: list[Any], body: Any) -> str:
        nonlocal seen
        seen += 1
        if seen == 6 and process is not None:
            os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.3)  # its child gets SIGTERM meanwhile; this answer arrives nowhere
        return answers.chat(messages, body) or ""

    server.chat = chat
    null = subprocess.DEVNULL
    process = subprocess.Popen(run.command(SCRIPT), cwd=ROOT, stdout=null, stderr=null)
    assert process.wait(180) == -signal.SIGKILL
    time.sleep(0.5)
    logged = (run.folder.phase2 / "label_log.jsonl").read_text().count('"run"')
    assert 0 < logged < 3 * len(MINE)
    process, seen = None, 100
    done = run.phase(SCRIPT)
    assert done.returncode == 0, done.stderr
    assert seen - 100 == 3 * len(MINE) - logged  # no discovery, and only what was missing


@pytest.mark.parametrize("missing", ["run.json", "phase1/report.json", "phase1/preds.json", "phase1/trajectories"])
def test_a_missing_input_names_the_command_that_makes_it(tmp_path: Path, missing: str) -> None:
    run = Run(tmp_path, "http://127.0.0.1:9")
    fill(run)
    path = run.folder.root / missing
    path.rename(path.with_name("away"))
    done = run.here(phase2.main)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert "swebench/qwen3.6_self_trace/phase1_baseline_eval.py --run-dir" in done.stderr
    assert not (run.folder.phase2 / "summaries.json").exists()


def test_a_score_id_among_the_summaries_stops_the_phase(tmp_path: Path) -> None:
    run = Run(tmp_path, "http://127.0.0.1:9")
    fill(run)
    args = phase2.parse_arguments(["--config", str(run.config), "--run-dir", str(run.folder.root)])
    settings = load_settings(run.config)
    step = phase2.summarize_step(args, run.folder, settings)
    part = step.command.index("--part")
    whole = dataclasses.replace(step, command=step.command[:part] + step.command[part + 2 :])
    assert phase2.run_steps(run.folder.phase2, [whole]) == 0
    with pytest.raises(InputError, match=SCORE[0]):
        phase2.refuse_score_ids(run.folder.phase2 / "summaries.json", run.folder, split=True)
    with pytest.raises(InputError, match=SCORE[0]):  # also when the split is not in the summaries
        phase2.refuse_score_ids(run.folder.phase2 / "summaries.json", run.folder, split=False)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--labels", "x.json"], "--candidates"),
        (["--agent", "claude", "--candidates", "x.json"], "--agent"),
        (["--mine-all"], "--input"),
        (["--mine-all", "--input", "nowhere"], "nowhere"),
    ],
)
def test_flags_that_do_not_go_together(tmp_path: Path, flags: list[str], said: str) -> None:
    run = Run(tmp_path, "http://127.0.0.1:9")
    done = run.here(phase2.main, *flags)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


# --------------------------------------------------------------------------- label files, and a coding agent

AGENT = """
import json, subprocess, sys
prompt = open(sys.argv[1]).read()
def run(*c):
    subprocess.run([sys.executable, *c], check=True)
run("pipeline/_summarize.py", "--input", "results/trajectories", "results/evaluation",
    "--output", "labels/summaries.json", "--blind-output", "labels/blind.json")
records = json.load(open("labels/summaries.json"))["trajectories"]
examples = [{"task_id": next(r["id"] for r in records if r["outcome"] == o), "note": o} for o in ("failed", "passed")]
names = [f"skill_number_{w}" for w in ("one", "two", "three", "four", "five")]
json.dump({"candidates": [{"name": n, "description": "d", "example_trajectories": examples} for n in names]},
          open("labels/candidate_capabilities.json", "w"))
for n in range(1, 4):
    labels = {}
    for r in records:
        m = next(m for m in r["messages"] if m["role"] == "assistant")
        cited = {"label": "LACKING" if r["outcome"] == "failed" else "PRESENT", "message": m["index"],
                 "quote": m["content"][:20]}
        labels[r["id"]] = {name: cited if name == names[0] else {"label": "NA"} for name in names}
    json.dump({"attempt": n, "labels": labels}, open(f"labels/labels_{n:02}.json", "w"))
common = ["--candidates", "labels/candidate_capabilities.json"]
run("pipeline/label_capabilities.py", "--labeler", "files", "--n-runs", "3", "--input", "labels/summaries.json",
    *common, "--labels", "labels/labels_*.json", "--output-dir", "labels")
run("pipeline/aggregate_capabilities.py", "--runs", "labels/run_*.json", "--k", "2", *common, "--resamples", "10",
    "--summaries", "labels/summaries.json", "--export", "labels/selected_capabilities.json")
"""


def test_a_coding_agent_gets_the_mine_part_and_nothing_else(tmp_path: Path) -> None:
    run = Run(tmp_path, "http://127.0.0.1:9")
    fill(run)
    (tmp_path / "agent.py").write_text(AGENT)
    agent = f"{sys.executable} {tmp_path / 'agent.py'} {{prompt_file}}"
    done = run.phase(SCRIPT, "--agent", agent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [e["skill"] for e in run.read("phase2", "selected_capabilities.json")] == ["skill_number_one"]
    root = run.folder.phase2 / "agent_root"
    files = [p for p in root.rglob("*") if p.is_file() and p.relative_to(root).parts[0] in ("results", "labels")]
    seen = "\n".join(f"{p.name} {p.read_text()}" for p in files)
    assert all(name in seen for name in MINE) and not any(name in seen for name in SCORE)
    names = {p.relative_to(root).parts[0] for p in root.rglob("*") if p.is_file()}
    modules = {"game_registry.py", "environment_calls.py", "tool_calls.py", "render_pipeline.py"}
    assert names == modules | {"pipeline", "prompts", "results", "labels", "config.yaml"}
    prompt = (run.folder.phase2 / "agent" / "prompt.md").read_text()
    assert "--input results/trajectories results/evaluation" in prompt and str(run.folder.phase1) not in prompt


def test_label_files_of_agents_can_be_given(mined: Mined, tmp_path: Path) -> None:
    """Candidates and labels from elsewhere, on the same trajectories."""
    run = Run(tmp_path, "http://127.0.0.1:9")
    fill(run)
    names = [c["name"] for c in mined.run.read("phase2", "candidate_capabilities.json")["candidates"]]
    records = list(read_summaries(mined.run.folder.phase2 / "summaries.json"))
    for n in range(1, 4):
        labels = {r.id: {name: {"label": "NA"} for name in names} for r in records}
        helpers.write(tmp_path / f"labels_{n}.json", {"attempt": n, "labels": labels})
    candidates = mined.run.folder.phase2 / "candidate_capabilities.json"
    flags = ["--candidates", candidates, "--labels", tmp_path / "labels_*.json"]
    assert run.here(phase2.main, "--dry-run", *flags).returncode == 0
    done = run.phase(SCRIPT, *flags)
    assert done.returncode == 1 and "selected: nothing" in done.stdout, done.stderr  # all NA: a verdict, no fault
    assert run.read("phase2", "selected_capabilities.json") == [] and "error" not in done.stderr


def test_an_agent_that_is_not_installed_fails_the_dry_run(tmp_path: Path) -> None:
    run = Run(tmp_path, "http://127.0.0.1:9")
    fill(run)
    done = run.here(phase2.main, "--dry-run", "--agent", "no-such-agent {prompt_file}")
    assert done.returncode == 2 and "FAIL  agent" in done.stdout


# --------------------------------------------------------------------------- real files


def counts(*inputs: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Outcomes of all records of real files, and outcome by id of those with messages."""
    args = phase2.parse_arguments(["--mine-all", "--input", *map(str, inputs)])
    records = phase2.mined_records(args, RunFolder(Path("nowhere")), load_settings())
    found: dict[str, int] = {}
    for record in records:
        found[str(record.outcome)] = found.get(str(record.outcome), 0) + 1
    return found, {r.id: str(r.outcome) for r in records if r.messages}


def test_real_trajectories_of_mini_swe_agent_2(shared_data: Path) -> None:
    data = shared_data / "trajectories"
    mini, swe = data / "mini_swe_agent", data / "swebench"
    files = [*mini.glob("v2.2.7_py*"), *mini.glob("v2.2.7_sql*"), swe / "keyed_report"]
    found, by_id = counts(*files, swe / "preds_mini_v2.2.7_deepseek_23.json", swe / "summary_harness_deepseek_23.json")
    assert found == {"passed": 8, "failed": 15}
    assert by_id == {"pydicom__pydicom-1256": "passed", "sqlfluff__sqlfluff-2419": "passed"}


def test_real_trajectories_of_mini_swe_agent_1(shared_data: Path) -> None:
    data = shared_data / "trajectories"
    files = [*sorted((data / "mini_swe_agent").glob("v1.15.0*")), data / "swebench" / "flat_report"]
    found, by_id = counts(*files)
    assert found == {"passed": 1, "failed": 1}
    assert by_id == {"django__django-10999": "failed", "django__django-16255": "passed"}


def test_real_errors_do_not_vanish(shared_data: Path) -> None:
    data = shared_data / "trajectories"
    reasoner = next((data / "mini_swe_agent").glob("v2.2.7_reasoner*"))
    found, by_id = counts(reasoner, data / "swebench" / "preds_empty_patches_reasoner_15.json")
    assert sum(found.values()) == 15 and found["infrastructure"] >= 10 and "failed" not in found
    assert by_id["pvlib__pvlib-python-1154"] == "infrastructure"


def test_the_agents_copy_of_real_files_keeps_their_verdicts(shared_data: Path, tmp_path: Path) -> None:
    data = shared_data / "trajectories"
    files = [*sorted((data / "mini_swe_agent").glob("v1.15.0*")), data / "swebench" / "flat_report"]
    assert agent_mining.copy_mined([str(f) for f in files], tmp_path, None) == 2
    found, by_id = counts(tmp_path / "trajectories", tmp_path / "evaluation")
    assert found == {"passed": 1, "failed": 1} and by_id["django__django-16255"] == "passed"
