"""Values of PyTorch that other processes get: state dicts as JSON and tensors, parameter groups."""
