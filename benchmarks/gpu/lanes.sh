#!/usr/bin/env bash
# All that two GPUs show, a lane for each: the session of one GPU beside the evidence run, then what needs both.
#   MODEL=/tmp/models/smollm2 OUT=/tmp/out setsid bash benchmarks/gpu/lanes.sh &         about 22 minutes on two H200
# LANES picks parts [session,helpdesk,two_gpus,ranks], STEPS steps of the session; END (epoch seconds): everything stops in
# time; OUT/lanes.txt tells what ran.
. "$(dirname "$0")/common.sh"
lanes=,${LANES:-session,helpdesk,two_gpus,ranks},
END=${END:-$(($(date +%s) + 1500))}
left() { echo $((END - $(date +%s) - ${1:-0})); }
has() { [[ $lanes == *,$1,* ]]; }
for lane in ${LANES:+${LANES//,/ }}; do
  [[ ,session,helpdesk,two_gpus,ranks, == *,$lane,* ]] || { echo "error: LANES: $lane is none of session, helpdesk, two_gpus, ranks" >&2; exit 2; }
done
[ "$(left)" -gt 60 ] || { echo "error: END: expected more than 60 s from now, found $(left)" >&2; exit 2; }
run() { # run NAME COMMAND...: its messages and exit code in OUT/NAME.txt
  local name=$1 code=0
  shift
  date +"$name begins %T" | tee -a "$OUT/lanes.txt"
  "$@" >>"$OUT/$name.txt" 2>&1 || code=$?
  date +"$name ended with $code %T" | tee -a "$OUT/lanes.txt"
  return $code
}
here=benchmarks/gpu
if has session; then
  run session env CUDA_VISIBLE_DEVICES=0 OUT="$OUT/session" WORK=/tmp/trace_session LIMIT_S="${SESSION_S:-$(left 30)}" bash $here/session.sh &
fi
if has helpdesk; then
  run helpdesk env CUDA_VISIBLE_DEVICES=1 OUT="$OUT/helpdesk" TOTAL_S="$(left 60)" bash $here/helpdesk.sh &
fi
wait
if has two_gpus && [ "$(left)" -gt 120 ]; then
  run two_gpus env OUT="$OUT/two_gpus" LIMIT_S="$(left 15)" bash $here/two_gpus.sh
fi
if has ranks && [ "$(left)" -gt 60 ]; then
  run ranks env OUT="$OUT/ranks" bash $here/two_gpus_ranks.sh
fi
exit $failed
