#!/usr/bin/env bash
# The published run on one machine: four GPUs serve, four others train. Goes on where it was stopped.
#
#   bash swebench/qwen3.6_self_trace/run_all.sh                            # configs/swebench_qwen36_vllm.yaml
#   bash swebench/qwen3.6_self_trace/run_all.sh --config my.yaml --run-dir runs/mine
#   bash swebench/qwen3.6_self_trace/run_all.sh --dry-run                  # the checks of every phase, starts nothing
#   SERVE=0,1,2,3 TRAIN=4,5,6,7                                            # which GPUs; CONFIG and RUN: as --config and --run-dir
#
# Flags: --config, --run-name, --run-dir, --dry-run, as every phase has them. Phase 3 covers what phase 2 selected.
# Exit code: that of the first phase that does not end with 0; of --dry-run 2 when a check fails (before phase 1 the
# later ones say which inputs are not there yet). Stopped by Ctrl-C or SIGTERM, it stops the server that it started.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python}"
serve="${SERVE:-0,1,2,3}"
train="${TRAIN:-4,5,6,7}"
config="${CONFIG:-}"
run_dir="${RUN:-}"
run_name=""
dry=""

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

with_server() { # PHASE FLAGS...: the phase beside a server that is started for it and stopped after it
  run env CUDA_VISIBLE_DEVICES="$serve" "$python" "$here/run_server.py" "${flags[@]}" -- \
    env CUDA_VISIBLE_DEVICES="$train" "$python" "$here/$1.py" "${flags[@]}" "${@:2}"
}

check() { # GPUS PHASE FLAGS...: the phase's dry run; the others follow also when it fails
  echo "== $2"
  run env CUDA_VISIBLE_DEVICES="$1" "$python" "$here/$2.py" "${flags[@]}" "${@:3}" --dry-run || failed=2
}

if [[ -n "$dry" ]]; then
  failed=0
  check "$serve" phase1_baseline_eval --serve
  check "$train" phase2_capability_mining
  check "$train" phase3_synthesis --all-selected
  check "$train" phase4_env_validation
  check "$train" phase5_training
  check "$serve" phase6_final_eval --serve
  exit "$failed"
fi
with_server phase1_baseline_eval
with_server phase2_capability_mining
with_server phase3_synthesis --all-selected
with_server phase4_env_validation
with_server phase5_training
run env CUDA_VISIBLE_DEVICES="$serve" "$python" "$here/phase6_final_eval.py" "${flags[@]}" --serve
