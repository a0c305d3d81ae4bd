"""Collectives that a script calls itself: which round each is, and what no round can do."""
