"""The state of every host: `Membership` keeps it; `events` are its events and actions."""

from gossip.membership.machine.membership import Membership

__all__ = ["Membership"]
