"""What the scheduler remembers: the replicated queue, the leader's soft state, a coordinator's gangs, a host's GPUs."""
