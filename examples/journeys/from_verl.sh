#!/usr/bin/env bash
# GRPO on unchanged parquet files in verl's form with verl's compute_score, validated on two files.
#   MODEL=DIR OUT=DIR examples/journeys/from_verl.sh
set -euo pipefail

CONFIG=${CONFIG:-examples/ctrl_smollm2_cpu.yaml}
MODEL=${MODEL:-runs/models/smollm2}
OUT=${OUT:-runs/from_verl}
RANKS=${RANKS:-2} ENGINE=${ENGINE:-vllm}

python examples/journeys/verl_form.py "$OUT"

ctrl-train-rl --nproc-per-node "$RANKS" --config "$CONFIG" \
  dag.custom_pipeline_fn=ctrl_megatron.pipeline:grpo_pipeline \
  "reward.reward_funcs=[examples/journeys/verl_form.py:compute_score]" \
  "actor_rollout_ref.model.path=$MODEL" "actor_rollout_ref.rollout.name=$ENGINE" \
  "data.train_files=$OUT/sums/train.parquet" \
  "data.val_files=[$OUT/sums/test.parquet,$OUT/differences/test.parquet]" \
  "trainer.default_local_dir=$OUT" trainer.experiment_name=solver
