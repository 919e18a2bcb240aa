"""Phase 1 without an agent: data set, split, protocol, accounting of real files, server, dry run."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import run_accounting
import run_agent_config
import run_dataset
import run_evaluation
import run_folder
import run_server
from run_agents import Outcome
from run_checks import startable
from run_folder import RunFolder, make_split
from run_grading import read_predictions
from run_settings import DEFAULT_CONFIG, RunSettings, load_settings
from scripted_server import ScriptedServer
from swe_run_helpers import (
    PHASES,
    ROOT,
    command,
    environment,
    needs_agents,
    phase,
    read,
    row,
    settings_data,
    write_config,
)

from pipeline.files import InputError, ServerError
from pipeline.ports import free_port
from pipeline.split import part_of

REAL = "trajectories/swebench"


# ---------------------------------------------------------------------- data set and run folder


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"instance_id": "a__b-1"\n', "line 1"),
        (json.dumps(row()) + "\n" + json.dumps(row("a__b-2", FAIL_TO_PASS="[oops")), "row 2: FAIL_TO_PASS"),
        (json.dumps(row()) + "\n" + json.dumps(row()), "appears 2 times"),
        (json.dumps(row("../../etc")), "instance_id"),
        (json.dumps(row(base_commit="HEAD; rm -rf /")), "base_commit"),
        (json.dumps({k: v for k, v in row().items() if k != "patch"}), "patch"),
        (json.dumps(row(FAIL_TO_PASS=[])), "FAIL_TO_PASS"),
        ("[1]\n", "row 1"),
        ("\n", "is empty|holds no instances"),
    ],
)
def test_a_malformed_data_set_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "d.jsonl").write_text(text)
    data = settings_data(dataset={"name": str(tmp_path / "d.jsonl"), "expected_instances": None})
    with pytest.raises(InputError) as error:
        run_dataset.freeze(RunSettings.model_validate(data), RunFolder(tmp_path / "run"))
    assert any(word in str(error.value) for word in words.split("|")) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_malformed_data_set_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps(row()) + "\n" + '{"instance_id": 3}\n')
    data = settings_data(dataset={"name": str(tmp_path / "d.jsonl"), "expected_instances": None})
    done = phase("phase1_baseline_eval.py", write_config(tmp_path, data), tmp_path / "run")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "row 2" in done.stderr
    assert not (tmp_path / "run" / "dataset.jsonl").exists()


def test_rows_from_hugging_face_hold_lists_as_text() -> None:
    (instance,) = run_dataset.checked_rows([row(FAIL_TO_PASS='["a", "b"]', PASS_TO_PASS="[]", image="i")], "rows")
    assert instance.FAIL_TO_PASS == ["a", "b"] and instance.row()["image"] == "i"


def test_a_data_set_of_another_size_or_without_an_id_is_refused() -> None:
    rows = run_dataset.checked_rows([row("a__b-1"), row("a__b-2")], "rows")
    settings = RunSettings.model_validate(settings_data(dataset={"expected_instances": 500}))
    with pytest.raises(InputError, match="expected 500 instances, found 2"):
        run_dataset.choose(rows, settings, "d")
    only = RunSettings.model_validate(settings_data(dataset={"expected_instances": 2, "instances": ["a__b-2"]}))
    assert [i.instance_id for i in run_dataset.choose(rows, only, "d")] == ["a__b-2"]
    wrong = RunSettings.model_validate(settings_data(dataset={"expected_instances": 2, "instances": ["a__b-3"]}))
    with pytest.raises(InputError, match="asks for a__b-3"):
        run_dataset.choose(rows, wrong, "d")


def test_the_split_is_recorded_disjoint_and_that_of_stage_1() -> None:
    ids = [f"django__django-{n}" for n in range(500)]
    split = make_split(ids, "40:60")
    assert not set(split.mine) & set(split.score) and sorted(split.mine + split.score) == sorted(ids)
    assert 0.33 < len(split.mine) / 500 < 0.47
    share = run_folder.parse_shares("40:60")
    assert all(part_of("django", i, share) == "mine" for i in split.mine)
    assert set(make_split(ids[:50], "40:60").mine) == set(split.mine) & set(ids[:50]), "no id depends on the others"


def test_a_run_folder_belongs_to_one_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    settings = RunSettings.model_validate(settings_data())
    run_folder.write_run(folder, settings, ["a__b-1"], "d1")
    assert run_folder.write_run(folder, settings, ["a__b-1"], "d1") == run_folder.read_run(folder)
    with pytest.raises(InputError, match="begun with another instances"):
        run_folder.write_run(folder, settings, ["a__b-1"], "d2")
    other = settings.model_copy(update={"mine_score": "60:40"})
    with pytest.raises(InputError, match="another mine_score"):
        run_folder.write_run(folder, other, ["a__b-1"], "d1")


@pytest.mark.parametrize("how", ["identity", "both", "unknown"])
def test_a_run_json_that_was_changed_is_refused(tmp_path: Path, how: str) -> None:
    folder = RunFolder(tmp_path)
    run_folder.write_run(folder, RunSettings.model_validate(settings_data()), ["a__b-1", "a__b-2"], "d")
    data = read(folder.run_json)
    if how == "identity":
        data["identity"]["instances"] = "e"
    elif how == "both":
        data["split"]["mine"] = data["split"]["score"] = ["a__b-1"]
    else:
        data["extra"] = 1
    folder.run_json.write_text(json.dumps(data))
    with pytest.raises(InputError):
        run_folder.read_run(folder)


def test_two_phases_on_one_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        done = phase("phase1_baseline_eval.py", write_config(tmp_path, settings_data()), folder.root)
    assert done.returncode == 2 and "another phase is running" in done.stderr
    with folder.locked():
        pass


# ---------------------------------------------------------------------- accounting


def test_real_files_give_the_numbers_of_their_index(shared_data: Path) -> None:
    """8 of 23 resolved; of the reasoner's 15 five have a patch, and none of the ten others vanishes."""
    folder = shared_data / REAL
    predictions = read_predictions(folder / "preds_mini_v2.2.7_deepseek_23.json")
    reports = sorted((folder / "keyed_report").glob("*/report.json"))
    verdicts = run_accounting.of_files([folder / "summary_harness_deepseek_23.json", *reports])
    value = run_accounting.account(sorted(predictions), predictions, verdicts, {})
    assert (value.n, len(value.ids("resolved")), len(value.ids("unresolved"))) == (23, 8, 15)
    assert {"pydicom__pydicom-1256", "sqlfluff__sqlfluff-2419"} <= set(value.ids("resolved"))
    assert math.isclose(value.pass_at_1.value, 8 / 23)

    reasoner = read_predictions(folder / "preds_empty_patches_reasoner_15.json")
    outcomes = run_accounting.of_trajectories(shared_data / "trajectories" / "mini_swe_agent", sorted(reasoner))
    assert outcomes["pvlib__pvlib-python-1154"].exit_status == "Timeout"
    value = run_accounting.account(sorted(reasoner), reasoner, {}, outcomes)
    assert {end: len(value.ids(end)) for end in ("harness_error", "empty_patch", "agent_error")} == {
        "harness_error": 5,
        "empty_patch": 9,
        "agent_error": 1,
    }
    assert value.pass_at_1.value == 0 and value.pass_at_1.n == 15


def test_real_reports_of_both_schemas(shared_data: Path) -> None:
    flat = sorted((shared_data / REAL / "flat_report").glob("*/report.json"))
    assert run_accounting.of_files(flat) == {
        "django__django-10999": "unresolved",
        "django__django-16255": "resolved",
    }
    trajectory = next((shared_data / "trajectories" / "mini_swe_agent").glob("v2.2.7_sql*"))
    with pytest.raises(InputError, match="expected a harness report or run summary, found mini-swe-agent"):
        run_accounting.of_files([trajectory])


def test_the_account_as_a_command(shared_data: Path) -> None:
    folder = shared_data / REAL
    line = [sys.executable, str(PHASES / "run_accounting.py"), "--json", "--preds"]
    line += [str(folder / "preds_mini_v2.2.7_deepseek_23.json"), "--verdicts"]
    line += [str(folder / "summary_harness_deepseek_23.json")]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.returncode == 0 and json.loads(done.stdout)["pass_at_1"]["value"] == round(8 / 23, 6)


def _outcome(kind: str) -> Outcome:
    return Outcome.model_validate({"instance_id": "x", "kind": kind, "exit_status": "s"})


def test_pass_at_1_is_over_all_instances_not_over_the_graded_ones() -> None:
    ids = list("abcdefgh")
    patched = {i: _prediction(i, "diff") for i in "abc"} | {i: _prediction(i, "") for i in "defg"}
    outcomes = {i: _outcome("submitted") for i in "abc"} | {"d": _outcome("limit"), "e": _outcome("infrastructure")}
    outcomes |= {"f": _outcome("empty_patch"), "g": _outcome("format")}
    verdicts: dict[str, run_accounting.Graded] = {"a": "resolved", "b": "patch_failed"}
    value = run_accounting.account(ids, patched, verdicts, outcomes)
    assert value.ends == {
        "a": "resolved",
        "b": "patch_failed",
        "c": "harness_error",
        "d": "limit",
        "e": "agent_error",
        "f": "empty_patch",
        "g": "format",
        "h": "not_run",
    }
    data = value.to_json()
    assert data["pass_at_1"]["value"] == 1 / 8 and data["pass_at_1"]["n"] == 8
    assert data["shares"]["error"]["value"] == 2 / 8 and data["shares"]["limit_terminated"]["value"] == 1 / 8
    assert sum(len(v) for v in data["ids"].values()) == 8, "every instance is in exactly one list"


def _prediction(instance_id: str, patch: str) -> Any:
    from run_grading import Prediction

    return Prediction(instance_id=instance_id, model_name_or_path="m", model_patch=patch)


def test_resolved_without_a_patch_is_a_mix_of_runs() -> None:
    with pytest.raises(InputError, match="not of one run"):
        run_accounting.account(["a"], {"a": _prediction("a", "")}, {"a": "resolved"}, {})


def test_wilson_interval_of_the_published_base_rate() -> None:
    """340 of 500 (68.0 %): the textbook interval, by hand."""
    value = run_accounting.Account({str(i): "resolved" if i < 340 else "unresolved" for i in range(500)}).pass_at_1
    z, n, p = 1.959964, 500, 0.68
    centre, half = (p + z * z / 2 / n) / (1 + z * z / n), z * math.sqrt(p * (1 - p) / n + (z / 2 / n) ** 2)
    assert math.isclose(value.low, centre - half / (1 + z * z / n), abs_tol=1e-6)
    assert math.isclose(value.high, centre + half / (1 + z * z / n), abs_tol=1e-6)


# ---------------------------------------------------------------------- protocol


@needs_agents
def test_protocol_holds_what_decides_results_and_nothing_else() -> None:
    base = RunSettings.model_validate(settings_data())
    one = run_evaluation.protocol_of(base, run_agent_config.shared_config(base), {"max_model_len": 4096})

    def changed(**sections: Any) -> list[str]:
        settings = RunSettings.model_validate(settings_data(**sections))
        return one.differences(
            run_evaluation.protocol_of(settings, run_agent_config.shared_config(settings), {"max_model_len": 4096})
        )

    assert changed(agent={"workers": 7, "infrastructure_retries": 5}, run_name="other") == []
    assert changed(model={"name": "other", "base_url": "http://x:1"}) == []
    assert changed(agent={"step_limit": 250}) == ["agent.config.agent.step_limit"]
    assert "sampling.temperature" in changed(sampling={"temperature": 1.0})
    assert "agent.backend" in changed(agent={"backend": "local"})
    assert "grading.timeout_s" in changed(grading={"timeout_s": 61})
    assert "agent.config.agent.system_template" in changed(agent={"base_config": "swebench_backticks.yaml"})
    other = run_evaluation.protocol_of(base, run_agent_config.shared_config(base), {"max_model_len": 2048})
    assert one.differences(other) == ["server.max_model_len"]


@needs_agents
def test_the_packages_own_templates_are_used() -> None:
    config = run_agent_config.shared_config(load_settings())
    assert "/testbed" in config["agent"]["instance_template"] and config["environment"]["cwd"] == "/testbed"
    assert config["agent"]["step_limit"] == 150 and config["agent"]["cost_limit"] == 0
    assert config["environment"]["environment_class"] == "docker" and config["environment"]["timeout"] == 60
    assert config["environment"]["container_timeout"] == "12h", "150 long steps outlive the package's 2 hours"
    assert config["environment"]["env"]["PAGER"] == "cat", "what the package sets stays"
    assert config["model"]["model_kwargs"]["extra_body"] == {"top_k": 20}
    assert config["model"]["cost_tracking"] == "ignore_errors"


def test_without_the_agents_the_remedy_is_named(tmp_path: Path) -> None:
    settings = RunSettings.model_validate(settings_data(agent={"python": str(tmp_path / "no")}))
    with pytest.raises(InputError, match="make agents"):
        run_folder.agent_python(settings)
    with pytest.raises(InputError, match="does not run"):
        run_folder.agent_versions(settings.model_copy(update={"agent": _python(settings, "/bin/false")}))


def _python(settings: RunSettings, path: str) -> Any:
    return settings.agent.model_copy(update={"python": path})


# ---------------------------------------------------------------------- dry run and server


@needs_agents
def test_dry_run_names_everything_that_is_wrong(tmp_path: Path) -> None:
    data = settings_data(f"http://127.0.0.1:{free_port()}")
    done = phase("phase1_baseline_eval.py", write_config(tmp_path, data), tmp_path / "run", "--dry-run")
    lines = done.stdout.splitlines()
    assert done.returncode == 2 and len(lines) == 8
    failed = [line for line in lines if line.startswith("FAIL")]
    assert failed == [
        f"FAIL  server: server {data['model']['base_url']}/v1/models: no answer (Connection refused); start it, or set "
        "VLLM_BASE_URL"
    ], "said once, without the library's own words"
    assert not (tmp_path / "run" / "run.json").exists(), "a dry run does not begin a run"
    done = phase("phase1_baseline_eval.py", write_config(tmp_path, data), tmp_path / "run")
    assert done.returncode == 2 and "no answer" in done.stderr and done.stderr.count("error: ") == 1


@needs_agents
def test_dry_run_sees_a_model_that_is_not_served_and_a_missing_docker(
    tmp_path: Path, scripted_server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = settings_data(scripted_server.url, model={"name": "another"}, grading={"backend": "harness"})
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    done = phase("phase1_baseline_eval.py", write_config(tmp_path, data), tmp_path / "run", "--dry-run")
    assert done.returncode == 2
    assert "FAIL  model name: server" in done.stdout and "serves scripted, not another" in done.stdout
    assert "FAIL  grading backend harness: Docker: docker.errors.DockerException" in done.stdout
    assert "start the Docker daemon, or use grading.backend modal" in done.stdout


FAKE_SERVER = """
import http.server, json, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
model = sys.argv[sys.argv.index("--model") + 1]
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": model, "max_model_len": 5}]}).encode()
        self.send_response(200); self.end_headers(); self.wfile.write(body)
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", port), H).serve_forever()
"""


def server_settings(tmp: Path, code: str = FAKE_SERVER, **server: Any) -> dict[str, Any]:
    (tmp / "server.py").write_text(code)
    port = free_port()
    data = settings_data(f"http://127.0.0.1:{port}")
    data["server"] = {"command": ["python", str(tmp / "server.py")], "args": f"--port {port}"} | server
    return data


def test_a_server_of_our_own_ends_with_its_command(tmp_path: Path) -> None:
    config = write_config(tmp_path, server_settings(tmp_path))
    show = "import os, urllib.request as u; print(u.urlopen(os.environ['VLLM_BASE_URL'] + '/v1/models').read())"
    for code, expected in ((show, 0), (f"{show}\nraise SystemExit(7)", 7)):
        line = [*command("run_server.py", config, tmp_path / "run"), "--", sys.executable, "-c", code]
        done = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=60, cwd=ROOT)
        assert done.returncode == expected, done.stderr
        assert "scripted" in done.stdout and "stopped" in done.stdout
        assert not run_server.alive(load_settings(config))


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_of_our_own_ends_when_we_are_stopped(tmp_path: Path, sign: signal.Signals) -> None:
    config = write_config(tmp_path, server_settings(tmp_path))
    settings = load_settings(config)
    line = [*command("run_server.py", config, tmp_path / "run"), "--", "sleep", "600"]
    process = subprocess.Popen(line, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not run_server.alive(settings):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.7)  # the command has begun
    process.send_signal(sign)
    assert process.wait(30) == (130 if sign == signal.SIGTERM else -9)
    while run_server.alive(settings):  # after SIGKILL: it would keep the GPUs and the port
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_dies_at_its_start_says_why(tmp_path: Path) -> None:
    data = server_settings(tmp_path, "raise SystemExit('CUDA out of memory')")
    with (
        pytest.raises(ServerError, match=r"ended with 1 while starting.*CUDA out of memory"),
        run_server.running(RunSettings.model_validate(data), tmp_path / "server.log"),
    ):
        raise AssertionError("must not come here")


def test_a_server_that_is_there_is_used_and_left_alone(tmp_path: Path, scripted_server: ScriptedServer) -> None:
    config = write_config(tmp_path, server_settings(tmp_path, "raise SystemExit(1)"))
    line = [*command("run_server.py", config, tmp_path / "run"), "--", "true"]
    env = environment() | {"VLLM_BASE_URL": scripted_server.url}
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=60, cwd=ROOT)
    assert done.returncode == 0 and "left running" in done.stdout
    settings = RunSettings.model_validate(settings_data(scripted_server.url))
    assert run_server.alive(settings)
    with pytest.raises(InputError, match="already there"), run_server.running(settings, tmp_path / "log"):
        pass


def test_the_published_server_command() -> None:
    line = run_server.command_line(load_settings())
    assert line[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert line[line.index("--model") + 1] == "Qwen/Qwen3.6-27B" and "--enable-lora" in line
    whole = run_server.command_line(load_settings(), "exported")
    assert whole[whole.index("--model") + 1] == "exported" and not [part for part in whole if "lora" in part]
    assert [part for part in line if "lora" not in part and part not in ("2", "32", "Qwen/Qwen3.6-27B")] == [
        part for part in whole if part != "exported"
    ]
    flags = ["--enable-lora", "--lora-modules", "a=b", "c=d", "--max-lora-rank=8", "--port", "1", "--seed=2"]
    assert run_server.without_adapters(flags) == ["--port", "1", "--seed=2"]


@pytest.mark.parametrize("script", ["phase1_baseline_eval.py", "phase6_final_eval.py", "run_server.py"])
def test_help(script: str) -> None:
    line = [sys.executable, str(PHASES / script), "--help"]
    done = subprocess.run(line, capture_output=True, text=True, cwd="/", env=environment())
    assert done.returncode == 0 and "--dry-run" in done.stdout and str(DEFAULT_CONFIG) in done.stdout.replace("\n", "")


def test_launch_script_is_sound() -> None:
    script = PHASES / "launch_phase1.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    env = environment() | {"PYTHON": sys.executable}
    done = subprocess.run([str(script), "--help"], capture_output=True, text=True, env=env, cwd="/")
    assert done.returncode == 0 and "phase1_baseline_eval.py" in done.stdout


def test_a_server_that_can_be_started(tmp_path: Path, scripted_server: ScriptedServer) -> None:
    settings = RunSettings.model_validate(server_settings(tmp_path))
    command_line = run_server.command_line(settings)
    assert "will be started" in startable(settings, command_line)
    with pytest.raises(InputError, match="not found"):
        startable(settings, ["no-such-program"])
    with pytest.raises(InputError, match="has no package no_such_package"):
        startable(settings, [sys.executable, "-m", "no_such_package.server"])
    with pytest.raises(InputError, match="is taken"):
        startable(RunSettings.model_validate(settings_data(scripted_server.url)), command_line)
