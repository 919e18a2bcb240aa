#!/usr/bin/env bash
# Two servers: speed against one (PARTS=servers), and one that is killed during training and comes back (PARTS=killed).
# About 6 and 7 minutes on two H200, a command each: PARTS=servers bash benchmarks/gpu/two_gpus_servers.sh
. "$(dirname "$0")/common.sh"
size=gpu
[ "$SIZE" = tiny ] && size=tiny
parts=${PARTS:-servers,killed}
for part in ${parts//,/ }; do
  step "two_gpus_$part" 560 "$PYTHON" benchmarks/bench_two_gpus.py --part "$part" --size $size \
    --model "${MODEL:-models/smollm2}" --logs "$OUT/${part}_logs" --out "$OUT/two_gpus_$part.json"
done
exit $failed
