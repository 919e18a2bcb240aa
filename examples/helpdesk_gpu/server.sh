#!/usr/bin/env bash
# The vLLM server of the evidence run, with run-time LoRA; it outlives the shell. Prints what run.sh needs to know:
#
#   eval "$(bash examples/helpdesk_gpu/server.sh)" && bash examples/helpdesk_gpu/run.sh
#   bash examples/helpdesk_gpu/server.sh stop      # or status: exit 0 when it answers
#
# A server that answers is left alone. SIZE=tiny or cpu: flags for a CPU. The merge of four adapters of rank 16 has rank 64. A slot
# for every adapter that may be in use at once (ten trained, thirteen scored): one without a slot waits for all others.
set -euo pipefail
cd "$(dirname "$0")/../.."
SIZE=${SIZE:-gpu}
PORT=${PORT:-8000}
MODEL=${MODEL:-models/smollm2}
PYTHON=${PYTHON:-python}
STATE=${STATE:-/tmp/trace_helpdesk_server_$PORT}
LOG=$STATE.log
URL=http://127.0.0.1:$PORT
# the server may not see the project: its plugin is for exported routed models
healthy() { "$PYTHON" -c "import sys, urllib.request as r; r.urlopen('$URL/health', timeout=2)" 2>/dev/null; }

if [ "${1:-}" = status ]; then
  healthy
  exit
fi
if [ "${1:-}" = stop ]; then
  if [ -f "$STATE.pid" ] && kill -TERM -- "-$(cat "$STATE.pid")" 2>/dev/null; then
    sleep 3
    kill -KILL -- "-$(cat "$STATE.pid")" 2>/dev/null || true
  fi
  rm -f "$STATE.pid"
  exit 0
fi
FLAGS="--dtype bfloat16 --max-model-len 2048 --enable-prefix-caching --enable-lora"
if [ "$SIZE" = gpu ]; then
  FLAGS+=" --attention-backend FLASH_ATTN --max-num-seqs 512 --max-loras 24 --max-lora-rank 64"
  FLAGS+=" --gpu-memory-utilization 0.05 --kv-cache-memory-bytes $((16 << 30))"   # fixed: others may use the GPU meanwhile
else
  rank=64; [ "$SIZE" = tiny ] && rank=8   # the CPU kernels gather max-lora-rank rows for every token
  FLAGS+=" --enforce-eager --block-size 32 --max-num-seqs 32 --max-num-batched-tokens 16384 --max-loras 12 --max-lora-rank $rank"
fi
if ! healthy; then
  export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1
  export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} OMP_WAIT_POLICY=passive KMP_BLOCKTIME=0
  # shellcheck disable=SC2086
  setsid "$PYTHON" -m vllm.entrypoints.openai.api_server --model "$MODEL" --served-model-name helpdesk-base \
    --host 127.0.0.1 --port "$PORT" $FLAGS ${EXTRA_FLAGS:-} >"$LOG" 2>&1 </dev/null &
  echo $! >"$STATE.pid"
  for _ in $(seq "${START_S:-300}"); do
    healthy && break
    kill -0 "$(cat "$STATE.pid")" 2>/dev/null || break
    sleep 1
  done
fi
if ! healthy; then
  echo "error: the vLLM server did not come up; end of $LOG:" >&2
  tail -n 8 "$LOG" >&2
  exit 1
fi
echo "export VLLM_BASE_URLS=$URL VLLM_MODEL=helpdesk-base"
