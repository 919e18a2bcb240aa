#!/usr/bin/env bash
# The published run on one machine: four GPUs serve, four others train. Goes on where it was stopped. One server is
# started for phases 1-5, another for the checkpoint of phase 6. Where VLLM_BASE_URL names a server, phases 1-5 use that
# one and leave it running; phase 6's is then started beside it, on the GPUs that have trained.
#
#   bash swebench/qwen3.6_self_trace/run_all.sh                            # configs/swebench_qwen36_vllm.yaml
#   bash swebench/qwen3.6_self_trace/run_all.sh --config my.yaml --run-dir runs/mine
#   bash swebench/qwen3.6_self_trace/run_all.sh --dry-run                  # the checks of every phase, starts nothing
#   SERVE=0,1,2,3 TRAIN=4,5,6,7                                            # which GPUs; CONFIG and RUN: as --config and --run-dir
#
# Flags: --config, --run-name, --run-dir, --dry-run, as every phase has them. Phase 3 covers what phase 2 selected.
# Exit code: that of the first phase that does not end with 0; of --dry-run 2 when a check fails (LATER: what an earlier
# phase brings, no fault). Stopped by Ctrl-C or SIGTERM, it stops the server that it started.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python}"
serve="${SERVE:-0,1,2,3}"
train="${TRAIN:-4,5,6,7}"
config="${CONFIG:-}"
run_dir="${RUN:-}"
run_name=""
dry=""
to_five="" # --to-five, for itself: phases 1-5 beside a server that is there
attached="${VLLM_BASE_URL:-${VLLM_BASE_URLS:-}}"

refuse() {
  echo "error: run_all.sh: $1; expected --config C, --run-name N, --run-dir D, --dry-run" >&2
  exit 2
}

while (($#)); do
  case "$1" in
    --config=* | --run-name=* | --run-dir=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    --config | --run-name | --run-dir)
      [[ $# -ge 2 && -n "$2" && "$2" != --* ]] || refuse "$1 lacks its value"
      case "$1" in
        --config) config="$2" ;;
        --run-name) run_name="$2" ;;
        --run-dir) run_dir="$2" ;;
      esac
      shift 2
      ;;
    --dry-run) dry=1 && shift ;;
    --to-five) to_five=1 && shift ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" && exit 0 ;;
    *) refuse "unknown argument '$1'" ;;
  esac
done
flags=()
[[ -z "$config" ]] || flags+=(--config "$config")
[[ -z "$run_name" ]] || flags+=(--run-name "$run_name")
[[ -z "$run_dir" ]] || flags+=(--run-dir "$run_dir")

child=""
finish() { # the child stops its server on SIGTERM; wait until it has
  trap '' INT TERM HUP
  if [[ -n "$child" ]]; then
    kill -TERM "$child" 2>/dev/null || true
    wait "$child" || true
  fi
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

run() { # COMMAND...: in the background, because bash answers no signal while it waits for a foreground command
  local code=0
  "$@" &
  child=$!
  wait "$child" || code=$?
  child=""
  return "$code"
}

check() { # GPUS PHASE FLAGS...: the phase's dry run
  echo "== $2"
  run env CUDA_VISIBLE_DEVICES="$1" "$python" "$here/$2.py" "${flags[@]}" "${@:3}" --dry-run --planned
}

phase() { # NAME FLAGS...: a phase beside the server that VLLM_BASE_URL names
  run env CUDA_VISIBLE_DEVICES="$train" "$python" "$here/$1.py" "${flags[@]}" "${@:2}"
}

final="$serve" # GPUs of phase 6's server: those of the first one, which has been stopped by then
[[ -z "$attached" ]] || final="$train" # a server that is there keeps its GPUs; the trainers have left theirs

if [[ -n "$dry" ]]; then
  failed=0
  check "$serve" phase1_baseline_eval --serve || failed=2
  check "$train" phase2_capability_mining || failed=2
  check "$train" phase3_synthesis --all-selected || failed=2
  check "$train" phase4_env_validation || failed=2
  check "$train" phase5_training || failed=2
  check "$final" phase6_final_eval --serve || failed=2
  exit "$failed"
fi
if [[ -n "$to_five" ]]; then
  phase phase1_baseline_eval
  phase phase2_capability_mining
  phase phase3_synthesis --all-selected
  phase phase4_env_validation
  phase phase5_training
  exit 0
fi
if [[ -n "$attached" ]]; then
  run bash "${BASH_SOURCE[0]}" "${flags[@]}" --to-five
else
  check "$serve" phase1_baseline_eval --serve # minutes go into a server's start
  run env CUDA_VISIBLE_DEVICES="$serve" "$python" "$here/run_server.py" "${flags[@]}" -- \
    env PYTHON="$python" TRAIN="$train" bash "${BASH_SOURCE[0]}" "${flags[@]}" --to-five
fi
run env CUDA_VISIBLE_DEVICES="$final" "$python" "$here/phase6_final_eval.py" "${flags[@]}" --serve
