"""The lending half of a host: what it lends to whom."""
