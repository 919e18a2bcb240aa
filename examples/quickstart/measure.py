"""Run a command, pass its output through, and record wall seconds and peak memory of the largest process.

    python examples/quickstart/measure.py --output FILE.json -- COMMAND ARG...

The record is written only when the command succeeds (exit 0); its exit code is passed on.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

from pipeline.files import run_cli, write_json


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    begin = time.perf_counter()
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        sys.stderr.write(f"error: this stage ended with exit code {code}: {' '.join(command)}\n")
        return code
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    seconds = time.perf_counter() - begin
    write_json(args.output, {"schema_version": 1, "command": command, "seconds": round(seconds, 2), "peak_bytes": peak})
    return 0


if __name__ == "__main__":
    run_cli(main)
