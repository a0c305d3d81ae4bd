"""The parts of `covey.jax`."""
