"""How a rank ends: with its own exit code, whatever the libraries' threads do when the interpreter ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import ROOT

SCRIPT = """
import atexit, os
from pipeline.files import InputError
from train.distributed import run_ranks

def main():
    atexit.register(ENDING)
    print("half a line", end="")
    WORK

run_ranks(main)
"""


def end(work: str, world: int, ending: str = "os.abort") -> subprocess.CompletedProcess[str]:
    script = SCRIPT.replace("WORK", work).replace("ENDING", ending)
    env = os.environ | {"WORLD_SIZE": str(world), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("work", "code", "says"),
    [
        ("raise InputError('expected x')", 2, "error: expected x\n"),
        ("raise RuntimeError('broken')", 1, "RuntimeError: broken\n"),
    ],
)
def test_a_rank_that_fails_keeps_its_exit_code(work: str, code: int, says: str) -> None:
    """Even where the orderly end of the interpreter would abort, as gloo's threads do when a peer is gone."""
    done = end(work, 2)
    assert done.returncode == code and done.stderr.endswith(says) and done.stdout == "half a line"


def test_a_process_alone_ends_as_the_interpreter_ends() -> None:
    assert end("return 3", 1).returncode == -6


def test_a_rank_that_succeeds_ends_in_order() -> None:
    done = end("return 0", 2, "lambda: print(', whole')")
    assert done.returncode == 0 and done.stdout == "half a line, whole\n"
