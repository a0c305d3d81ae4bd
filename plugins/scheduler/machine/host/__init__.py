"""This host's GPUs: who holds which of them."""
