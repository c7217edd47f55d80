#!/usr/bin/env bash
# A training step of your own: the nodes of examples/own_pipeline.py on your own prompts.
#   MODEL=DIR OUT=DIR examples/journeys/own_pipeline.sh
set -euo pipefail

CONFIG=${CONFIG:-examples/ctrl_smollm2_cpu.yaml}
MODEL=${MODEL:-runs/models/smollm2}
OUT=${OUT:-runs/own_pipeline}
RANKS=${RANKS:-2} ENGINE=${ENGINE:-vllm}

python examples/journeys/own_reward.py "$OUT/train.parquet"

ctrl-train-rl --nproc-per-node "$RANKS" --config "$CONFIG" \
  dag.custom_pipeline_fn=examples.own_pipeline:build \
  "actor_rollout_ref.model.path=$MODEL" "actor_rollout_ref.rollout.name=$ENGINE" \
  "data.train_files=$OUT/train.parquet" "data.val_files=[]" \
  "trainer.default_local_dir=$OUT" trainer.experiment_name=vowels
