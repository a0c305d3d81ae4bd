"""Processes that have started ahead, to become ranks."""
