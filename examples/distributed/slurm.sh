#!/bin/bash
#SBATCH --job-name=onnxtrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --requeue
# sbatch examples/distributed/slurm.sh art train.npz --out runs/slurm --device cuda
# The folder of --out must be on a file system that all nodes share.
set -e
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node gpu --max-restarts 3 \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:29400" \
  examples/distributed/train.py "$@"
