#!/usr/bin/env bash
# Four capabilities against one on one server: wall_ratio_4_vs_1, target <= 1.5. TWO=1: the group of grpo_step.sh (Qwen3-4B
# shape), the server on a GPU of its own; without it a small model that keeps the server busy, on one GPU.
# About 6 minutes on one H200: bash benchmarks/gpu/capabilities.sh       (SIZE=tiny on a CPU: 3 minutes)
# PRESET: another of bench_capabilities.py, such as h200-4b or h200-two.
. "$(dirname "$0")/common.sh"
preset=h200 iterations=8
[ "${TWO:-0}" = 1 ] && preset=h200-x2
preset=${PRESET:-$preset}
[ "$SIZE" = tiny ] && preset=cpu-server iterations=3
step "capabilities_$preset" 470 "$PYTHON" benchmarks/bench_capabilities.py --preset $preset --iterations $iterations \
  --warmup $((iterations > 4 ? 2 : 1)) --server-log "$OUT/capabilities_server.log" --out "$OUT/bench_capabilities_$preset.json"
exit $failed
