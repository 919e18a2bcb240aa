#!/usr/bin/env bash
# All that one H200 must show, in order of value, within LIMIT_S; the next call goes on with what is missing.
#   LIMIT_S=300 PARTS=torch MODEL=/tmp/models/smollm2 bash benchmarks/gpu/session.sh      then PARTS=serve LIMIT_S=560
# SIZE=tiny on a CPU: 8 minutes. Results: OUT/session.json and OUT/session_logs.tar.gz (benchmarks/gpu_jobs.md).
WORK=${WORK:-/tmp/trace_session}
. "$(dirname "$0")/common.sh"
more=()
[ -n "${DONE:-}" ] && more+=(--continue-from "$DONE")
[ -n "${STEPS:-}" ] && more+=(--steps "$STEPS")
exec "$PYTHON" benchmarks/session.py --size "$SIZE" --limit-s "${LIMIT_S:-560}" --parts "${PARTS:-torch,serve}" \
  --model "${MODEL:-models/smollm2}" --work "$WORK" --out "$OUT" "${more[@]}"
