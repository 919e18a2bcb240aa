"""Phase 3 for semantic_logic_precision: 10 calibrated scenarios.

    python swebench/qwen3.6_self_trace/phase3_synth_semantic_logic_precision.py [--use-shipped] [--dry-run]

What it does and writes: phase3_synthesis.py.
"""

from __future__ import annotations

from phase3_synthesis import main_for

from pipeline.files import run_cli

if __name__ == "__main__":
    run_cli(lambda: main_for("semantic_logic_precision", __doc__))
