"""A rank's side of a shared device: its share of the time, and its memory limit."""
