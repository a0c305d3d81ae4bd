"""The parts of `JobClient`, a script's object for its job: `job.tensors`, `job.state`, and the agent's connection."""
