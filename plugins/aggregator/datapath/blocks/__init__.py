"""Blocks on their way from one owner to the next."""
