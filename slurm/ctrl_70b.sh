#!/usr/bin/env bash
#SBATCH --job-name=ctrl_70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300

# Critique-revision GRPO with a 70B-class critic on 8 machines of 8 GPUs.
#
#   CTRL_VENV=/shared/venv sbatch slurm/ctrl_70b.sh [key=value ...]
#
# Submit from the root of the checkout, on a file system that every machine sees.
#   CTRL_VENV  virtual environment with CUDA builds of torch, megatron-core and vllm (required)
#   CONFIG     YAML file of the run; examples/ctrl_70b.yaml by default
# Arguments override keys of that file, e.g. trainer.total_epochs=1.
#
# Time limit: 300 s before the end SLURM sends USR1 to this script alone (B:; signalled as a whole,
# the step would lose its engine and its sandbox). The script asks torchrun on the first machine to
# stop; the ranks agree among themselves, save a checkpoint and end; the job is requeued and goes on
# from that checkpoint (trainer.resume_mode=auto). Give more than 300 s where a step and a save take
# longer, in --signal above and in stop_seconds below.
#
# Machines meet by their names; where a name leads to the wrong network, export GLOO_SOCKET_IFNAME and
# NCCL_SOCKET_IFNAME. Every machine starts a sandbox and as many engines as its GPUs make.
#
# Not there yet: a vLLM engine with tensor_model_parallel_size=8 on GPUs has not been run.

set -euo pipefail

stop_seconds=270

fail() {
  echo "ctrl_70b: $*" >&2
  exit 2
}

for name in SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_GPUS_ON_NODE SLURM_SUBMIT_DIR; do
  [[ -n ${!name:-} ]] || fail "$name is not set; start this script with sbatch and ask for GPUs"
done
[[ -n ${CTRL_VENV:-} ]] || fail "CTRL_VENV is not set; give the virtual environment to run in"
[[ -x $CTRL_VENV/bin/torchrun ]] || fail "$CTRL_VENV/bin/torchrun is missing; is CTRL_VENV a virtual environment with torch?"
cd "$SLURM_SUBMIT_DIR"
[[ -f tools/train_rl.py ]] || fail "$SLURM_SUBMIT_DIR has no tools/train_rl.py; submit from the root of the checkout"
config=${CONFIG:-examples/ctrl_70b.yaml}
[[ -f $config ]] || fail "CONFIG=$config does not exist"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
((${#nodes[@]} == SLURM_JOB_NUM_NODES)) ||
  fail "scontrol lists ${#nodes[@]} hosts in $SLURM_JOB_NODELIST, the job has $SLURM_JOB_NUM_NODES"
# Every machine computes the same port, and two jobs on one machine different ones.
port=$((20000 + SLURM_JOB_ID % 10000))

export PATH="$CTRL_VENV/bin:$PATH"
export PYTHONUNBUFFERED=1
export TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
# Megatron-Core overlaps tensor-parallel communication by the order in which kernels are queued.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"

launcher=(
  "$CTRL_VENV/bin/torchrun"
  --nnodes "$SLURM_JOB_NUM_NODES"
  --nproc-per-node "$SLURM_GPUS_ON_NODE"
  --rdzv-backend c10d
  --rdzv-endpoint "${nodes[0]}:$port"
  --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
  --max-restarts 0
  --shutdown-timeout "$stop_seconds"
  tools/train_rl.py --config "$config" "$@"
)
# CTRL_ names are the package's own; these two are meant for this script.
export -n CTRL_VENV CONFIG

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
pid_file=$scratch/torchrun.pid
# shellcheck disable=SC2016  # expanded on each machine
on_each_node='if ((${SLURM_NODEID:-0} == 0)); then echo $$ >"$1"; fi; shift; exec "$@"'

stop_asked=
ask_to_stop() {
  if [[ -s $pid_file ]]; then
    stop_asked=yes
    echo "ctrl_70b: the time limit is near, asking the run to save and stop" >&2
    kill -TERM "$(<"$pid_file")"
  else
    echo "ctrl_70b: the time limit is near and torchrun is not up yet; nothing to save" >&2
  fi
}
trap ask_to_stop USR1

srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
  --kill-on-bad-exit=1 bash -c "$on_each_node" node "$pid_file" "${launcher[@]}" &
step=$!

# A signal interrupts wait; the step may go on.
status=0
until
  wait "$step"
  status=$?
  ! kill -0 "$step" 2>/dev/null
do :; done

if [[ -n $stop_asked ]] && ((status != 0)); then
  echo "ctrl_70b: stopped before the end, requeueing job $SLURM_JOB_ID" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
