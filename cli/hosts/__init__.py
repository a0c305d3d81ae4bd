"""What `agentctl` says and does about hosts, GPUs and the log."""
