"""Grading of predictions: the official harness, or its report code over tests that run in a sandbox here.

Both leave, in ``<out>/grading``, the official layout ``logs/run_evaluation/<run id>/<model>/<instance>/report.json``
and the official run summary. ``<out>/report.json`` is all instance reports in one file, keyed by id (the keyed schema).
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictStr
from run_agent_config import source_repository
from run_dataset import Instance
from run_folder import RunFolder, agent_python
from run_settings import RunSettings
from steps import HELD_LOCKS, ending_with_us

from environment_calls import as_unicode
from pipeline import sandbox
from pipeline.command_line import ProgressLine
from pipeline.files import InputError, ServerError, check, parse_json, read_json, read_text, write_json, write_text
from pipeline.readers.swebench import Report

RUN_ID = "trace"
DRIVER = Path(__file__).resolve().with_name("run_grading_driver.py")
DRIVER_TIMEOUT_S = 600.0
MEMORY_MB, PROCESSES, FILE_MB, TMP_MB, OUTPUT_MB = 1024, 64, 16, 128, 4.0
# What the harness' log says where it writes no report though the patch is at fault; grading here reports both.
AT_FAULT = re.compile(r">>>>> Patch Apply Failed:|Test timed out after \d+ seconds")
NO_VERDICT = {"patch_is_None": False, "patch_exists": True, "patch_successfully_applied": False, "resolved": False}
VERDICT = re.compile(r"^(\S+ \(\S+\)) \.\.\. (ok|FAIL|ERROR)$", re.M)
TESTBED = "/tmp/testbed"  # the only place that a sandbox can write to

# The harness' own steps: a pristine tree, the model's patch by the first of its four commands that works (each on a
# pristine tree again), then the row's evaluation script, whose output is what is graded.
PROCEDURE = """
cp -r {repo} {testbed} && cd {testbed} || exit 97
git config --global --add safe.directory '*'
git checkout -q -f {commit} && git clean -q -fdx || exit 97
applied=no
for command in 'git apply --verbose' 'git apply --verbose --3way' 'git apply --verbose --reject' \
    'patch --batch --forward --fuzz=5 -p1 -i'; do
  if $command {patch} > /tmp/apply.log 2>&1; then applied=yes; break; fi
  git checkout -q -- . ; git clean -q -fd
done
if [ $applied = no ]; then echo '>>>>> Patch Apply Failed'; cat /tmp/apply.log; exit 0; fi
TESTBED={testbed} timeout {timeout} bash {script} 2>&1
code=$?
if [ $code = 124 ]; then echo '>>>>> Tests Timed Out'; fi
exit 0
"""


class Prediction(BaseModel):
    """An entry of ``preds.json``."""

    model_config = ConfigDict(extra="ignore")
    instance_id: StrictStr
    model_name_or_path: StrictStr
    model_patch: StrictStr | None


def read_predictions(path: Path) -> dict[str, Prediction]:
    """``preds.json`` as mini-swe-agent and this phase write it: an object by id, or a list.

    Raises:
        InputError: something else, or two predictions of one instance.
    """
    raw = read_json(path, "predictions")
    entries = list(raw.values()) if isinstance(raw, dict) else raw
    if not isinstance(entries, list):
        raise InputError(f"predictions {path}: expected an object or a list, found {type(raw).__name__}")
    found: dict[str, Prediction] = {}
    for n, entry in enumerate(entries):
        prediction = check(Prediction, entry, f"predictions {path}: {n}")
        if prediction.instance_id in found:
            raise InputError(f"predictions {path}: a second one of {prediction.instance_id}; keep one")
        found[prediction.instance_id] = prediction
    return found


def grade(settings: RunSettings, folder: RunFolder, out: Path, instances: Sequence[Instance]) -> dict[str, Report]:
    """Grade ``<out>/preds.json``; the report of each instance that was graded (those with a patch).

    Raises:
        InputError: the backend cannot work here.
        ServerError: the harness failed as a whole.
    """
    predictions = read_predictions(out / "preds.json")
    ids = [i.instance_id for i in instances]
    unknown = sorted(set(predictions) - set(ids))
    if unknown:
        raise InputError(f"predictions {out / 'preds.json'}: {unknown[0]} is not among the instances; remove it")
    where = out / "grading"
    where.mkdir(parents=True, exist_ok=True)
    if settings.grading.backend == "harness" and not (where / "logs").exists() and not (where / "run_id").exists():
        write_text(where / "run_id", f"{RUN_ID}-{secrets.token_hex(4)}\n")
    _drop_stale(where, predictions, unfinished=settings.grading.backend == "modal")
    if settings.grading.backend == "local":
        _grade_here(settings, folder, where, instances, predictions)
    else:
        _grade_by_harness(settings, folder, out, where, ids)
    reports = _collect(where, predictions)
    write_json(out / "report.json", reports)
    return {i: check(Report, report, f"report of {i}") for i, report in reports.items()}


def run_id_of(where: Path) -> str:
    """The harness' name of the run that is graded in ``where``. It is part of its containers' names, so two runs on one
    Docker host must not share it: each would remove the other's."""
    path = where / "run_id"
    return read_text(path, "run id").strip() if path.exists() else RUN_ID


def log_folder(where: Path, prediction: Prediction) -> Path:
    """Where the harness keeps what belongs to a prediction."""
    model = prediction.model_name_or_path.replace("/", "__")
    return where / "logs" / "run_evaluation" / run_id_of(where) / model / prediction.instance_id


def _drop_stale(where: Path, predictions: Mapping[str, Prediction], *, unfinished: bool = False) -> None:
    """Remove reports of patches that have changed since (an instance that ended in an error was run again), and those
    that say that the environment broke: they are graded again.

    Args:
        unfinished: also what has no report; on Modal the harness passes over every folder that is there.
    """
    for prediction in predictions.values():
        logs = log_folder(where, prediction)
        patch = logs / "patch.diff"
        text = (prediction.model_patch or "").encode("utf-8", "surrogatepass")
        same = patch.is_file() and patch.read_bytes() == text  # bytes: a patch may have any line ends
        report = logs / "report.json"
        keep = same and not broken(report) and (report.exists() or not unfinished)
        if logs.is_dir() and not keep:
            shutil.rmtree(logs)
        elif logs.exists() and not logs.is_dir():
            logs.unlink()


def broken(path: Path) -> bool:
    """Whether a ``report.json`` says that the environment broke, or is damaged: it is no verdict."""
    try:
        reports = read_json(path, "report") if path.exists() else {}
    except InputError:
        return True
    if not isinstance(reports, dict):
        return True
    return any(not isinstance(report, dict) or report.get("infra_failure") for report in reports.values())


def at_fault(logs: Path) -> bool:
    """Whether the harness wrote no report because the patch does not apply, or its tests ran out of time."""
    log = logs / "run_instance.log"
    if (logs / "report.json").exists() or not log.is_file():
        return False
    return AT_FAULT.search(log.read_text(encoding="utf-8", errors="replace")) is not None


def _collect(where: Path, predictions: Mapping[str, Prediction]) -> dict[str, Any]:
    reports: dict[str, Any] = {}
    for instance_id, prediction in sorted(predictions.items()):
        path = log_folder(where, prediction) / "report.json"
        if at_fault(path.parent):
            reports[instance_id] = NO_VERDICT
        elif path.exists():
            report = read_json(path, "report")
            if not isinstance(report, dict) or instance_id not in report:
                raise InputError(f"report {path}: expected an object with {instance_id}; delete it and grade again")
            reports[instance_id] = report[instance_id]
    return reports


def _grade_by_harness(settings: RunSettings, folder: RunFolder, out: Path, where: Path, ids: Sequence[str]) -> None:
    """``python -m swebench.harness.run_evaluation``, in ``where``: it writes its logs to the working directory."""
    command = [agent_python(settings), "-m", "swebench.harness.run_evaluation", "--run_id", run_id_of(where)]
    dataset, predictions = str(folder.dataset.resolve()), str((out / "preds.json").resolve())
    command += ["--dataset_name", dataset, "--predictions_path", predictions]
    command += ["--max_workers", str(settings.grading.workers), "--timeout", str(settings.grading.timeout_s)]
    command += ["--modal", str(settings.grading.backend == "modal").lower(), "--report_dir", "."]
    command += ["--instance_ids", *ids]
    with open(where / "harness.log", "ab") as log:
        # ends with us: two harnesses under one run id would remove each other's containers
        code = subprocess.run(
            command, cwd=where, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            preexec_fn=ending_with_us(), pass_fds=tuple(HELD_LOCKS),
        ).returncode  # fmt: skip
    if code != 0:
        tail = " ".join((where / "harness.log").read_text(errors="replace").split())[-300:]
        raise ServerError(f"grading: the harness ended with {code}; {where / 'harness.log'} ends with: {tail}")


def _grade_here(
    settings: RunSettings,
    folder: RunFolder,
    where: Path,
    instances: Sequence[Instance],
    predictions: Mapping[str, Prediction],
) -> None:
    patched = [i for i in instances if i.instance_id in predictions and predictions[i.instance_id].model_patch]
    for instance in patched:
        if not isinstance(instance.row().get("eval_script"), str):
            raise InputError(f"grading.backend local: {instance.instance_id} has no eval_script; use harness")
    if not patched and not predictions:
        return
    write_json(where / "job.json", _job(where, instances, predictions))
    todo = [i for i in patched if not (log_folder(where, predictions[i.instance_id]) / "test_output.txt").exists()]
    if todo:
        _drive(settings, where, "scripts")
    progress = ProgressLine("grading", len(patched))
    progress.advance(len(patched) - len(todo))
    with concurrent.futures.ThreadPoolExecutor(min(settings.grading.workers, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(_test, settings, folder, where, i, predictions[i.instance_id]) for i in todo]
        for future in concurrent.futures.as_completed(futures):
            future.result()
            progress.advance()
    progress.close()
    _drive(settings, where, "reports")


def _job(where: Path, instances: Sequence[Instance], predictions: Mapping[str, Prediction]) -> dict[str, Any]:
    """What the driver reads."""
    return {
        "folder": str(where.resolve()),
        "run_id": run_id_of(where),
        "instances": [i.row() for i in instances],
        "predictions": {i: p.model_dump() for i, p in predictions.items()},
    }


def regraded(
    settings: RunSettings, where: Path, instances: Sequence[Instance], predictions: Mapping[str, Prediction]
) -> dict[str, Report]:
    """What the official report code makes, now, of the tests' output that lies in ``where``. Writes nothing there."""
    if not predictions:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "job.json", _job(where, instances, predictions))
        printed = _drive(settings, where, "again", Path(folder) / "job.json")
    found = parse_json(printed, f"grading of {where}")
    found |= {i: NO_VERDICT for i, prediction in predictions.items() if at_fault(log_folder(where, prediction))}
    return {i: check(Report, report, f"report of {i}") for i, report in found.items()}


def raw_reports(where: Path, predictions: Mapping[str, Prediction]) -> dict[str, Report]:
    """The harness' own file for each instance that was graded.

    Raises:
        InputError: one is of another patch than the prediction's, or is damaged.
    """
    for instance_id, prediction in predictions.items():
        logs = log_folder(where, prediction)
        text, patch = (prediction.model_patch or "").encode("utf-8", "surrogatepass"), logs / "patch.diff"
        if (logs / "report.json").exists() and not (patch.is_file() and patch.read_bytes() == text):
            raise InputError(f"{logs / 'patch.diff'}: is not the patch that {instance_id} handed in; grade it again")
    return {i: check(Report, report, f"report of {i}") for i, report in _collect(where, predictions).items()}


def _drive(settings: RunSettings, where: Path, step: str, job: Path | None = None) -> str:
    command = [agent_python(settings), "-I", str(DRIVER), step, str((job or where / "job.json").resolve())]
    try:
        done = subprocess.run(  # ends with us: what it writes, the next start writes too
            command, capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, cwd=where, preexec_fn=ending_with_us()
        )
    except subprocess.TimeoutExpired:
        raise ServerError(f"grading in {where}: no end within {DRIVER_TIMEOUT_S:.0f} s; run it again") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ServerError(
            f"grading: the official report code failed ({last[:300]}); if a file below {where / 'logs'} is damaged, "
            "delete its folder and run the evaluation again"
        )
    return done.stdout


def _test(settings: RunSettings, folder: RunFolder, where: Path, instance: Instance, prediction: Prediction) -> None:
    """Run the tests of one instance in a sandbox; its output goes to ``test_output.txt``, written last."""
    logs = log_folder(where, prediction)
    logs.mkdir(parents=True, exist_ok=True)
    write_text(logs / "patch.diff", prediction.model_patch or "")
    output = run_tests(settings, folder, instance, logs / "patch.diff")
    write_text(logs / "test_output.txt", as_unicode(output))


def run_tests(settings: RunSettings, folder: RunFolder, instance: Instance, patch: Path) -> str:
    """Output of the evaluation script ``eval.sh`` beside ``patch``, on the pristine base commit with ``patch`` applied.

    The sandbox has no network, no variables of ours, and sees the repository, the patch and the script read-only.

    Raises:
        InputError: there is no sandbox or repository.
    """
    names = {name: f"/trace/grading/{name}" for name in ("repo", "patch.diff", "eval.sh")}
    binds = [
        (str(source_repository(settings, folder, instance.instance_id)), names["repo"]),
        (str(patch), names["patch.diff"]),
        (str(patch.with_name("eval.sh")), names["eval.sh"]),
    ]
    procedure = PROCEDURE.format(
        repo=names["repo"],
        testbed=TESTBED,
        commit=instance.base_commit,
        patch=names["patch.diff"],
        script=names["eval.sh"],
        timeout=settings.grading.timeout_s,
    )
    limits = sandbox.Limits(
        wall_s=settings.grading.timeout_s + 60.0,
        cpu_s=settings.grading.timeout_s + 60,
        memory_mb=MEMORY_MB,
        processes=PROCESSES,
        file_mb=FILE_MB,
        tmp_mb=TMP_MB,
        output_mb=OUTPUT_MB,
    )
    python = str(Path(sandbox.PYTHON).parent)
    environment = {"PATH": f"{python}:/usr/bin:/bin", "GIT_CONFIG_NOSYSTEM": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = sandbox.run(["/usr/bin/bash", "-c", procedure], limits=limits, binds=binds, environment=environment)
    output = (done.stdout + done.stderr).decode("utf-8", "replace")
    if done.returncode == 97:
        raise InputError(f"grading of {instance.instance_id}: the base commit cannot be laid out ({output[-200:]})")
    if twice := contradicted(output):
        output += f"\n>>>>> Tests Errored\n(two verdicts of {twice}: something other than the tests printed one)\n"
    if done.stopped is not None:
        output += f"\n>>>>> Tests Timed Out\n(stopped at the limit {done.stopped})\n"
    return output


def contradicted(output: str) -> str | None:
    """A test that passes in one line of the output and fails in another: the tested code printed one of them.

    This catches verdicts that are printed at the end. Code that shares the process with the tests can do worse, here
    as in the official harness; only an environment whose reward trains a model must rule that out (stage 2 does).
    """
    seen: dict[str, bool] = {}
    for name, verdict in VERDICT.findall(output):
        if seen.setdefault(name, verdict == "ok") != (verdict == "ok"):
            return str(name)
    return None


def harness_summary(where: Path) -> Any:
    """The official run summary, where the harness wrote one."""
    found = sorted(where.glob(f"*.{run_id_of(where)}.json"))
    return read_json(found[0], "run summary of the harness") if found else None
