#!/usr/bin/env bash
# Two NCCL ranks against one: equal gradients, scaling of the update step, and the memory of a sharded base.
# About 5 minutes on two H200: bash benchmarks/gpu/two_gpus_ranks.sh     (SIZE=tiny on a CPU with gloo: 1 minute)
. "$(dirname "$0")/common.sh"
preset=h200
[ "$SIZE" = tiny ] && preset=cpu
for part in whole whole,sharded; do  # the first result is there even when sharding takes the second run with it
  step "ranks_${part/,/_}" 240 "$PYTHON" benchmarks/bench_ranks.py --preset $preset --parts $part --limit-s 110 \
    --out "$OUT/bench_ranks_${part/,/_}.json"
done
exit $failed
