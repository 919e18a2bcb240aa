#!/usr/bin/env bash
# The published run on one machine: four GPUs serve, four others train. Goes on where it was stopped.
#
#   bash swebench/qwen3.6_self_trace/run_all.sh                            # configs/swebench_qwen36_vllm.yaml
#   CONFIG=my.yaml RUN=runs/mine bash swebench/qwen3.6_self_trace/run_all.sh
#   SERVE=0,1,2,3 TRAIN=4,5,6,7                                            # which GPUs
#
# Exit code: that of the first phase that does not end with 0. VLLM_BASE_URL names a server that is there already.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/../.."
python="${PYTHON:-python}"
config="${CONFIG:-configs/swebench_qwen36_vllm.yaml}"
run="${RUN:-runs/qwen36_self_trace}"
serve="${SERVE:-0,1,2,3}"
train="${TRAIN:-4,5,6,7}"
flags=(--config "$config" --run-dir "$run")

with_server() { # PHASE FLAGS...: the phase beside a server that is started for it and stopped after it
  CUDA_VISIBLE_DEVICES="$serve" "$python" "$here/run_server.py" "${flags[@]}" -- \
    env CUDA_VISIBLE_DEVICES="$train" "$python" "$here/$1.py" "${flags[@]}" "${@:2}"
}

with_server phase1_baseline_eval
with_server phase2_capability_mining
with_server phase3_synth_deep_call_graph_traversal
with_server phase3_synth_semantic_logic_precision
with_server phase4_env_validation
with_server phase5_training
CUDA_VISIBLE_DEVICES="$serve" "$python" "$here/phase6_final_eval.py" "${flags[@]}" --checkpoint "$run/phase5/exported" --serve
