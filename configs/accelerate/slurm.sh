#!/usr/bin/env bash
# A training run on the nodes of a Slurm job, with any of the *_nodes.yaml beside this file or nodes.yaml, also for one
# node and one process:
#
#   sbatch configs/accelerate/slurm.sh configs/accelerate/zero3_nodes.yaml --config configs/long.yaml \
#       --output.folder /shared/runs/long --data.cache_folder /shared/features --target.placement sharded
#
# Two minutes before the time is up Slurm sends SIGUSR1 to this script: the run is asked to stop (SIGTERM), writes a
# checkpoint within the 30 seconds that its launcher leaves it, and the job, put into the queue again, goes on from it.
# SIGTERM (`scancel`) stops it in the same way and does not queue it. Set PROCESSES_PER_NODE where there are no GPUs to
# count.
#SBATCH --job-name=headstart
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: sbatch $0 ACCELERATE_CONFIG [ARGUMENTS OF train_heads.py]" >&2
    exit 2
fi
export LAUNCH_CONFIG=$1
shift
MAIN_HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MAIN_PORT=$((20000 + SLURM_JOB_ID % 20000))
PROCESSES=$((SLURM_NNODES * ${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}))
export MAIN_HOST MAIN_PORT PROCESSES

# One launcher a node; each is told which node it is on. That of `distributed_type: NO`, for one process, ends at SIGTERM
# without waiting for the process, which hears of it by that: here it is waited for.
ALONE=$(grep -cE "^distributed_type: *[\"']?NO\b" "$LAUNCH_CONFIG" || true)
export ALONE
# shellcheck disable=SC2016  # the node expands it
srun --kill-on-bad-exit=1 bash -c '
launcher=(accelerate launch --config_file "$LAUNCH_CONFIG" --num_machines "$SLURM_NNODES" --num_processes "$PROCESSES"
    --machine_rank "$SLURM_NODEID" --main_process_ip "$MAIN_HOST" --main_process_port "$MAIN_PORT")
[ "$ALONE" = 0 ] && exec "${launcher[@]}" train/train_heads.py "$@"
set -m
"${launcher[@]}" train/train_heads.py "$@" &
trap "kill -TERM $! 2>/dev/null" TERM
while kill -0 -- "-$!" 2>/dev/null; do
    wait "$!"
    sleep 0.1
done
wait "$!"' train_heads "$@" &
running=$!
again=
trap 'again=yes; kill -TERM "$running" || true' USR1
trap 'again=; kill -TERM "$running" || true' TERM
while kill -0 "$running" 2>/dev/null; do
    wait "$running" || true  # ended by a signal, too, while the run goes on
done
status=0
wait "$running" || status=$?  # the run's own
if [ -n "$again" ] && [ "$status" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
