"""Run a command, pass its output through, and record wall seconds and peak memory of the largest process.

    python examples/quickstart/measure.py --output FILE.json -- COMMAND ARG...

The record is written only when the command succeeds (exit 0, or a code of ``--also-done``, which counts as success);
any other exit code is passed on. Seconds of starts that were stopped are kept beside it and added to the record.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

from pipeline.files import read_json, run_cli, write_json


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument(
        "--also-done", type=int, action="append", default=[], help="exit code of a command that ran and said no"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    unfinished = args.output.with_name(args.output.name + ".unfinished")
    before = float(read_json(unfinished, "stage record")["seconds"]) if unfinished.exists() else 0.0
    begin = time.perf_counter()
    code: int | None = None
    try:
        code = subprocess.run(command, check=False).returncode
    finally:
        seconds = before + time.perf_counter() - begin
        done = code == 0 or code in args.also_done
        if not done:
            write_json(unfinished, {"seconds": round(seconds, 2)})
    if not done:
        sys.stderr.write(f"error: this stage ended with exit code {code}: {' '.join(command)}\n")
        return code
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    record = {"schema_version": 1, "command": command, "seconds": round(seconds, 2), "peak_bytes": peak}
    write_json(args.output, record | ({"exit_code": code} if code else {}))
    unfinished.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    run_cli(main)
