"""A gang of ranks: its GPUs are found all at one moment, and a rank that hangs is found."""
