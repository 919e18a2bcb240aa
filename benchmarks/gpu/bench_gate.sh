#!/usr/bin/env bash
# What routing costs on one GPU: Qwen3-4B shape, random weights, four adapters of rank 32 on all linears.
#
#   bash benchmarks/gpu/bench_gate.sh                         # everything, about 12 minutes on an H200
#   PARTS=hf OUT=/out bash benchmarks/gpu/bench_gate.sh       # one command per part where time is lent in pieces:
#   PARTS=vllm_base,vllm_one_lora ...   PARTS=vllm_routed ...   (each server start takes about two minutes)
#
# The first call makes the models in WORK (16 GiB, two to three minutes); later ones take them. OUT/gate.json grows part by
# part, so what was measured before a kill is kept.
set -euo pipefail
cd "$(dirname "$0")/../.."
WORK=${WORK:-/tmp/trace_bench_gate}
OUT=${OUT:-runs/bench}
PARTS=${PARTS:-hf,vllm_base,vllm_one_lora,vllm_routed}
SHAPE=${SHAPE:-qwen3-4b}
SIZE=${SIZE:-gpu}
mkdir -p "$OUT"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1
failed=0
for part in ${PARTS//,/ }; do   # a part that fails leaves the others their turn
  python benchmarks/bench_gate.py --shape "$SHAPE" --size "$SIZE" --parts "$part" --work "$WORK" --out "$OUT/gate.json" \
    || { echo "part $part failed" >&2; failed=1; }
done
exit "$failed"
