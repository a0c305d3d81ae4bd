"""Datagrams, control links and streams."""
