#!/usr/bin/env bash
# Two NCCL ranks against one: equal gradients, scaling of the update step, and the memory of a sharded base.
# About 2.5 minutes on two H200: bash benchmarks/gpu/two_gpus_ranks.sh     (SIZE=tiny on a CPU with gloo: 1 minute)
. "$(dirname "$0")/common.sh"
preset=h200
[ "$SIZE" = tiny ] && preset=cpu
export TORCHINDUCTOR_DETERMINISTIC=1   # kernels that each rank chooses by timing would differ in rounding
step ranks "${LIMIT_S:-330}" "$PYTHON" benchmarks/bench_ranks.py --preset $preset --limit-s 150 --out "$OUT/bench_ranks.json"
exit $failed
