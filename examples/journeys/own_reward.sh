#!/usr/bin/env bash
# GRPO without critiques or a sandbox: questions with answers (GSM8K) and a reward of ten lines.
#   MODEL=DIR OUT=DIR examples/journeys/own_reward.sh
set -euo pipefail

CONFIG=${CONFIG:-examples/ctrl_smollm2_cpu.yaml}
MODEL=${MODEL:-runs/models/smollm2}
OUT=${OUT:-runs/own_reward}
RANKS=${RANKS:-2} ENGINE=${ENGINE:-vllm}

python examples/journeys/own_reward.py "$OUT/train.parquet"

ctrl-train-rl --nproc-per-node "$RANKS" --config "$CONFIG" \
  dag.custom_pipeline_fn=ctrl_megatron.pipeline:grpo_pipeline \
  "reward.reward_funcs=[examples.journeys.own_reward:last_number]" \
  "actor_rollout_ref.model.path=$MODEL" "actor_rollout_ref.rollout.name=$ENGINE" \
  "data.train_files=$OUT/train.parquet" "data.val_files=$OUT/train.parquet" \
  "trainer.default_local_dir=$OUT" trainer.experiment_name=solver
