"""The miniature: declared instances, deterministic repositories, the official report code, hostile patches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_dataset
import run_declared
import run_grading
from run_folder import RunFolder, make_split
from run_settings import RunSettings
from swe_run_helpers import MINIATURE, build_miniature, needs_agents, settings_data

from pipeline.files import InputError

CANARY = "/var/tmp/trace_swe_canary"


@pytest.fixture(scope="module")
def declared() -> list[run_declared.Declared]:
    return run_declared.read_declared(MINIATURE)


def test_eight_instances_of_two_capabilities(declared: list[run_declared.Declared]) -> None:
    assert len(declared) == 8
    kinds = [d.capability for d in declared]
    assert kinds.count("deep_call_graph_traversal") == kinds.count("semantic_logic_precision") == 4
    for d in declared:
        assert d.play("base") and d.play("trained"), d.instance_id
        assert d.patch.strip() not in json.dumps(d.plays), "a play must repair, not quote the gold patch"
        assert not set(d.FAIL_TO_PASS) & set(d.PASS_TO_PASS)


def test_deep_ones_are_far_from_their_symptom(declared: list[run_declared.Declared]) -> None:
    """The repaired file is at least three modules away from the one that the issue names."""
    for d in declared:
        if d.capability == "deep_call_graph_traversal":
            repaired = [line[6:] for line in d.patch.splitlines() if line.startswith("+++ b/")]
            sources = [f for f in d.files if f.endswith(".py") and not f.startswith("tests/") and "__init__" not in f]
            assert len(sources) >= 4 and len(repaired) == 1, d.instance_id


def test_the_issues_tell_the_truth(declared: list[run_declared.Declared], tmp_path: Path) -> None:
    """Every session that an issue shows happens so at the base commit: an agent that tries it sees the fault."""
    shown = 0
    for d in declared:
        for name, text in d.files.items():
            (tmp_path / d.instance_id / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / d.instance_id / name).write_text(text)
        (tmp_path / d.instance_id / "issue.txt").write_text(d.problem_statement)
        package = d.repo.split("/")[1]
        code = f"import doctest, {package} as p; print(doctest.testfile('issue.txt', False, globs=vars(p)))"
        line = [sys.executable, "-c", code]
        done = subprocess.run(line, cwd=tmp_path / d.instance_id, capture_output=True, text=True)
        assert "failed=0" in done.stdout, done.stdout + done.stderr
        shown += "attempted=0" not in done.stdout
    assert shown >= 5


def test_both_parts_have_work(declared: list[run_declared.Declared]) -> None:
    split = make_split([d.instance_id for d in declared], "40:60")
    assert (len(split.mine), len(split.score)) == (3, 5)
    assert not set(split.mine) & set(split.score)


def test_commits_are_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_declared.build(MINIATURE, tmp_path / "a")
    config = tmp_path / "gitconfig"
    config.write_text("[user]\nname = Somebody\nemail = s@e\n[core]\nautocrlf = true\n[commit]\ngpgsign = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2001-01-01T00:00:00+00:00")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    second = run_declared.build(MINIATURE, tmp_path / "b")
    assert first == second
    assert {r["base_commit"] for r in first} and len({r["base_commit"] for r in first}) == 8


def test_rows_are_in_the_official_format(tmp_path: Path) -> None:
    rows = build_miniature(tmp_path)
    for instance in run_dataset.checked_rows(rows, "rows"):
        have = instance.row()
        for column in ("image", "eval_script", "log_parser", "eval_type", "hints_text", "created_at", "version"):
            assert isinstance(have[column], str), column
        assert "plays" not in have and "files" not in have, "a row must not hold what only the miniature knows"


@pytest.mark.parametrize("name", ["../x.py", "/etc/x.py", "a/../../x.py", ".git/hooks/post-checkout"])
def test_a_declared_file_stays_inside(declared: list[run_declared.Declared], name: str) -> None:
    data = declared[0].model_dump() | {"files": {name: "x"}}
    with pytest.raises(ValueError, match="not a path inside"):
        run_declared.Declared.model_validate(data)


def test_a_file_must_have_the_name_of_its_instance(tmp_path: Path) -> None:
    source = next(MINIATURE.glob("*.yaml"))
    (tmp_path / "other.yaml").write_text(source.read_text())
    with pytest.raises(InputError, match="name the file after it"):
        run_declared.read_declared(tmp_path)


NO_OP = "diff --git a/NOTE b/NOTE\nnew file mode 100644\n--- /dev/null\n+++ b/NOTE\n@@ -0,0 +1 @@\n+x\n"


def new_file(name: str, *lines: str, mode: str = "100644") -> str:
    body = "".join(f"+{line}\n" for line in lines)
    head = f"diff --git a/{name} b/{name}\nnew file mode {mode}\n--- /dev/null\n+++ b/{name}\n"
    return f"{head}@@ -0,0 +1,{len(lines)} @@\n{body}"


def symlink(name: str, target: str) -> str:
    return new_file(name, target, mode="120000") + "\\ No newline at end of file\n"


GONE = """diff --git a/tests/test_statement.py b/tests/test_statement.py
deleted file mode 100644
--- a/tests/test_statement.py
+++ /dev/null
"""
LEDGER = "mini__ledger-1"
CASE = "tests.test_statement.StatementTest"
FORGED = ("test_a_refund_is_the_opposite_of_the_charge", "test_charge_and_refund_cancel")
FORGE = ["import atexit", *(f"atexit.register(print, '{t} ({CASE}.{t}) ... ok')" for t in FORGED)]
IMPORT_FORGE = """diff --git a/ledger/tax.py b/ledger/tax.py
--- a/ledger/tax.py
+++ b/ledger/tax.py
@@ -1,3 +1,4 @@
 \"\"\"Tax on one amount.\"\"\"
+import ledger.forge

 from ledger.money import to_cents
"""
BINARY = """diff --git a/a.bin b/a.bin
new file mode 100644
index 0000000000000000000000000000000000000000..f971a5e28b6c4cb237ca3c7349e33bb600dbc907
GIT binary patch
literal 4
LcmZQzWcm*P0SW;F

literal 0
HcmV?d00001

"""
HOSTILE = {
    "own-tests": new_file("tests/test_more.py", "import unittest")
    + new_file("tests/conftest.py", "print('test_x ... ok')"),
    "shadow": new_file("unittest/__init__.py", "raise SystemExit(0)") + new_file("sitecustomize.py", "1 / 0"),
    "symlink": symlink("link", "/var/tmp") + new_file("link/trace_swe_canary", "x"),
    "absolute": new_file("/var/tmp/trace_swe_canary", "x"),
    "parent": new_file("../../../var/tmp/trace_swe_canary", "x"),
    "git-folder": new_file(".git/hooks/post-checkout", "#!/bin/sh", f"touch {CANARY}", mode="100755"),
    "no-patch": "I could not find the fault, sorry.\n",
    "writes-outside": new_file("ledger/money.py.orig", "x") + new_file("zz.py", "x"),
    "forged-at-exit": new_file("ledger/forge.py", *FORGE) + IMPORT_FORGE,
    "nul": "diff --git a/x b/x\n\x00\x01garbage\n",
}


@needs_agents
def test_gold_passes_nothing_fails_and_hostile_patches_change_nothing(tmp_path: Path) -> None:
    """One grading of all of them through the official code: 8 gold, 8 without effect, and the hostile ones."""
    Path(CANARY).unlink(missing_ok=True)
    settings = RunSettings.model_validate(settings_data())
    folder = RunFolder(tmp_path / "run")
    built = build_miniature(folder.root / "repositories")
    rows, predictions = [], {}

    def add(base: dict[str, object], suffix: str, patch: str) -> None:
        name = f"{base['instance_id']}.{suffix}"
        os.symlink(folder.root / "repositories" / str(base["instance_id"]), folder.root / "repositories" / name)
        rows.append(base | {"instance_id": name})
        predictions[name] = {"instance_id": name, "model_name_or_path": "org/model", "model_patch": patch}

    for base in built:
        add(base, "gold", base["patch"])
        add(base, "noop", NO_OP)
        if base["instance_id"] == LEDGER:
            for suffix, patch in HOSTILE.items():
                add(base, suffix, patch)
            add(base, "gold-and-tests-deleted", base["patch"] + GONE + _deleted_body(base, folder))
            add(base, "loop", base["patch"] + new_file("ledger/loop.py", "x"))
            add(base, "crlf", base["patch"].replace("\n", "\r\n"))
            add(base, "binary", base["patch"] + BINARY)
    out = tmp_path / "out"
    out.mkdir()
    (out / "preds.json").write_text(json.dumps(predictions))
    reports = run_grading.grade(settings, folder, out, run_dataset.checked_rows(rows, "rows"))
    resolved = {name for name, report in reports.items() if report.resolved}
    golds = {f"{b['instance_id']}.gold" for b in built}
    # The hook in .git is written by the last of the official commands, in a sandbox that leaves nothing behind.
    # A patch that repairs and also deletes the tests is graded by the tests of the data set, as officially.
    good = ("gold-and-tests-deleted", "loop", "crlf", "binary")
    assert resolved == golds | {f"{LEDGER}.{suffix}" for suffix in good}
    assert len(reports) == len(predictions), "every patch has a report"
    for suffix in ("symlink", "parent", "no-patch", "nul"):
        assert reports[f"{LEDGER}.{suffix}"].patch_successfully_applied is False, suffix
    assert not Path(CANARY).exists()
    _check_official_layout(out)


def _deleted_body(base: dict[str, object], folder: RunFolder) -> str:
    text = (folder.root / "repositories" / LEDGER / "tests" / "test_statement.py").read_text()
    lines = text.splitlines()
    return f"@@ -1,{len(lines)} +0,0 @@\n" + "".join(f"-{line}\n" for line in lines)


def _check_official_layout(out: Path) -> None:
    keyed = json.loads((out / "report.json").read_text())
    one = keyed[f"{LEDGER}.gold"]
    assert set(one["tests_status"]) == {"FAIL_TO_PASS", "PASS_TO_PASS", "FAIL_TO_FAIL", "PASS_TO_FAIL"}
    assert len(one["tests_status"]["FAIL_TO_PASS"]["success"]) == 2
    summary = run_grading.harness_summary(out / "grading")
    assert summary["schema_version"] == 2 and summary["resolved_instances"] == 12
    path = out / "grading" / "logs" / "run_evaluation" / "trace" / "org__model" / f"{LEDGER}.gold" / "report.json"
    assert json.loads(path.read_text()) == {f"{LEDGER}.gold": one}


def test_a_test_that_never_ends_is_stopped(tmp_path: Path) -> None:
    settings = RunSettings.model_validate(settings_data(grading={"timeout_s": 2}))
    folder = RunFolder(tmp_path)
    rows = run_dataset.checked_rows(build_miniature(folder.root / "repositories"), "rows")
    instance = next(i for i in rows if i.instance_id == LEDGER)
    patch = tmp_path / "patch.diff"
    patch.write_text(new_file("ledger/wait.py", "import time", "time.sleep(600)"))
    (tmp_path / "eval.sh").write_text("cd $TESTBED\npython3 -c 'import ledger.wait'\n")
    assert ">>>>> Tests Timed Out" in run_grading.run_tests(settings, folder, instance, patch)


def test_the_sandbox_sees_no_variables_and_no_files_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-secret-key")
    settings = RunSettings.model_validate(settings_data())
    rows = run_dataset.checked_rows(build_miniature(tmp_path / "repositories"), "rows")
    patch = tmp_path / "patch.diff"
    patch.write_text(NO_OP)
    (tmp_path / "eval.sh").write_text(f"env; ls {tmp_path} /root; touch /trace/grading/repo/x; cat $TESTBED/NOTE\n")
    output = run_grading.run_tests(settings, RunFolder(tmp_path), rows[0], patch)
    assert "a-secret-key" not in output and "eval.sh" not in output.replace("/trace/grading/eval.sh", "")
    assert "Read-only file system" in output and "\nx\n" in output


def test_a_patch_that_changed_is_graded_again(tmp_path: Path) -> None:
    """An instance that ended in an error was run again: the report of its old patch must not stay."""
    prediction = run_grading.Prediction(instance_id="a", model_name_or_path="m", model_patch="new")
    logs = run_grading.log_folder(tmp_path, prediction)
    logs.mkdir(parents=True)
    (logs / "patch.diff").write_text("old")
    (logs / "report.json").write_text('{"a": {"resolved": true}}')
    run_grading._drop_stale(tmp_path, {"a": prediction})
    assert not logs.exists()


def test_rows_without_a_script_need_the_harness(tmp_path: Path) -> None:
    settings = RunSettings.model_validate(settings_data())
    rows = build_miniature(tmp_path / "repositories")[:1]
    del rows[0]["eval_script"]
    name = rows[0]["instance_id"]
    entry = {"instance_id": name, "model_name_or_path": "m", "model_patch": NO_OP}
    (tmp_path / "preds.json").write_text(json.dumps({name: entry}))
    with pytest.raises(InputError, match="has no eval_script; use harness"):
        run_grading.grade(settings, RunFolder(tmp_path), tmp_path, run_dataset.checked_rows(rows, "rows"))


def test_predictions_of_something_else_are_refused(tmp_path: Path) -> None:
    settings = RunSettings.model_validate(settings_data())
    rows = run_dataset.checked_rows(build_miniature(tmp_path / "repositories"), "rows")
    entry = {"instance_id": "other__x-1", "model_name_or_path": "m", "model_patch": NO_OP}
    (tmp_path / "preds.json").write_text(json.dumps([entry]))
    with pytest.raises(InputError, match="other__x-1 is not among the instances"):
        run_grading.grade(settings, RunFolder(tmp_path), tmp_path, rows)
    (tmp_path / "preds.json").write_text(json.dumps([entry, entry]))
    with pytest.raises(InputError, match="a second one"):
        run_grading.read_predictions(tmp_path / "preds.json")
