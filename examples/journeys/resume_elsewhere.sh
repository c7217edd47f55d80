#!/usr/bin/env bash
# A run that starts with data-parallel ranks and resumes elsewhere with tensor-parallel ranks.
#   MODEL=DIR OUT=DIR TENSOR=2 examples/journeys/resume_elsewhere.sh
set -euo pipefail

CONFIG=${CONFIG:-examples/ctrl_smollm2_cpu.yaml}
MODEL=${MODEL:-runs/models/smollm2}
OUT=${OUT:-runs/resume_elsewhere}
ENGINE=${ENGINE:-vllm} TENSOR=${TENSOR:-3}

python examples/journeys/own_reward.py "$OUT/train.parquet"

RL=(ctrl-train-rl --config "$CONFIG"
  dag.custom_pipeline_fn=ctrl_megatron.pipeline:grpo_pipeline
  "reward.reward_funcs=[examples.journeys.own_reward:last_number]"
  "actor_rollout_ref.model.path=$MODEL" "actor_rollout_ref.rollout.name=$ENGINE"
  "data.train_files=$OUT/train.parquet" "data.val_files=[]" trainer.experiment_name=solver)

"${RL[@]}" --nproc-per-node 2 trainer.n_gpus_per_node=2 "trainer.default_local_dir=$OUT/here" \
  trainer.total_training_steps=1

mkdir -p "$OUT/there"
mv "$OUT/here/solver" "$OUT/there/"

"${RL[@]}" --nproc-per-node "$TENSOR" "trainer.n_gpus_per_node=$TENSOR" \
  "trainer.default_local_dir=$OUT/there" trainer.total_training_steps=2 \
  "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TENSOR"
