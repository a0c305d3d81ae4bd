"""Processes of this machine: ranks under their shims, and Covey's own programs."""
