"""Runs mini-swe-agent on one instance after another. Started in the agents' environment by ``run_agent_worker``.

Every line on stdin is the path of a ``job.json`` with ``instance`` (a row), ``config`` (sections agent, model,
environment), ``output`` (a folder) and ``log``; every line on stdout says that the job is over. The work is done by the
package's own benchmark runner; it leaves ``preds.json`` and ``<id>/<id>.traj.json`` in ``output``. One process serves
many instances because importing litellm takes seconds. Imports nothing of the project: the pins do not fit together.
"""

import json
import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")


def read_jobs(source: TextIO, jobs: "queue.Queue[str]") -> None:
    """Hand on the lines of stdin; at its end the phase is gone, and so must be this process and its children."""
    for line in source:
        jobs.put(line.strip())
    os.killpg(os.getpgid(0), signal.SIGKILL)


def stop_what_was_started(made: list[Any]) -> None:
    """Stop what does not stop by itself: nothing in the package ends a Modal sandbox before its time is up."""
    for environment in made:
        if hasattr(environment, "stop"):
            environment.stop()
    made.clear()  # the others end when they are collected


def run(path: Path) -> None:
    """One job; whatever it prints goes to its own log."""
    job = json.loads(path.read_text(encoding="utf-8"))
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    try:
        from minisweagent.run.benchmarks import swebench
        from minisweagent.run.benchmarks.utils.batch_progress import RunBatchProgressManager

        made: list[Any] = []
        make = swebench.get_sb_environment

        def make_noted(*arguments: Any) -> Any:
            made.append(make(*arguments))
            return made[-1]

        swebench.get_sb_environment = make_noted
        output = Path(job["output"])
        output.mkdir(parents=True, exist_ok=True)
        try:
            swebench.process_instance(job["instance"], output, job["config"], RunBatchProgressManager(1))
        finally:
            swebench.get_sb_environment = make
            stop_what_was_started(made)
    except Exception:  # the package's: an instance that it cannot even start must not end the ones after it
        traceback.print_exc()


def main() -> None:
    # Private copies, which no child inherits: a command of the model that reads its stdin must not get the next job.
    source, report = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    jobs: queue.Queue[str] = queue.Queue()
    threading.Thread(target=read_jobs, args=(source, jobs), daemon=True).start()
    while True:
        run(Path(jobs.get()))
        sys.stdout.flush()
        report.write("over\n")
        report.flush()


if __name__ == "__main__":
    main()
