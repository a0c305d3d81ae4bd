"""The interfaces to a volume: its own protocol, NBD, swap and arrays."""
