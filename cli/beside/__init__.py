"""Commands, shells and stacks beside a job's ranks, and jobs that are run attached."""
