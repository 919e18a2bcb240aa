"""Run mini-swe-agent on one instance. Started in the agents' environment, one process for each instance::

    .venv-agents/bin/python -I run_agent_driver.py job.json

``job.json`` holds ``instance`` (a row), ``config`` (sections agent, model, environment) and ``output`` (a folder). The
work is done by the package's own benchmark runner; it leaves ``preds.json`` and ``<id>/<id>.traj.json`` in ``output``.
Imports nothing of the project: its packages do not fit beside those of the agent.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")


def end_with_parent() -> None:
    """Wait for the pipe to close: then the phase is gone, and so must be this process and its children."""
    sys.stdin.read()
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    from minisweagent.run.benchmarks.swebench import process_instance
    from minisweagent.run.benchmarks.utils.batch_progress import RunBatchProgressManager

    output = Path(job["output"])
    output.mkdir(parents=True, exist_ok=True)
    process_instance(job["instance"], output, job["config"], RunBatchProgressManager(1))


if __name__ == "__main__":
    main()
