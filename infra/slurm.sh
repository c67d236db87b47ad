#!/usr/bin/env bash
# A Ray cluster inside a Slurm allocation, and one training on it: sbatch infra/slurm.sh +experiment=llama7b_zero2 ...
# What follows the script's name goes to `python -m orchestrator train`. To change: the SBATCH lines and the two paths.
#SBATCH --job-name=orchestrator
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
set -euo pipefail

SHARED=${SHARED:-/shared}                      # on every node at the same path
ENVIRONMENT=${ENVIRONMENT:-$SHARED/venv}       # a virtual environment with this package
# shellcheck source=/dev/null
source "$ENVIRONMENT/bin/activate"

port=${RAY_PORT:-6379}
head=$(hostname)
address=$(hostname --ip-address | cut -d' ' -f1)
RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')   # others on the network shall not run code here
export RAY_AUTH_MODE RAY_AUTH_TOKEN RAY_ADDRESS=$address:$port
trap 'kill $(jobs -p) 2>/dev/null' EXIT

srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  ray start --head --block --node-ip-address="$address" --port="$port" --disable-usage-stats &
until ray health-check --address "$RAY_ADDRESS" 2>/dev/null; do sleep 1; done
if ((SLURM_JOB_NUM_NODES > 1)); then
  srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" --overlap \
    ray start --block --address="$RAY_ADDRESS" --disable-usage-stats &
fi

# `cluster=ray` describes the nodes that have joined, so all must have.
until [ "$(ray list nodes --filter state=ALIVE --format json | grep -c '"node_id"')" -ge "$SLURM_JOB_NUM_NODES" ]; do
  sleep 1
done

python -m orchestrator train cluster=ray run.directory="$SHARED/runs" \
  tracking.uri="sqlite:///$SHARED/runs/mlflow.db" "$@" &
training=$!
# Slurm sends TERM five minutes before the end, or when the job is preempted: the training saves and ends with 4.
trap 'kill -TERM "$training"' TERM
code=0
wait "$training" || code=$?
while kill -0 "$training" 2>/dev/null; do      # a trap ends `wait` early
  code=0
  wait "$training" || code=$?
done
if ((code == 4)); then
  scontrol requeue "$SLURM_JOB_ID"             # the same command continues the run
fi
exit "$code"
