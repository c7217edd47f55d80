#!/usr/bin/env bash
#SBATCH --job-name=ctrl_sandbox
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append

# One sandbox service on every machine of the job, for a trainer elsewhere.
#
#   CTRL_VENV=/shared/venv sbatch slurm/sandbox.sh [option of tools/serve_sandbox.py ...]
#
# Submit from the root of the checkout, on a file system that every machine sees.
#   CTRL_VENV   virtual environment with the package's dependencies (required)
#   ENDPOINTS   folder for the addresses, one file per machine; ./sandbox-<job id> by default
#   TOKEN_FILE  file with the bearer token; by default a new one, ./sandbox-<job id>.token
# Arguments go to the service, e.g. --isolation standard.
#
# A trainer spreads its requests over all services with
#   sandbox.endpoint="$(paste -sd, sandbox-<job id>/*)"
# A service removes its file when it ends; scancel lets running requests finish.

set -euo pipefail

fail() {
  echo "sandbox: $*" >&2
  exit 2
}

for name in SLURM_JOB_ID SLURM_JOB_NUM_NODES SLURM_CPUS_ON_NODE SLURM_SUBMIT_DIR; do
  [[ -n ${!name:-} ]] || fail "$name is not set; start this script with sbatch"
done
[[ -n ${CTRL_VENV:-} ]] || fail "CTRL_VENV is not set; give the virtual environment to run in"
[[ -x $CTRL_VENV/bin/python ]] || fail "$CTRL_VENV/bin/python is missing; is CTRL_VENV a virtual environment?"
cd "$SLURM_SUBMIT_DIR"
[[ -f tools/serve_sandbox.py ]] || fail "$SLURM_SUBMIT_DIR has no tools/serve_sandbox.py; submit from the root of the checkout"

endpoints=${ENDPOINTS:-$PWD/sandbox-$SLURM_JOB_ID}
token_file=${TOKEN_FILE:-$PWD/sandbox-$SLURM_JOB_ID.token}
mkdir -p "$endpoints"
if [[ ! -e $token_file ]]; then
  (umask 077 && "$CTRL_VENV/bin/python" -c 'import secrets; print(secrets.token_hex(32))' >"$token_file")
fi
python=$CTRL_VENV/bin/python
# CTRL_ names are the package's own; this one is meant for this script.
export -n CTRL_VENV
export PYTHONUNBUFFERED=1

# shellcheck disable=SC2016  # expanded on each machine
on_each_node='file=$1/$SLURM_NODEID; shift; exec "$@" --endpoint-file "$file"'

# Every processor and all memory, also on sites that would bind the task to one processor.
exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
  --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none --mem=0 \
  bash -c "$on_each_node" node "$endpoints" \
  "$python" tools/serve_sandbox.py --host 0.0.0.0 --port 0 --isolation strict \
  --token-file "$token_file" --drain-seconds 20 "$@"
