"""What the official package does before and after the tests. Started in the agents' environment::

    .venv-agents/bin/python -I run_grading_driver.py scripts job.json
    .venv-agents/bin/python -I run_grading_driver.py reports job.json
    .venv-agents/bin/python -I run_grading_driver.py again job.json

``job.json``: ``folder`` (where ``logs/run_evaluation`` is), ``run_id``, ``instances`` (rows), ``predictions``.
``scripts`` writes the evaluation script of each instance that has a patch. ``reports`` has ``get_eval_report`` write
``report.json`` where there is a ``test_output.txt``, and ``make_run_report`` the summary. ``again`` prints the reports
that the kept test outputs give now, and writes nothing. Nothing here needs Docker, and nothing decides what counts as
resolved but the official code.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def write_scripts(job: dict[str, Any], folders: dict[str, Path]) -> None:
    from swebench.harness.utils import make_test_spec

    for row in job["instances"]:
        if (folder := folders.get(row["instance_id"])) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "eval.sh").write_text(make_test_spec(row).eval_script, encoding="utf-8")


def write_reports(job: dict[str, Any], folders: dict[str, Path]) -> None:
    from swebench.harness.constants import LOG_REPORT, LOG_TEST_OUTPUT
    from swebench.harness.grading import get_eval_report
    from swebench.harness.reporting import make_run_report
    from swebench.harness.utils import make_test_spec

    for row in job["instances"]:
        folder = folders.get(row["instance_id"])
        if folder is None or not (folder / LOG_TEST_OUTPUT).exists() or (folder / LOG_REPORT).exists():
            continue
        prediction = job["predictions"][row["instance_id"]]
        report = get_eval_report(make_test_spec(row), prediction, str(folder / LOG_TEST_OUTPUT), True)
        temporary = folder / f".{LOG_REPORT}"
        temporary.write_text(json.dumps(report, indent=4), encoding="utf-8")
        temporary.replace(folder / LOG_REPORT)
    with contextlib.redirect_stdout(sys.stderr):  # it prints what the phase prints itself
        make_run_report(job["predictions"], job["instances"], job["run_id"])


def print_reports(job: dict[str, Any], folders: dict[str, Path]) -> None:
    from swebench.harness.constants import LOG_TEST_OUTPUT
    from swebench.harness.grading import get_eval_report
    from swebench.harness.utils import make_test_spec

    found: dict[str, Any] = {}
    for row in job["instances"]:
        output = folders.get(row["instance_id"], Path("/nowhere")) / LOG_TEST_OUTPUT
        if output.exists():
            found |= get_eval_report(make_test_spec(row), job["predictions"][row["instance_id"]], str(output), True)
    sys.stdout.write(json.dumps(found))


def main() -> None:
    step = {"scripts": write_scripts, "reports": write_reports, "again": print_reports}[sys.argv[1]]
    job = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    os.chdir(job["folder"])
    root = Path("logs/run_evaluation") / job["run_id"]
    folders = {
        i: root / p["model_name_or_path"].replace("/", "__") / i
        for i, p in job["predictions"].items()
        if p["model_patch"]
    }
    step(job, folders)


if __name__ == "__main__":
    main()
