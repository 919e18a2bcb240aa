#!/usr/bin/env bash
# The evidence run of examples/helpdesk_gpu in pieces on one GPU: the same command until it exits 0 (75 = go on).
#
#   TOTAL_S=560 OUT=out1 bash benchmarks/gpu/helpdesk.sh                        # a piece; the server stays up
#   TOTAL_S=560 OUT=out3 STATE_FROM="out1 out2" bash benchmarks/gpu/helpdesk.sh # a fresh machine: all packs so far
#
# RUN [/tmp/trace_helpdesk] must be the same path on every machine, MODEL too. OUT gets at most seven files: pack*.NN, the state
# in parts of 15 MiB (see state.py), and results.tgz: table, figures, report, logs, of what is done by then.
RUN=${RUN:-/tmp/trace_helpdesk}
. "$(dirname "$0")/common.sh"
export SIZE MODEL="${MODEL:-models/smollm2}" PYTHON
TOTAL_S=${TOTAL_S:-560}   # for everything: unpacking, the server's start, the stages, packing
PACK_S=${PACK_S:-45}      # of them for the table and for packing

if [ -n "${STATE_FROM:-}" ] && [ ! -f "$RUN/packed.json" ]; then
  # shellcheck disable=SC2086
  "$PYTHON" examples/helpdesk_gpu/state.py unpack --run "$RUN" $STATE_FROM || exit 2
fi
up=$SECONDS
served=$(bash examples/helpdesk_gpu/server.sh) || exit 1
eval "$served"
echo "server after $((SECONDS - up)) s: $VLLM_BASE_URLS"
for try in 1 2 3; do
  # never negative: then every stage waits for the next piece
  left=$((TOTAL_S - PACK_S - SECONDS)); [ "$left" -gt 1 ] || left=1
  code=0
  LIMIT_S=$left bash examples/helpdesk_gpu/run.sh --run "$RUN" --results "$RUN/results" || code=$?
  for log in /tmp/trace_helpdesk_server_*.log; do [ -f "$log" ] && cp "$log" "$RUN/logs/$(basename "$log" .log)_$try.log"; done
  # stages that failed because their server died go on with another one
  if [ "$code" -eq 0 ] || [ "$code" -eq 75 ] || bash examples/helpdesk_gpu/server.sh status; then break; fi
  left=$((TOTAL_S - PACK_S - SECONDS))
  if [ "$try" -eq 3 ] || [ "$left" -lt 1 ]; then break; fi
  echo "the server died after $SECONDS s; another one is started"
  bash examples/helpdesk_gpu/server.sh stop
  served=$(START_S=$left bash examples/helpdesk_gpu/server.sh) || break
  eval "$served"
done
"$PYTHON" examples/helpdesk_gpu/state.py pack --run "$RUN" --size "$SIZE" --model "$MODEL" --out "$OUT" || exit 1
tar czf "$OUT/results.tgz" -C "$RUN" $(cd "$RUN" && ls -d results logs done 2>/dev/null)
echo "piece of $SECONDS s ended with $code"
exit $code
