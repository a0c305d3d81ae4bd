"""The ways into a volume: its own protocol, NBD, swap and arrays."""
