#!/usr/bin/env bash
# Two NCCL ranks against one: scaling of the update step, the memory of a sharded base, and equal gradients.
# About 2.5 minutes on two H200: bash benchmarks/gpu/two_gpus_ranks.sh     (SIZE=tiny on a CPU with gloo: 1 minute)
. "$(dirname "$0")/common.sh"
preset=h200
[ "$SIZE" = tiny ] && preset=cpu
limit=${LIMIT_S:-330}
bench="benchmarks/bench_ranks.py --preset $preset"
step ranks "$limit" "$PYTHON" $bench --limit-s 150 --out "$OUT/bench_ranks.json"
left=$((limit - SECONDS)); [ "$left" -gt 1 ] || left=1
step ranks_deterministic "$left" "$PYTHON" $bench --deterministic --repeats 1 --limit-s 100 --out "$OUT/bench_ranks_deterministic.json"
exit $failed
