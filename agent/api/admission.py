"""Who may ask an agent over which of its listeners; what they may do then is judged by `agent.api.access`. The listener
over which a request came decides, never what can be found out of its connection at that moment: a client may have
closed it before its request is read, and then the kernel tells of no user, or of root.

- `OwnSocket`, the unix socket: requests of root, of the agent's own user, and of users in the group of [http], whoever
  the kernel says they are.
- `Network`, `[http] bind` without TLS: reads, to whoever connects. No change exists there, whoever asks: it cannot be
  told who is at the other end, so it is a viewer. Beyond loopback there is health and counters alone; on
  loopback with `read_open` everything is read.
- `Certified`, the same address over TLS: all that the user may do whom a certificate of the rack's authority names, as
  at the unix socket of this host; without a certificate, health and counters alone.

A web page may send its visitor's browser to a loopback port, under a name of its own that it points at 127.0.0.1; the
browser then lets the page read the answers. So what shows jobs is read under an IP address, `localhost`, this host's
name and the names in `[http] names`. `ANY_NAME` has counters alone and is for machines, which come by any DNS name.
"""

import asyncio
import ipaddress
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

import msgspec
from aiohttp import hdrs, web

from agent.api.gate import ROOT
from agent.authority.certificates import Named, NotBelieved
from agent.ports.network.peers import is_in_group, peer_of
from covey.ports.addresses import hears_others
from covey.ports.streams import UNKNOWN_USER
from covey.ports.users import Users
from plugins.askers import Asker

ANY_NAME = frozenset(("/metrics", "/livez", "/readyz"))
"""Paths that answer whatever the `Host` header says."""
FOR_MACHINES = ANY_NAME | {"/healthz"}
"""Paths that say nothing of jobs, and are open to whoever reaches the address."""
READS = ("GET", "HEAD")
AskerOf = Callable[[int], Awaitable[Asker | None]]
"""Who has this uid (`agent.api.gate.Gate.asker`); None: nobody that this host knows."""


NamedBy = Callable[[bytes], Named | NotBelieved]
"""Whom a certificate names (`agent.authority.service.HostAuthority.named_by`)."""
NOT_ALLOWED = "this request is not allowed"
LOGIN = "on a host of the rack: agentctl login"


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

    async def admit(self, request: web.Request) -> Asker | NotAdmitted:
        """Who asks, or why the request is not served."""


class OwnSocket:
    """The rules of the unix socket. `own_uid`: the agent's own user; `gid`: the group whose users may ask, too; None:
    none has been let in."""

    changes = True

    def __init__(self, own_uid: int, asker_of: AskerOf, gid: int | None = None, group: str = "") -> None:
        self._may, self._asker_of, self._gid, self._group = (own_uid, ROOT), asker_of, gid, group

    async def admit(self, request: web.Request) -> Asker | NotAdmitted:
        connection, uid = _connection(request.transport), uid_of(request.transport)
        who = f"uid {uid}" if uid >= 0 else "a user unknown to the kernel"
        member = self._gid is not None and connection is not None and is_in_group(connection, self._gid)
        if uid < 0 or not (uid in self._may or member):
            others = f", for root and for group {self._group}" if self._gid is not None else " and root"
            why = f"this socket is for uid {self._may[0]}{others}, and {who} sent the request"
            return self._refused(why, "run agentctl as the agent's user, or as root")
        asker = await self._asker_of(uid)
        if asker is None:
            return self._refused(f"this host knows no name of {who}", f"create the user: getent passwd {uid}")
        return asker

    def _refused(self, why: str, next: str) -> NotAdmitted:
        return NotAdmitted("uid", NOT_ALLOWED, why, next)


class Network:
    """The rules of a TCP address. `own`: this host's name; `names`: further ones; `path`: the unix socket's, for
    whoever is refused; `bind`: the address; `read_open`: whether everything is read there."""

    changes = False

    def __init__(self, own: str, names: tuple[str, ...], path: str, bind: str, read_open: bool) -> None:
        self._own, self._path, self._bind = own, path, bind
        self._machines_alone = hears_others(bind)
        self._visitor = Asker(UNKNOWN_USER, "", "viewer", reads_all=read_open)
        self.rename(names)

    def rename(self, names: tuple[str, ...]) -> None:
        """Let browsers come under these names from now on."""
        self._names = known_names(self._own, names)

    async def admit(self, request: web.Request) -> Asker | NotAdmitted:
        next = f"on host {self._own}: agentctl --agent unix:{self._path} ..."
        if request.method not in READS:
            why = "an agent cannot tell who sends a request over TCP, so it only answers reads there"
            return NotAdmitted("change", "nothing can be changed over http", why, next)
        if no := _unknown_name(request, self._names):
            return no
        if self._machines_alone and request.path not in FOR_MACHINES:
            why = f"other machines reach {self._bind}, and an agent cannot tell who asks there without a certificate"
            return NotAdmitted("closed", "jobs cannot be read here", why, f"{LOGIN}, then https; or {next}")
        return self._visitor


class Certified:
    """The rules of TLS connections at a TCP address. `own`: this host's name; `names`: further ones; `named_by`: whom a
    certificate names; `group`: as in [http], of which users are here too."""

    changes = True

    def __init__(
        self, own: str, names: tuple[str, ...], named_by: NamedBy, users: Users, asker_of: AskerOf, group: str
    ) -> None:
        self._own, self._named_by, self._users, self._asker_of, self._group = own, named_by, users, asker_of, group
        self._visitor = Asker(UNKNOWN_USER, "", "viewer")
        self.rename(names)

    def rename(self, names: tuple[str, ...]) -> None:
        self._names = known_names(self._own, names)

    async def admit(self, request: web.Request) -> Asker | NotAdmitted:
        if no := _unknown_name(request, self._names):
            return no
        der, reads = certificate_of(request.transport), request.method in READS
        if not der:
            if reads and request.path in FOR_MACHINES:
                return self._visitor
            return NotAdmitted("no_certificate", NOT_ALLOWED, "it came without a certificate of this rack", LOGIN)
        if not reads and hdrs.ORIGIN in request.headers:
            why = "it came from a web page, which may send what its visitor does not know of"
            return NotAdmitted("web_page", "nothing can be changed from a browser", why, "use agentctl")
        named = self._named_by(der)
        if isinstance(named, NotBelieved):
            return NotAdmitted(named.reason, "this certificate is not believed", named.why, LOGIN)
        return await self._asker(named)

    async def _asker(self, named: Named) -> Asker | NotAdmitted:
        """The user of this host whom a certificate names. Refused where name and number are not the same here, and
        where the user might not use the unix socket."""
        user = await self._users.named(named.user)
        if user is None or (user.name, user.uid) != (named.user, named.uid):
            here = "does not know that user" if user is None else f"has that name for uid {user.uid}"
            why = f"the certificate names {named.user} with uid {named.uid}, and {self._own} {here}"
            return NotAdmitted("certificate_of_nobody", NOT_ALLOWED, why, "give users the same numbers on all hosts")
        if not self._group or self._group not in (await self._users.with_groups(user)).groups:
            why = f"{user.name} is not in group {self._group or '(none)'} of {self._own}, whose users may ask"
            return NotAdmitted("group", NOT_ALLOWED, why, f"as root there: usermod -aG {self._group} {user.name}")
        asker = await self._asker_of(user.uid)
        if asker is None or asker.is_agent or asker.user != named.user:
            why = f"{self._own} knows no user by this certificate of {named.user}"
            return NotAdmitted("certificate_of_nobody", NOT_ALLOWED, why, "use agentctl on a host")
        return msgspec.structs.replace(asker, by_certificate=True)


def known_names(own: str, names: tuple[str, ...]) -> frozenset[str]:
    """The names under which a host may be asked over TCP."""
    return frozenset(plain_name(name) for name in ("localhost", own, *names))


def plain_name(name: str) -> str:
    """The name as it is compared, and as it is in a certificate: `GPU1.example.org.` is `gpu1.example.org`."""
    return name.lower().rstrip(".")


def peer_ip(transport: asyncio.BaseTransport | None) -> str:
    """The IP address at the other end of a TCP connection; empty where it is over."""
    peer = transport.get_extra_info("peername") if transport is not None else None
    return str(peer[0]) if peer else ""


def network_of(address: str) -> str:
    """What counts as one machine: an IPv4 address, or the network of 64 bits of an IPv6 address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(ip, ipaddress.IPv4Address) or ip.ipv4_mapped is not None:
        return str(getattr(ip, "ipv4_mapped", None) or ip)
    return str(ipaddress.ip_network((ip, 64), strict=False))


def _unknown_name(request: web.Request, names: frozenset[str]) -> NotAdmitted | None:
    host = request.headers.get(hdrs.HOST, "")
    if request.path in ANY_NAME or is_known_name(host, names):
        return None
    why = f"the Host header says {host[:80]!r}"
    step = "use an IP address or localhost, or add that name to `names` of [http] in agent.toml"
    return NotAdmitted("host", NOT_ALLOWED, why, step)


def certificate_of(transport: asyncio.BaseTransport | None) -> bytes:
    """The certificate that the other end of a TLS connection showed, as DER; empty: none, or the connection is over."""
    found = transport.get_extra_info("ssl_object") if transport is not None else None
    return (found.getpeercert(binary_form=True) or b"") if isinstance(found, ssl.SSLObject) else b""


def uid_of(transport: asyncio.BaseTransport | None) -> int:
    """The user at the other end of a unix socket; unknown where the connection is over."""
    connection = _connection(transport)
    return UNKNOWN_USER if connection is None else peer_of(connection)[1]


def _connection(transport: asyncio.BaseTransport | None) -> Any:
    """The socket of a connection; None where it is over."""
    return transport.get_extra_info("socket") if transport is not None else None


def is_known_name(host: str, names: frozenset[str]) -> bool:
    """Whether a Host header is an IP address, or one of these names, whatever the port."""
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdigit() or host.endswith("]"):
        name = host
    name = plain_name(name)
    if name in names:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
