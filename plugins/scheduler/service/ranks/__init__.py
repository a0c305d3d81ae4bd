"""Ranks on this host: they are made to run as the log says, and what they say is told."""
