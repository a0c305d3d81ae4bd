"""Who may ask what of the agent's HTTP. The listener over which a request came decides, never what can be found out of
its connection at that moment: a client may have closed it before its request is read, and then the kernel tells of no
user, or of root.

- `OwnSocket`, the unix socket: everything, to whomever the kernel says is root or the agent's own user.
- `Network`, `[http] bind`: reads, to whoever connects. No change exists there, whoever asks: over TCP it cannot be
  told who is at the other end.

A web page may send its visitor's browser to a loopback port, under a name of its own that it points at 127.0.0.1; the
browser then lets the page read the answers. So what shows jobs is read under an IP address, `localhost`, this host's
name and the names in `[http] names`. `ANY_NAME` has counters alone and is for machines, which come by any DNS name.
"""

import ipaddress
import os
from typing import NamedTuple, Protocol

from aiohttp import hdrs, web

from agent.ports.network.peers import peer_of
from covey.ports.streams import UNKNOWN_USER

ANY_NAME = frozenset(("/metrics", "/livez", "/readyz"))
"""Paths that answer whatever the `Host` header says."""
READS = ("GET", "HEAD")
ROOT = 0


class NotAdmitted(NamedTuple):
    """Why a request is not served: `reason` is a label of `covey_http_refused_total`."""

    reason: str
    what: str
    why: str
    next: str


class Door(Protocol):
    """The rules of one listener."""

    @property
    def changes(self) -> bool:
        """Whether the listener has the routes that change something."""

    def stops(self, request: web.Request) -> NotAdmitted | None:
        """Why the request is not served; None: it may be."""


class OwnSocket:
    """The rules of the unix socket: requests of the agent's own user, and of root."""

    changes = True

    def __init__(self) -> None:
        self._may = (os.geteuid(), ROOT)

    def stops(self, request: web.Request) -> NotAdmitted | None:
        uid = _uid(request)
        if uid >= 0 and uid in self._may:
            return None
        who = f"uid {uid}" if uid >= 0 else "a user unknown to the kernel"
        why = f"this socket is for uid {self._may[0]} and root, and {who} sent the request"
        return NotAdmitted("uid", "this request is not allowed", why, "run agentctl as the agent's user, or as root")


class Network:
    """The rules of a TCP address. `own`: this host's name; `names`: further ones; `path`: the unix socket's, for
    whoever is refused."""

    changes = False

    def __init__(self, own: str, names: tuple[str, ...], path: str) -> None:
        self._own, self._path = own, path
        self.rename(names)

    def rename(self, names: tuple[str, ...]) -> None:
        self._names = frozenset(("localhost", self._own.lower(), *(name.lower().rstrip(".") for name in names)))

    def stops(self, request: web.Request) -> NotAdmitted | None:
        if request.method not in READS:
            why = "an agent cannot tell who sends a request over TCP, so it only answers reads there"
            next = f"on host {self._own}: agentctl --agent unix:{self._path} ..."
            return NotAdmitted("change", "nothing can be changed over TCP", why, next)
        host = request.headers.get(hdrs.HOST, "")
        if request.path in ANY_NAME or is_known_name(host, self._names):
            return None
        why = f"the Host header says {host[:80]!r}"
        next = "use an IP address or localhost, or add that name to `names` of [http] in agent.toml"
        return NotAdmitted("host", "this request is not allowed", why, next)


def _uid(request: web.Request) -> int:
    """The user of the process at the other end of a unix socket; unknown where the connection is over."""
    connection = request.transport.get_extra_info("socket") if request.transport is not None else None
    return UNKNOWN_USER if connection is None else peer_of(connection)[1]


def is_known_name(host: str, names: frozenset[str]) -> bool:
    """Whether a Host header is an IP address, or one of these names, whatever the port."""
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdigit() or host.endswith("]"):
        name = host
    name = name.lower().rstrip(".")
    if name in names:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
