"""A rank's side of a shared device: its share of the time, its limit of memory."""
