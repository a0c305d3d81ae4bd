"""Whose programs the starter starts, and whose it does not."""

import pwd
from collections.abc import Callable
from typing import NamedTuple

OVERFLOW_UIDS = (65534, 65535)
"""The kernel's `nobody`, which stands for users that have no number, and -1 of 16 bits."""
UID_MIN = 1000
"""The first number of people's accounts on today's distributions (UID_MIN in login.defs)."""
Lookup = Callable[[str], pwd.struct_passwd]
"""Finds a user by name. KeyError."""


class Denied(Exception):
    """What cannot be done, why, and the next step."""

    def __init__(self, why: str, next: str) -> None:
        super().__init__(why)
        self.next = next


class UnixAccount(NamedTuple):
    name: str
    uid: int
    gid: int
    home: str
    shell: str


class Rules(NamedTuple):
    """Who may be started."""

    agent_uid: int
    uid_min: int = UID_MIN
    allowed: frozenset[str] = frozenset()
    """Names of users under `uid_min` that may have jobs all the same."""


def account_of(name: str, uid: int, rules: Rules, lookup: Lookup = pwd.getpwnam) -> UnixAccount:
    """The account on this host of the user that the log names. Denied says why there is none that may be used."""
    try:
        found = lookup(name)
    except KeyError:
        raise Denied(f"there is no user {name} on this host", f"make the user, with uid {uid}") from None
    if name.isdigit() or found.pw_name != name:
        raise Denied(f"the name {name!r} stands for more than one user: systemd reads digits as a number", "rename it")
    if found.pw_uid != uid:
        why = f"{name} has uid {found.pw_uid} on this host, and uid {uid} where the job was submitted"
        raise Denied(why, "give users the same number on every host of the rack")
    if uid == 0:
        raise Denied("jobs never run as root", "submit as a user")
    if uid == rules.agent_uid:
        raise Denied(f"{name} is the agent's own user", "the agent starts these jobs itself")
    if uid in OVERFLOW_UIDS or (uid < rules.uid_min and name not in rules.allowed):
        why = f"{name} (uid {uid}) is a system user: jobs run as users from uid {rules.uid_min} on"
        raise Denied(why, f"submit as another user, or start covey-starter with --allow {name}")
    if found.pw_gid == 0:
        raise Denied(f"the group of {name} is root's", f"usermod -g GROUP {name}")
    return UnixAccount(found.pw_name, uid, found.pw_gid, found.pw_dir or "/", found.pw_shell or "/bin/sh")
