#!/usr/bin/env bash
# The README's layout: server on GPU 0, trainer on GPU 1, one and four capabilities. MODEL: a small real model's folder.
# About 7 minutes on two H200: MODEL=models/smollm2 bash benchmarks/gpu/two_gpus_layout.sh   (SIZE=tiny: 5 minutes)
. "$(dirname "$0")/common.sh"
size=gpu
[ "$SIZE" = tiny ] && size=tiny
step two_gpus_layout 470 "$PYTHON" benchmarks/bench_two_gpus.py --part layout --size $size --model "${MODEL:-models/smollm2}" \
  --logs "$OUT/layout_logs" --out "$OUT/two_gpus_layout.json"
exit $failed
