"""Commands about what is left of a job that stops: its checkpoints, and its handler for that."""
