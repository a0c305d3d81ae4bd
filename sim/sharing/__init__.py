"""`covey-sim sharing`: jobs that share GPUs."""
