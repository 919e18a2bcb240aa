#!/usr/bin/env bash
# Multi-turn episodes against the saturated server, Qwen3-4B shape with dummy weights, 256 episodes in flight.
# About 7 minutes on one H200: bash benchmarks/gpu/rollouts.sh           (SIZE=tiny on a CPU: 2 minutes)
. "$(dirname "$0")/common.sh"
if [ "$SIZE" = tiny ]; then
  step rollouts_shape 120 "$PYTHON" benchmarks/shape_model.py --shape tiny --vocabulary 1024 --out "$WORK/shape"
  step rollouts 240 "$PYTHON" benchmarks/bench_rollouts.py --start-server --model "$WORK/shape" --size cpu --rounds 1 \
    --episodes 8 --concurrency 4 --group 4 --turns 2 --tokens 4 --prompt 48 --server-flags "--load-format dummy" \
    --server-log "$OUT/rollouts_server.log" --json-output "$OUT/bench_rollouts.json"
else
  step rollouts_shape 120 "$PYTHON" benchmarks/shape_model.py --shape qwen3-4b --out "$WORK/shape"
  step rollouts 420 "$PYTHON" benchmarks/bench_rollouts.py --start-server --model "$WORK/shape" --size gpu --rounds 2 \
    --server-flags "--load-format dummy --max-model-len 8192 $SERVER_FLAGS --gpu-memory-utilization 0.85" \
    --server-log "$OUT/rollouts_server.log" --json-output "$OUT/bench_rollouts.json"
fi
exit $failed
