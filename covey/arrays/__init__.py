"""Memory of other hosts as bytes and as NumPy arrays."""
