#!/usr/bin/env bash
#SBATCH --job-name=sft_70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@1800

# Fine-tuning of a 70B-class critic on synthesised critiques, on 8 machines of 8 GPUs.
#
#   CTRL_VENV=/shared/venv sbatch slurm/sft_70b.sh [key=value ...]
#
# Submit from the root of the checkout, on a file system that every machine sees. Environment,
# signals and requeueing: slurm/common.sh; step by step: docs/cluster.md.

set -euo pipefail
: "${SLURM_SUBMIT_DIR:?is not set; start this script with sbatch}"
cd "$SLURM_SUBMIT_DIR"
[[ -f slurm/common.sh ]] || {
  echo "$SLURM_SUBMIT_DIR has no slurm/common.sh; submit from the root of the checkout" >&2
  exit 2
}
# shellcheck source=slurm/common.sh
source slurm/common.sh
run_training sft_70b tools/train_sft.py examples/ctrl_70b.yaml sft "$@"
