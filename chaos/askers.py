"""Who asks an agent for a command, where nobody is at the other end of a socket: in the simulator and in tests."""

from collections.abc import Mapping
from typing import Any

from covey.ports.streams import UNKNOWN_USER
from covey.ports.users import FixedUsers, User
from plugins.askers import ASKER, Asker

OWN_UID = 0
ROOT = Asker(OWN_UID, "root", "operator", is_agent=True)
ANN, BOB, EVE = Asker(64001, "ann", "user"), Asker(64002, "bob", "user"), Asker(64003, "eve", "viewer")
"""Ann and bob have tenants, eve has none."""
VISITOR = Asker(UNKNOWN_USER, "", "viewer")
"""Whoever connects over TCP."""
USERS = FixedUsers(*(User(each.user, each.uid) for each in (ROOT, ANN, BOB, EVE)), own_uid=OWN_UID)
"""The users of every simulated host."""


def asked_by(asker: Asker, given: Mapping[str, Any]) -> dict[str, Any]:
    """The request, as the agent hears it from this asker."""
    return {**given, ASKER: asker}


def as_root(given: Mapping[str, Any]) -> dict[str, Any]:
    """The request, as the agent hears it from its own user, unless it says who asks."""
    return {ASKER: ROOT, **given}
