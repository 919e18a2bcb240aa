#!/usr/bin/env bash
# Two servers against one, one that is killed during training, and the README's layout. MODEL: a small real model.
# About 9 minutes on two H200: MODEL=models/smollm2 bash benchmarks/gpu/two_gpus.sh   (SIZE=tiny on a CPU: 8 minutes)
# Where a command may take less: PARTS=killed,layout and then PARTS=servers.
. "$(dirname "$0")/common.sh"
size=gpu
[ "$SIZE" = tiny ] && size=tiny
step two_gpus "${LIMIT_S:-590}" "$PYTHON" benchmarks/bench_two_gpus.py --parts "${PARTS:-killed,layout,servers}" --size $size \
  --model "${MODEL:-models/smollm2}" --logs "$OUT/two_gpus_logs" --out "$OUT/two_gpus.json"
exit $failed
