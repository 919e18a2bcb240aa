#!/usr/bin/env bash
# Load + canary of a rank-32 adapter on all linears of an 8B shape (dummy weights): delivery_s, target <= 0.5.
# About 5 minutes on one H200: bash benchmarks/gpu/delivery_8b.sh        (SIZE=tiny on a CPU: 2 minutes)
. "$(dirname "$0")/common.sh"
few="--rounds 1 --turns 2 --tokens 8 --delivery --delivery-repeats 5"
if [ "$SIZE" = tiny ]; then
  step delivery_shape 120 "$PYTHON" benchmarks/shape_model.py --shape tiny --vocabulary 1024 --out "$WORK/shape"
  step delivery_8b 240 "$PYTHON" benchmarks/bench_rollouts.py --start-server --model "$WORK/shape" --size cpu $few \
    --episodes 4 --concurrency 4 --group 4 --prompt 96 --rank 8 --server-flags "--load-format dummy" \
    --server-log "$OUT/delivery_server.log" --json-output "$OUT/delivery_8b.json"
else
  step delivery_shape 120 "$PYTHON" benchmarks/shape_model.py --shape qwen3-8b --out "$WORK/shape"
  step delivery_8b 360 "$PYTHON" benchmarks/bench_rollouts.py --start-server --model "$WORK/shape" --size gpu $few \
    --episodes 64 --concurrency 64 --rank 32 --json-output "$OUT/delivery_8b.json" \
    --server-flags "--load-format dummy --max-model-len 8192 $SERVER_FLAGS" --server-log "$OUT/delivery_server.log"
fi
exit $failed
