"""agentctl commands about jobs that have ended, and what became of GPU-hours."""
