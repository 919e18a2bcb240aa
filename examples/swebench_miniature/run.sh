#!/usr/bin/env bash
# The six phases of swebench/qwen3.6_self_trace on eight small local repositories: real mini-swe-agent, real grading
# code, real training, scripted model. Two CPU cores, no GPU, no Docker. Calling it again resumes.
#
#   make setup agents && source .venv/bin/activate
#   bash examples/swebench_miniature/run.sh                # --real-model: phase 1 once more with SmolLM2 on vLLM
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_WAIT_POLICY=passive KMP_BLOCKTIME=0 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec python swebench/qwen3.6_self_trace/run_miniature.py "$@"
