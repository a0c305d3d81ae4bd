"""Volumes without a disk, of which each slab has several members: mirrors and parity."""
