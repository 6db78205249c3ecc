#!/bin/bash
# Trains on several machines of a SLURM cluster:  sbatch examples/slurm.sh
#
# srun starts paceline once on each machine; it reads from SLURM which machines there are, meets the
# others on the first of them, and starts one rank for each GPU, or else for each core. For one task
# for each rank, give --ntasks-per-node that number instead: each paceline then becomes its rank.

#SBATCH --job-name=paceline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=00:10:00
##SBATCH --gpus-per-node=4

srun --kill-on-bad-exit=1 paceline run examples/digits.py "$@"
