"""Ranks on this host: what the log says is made to run, and what they say is told."""
