"""Pages on this host's disk, of slabs that have no lender or lost it."""
