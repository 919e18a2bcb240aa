"""What is wrong with the arguments of ``python -m train`` is said at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--game", "capability_nowhere", "--model", "m"], "capability_nowhere"),
        (["--game", "capability_lookup", "--model", "m", "--train-seeds", "0:1"], "give more, or lower"),
        (["--lora-rnk", "3"], "--lora-rnk"),
    ],
)
def test_without_the_packages_that_take_seconds(flags: list[str], told: str, tmp_path: Path) -> None:
    """transformers and peft are imported when everything that needs neither is right."""
    script = (
        "import sys, train.__main__\n"
        "from pipeline.files import run_cli\n"
        f"sys.argv = ['train', '--output-dir', {str(tmp_path / 'r')!r}, *{flags!r}]\n"
        "try:\n"
        "    run_cli(train.__main__.main)\n"
        "finally:\n"
        "    print(sorted({'peft', 'transformers', 'vllm'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and told in done.stderr.splitlines()[-1], done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
