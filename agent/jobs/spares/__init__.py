"""Spares: processes that have started ahead, to become ranks."""
