#!/usr/bin/env bash
# A critic for your own problems: training files, fine-tuning, reinforcement learning, export,
# evaluation.
# From the root of the checkout, with your files:
#   MODEL=DIR PROBLEMS=FILE OUT=DIR examples/journeys/own_problems.sh
set -euo pipefail

CONFIG=${CONFIG:-examples/ctrl_smollm2_cpu.yaml}
MODEL=${MODEL:-runs/models/smollm2}
PROBLEMS=${PROBLEMS:-examples/problems}
OUT=${OUT:-runs/own_problems}
RANKS=${RANKS:-2} ENGINE=${ENGINE:-vllm}
SOLVE=${SOLVE:---solver $MODEL --engine $ENGINE} # or --solutions FILE, if you have some

ctrl-synthesize --problems "$PROBLEMS" $SOLVE --out "$OUT/data"

ctrl-train-sft --nproc-per-node "$RANKS" --config "$CONFIG" \
  "actor_rollout_ref.model.path=$MODEL" "sft.train_files=$OUT/data/sft_train.parquet" \
  "trainer.default_local_dir=$OUT" trainer.experiment_name=sft

ctrl-train-rl --nproc-per-node "$RANKS" --config "$CONFIG" \
  "actor_rollout_ref.model.path=$OUT/sft/hf" "actor_rollout_ref.proxy.model.path=$MODEL" \
  "actor_rollout_ref.rollout.name=$ENGINE" \
  "data.train_files=$OUT/data/train.parquet" "data.val_files=$OUT/data/val.parquet" \
  "trainer.default_local_dir=$OUT" trainer.experiment_name=critic

ctrl-convert-megatron-to-hf --checkpoint "$OUT/critic" --out "$OUT/exported"
ctrl-evaluate --config "$CONFIG" "before=$MODEL" "after SFT=$OUT/sft/hf" "after RL=$OUT/exported" \
  --out "$OUT/evaluation" \
  --set "actor_rollout_ref.model.path=$MODEL" "actor_rollout_ref.rollout.name=$ENGINE" \
  "data.train_files=$OUT/data/train.parquet" "data.val_files=$OUT/data/val.parquet"
