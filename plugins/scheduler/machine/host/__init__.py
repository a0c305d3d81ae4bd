"""This host's GPUs: which grant holds which of them."""
