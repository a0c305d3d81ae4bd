"""Successors of lost ranks: `healing.py` says how they get their state."""
