#!/usr/bin/env bash
# What routing costs: Qwen3-4B shape, random weights, four adapters of rank 32 on all linears, in transformers and in vLLM.
# About 12 minutes on one H200: bash benchmarks/gpu/bench_gate.sh        (SIZE=tiny on a CPU: 5 minutes)
# Where a command may take ten minutes only, in two: PARTS=hf,sft,vllm_base and then PARTS=vllm_one_lora,vllm_routed.
# The first makes the models in WORK (16 GiB); later ones on the same machine take them. OUT/gate.json grows part by part.
WORK=${WORK:-/tmp/trace_bench_gate}
. "$(dirname "$0")/common.sh"
parts=${PARTS:-hf,sft,vllm_base,vllm_one_lora,vllm_routed}
what="--shape qwen3-4b --size gpu"
options='{"attention_backend": "FLASH_ATTN"}'
if [ "$SIZE" = tiny ]; then
  what="--model models/smollm2 --size tiny --rank 8"
  options='{"enforce_eager": true}'
fi
for part in ${parts//,/ }; do
  now=$what name=gate
  if [ "$part" = sft ]; then   # the gate's training is measured on a real model
    now="--model models/smollm2 --size ${SIZE/gpu/cpu}" name=gate_sft
  fi
  step "bench_$part" 300 "$PYTHON" benchmarks/bench_gate.py $now --parts "$part" --work "$WORK/$name" --vllm-options "$options" \
    --out "$OUT/$name.json"
done
exit $failed
