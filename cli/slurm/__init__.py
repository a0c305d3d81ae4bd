"""The names and options of Slurm, and what each is here."""
