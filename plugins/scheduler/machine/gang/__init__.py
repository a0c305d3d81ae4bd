"""A gang of ranks: its GPUs are found at one moment, and whoever hangs is found."""
