"""Sums of a job's tensors at their owner: what `aggd` and a rank that owns a table have in common."""
