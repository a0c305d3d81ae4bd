"""What may come next on a command line of `agentctl`, and the scripts by which shells ask for it."""
