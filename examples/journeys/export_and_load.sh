#!/usr/bin/env bash
# Export a checkpoint as a Hugging Face directory, use it with transformers, and convert it back.
#   CHECKPOINT=runs/NAME/checkpoints/global_step_N OUT=DIR examples/journeys/export_and_load.sh
set -euo pipefail

CHECKPOINT=${CHECKPOINT:-runs/own_problems/critic/checkpoints/global_step_5}
OUT=${OUT:-runs/exported}

ctrl-convert-megatron-to-hf --checkpoint "$CHECKPOINT" --out "$OUT/hf"

python examples/journeys/load.py "$OUT/hf" "What is 3 and 4?"

ctrl-convert-hf-to-megatron --hf "$OUT/hf" --out "$OUT/checkpoint"
