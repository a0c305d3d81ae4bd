"""Who asks for a command, and whose a job or a volume is: the words that the agent and its plugins share for it.

Only the kernel's word, or a certificate that the rack's authority signed, says who asks; no request does.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from covey.core.errors import Refused

Role = Literal["operator", "user", "viewer"]
"""What somebody may do: an operator all, a user what concerns own jobs and volumes, a viewer only look."""


class Asker(msgspec.Struct, frozen=True):
    """Who asks for a command: the user at the other end of the agent's socket, as the kernel tells it, or whom a
    certificate of the rack names."""

    uid: int
    """The user's number on this host; negative: it is not known."""
    user: str
    """The user's name on this host; empty: it has none here."""
    role: Role
    """The user's role on this host (`agent.api.access`)."""
    is_agent: bool = False
    """Whether it is root or the agent's own user: what they submit runs as the agent's own user."""
    by_certificate: bool = False
    """Whether a certificate says who it is, and not the kernel."""
    reads_all: bool = False
    """Whether it may read what belongs to others, as whoever connects to a host with `[http] read_open`."""

    @property
    def name(self) -> str:
        """The asker in the words of events, such as `ann` or `uid 1001`."""
        return self.user or f"uid {self.uid}"


class OwnerUser(msgspec.Struct, frozen=True):
    """Whose a job or a volume is."""

    user: str = ""
    """The user's name; empty: only the number is known."""
    uid: int | None = None
    """The user's number; None: it belongs to the agent's own user."""

    def is_user(self, asker: Asker) -> bool:
        """Whether the asker is this owner: the same number, and the same name where one is known. A name that stands
        for another number on this host is another user."""
        return self.uid is not None and asker.uid == self.uid and self.user in ("", asker.user)


ASKER = "asker"
"""Where a command finds who asks, in what it takes: an `Asker`. Whatever a request says under that name is dropped."""


def asker_of(given: Mapping[str, Any]) -> Asker:
    """Who asks. Refused where that is not known: not known is not allowed."""
    asker = given.get(ASKER)
    if not isinstance(asker, Asker):
        why = "it is not known who asks"
        raise Refused(4, "this request is not allowed", why, "use agentctl on a host of the rack")
    return asker
