"""What a script holds of its job: `job.tensors`, `job.state`, and the connection to its agent."""
