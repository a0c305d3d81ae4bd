"""A simulated kernel that uses a volume as a block device, and checks each byte against what was acknowledged."""
