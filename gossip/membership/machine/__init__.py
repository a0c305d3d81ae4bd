"""Who is there: `Membership` remembers, `events` are what it is told and what it asks for."""

from gossip.membership.machine.membership import Membership

__all__ = ["Membership"]
