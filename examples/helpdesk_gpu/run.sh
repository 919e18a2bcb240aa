#!/usr/bin/env bash
# TRACE on helpdesk, larger than the quickstart, with every comparison: bash examples/helpdesk_gpu/run.sh
# On a machine that is lent by the piece: LIMIT_S=530 bash examples/helpdesk_gpu/run.sh, again until it exits 0 (75 = go on).
# SIZE=tiny or SIZE=cpu runs it without a GPU. With a vLLM server: see server.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_WAIT_POLICY=passive KMP_BLOCKTIME=0 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
PYTHON=${PYTHON:-python}
MODEL=${MODEL:-models/smollm2}
[ -e "$MODEL" ] || "$PYTHON" -m train.local_model --out "$MODEL"
exec "$PYTHON" examples/helpdesk_gpu/run.py --model "$MODEL" --limit-s "${LIMIT_S:-inf}" "$@"
