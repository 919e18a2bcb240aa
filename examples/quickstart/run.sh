#!/usr/bin/env bash
# The whole of TRACE on SmolLM2-135M-Instruct and two CPU cores: nothing but the published stage commands, in order.
#
#   make demo                                  or: bash examples/quickstart/run.sh
#   RUN=runs/other bash examples/quickstart/run.sh
#
# Every artefact lands in one folder. A stage that is done leaves a mark and is not done again, so the same command resumes.
set -euo pipefail
cd "$(dirname "$0")/../.."
RUN=${RUN:-runs/quickstart}
MODEL=${MODEL:-models/smollm2}
ITERATIONS=${ITERATIONS:-20}
SEEDS=${SEEDS:-10000:10128}
export OMP_WAIT_POLICY=passive KMP_BLOCKTIME=0 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

# before the first minutes, not after them: stage 2 runs environments in a sandbox
python -c 'from pipeline.files import run_cli; from pipeline.sandbox import find_isolation; run_cli(lambda: find_isolation() and 0)'
mkdir -p "$RUN/done"

stage() { # stage NAME COMMAND...: run once, keep its seconds and peak memory
  local name=$1; shift
  [ -f "$RUN/done/$name.json" ] && { echo "== $name: done before"; return; }
  echo "== $name: $*"
  python examples/quickstart/measure.py --output "$RUN/done/$name.json" -- "$@"
}

# 1 Capability selection
stage 01_base_rollouts python -m train.collect_rollouts --env helpdesk --model "$MODEL" --num-seeds 96 --num-samples 2 --seed 0 \
  -o "$RUN/base_rollouts.json"
stage 02_summaries python pipeline/_summarize.py --input "$RUN/base_rollouts.json" --output "$RUN/summaries.json"
stage 03_labels python pipeline/label_capabilities.py --labeler checks --checks-module games.helpdesk \
  --input "$RUN/base_rollouts.json" --output-dir "$RUN/labels"
stage 04_selection python pipeline/aggregate_capabilities.py --runs "$RUN/labels/run_*.json" \
  --candidates "$RUN/labels/candidate_capabilities.json" --summaries "$RUN/summaries.json" \
  --export "$RUN/selected_capabilities.json"
stage 05_selection_report python pipeline/report.py --selection "$RUN/selected_capabilities.json" \
  --output "$RUN/selection_report.html"

# 2 Environments: the best two that were selected
mapfile -t CHOSEN < <(python examples/quickstart/choose.py "$RUN/selected_capabilities.json" --count 2)
for name in "${CHOSEN[@]}"; do
  stage "06_validate_$name" python pipeline/validate_environment.py "capability_$name" --target-tools helpdesk \
    --json-output "$RUN/$name.validation.json"
  stage "07_rollouts_$name" python -m train.collect_rollouts --env "capability_$name" --model "$MODEL" --num-seeds 24 \
    --num-samples 8 --seed 0 -o "$RUN/$name.rollouts.json"
  stage "08_calibrate_$name" python pipeline/calibrate_environment.py "$RUN/$name.rollouts.json" --group-size 8 \
    --success-min 0.05 --mean-min 0.05 --max-all-zero 0.5 --json-output "$RUN/$name.calibration.json"
done

# 3 GRPO: one LoRA per capability, both at once on one base
CAPABILITIES=$(printf 'capability_%s,' "${CHOSEN[@]}")
stage 09_grpo python -m train --config examples/quickstart/train.yaml --capabilities "${CAPABILITIES%,}" --model "$MODEL" \
  --max-iters "$ITERATIONS" --output-dir "$RUN/train" --adapter-dir "$RUN/adapters" --resume

# 4 Composition: the gate, trained on the successful rollouts of the last iterations
python examples/quickstart/gate_config.py --run "$RUN" --model "$MODEL" --names "${CHOSEN[@]}"
stage 10_gate python -m train.train_router_sft --config "$RUN/moe_gate.yaml"

# 5 Evaluation on seeds that nobody has trained on: each adapter at home, then everything on the target
for name in "${CHOSEN[@]}"; do
  stage "11_evaluation_$name" python -m train.evaluate --model "$MODEL" --envs "capability_$name" --seeds "$SEEDS" --trials 3 \
    --adapters "$RUN/adapters/$name" --max-rows 256 --out-dir "$RUN/evaluation_$name"
done
ADAPTERS=$(printf "$RUN/adapters/%s," "${CHOSEN[@]}")
stage 12_evaluation python -m train.evaluate --model "$MODEL" --envs helpdesk --seeds "$SEEDS" --trials 3 \
  --adapters "${ADAPTERS%,}" --merge --gate "$RUN/gate" --max-rows 256 --train-metrics "$RUN/train/metrics.jsonl" \
  --out-dir "$RUN/evaluation"
python examples/quickstart/summary.py --run "$RUN" --names "${CHOSEN[@]}"
