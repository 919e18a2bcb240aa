#!/usr/bin/env bash
# Phase 1 with a server of its own: starts vLLM with the configuration's flags, waits until it is healthy, runs the
# phase, stops the server that it started (by its process id, also after an error or Ctrl-C).
#
#   swebench/qwen3.6_self_trace/launch_phase1.sh                                   # the published configuration
#   swebench/qwen3.6_self_trace/launch_phase1.sh --config C --run-name N           # flags of phase1_baseline_eval.py
#   VLLM_BASE_URL=http://host:8000 swebench/qwen3.6_self_trace/launch_phase1.sh    # uses that server, leaves it running
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
exec "${PYTHON:-python}" "$here/phase1_baseline_eval.py" --serve "$@"
