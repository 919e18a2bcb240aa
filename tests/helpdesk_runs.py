"""What the tests of the evidence run share: its folder, its capabilities, what a mining run leaves."""

from __future__ import annotations

from pathlib import Path

import other_candidates
from scheduler import record_of

from pipeline.files import write_json

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "helpdesk_gpu"
NAMES = [
    "structured_data_reasoning",
    "tool_calling_precision",
    "precondition_verification",
    "multi_step_task_completion",
]


def select(run: Path, part: str = "a", deltas: tuple[float, ...] = (0.6, 0.4, 0.1, 0.05)) -> None:
    """What a mining run leaves of its selection."""
    scored = [*zip(NAMES, deltas, strict=True), *((n, 0.0) for n in other_candidates.NAMES)]
    found = [{"skill": n, "selected": d > 0.2, "mean_delta": d} for n, d in scored]
    write_json(run / f"mine_{part}" / "selected_capabilities.report.json", {"candidates": found})
    write_json(record_of(run, f"04_selection_{part}"), {"seconds": 1.0, "peak_bytes": 2**20, "command": []})
