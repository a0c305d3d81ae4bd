"""NVIDIA GPUs and MIG instances, by their driver."""
