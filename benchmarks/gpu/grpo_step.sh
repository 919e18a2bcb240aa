#!/usr/bin/env bash
# The update step against TRL's and against the floating-point limit, twice (the second time with another attention).
# About 5 minutes on one H200: bash benchmarks/gpu/grpo_step.sh          (SIZE=tiny on a CPU: 1 minute)
. "$(dirname "$0")/common.sh"
if [ "$SIZE" = tiny ]; then preset=cpu first=tree,trl,check second=tree; else
  preset=h200 first=tree,trl,check,attention second=tree,tree_flex; fi
step grpo_step_1 280 "$PYTHON" benchmarks/bench_grpo_step.py --preset $preset --variants $first --out "$OUT/bench_grpo_step.json"
step grpo_step_2 200 "$PYTHON" benchmarks/bench_grpo_step.py --preset $preset --variants $second --out "$OUT/bench_grpo_step_2.json"
exit $failed
