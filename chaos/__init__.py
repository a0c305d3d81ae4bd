"""What breaks a rack, played in virtual time (`world/`, `stories/`) and on real hosts (`rack/`)."""

PRODUCT = ("covey", "gossip", "plugins", "agent")
"""The packages that are played with."""
