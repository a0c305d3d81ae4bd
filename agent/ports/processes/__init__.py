"""Processes of this machine: ranks under their shims, and our own programs."""
