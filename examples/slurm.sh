#!/usr/bin/env bash
# A training run on several nodes, by Slurm and torchrun:
#
#     sbatch examples/slurm.sh DATA OUTPUT [flags of vitfast pretrain]
#     sbatch --nodes=2 examples/slurm.sh /data/imagenet runs/b16 --recipe vit-b16/imagenet --set parallel=ddp
#
# srun starts one torchrun on each node, and torchrun starts one process for each GPU there. All nodes must see DATA and
# OUTPUT. Five minutes before the time is up, and when the job is preempted, Slurm sends SIGTERM: the run stops after a
# step and saves. The job is then queued again and continues, on any number of nodes. This also happens after a crash, if
# the job has saved a checkpoint. Without one, the job fails: it would fail again.
#SBATCH --job-name=vitfast
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
usage="usage: sbatch examples/slurm.sh DATA OUTPUT [FLAG ...]"
data=${1:?$usage} output=${2:?$usage}
shift 2

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000))          # another one for another job on the same node
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not read it from the #SBATCH line
started=$(mktemp)

# The processes meet at the first node. torchrun kills those that have not saved 30 s after SIGTERM.
status=0
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "${nodes%%$'\n'*}:$port" --rdzv-id "$SLURM_JOB_ID" \
    -m vitfast pretrain --recipe vit-l16/imagenet21k --data "$data" --output "$output" \
    --set parallel=fsdp workers=11 "$@" || status=$?

if [ ! -f "$output/summary.json" ] && [ "$output/checkpoints/last" -nt "$started" ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
