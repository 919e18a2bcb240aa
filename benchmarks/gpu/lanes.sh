#!/usr/bin/env bash
# All that GPUs show. Two: a lane for each, the session of one GPU beside the evidence run, then what needs both.
# One: the session, then the evidence run.
#   MODEL=/tmp/models/smollm2 OUT=/tmp/out setsid bash benchmarks/gpu/lanes.sh &      22 minutes on two H200; END ends it
# LANES picks parts [session,helpdesk,two_gpus,ranks], STEPS steps of the session; END (epoch seconds): everything stops in
# time; GPUS: use fewer than there are; OUT/lanes.txt tells what ran. Exit 1: a part failed, or was left out.
parts=session,helpdesk,two_gpus,ranks
given=${LANES:-$parts}
lanes=,${given//[[:space:]]/},
[[ $lanes =~ [a-z] ]] || { echo "error: LANES: expected some of $parts, found '$given'" >&2; exit 2; }
for lane in ${lanes//,/ }; do
  [[ ,$parts, == *,$lane,* ]] || { echo "error: LANES: $lane is none of $parts" >&2; exit 2; }
done
END=${END:-$(($(date +%s) + 1500))}
HELPDESK_S=${HELPDESK_S:-720}   # kept for the evidence run where it comes second
for name in END HELPDESK_S SESSION_S GPUS; do
  [[ ${!name:-1} =~ ^[1-9][0-9]*$ ]] || { echo "error: $name: expected a whole number > 0, found '${!name}'" >&2; exit 2; }
done
left() { echo $((END - $(date +%s) - ${1:-0})); }
[ "$(left)" -gt 60 ] || { echo "error: END: expected more than 60 s from now, found $(left)" >&2; exit 2; }
. "$(dirname "$0")/common.sh"
devices=${CUDA_VISIBLE_DEVICES:-0,1}   # of the two lanes
if [ -z "${GPUS:-}" ]; then
  GPUS=$(tr , '\n' <<<"$devices" | wc -l)   # as many as were given; a CPU does as two
  present=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')   # not the lines of its parts (MIG)
  if [ "$SIZE" = gpu ] && [ "$present" -lt "$GPUS" ]; then GPUS=$present; fi
fi
has() { [[ $lanes == *,$1,* ]]; }
run() { # run NAME COMMAND...: its messages and exit code in OUT/NAME.txt
  local name=$1 code=0
  shift
  date +"$name begins %T" | tee -a "$OUT/lanes.txt"
  "$@" >>"$OUT/$name.txt" 2>&1 || code=$?
  date +"$name ended with $code %T" | tee -a "$OUT/lanes.txt"
  [ "$code" -eq 0 ] || [ "$code" -eq 75 ]   # 75: it goes on in another piece
}
leave_out() { # leave_out NAME WHY
  echo "$1 left out: $2" | tee -a "$OUT/lanes.txt"
  failed=1
}
both() { # both NAME SECONDS COMMAND...: on both GPUs, unless less time is left
  if [ "$(left)" -gt "$2" ]; then
    run "$1" "${@:3}" || failed=1
  else
    leave_out "$1" "$(left) s are left, it needs $2"
  fi
}
here=benchmarks/gpu
session() { # session SECONDS
  run session env CUDA_VISIBLE_DEVICES="${devices%%,*}" OUT="$OUT/session" WORK=/tmp/trace_session LIMIT_S="$1" bash $here/session.sh
}
helpdesk() { # helpdesk DEVICE
  run helpdesk env CUDA_VISIBLE_DEVICES="$1" OUT="$OUT/helpdesk" TOTAL_S="$(left 60)" bash $here/helpdesk.sh
}
if [ "$GPUS" -lt 2 ]; then
  reserve=30
  if has helpdesk; then reserve=$HELPDESK_S; fi
  if has session; then
    if [ "$(left "$reserve")" -gt 0 ]; then
      session "${SESSION_S:-$(left "$reserve")}" || failed=1
    else
      leave_out session "$(left) s are left, $reserve of them are kept for what follows"
    fi
  fi
  if has helpdesk; then
    if [ "$(left)" -gt 120 ]; then
      helpdesk "${devices%%,*}" || failed=1
    else
      leave_out helpdesk "$(left) s are left, it needs 120"
    fi
  fi
  for lane in two_gpus ranks; do
    if has $lane; then leave_out $lane "one GPU is here, it needs two"; fi
  done
  exit $failed
fi
if has session; then session "${SESSION_S:-$(left 30)}" & fi
if has helpdesk; then helpdesk "${devices#*,}" & fi
for job in $(jobs -p); do wait "$job" || failed=1; done
if has two_gpus; then both two_gpus 120 env OUT="$OUT/two_gpus" LIMIT_S="$(left 15)" bash $here/two_gpus.sh; fi
if has ranks; then both ranks 60 env OUT="$OUT/ranks" LIMIT_S="$(left 15)" bash $here/two_gpus_ranks.sh; fi
exit $failed
