# shellcheck shell=bash
# Functions of the training scripts in this folder, which source it and call run_training.
#
# Environment:
#   CTRL_VENV    virtual environment with CUDA builds of torch, megatron-core and vllm (required;
#                requirements/cuda.txt)
#   CONTAINER    prefix of every command, e.g. "apptainer exec --nv --bind /shared ctrl.sif";
#                CTRL_VENV is then the environment inside the image (/opt/venv)
#   CONFIG       YAML file of the run; defaults to the script's file
#   GPU_MEMORY   GiB of one GPU, for the memory plan; 80 by default
#   MAX_RESTARTS most restarts of the run inside the job, in a row without a new checkpoint; 2 by
#                default
#   PROXY_NODES  machines of the job, its last ones, that have no ranks: vLLM's server on each of them
#                serves the proxy (kind=api); none by default
#   PROXY_MODEL  the proxy's directory, with PROXY_NODES
#   PROXY_ARGS   further arguments of `vllm serve`, e.g. "--tensor-parallel-size 8"
#   MAX_CRASHES  most consecutive crashes without a new checkpoint before the job gives up;
#                3 by default
# Arguments of a script override keys of the file, e.g. trainer.total_epochs=1.
#
# Where engines have GPUs of their own (rollout.placement=dedicated, proxy.kind=engine), the ranks get
# the others of each machine; trainer.n_gpus_per_node is their number.
#
# A job runs the memory plan (on the first machine), a health check (on every machine) and the run
# (torch's launcher on every machine, with the exit code of the rank that ended first; srun reports the
# highest). If the run is not finished, the job is requeued.
#
# Time limit: --signal=B:USR1@N lets SLURM signal this script alone, N seconds before the end
# (signalled as a whole, the run would lose its engines and sandboxes). torchrun on the first machine
# gets the signal to stop, and the ranks agree on it. A step that has not changed weights is dropped, an
# update in progress is finished; then a checkpoint is saved, and the requeued job continues from it
# (trainer.resume_mode=auto). So N must exceed the seconds of an update and of two saves, because one
# may be in progress: time/actor_update, time/critic_update and twice checkpoint/seconds in
# metrics.jsonl.
# By hand: `scancel --batch --signal=USR1 JOB` saves and requeues, with --signal=TERM it saves and
# ends, and plain `scancel JOB` ends without saving.
#
# After a crash the ranks are started again in the job, at most MAX_RESTARTS times in a row. Then the
# job is requeued, at most MAX_CRASHES times in a row. That count is in a file beside the job's output.
# Both counts begin anew after a checkpoint, the second one also after a stop at the time limit. Wrong
# input (exit code 2 of the check or of a rank) ends the job: no restart mends it.
#
# After the loss of a machine SLURM requeues the job (--requeue). With `sbatch --no-kill` and
# trainer.min_nnodes=M the job goes on instead, on as many machines as hold whole model copies that
# share the batches equally, if these are M or more and the first machine is one of them.

# The exit code of every command for wrong input.
WRONG_INPUT=2

fail() {
  echo "$name: $*" >&2
  exit "$WRONG_INPUT"
}

say() {
  echo "$name: $*" >&2
}

# check_job: the variables of SLURM and of the user; sets nodes, python, config and crash_file.
check_job() {
  local variable
  for variable in SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_GPUS_ON_NODE \
    SLURM_CPUS_ON_NODE; do
    [[ -n ${!variable:-} ]] || fail "$variable is not set; start this script with sbatch and ask for GPUs"
  done
  [[ -n ${CTRL_VENV:-} ]] || fail "CTRL_VENV is not set; give the virtual environment to run in"
  read -r -a container <<<"${CONTAINER:-}"
  if ((${#container[@]} == 0)); then
    [[ -x $CTRL_VENV/bin/torchrun ]] ||
      fail "$CTRL_VENV/bin/torchrun is missing; is CTRL_VENV a virtual environment with torch?"
  fi
  python=("${container[@]}" "$CTRL_VENV/bin/python")
  [[ -f $program ]] || fail "$PWD has no $program; submit from the root of the checkout"
  config=${CONFIG:-$config}
  [[ -f $config ]] || fail "CONFIG=$config does not exist"
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  ((${#nodes[@]} == SLURM_JOB_NUM_NODES)) ||
    fail "scontrol lists ${#nodes[@]} hosts in $SLURM_JOB_NODELIST, the job has $SLURM_JOB_NUM_NODES"
  serving=()
  if ((${PROXY_NODES:-0} > 0)); then
    [[ -n ${PROXY_MODEL:-} ]] || fail "PROXY_NODES=$PROXY_NODES needs PROXY_MODEL, the proxy's directory"
    ((PROXY_NODES < ${#nodes[@]})) ||
      fail "PROXY_NODES=$PROXY_NODES leaves no machine of ${#nodes[@]} for ranks"
    serving=("${nodes[@]: -PROXY_NODES}")
    nodes=("${nodes[@]:0:${#nodes[@]}-PROXY_NODES}")
    proxy_port=$((30000 + SLURM_JOB_ID % 10000))
    local urls=("${serving[@]/#/http://}")
    urls=("${urls[@]/%/:$proxy_port/v1}")
    overrides+=(actor_rollout_ref.proxy.kind=api "actor_rollout_ref.proxy.api.model=$PROXY_MODEL"
      "actor_rollout_ref.proxy.api.base_url=[$(IFS=,; echo "${urls[*]}")]")
  fi
  machines=${#nodes[@]}
  crash_file=$SLURM_SUBMIT_DIR/$name-$SLURM_JOB_ID.crashes
}

set_environment() {
  export PATH="$CTRL_VENV/bin:$PATH"
  export PYTHONUNBUFFERED=1
  export TOKENIZERS_PARALLELISM=false
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
  export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
  export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
  # CTRL_ names are the package's own; these are meant for the script.
  export -n CTRL_VENV CONTAINER CONFIG GPU_MEMORY MAX_CRASHES MAX_RESTARTS
  export -n PROXY_NODES PROXY_MODEL PROXY_ARGS
}

# serve_proxy: start the proxy's servers on the machines in serving, each again where it ends, and
# return when all answer.
serve_proxy() {
  ((${#serving[@]})) || return 0
  local list host given
  read -r -a given <<<"${PROXY_ARGS:-}"
  list=$(IFS=,; echo "${serving[*]}")
  # The trainer sends the key that the servers require.
  OPENAI_API_KEY=${OPENAI_API_KEY:-$(od -An -tx1 -N24 /dev/urandom | tr -d ' \n')}
  export OPENAI_API_KEY VLLM_API_KEY=$OPENAI_API_KEY
  # shellcheck disable=SC2016  # expanded on each machine
  srun --nodes="${#serving[@]}" --nodelist="$list" --ntasks="${#serving[@]}" --ntasks-per-node=1 \
    --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none --mem=0 --kill-on-bad-exit=0 --label \
    --output="$SLURM_SUBMIT_DIR/$name-$SLURM_JOB_ID-proxy.out" --open-mode=append \
    bash -c 'while true; do "$@"; sleep 10; done' node \
    "${container[@]}" "$CTRL_VENV/bin/vllm" serve "$PROXY_MODEL" --port "$proxy_port" "${given[@]}" &
  serving_pid=$!
  for host in "${serving[@]}"; do
    until curl --silent --fail --output /dev/null "http://$host:$proxy_port/health"; do
      kill -0 "$serving_pid" 2>/dev/null || fail "the proxy's servers do not start, see *-proxy.out"
      [[ -z $stopping ]] || return 0
      pause "${SLURM_RETRY_SECONDS:-30}"
    done
  done
}

# on_every_node COMMAND...: one task per machine, in the background, followed to its end; sets status.
# A task gets every processor and all memory of the job there: without --cpus-per-task SLURM gives a
# step one processor per task, and sites that bind by default would pin torchrun and all it starts to
# it.
on_every_node() {
  local list
  list=$(IFS=,; echo "${nodes[*]}")
  srun --nodes="${#nodes[@]}" --nodelist="$list" --ntasks="${#nodes[@]}" --ntasks-per-node=1 \
    --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none --mem=0 "$@" &
  follow $!
}

# follow PID: wait for it, also where a signal interrupts the wait; sets status.
follow() {
  status=0
  until
    wait "$1"
    status=$?
    ! kill -0 "$1" 2>/dev/null
  do :; done
}

# stop_training WORD: ask torchrun on this machine, the first, to stop, as soon as it is up. TERM after
# USR1 means that the job is cancelled while it saves.
stop_training() {
  local before=$stopping
  [[ $stopping == TERM ]] || stopping=$1
  [[ -z $before ]] || return 0
  say "asked to stop ($1); a run that is up saves first"
  (
    until [[ -s $pid_file ]]; do sleep 0.5; done
    kill -TERM "$(<"$pid_file")"
  ) &
  waiting_to_stop=$!
}

# patiently COMMAND...: again until it succeeds, for five minutes: SLURM's controller may be away.
patiently() {
  local try
  for try in {1..10}; do
    if "$@"; then return; fi
    ((try == 10)) || sleep "${SLURM_RETRY_SECONDS:-30}"
  done
  return 1
}

job_state() {
  local state
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) && [[ -n $state ]] && echo "$state"
}

# requeue WHY: back into the queue, unless the job is being cancelled.
requeue() {
  local state
  if ! state=$(patiently job_state); then
    say "$1; SLURM does not say what state job $SLURM_JOB_ID is in: it is not requeued, submit again"
  elif [[ $state != RUNNING ]]; then
    say "$1; the job is being ended from outside ($state) and is not requeued"
  else
    say "$1, requeueing job $SLURM_JOB_ID"
    patiently scontrol requeue "$SLURM_JOB_ID" || say "SLURM does not requeue it, submit again"
  fi
}

# saved_since FILE: whether the run has saved a checkpoint since FILE was written.
saved_since() {
  local run_dir
  run_dir=$("${python[@]}" -c 'import sys
from ctrl_megatron.config import load_config
print(load_config(sys.argv[1], sys.argv[2:], "none").trainer.run_dir)' "$config" "${overrides[@]}") &&
    [[ -d $run_dir/checkpoints ]] &&
    [[ -n $(find "$run_dir/checkpoints" -maxdepth 1 -name 'global_step_*' -newer "$1") ]]
}

# conclude: where an unfinished job goes; uses status and stopping, ends the script.
conclude() {
  local crashes=0
  if ((status == 0)); then
    rm -f "$crash_file"
  elif [[ $stopping == TERM ]]; then
    say "stopped as asked, not requeued"
  elif [[ $stopping == USR1 ]]; then
    rm -f "$crash_file"
    requeue "stopped before the end"
  elif ((status == WRONG_INPUT)); then
    say "wrong input, see above; not requeued"
  else
    if [[ -s $crash_file ]] && ! saved_since "$crash_file"; then crashes=$(<"$crash_file"); fi
    crashes=$((crashes + 1))
    echo "$crashes" >"$crash_file"
    if ((crashes > ${MAX_CRASHES:-3})); then
      say "crash $crashes in a row (exit code $status); given up after ${MAX_CRASHES:-3}." \
        "Submit again once the cause is mended; the run goes on from its last checkpoint"
    else
      requeue "crash $crashes of at most ${MAX_CRASHES:-3} in a row (exit code $status)"
    fi
  fi
  exit "$status"
}

# machines_left: sets nodes to machines that the job still has and the run can use; fails if it can use
# none. SLURM removes a lost machine from the job when it has been silent for SlurmdTimeout seconds.
machines_left() {
  local list count try
  for try in {1..40}; do
    list=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N) || return 1
    [[ $(sinfo --noheader --nodes="$list" --format=%t) == *"*"* ]] || break
    sleep "${SLURM_RETRY_SECONDS:-30}"
  done
  mapfile -t nodes < <(
    scontrol show hostnames "$list" | grep -vxF "$(printf '%s\n' "${serving[@]:--}")"
  )
  ((${#nodes[@]} < machines)) || return 0
  say "${#nodes[@]} of $machines machines are left: ${nodes[*]}"
  count=$("${python[@]}" tools/plan.py --config "$config" --purpose "$purpose" \
    --gpus-per-node "$SLURM_GPUS_ON_NODE" --nodes "$machines" \
    --left "${#nodes[@]}" "${overrides[@]}") || return 1
  nodes=("${nodes[@]:0:count}")
  plan
}

# plan: whether the run fits the machines in nodes.
plan() {
  "${python[@]}" tools/plan.py --config "$config" --nodes "${#nodes[@]}" \
    --gpus-per-node "$SLURM_GPUS_ON_NODE" --gpu-memory "${GPU_MEMORY:-80}" \
    --purpose "$purpose" "${overrides[@]}"
}

# count_ranks: sets ranks, the ranks of a machine: one on each GPU that does not belong to engines alone.
count_ranks() {
  ranks=$("${python[@]}" tools/plan.py --config "$config" --gpus-per-node "$SLURM_GPUS_ON_NODE" \
    --purpose "$purpose" --ranks "${overrides[@]}") || fail "wrong input, see above"
}

# pause SECONDS: a request to stop ends it within a second, also one that came just before it.
pause() {
  local end=$((SECONDS + $1))
  until [[ -n $stopping ]] || ((SECONDS >= end)); do sleep 1; done
}

# run_training NAME PROGRAM CONFIG PURPOSE [key=value ...]: the whole job; does not return.
run_training() {
  name=$1 program=$2 config=$3 purpose=$4
  shift 4
  overrides=("$@")
  check_job
  set_environment

  scratch=$(mktemp -d)
  pid_file=$scratch/torchrun.pid
  stopping='' waiting_to_stop='' serving_pid=''
  trap 'rm -rf "$scratch"; kill $waiting_to_stop $serving_pid 2>/dev/null || true' EXIT
  trap 'stop_training USR1' USR1
  # HUP: the terminal of an interactive allocation is gone; bash keeps an ignored HUP ignored.
  trap 'stop_training TERM' TERM HUP

  count_ranks
  plan || fail "the memory plan refuses this configuration (exit code $?), see above"

  on_every_node --label "${python[@]}" tools/check_env.py --config "$config" --purpose "$purpose" \
    --nproc-per-node "$ranks" "${overrides[@]}"
  ((status != WRONG_INPUT)) || fail "wrong input, see above"
  if ((status != 0)); then
    say "the health check failed, see the lines with FAIL; their first number is the place in" \
      "${nodes[*]}. Keep a bad machine out with sbatch --exclude=HOST"
    conclude
  fi
  serve_proxy
  if [[ -n $stopping ]]; then
    status=1
    conclude
  fi

  local restarts=0 in_a_row=0
  while
    touch "$scratch/started"
    train "$restarts"
    ((status != 0 && status != WRONG_INPUT)) && [[ -z $stopping ]]
  do
    if saved_since "$scratch/started"; then in_a_row=0; fi
    in_a_row=$((in_a_row + 1)) restarts=$((restarts + 1))
    ((in_a_row <= ${MAX_RESTARTS:-2})) && machines_left || break
    say "the run has crashed (exit code $status); restart $in_a_row of at most ${MAX_RESTARTS:-2}" \
      "in a row, on ${#nodes[@]} machines"
    pause "${RESTART_SECONDS:-10}"
    [[ -z $stopping ]] || break
    export CTRL_RESTARTS=$restarts
  done
  conclude
}

# train RESTART: the run, from the start of torchrun on every machine to its end; sets status.
train() {
  # Every machine computes the same port, and two jobs on one machine different ones. A port may stay in
  # use for a while.
  local port=$((20000 + (SLURM_JOB_ID + 1000 * $1) % 10000))
  # Processes of the run get the hard limit of open files; the first machine leaves torchrun's pid.
  # shellcheck disable=SC2016  # expanded on each machine
  local on_each_node='ulimit -S -n "$(ulimit -H -n)"
    if ((${SLURM_NODEID:-0} == 0)); then echo $$ >"$1"; fi; shift; exec "$@"'
  # Ranks read only what is signed with it.
  CTRL_RUN_KEY=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')
  export CTRL_RUN_KEY
  # torchrun waits for ranks that save as long as SLURM lets it. A machine whose torchrun is still
  # there two minutes after the first has ended is hanging.
  on_every_node --kill-on-bad-exit=0 --wait=120 bash -c "$on_each_node" node "$pid_file" \
    "${python[@]}" -m ctrl_megatron.commands.launcher \
    --nnodes "${#nodes[@]}" \
    --nproc-per-node "$ranks" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${nodes[0]}:$port" \
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$1" \
    --max-restarts 0 \
    --shutdown-timeout 3600 \
    "$program" --config "$config" "${overrides[@]}"
  # A stop that is asked for between two starts must not reach another process with that number.
  rm -f "$pid_file"
}
