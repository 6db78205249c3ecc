#!/bin/bash
# Trains on several machines of a SLURM cluster:  sbatch examples/slurm.sh
#
# srun starts paceline once on each machine; it reads from SLURM which machines there are, meets the
# others on the first of them, and starts one rank for each GPU, or else for each core. For one task
# for each rank, give --ntasks-per-node that number instead: each paceline then becomes its rank.
#
# The machines know each other by the key of the job. It is made here, in a folder that all of them
# see and nobody else may read, and goes with the job.

#SBATCH --job-name=paceline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=00:10:00
##SBATCH --gpus-per-node=4

folder=$(mktemp -d "$PWD/.paceline-key-XXXXXX") || exit
trap 'rm -rf "$folder"' EXIT
paceline run --new-key "$folder/key" || exit

srun --kill-on-bad-exit=1 paceline run --key "$folder/key" examples/digits.py "$@"
