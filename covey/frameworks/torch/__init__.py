"""The parts of `covey.torch`."""
