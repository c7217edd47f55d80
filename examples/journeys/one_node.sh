#!/usr/bin/env bash
# Your own model on one machine with GPUs, from problems to a critic: a run that you watch, stop and
# resume. From the root of the checkout, in its environment:
#   MODEL=DIR bash examples/journeys/one_node.sh
# Without a GPU, with a small model:
#   CONFIG=examples/ctrl_smollm2_cpu.yaml MODEL=runs/models/smollm2 RANKS=2 bash examples/journeys/one_node.sh
set -euo pipefail

CONFIG=${CONFIG:-examples/ctrl_7b.yaml}
MODEL=${MODEL:-models/Qwen2.5-Coder-7B-Instruct}
PROBLEMS=${PROBLEMS:-examples/problems}
OUT=${OUT:-runs/one_node}
RANKS=${RANKS:-8} ENGINE=${ENGINE:-vllm}
SOLVE=${SOLVE:---solver $MODEL --engine $ENGINE --n 4} # or --solutions FILE, if you have some

ctrl-plan --config "$CONFIG" --gpu-memory 80 "actor_rollout_ref.model.path=$MODEL" \
  "actor_rollout_ref.proxy.model.path=$MODEL" \
  "data.train_files=$OUT/data/train.parquet" "data.val_files=$OUT/data/val.parquet"

ctrl-synthesize --problems "$PROBLEMS" $SOLVE --out "$OUT/data"

ctrl-train-sft --nproc-per-node "$RANKS" --config "$CONFIG" \
  "actor_rollout_ref.model.path=$MODEL" "sft.train_files=$OUT/data/sft_train.parquet" \
  "sft.val_files=$OUT/data/sft_val.parquet" \
  "trainer.default_local_dir=$OUT" trainer.experiment_name=sft

REINFORCE=(ctrl-train-rl --nproc-per-node "$RANKS" --config "$CONFIG"
  "actor_rollout_ref.model.path=$OUT/sft/hf" "actor_rollout_ref.proxy.model.path=$MODEL"
  "actor_rollout_ref.rollout.name=$ENGINE"
  "data.train_files=$OUT/data/train.parquet" "data.val_files=$OUT/data/val.parquet"
  "trainer.default_local_dir=$OUT" trainer.experiment_name=rl)

"${REINFORCE[@]}" > "$OUT/rl.log" 2>&1 &
RUN=$!

until grep -q '"step": 1,' "$OUT/rl/metrics.jsonl" 2> /dev/null; do
  kill -0 "$RUN" || break # it has ended, and its log says why
  sleep 1
done
tail -n 3 "$OUT/rl.log"

kill "$RUN"
wait "$RUN" || [ $? = 130 ]

"${REINFORCE[@]}" 2>&1 | tee -a "$OUT/rl.log"
