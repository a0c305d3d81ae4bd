"""What the scheduler remembers: the replicated queue, the leader's soft state, a home's gangs, a host's GPUs."""
