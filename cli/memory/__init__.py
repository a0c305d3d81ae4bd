"""What `agentctl` says and does about remote memory."""
