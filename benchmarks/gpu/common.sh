# Sourced by the job scripts of this folder. SIZE=tiny runs the same steps on a CPU in small; OUT gets results and logs.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
SIZE=${SIZE:-gpu}
OUT=${OUT:-runs/bench}
PYTHON=${PYTHON:-python3}
if [ "$SIZE" = gpu ] && ! nvidia-smi -L >/dev/null 2>&1; then
  echo "error: no GPU here (nvidia-smi -L); SIZE=tiny runs the same steps in small on a CPU" >&2
  exit 2
fi
if [ -z "${WORK:-}" ]; then
  WORK=$(mktemp -d /tmp/trace_gpu_job.XXXXXX)
  trap 'rm -rf "$WORK"' EXIT
fi
mkdir -p "$OUT" "$WORK"
OUT=$(cd "$OUT" && pwd)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1  # no NVLink multicast
SERVER_FLAGS="--attention-backend FLASH_ATTN --dtype bfloat16 --gpu-memory-utilization 0.3 --enable-prefix-caching"
SERVER_FLAGS+=" --enable-lora --max-loras 8 --max-lora-rank 32"
[ "$SIZE" = tiny ] && export OMP_WAIT_POLICY=passive KMP_BLOCKTIME=0 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# by default each process takes all cores for every small operation: side by side they wait for one another, ten times slower
[ "$SIZE" = gpu ] && export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
failed=0

# step NAME SECONDS COMMAND...: a step that fails or hangs leaves the others their turn; its messages go to OUT/NAME.log.
step() {
  local name=$1 limit=$2 begin=$SECONDS code=0
  shift 2
  timeout --signal=TERM --kill-after=30 "$limit" "$@" >"$OUT/$name.log" 2>&1 || code=$?
  printf '{"step": "%s", "exit": %d, "seconds": %d, "size": "%s"}\n' "$name" "$code" $((SECONDS - begin)) "$SIZE" \
    | tee -a "$OUT/steps.jsonl"
  if [ "$code" -ne 0 ]; then
    failed=1
    tail -n 15 "$OUT/$name.log" >&2
  fi
}
