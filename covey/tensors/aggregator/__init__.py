"""Rounds with aggregators of other hosts."""
