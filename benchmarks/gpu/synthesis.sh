#!/usr/bin/env bash
# The shipped SWE scenarios on a real small model (10 rollouts each) and four tries of synthesis, end to end.
# About 90 s beside a server: BASE_URL=http://localhost:8000 MODEL=smollm2 bash benchmarks/gpu/synthesis.sh
# Needs bubblewrap; where there is none, ISOLATION=process accepts less (see docs/environments.md).
# Without BASE_URL it starts a server of the folder MODEL [models/smollm2]: 4 minutes. SIZE=tiny on a CPU: 3 minutes.
. "$(dirname "$0")/common.sh"
few="--rollouts 10 --tries 4 --concurrency 100 --max-tokens 512 --write-max-tokens 4096"
# a fixed cache: other work may use the GPU meanwhile
flags="${SERVER_FLAGS/0.3/0.05} --kv-cache-memory-bytes $((16 << 30)) --max-num-batched-tokens 8192"
if [ "$SIZE" = tiny ]; then
  few="--rollouts 1 --tries 1 --concurrency 10 --max-tokens 48 --write-max-tokens 192"
  flags="--enforce-eager --enable-prefix-caching --no-enable-chunked-prefill --max-num-batched-tokens 8192"
fi
step synthesis 420 "$PYTHON" benchmarks/bench_scenarios.py --model "${MODEL:-models/smollm2}" $few --server-flags "$flags" \
  --isolation "${ISOLATION:-auto}" ${BASE_URL:+--base-url "$BASE_URL"} --work-dir "$OUT/scenarios" --output "$OUT/scenarios.json"
exit $failed
