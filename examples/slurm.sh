#!/usr/bin/env bash
# ViT-L/16 on 4 nodes of 8 GPUs: sbatch examples/slurm.sh /data/imagenet21k runs/l16
# Slurm sends SIGTERM 120 s before the time is up: the run saves, and the requeued job goes on where it stopped, on any
# number of nodes.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail
data=${1:?usage: sbatch examples/slurm.sh DATA OUTPUT} output=${2:?usage: sbatch examples/slurm.sh DATA OUTPUT}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" \
    -m vitfast pretrain --recipe vit-l16/imagenet21k --data "$data" --output "$output" --set parallel=fsdp workers=11

# Saved but not finished: once more.
[ -f "$output/summary.json" ] || scontrol requeue "$SLURM_JOB_ID"
