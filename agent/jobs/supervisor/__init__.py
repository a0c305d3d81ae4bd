"""The supervisor: one process for each job, epoch and host, which outlives its agent."""
