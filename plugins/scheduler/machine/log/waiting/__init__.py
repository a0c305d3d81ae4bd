"""What keeps a queued job from starting, beside GPUs: other jobs, and tasks of its own."""
