#!/bin/sh
#SBATCH --job-name=BERT_sweep
#SBATCH --ntasks=1 --gres=gpu:1 --time=10
#SBATCH --array=1-4%2
#COVEY --output sweep-%j.txt
echo "task $COVEY_TASK of $COVEY_TASKS, rank $SLURM_PROCID of $SLURM_NTASKS"
