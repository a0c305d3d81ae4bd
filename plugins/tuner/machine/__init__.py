"""Two tuners: `tuner` for live elastic jobs, `disjoint` for the paper's tables."""
