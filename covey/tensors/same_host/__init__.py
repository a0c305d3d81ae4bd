"""Rounds among ranks of one host, in memory that they share."""
