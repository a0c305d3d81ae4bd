"""What the plugin remembers: `JobCoordinator` of jobs, `Owner` of tensors, `Directory` for the ranks of this host."""
