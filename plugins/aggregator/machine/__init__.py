"""The state of the plugin: `JobCoordinator` for jobs, `Owner` for tensors, `Directory` for the ranks of this host."""
