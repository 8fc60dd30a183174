#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=08:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

# 300 s before the time limit, every task gets SIGUSR1: the run is saved, and ends with code 143.
srun --kill-on-bad-exit=1 --distribution=block python train.py run.toml runs/a
code=$?
if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
