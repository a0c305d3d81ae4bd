"""Files that say what a job is, and the options of Slurm that may stand in them."""
