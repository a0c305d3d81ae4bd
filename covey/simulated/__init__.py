"""Ranks of a simulated job: the job side's own machines, on streams of virtual time."""
