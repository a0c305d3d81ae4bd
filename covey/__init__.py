"""Covey's job side."""
