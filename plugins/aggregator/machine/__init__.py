"""What the plugin remembers: `Home` of jobs, `Owner` of their tensors, `Directory` for the ranks of this host."""
