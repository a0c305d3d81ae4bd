"""Slurm's commands by their own names: a link to agentctl that is called `sbatch` is sbatch.

    ln -s "$(command -v agentctl)" ~/bin/sbatch        likewise squeue, scancel, sinfo, sacct, scontrol

Ids are numbers here, as in Slurm: job 12 is j12, 12_3 is its task j12[3]. What an option cannot mean is refused, with
the nearest one that there is.
"""
