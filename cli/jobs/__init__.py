"""What `agentctl` says and does about jobs, quotas and tensors."""
