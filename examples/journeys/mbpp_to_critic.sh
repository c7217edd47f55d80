#!/usr/bin/env bash
# From MBPP's own file to an evaluated critic. From the root of the checkout:
#   MBPP=mbpp.jsonl MODEL=DIR OUT=DIR bash examples/journeys/mbpp_to_critic.sh
# After a kill in any stage the same command continues and writes the same files. SELECT and
# SYNTHESIZE are further flags of the first two commands.
set -euo pipefail

CONFIG=${CONFIG:-examples/ctrl_smollm2_cpu.yaml}
MBPP=${MBPP:?the file mbpp.jsonl}
MODEL=${MODEL:-runs/models/smollm2}
OUT=${OUT:-runs/mbpp_to_critic}
RANKS=${RANKS:-2} ENGINE=${ENGINE:-vllm}

ctrl-prepare-data --format mbpp --input "$MBPP" --split train \
  --out "$OUT/problems.jsonl" ${SELECT:-}

ctrl-synthesize --problems "$OUT/problems.jsonl" --solver "$MODEL" --engine "$ENGINE" \
  --out "$OUT/data" ${SYNTHESIZE:-}

ctrl-train-sft --nproc-per-node "$RANKS" --config "$CONFIG" \
  "actor_rollout_ref.model.path=$MODEL" "sft.train_files=$OUT/data/sft_train.parquet" \
  "trainer.default_local_dir=$OUT" trainer.experiment_name=sft

rows=("data.train_files=$OUT/data/train.parquet" "data.val_files=$OUT/data/val.parquet"
  "actor_rollout_ref.proxy.model.path=$MODEL" "actor_rollout_ref.rollout.name=$ENGINE"
  "trainer.default_local_dir=$OUT")
ctrl-train-rl --nproc-per-node "$RANKS" --config "$CONFIG" \
  "actor_rollout_ref.model.path=$OUT/sft/hf" "${rows[@]}" trainer.experiment_name=rl

last=$(ls -d "$OUT"/rl/checkpoints/global_step_* | sort -V | tail -n 1)
if [ ! -e "$OUT/critic" ]; then
  ctrl-convert-megatron-to-hf --checkpoint "$last" --out "$OUT/critic"
fi

ctrl-evaluate --config "$CONFIG" "before=$MODEL" "after SFT=$OUT/sft/hf" "after RL=$OUT/critic" \
  --out "$OUT/evaluation" --set "actor_rollout_ref.model.path=$OUT/sft/hf" "${rows[@]}"
