#!/usr/bin/env bash
# The update step against TRL's and against the floating-point limit.
# About 4 minutes on one H200: bash benchmarks/gpu/grpo_step.sh          (SIZE=tiny on a CPU: 1 minute)
. "$(dirname "$0")/common.sh"
if [ "$SIZE" = tiny ]; then preset=cpu variants=tree,trl,check; else preset=h200 variants=tree,trl,check,attention,small; fi
step grpo_step 380 "$PYTHON" benchmarks/bench_grpo_step.py --preset $preset --variants $variants --out "$OUT/bench_grpo_step.json"
exit $failed
