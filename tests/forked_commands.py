"""Commands of the trainers as forked processes, for tests that start many of them.

A process that has imported the heavy libraries, and nothing of the project, forks a child for each command. The child
is what ``python -m MODULE`` would be (arguments, variables, working directory, exit code), seconds sooner.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ["torch", "transformers", "peft", "safetensors.torch"]
Call = Callable[[Sequence[str], Mapping[str, str] | None], int]


def _run(arguments: list[str], variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.argv = arguments[1:]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)


def forked(otherwise: Call) -> Call:
    """A stand-in for ``steps.call``: ``python -m`` of a trainer is forked, ``otherwise`` runs everything else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)

    def call(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        if command[1] != "-m" or not command[2].startswith(("train", "moe_gate")):
            return otherwise(command, environment)
        child = context.Process(target=_run, args=([*command[1:]], {**os.environ, **(environment or {})}))
        child.start()
        child.join()
        assert child.exitcode is not None
        return child.exitcode if child.exitcode >= 0 else 128 - child.exitcode

    return call
