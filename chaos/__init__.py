"""Faults that break a rack, played in virtual time (`world/`, `stories/`) and on real hosts (`rack/`)."""

PRODUCT = ("covey", "gossip", "plugins", "agent")
"""The product's packages, which the stories run."""
