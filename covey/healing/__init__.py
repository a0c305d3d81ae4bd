"""A rank that is lost gets a successor: `healing.py` says how."""
