"""The words of gossip: who a host is, what is told to the agent, what can be set, and bounds for what is decoded.

A host is a *name* (what people say), a *uuid* (16 bytes, made once, kept on disk) and a *boot* (counts starts of its
agent). Name and uuid together are its *identity*, 63 bits of a hash; a name claimed under two identities is a
conflict. Within one identity `(boot, incarnation)` orders everything that was ever said about it: a restart is a new
boot and so beats all that was said of the last one, also that it is dead.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from covey.core import ID_PATTERN, Fact, HostId, Message
from covey.ports import Address

T = TypeVar("T")

# ---- bounds of what comes from the network ---------------------------------------------------------------------------

U32_MAX = 2**32 - 1
U63_MAX = 2**63 - 1
KEY_BYTES = 32
"""AES-256."""
UUID_BYTES = 16

AWAY_S_MAX = 3600
"""Longest that a host may say it is away, seconds."""
AwaySeconds = Annotated[int, Meta(ge=0, le=AWAY_S_MAX)]
U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]
Boot = Annotated[int, Meta(ge=0, le=U63_MAX)]
Identity = Annotated[int, Meta(ge=0, le=U63_MAX)]
HostName = Annotated[HostId, Meta(pattern=ID_PATTERN)]
"""`\\Z`, since `$` would let a name end in a line feed."""
MaybeHostName = Annotated[HostId, Meta(pattern=rf"(?:\A\Z|{ID_PATTERN})")]
Uuid = Annotated[bytes, Meta(min_length=UUID_BYTES, max_length=UUID_BYTES)]
PeerAddress = Annotated[Address, Meta(pattern=r"\A[0-9A-Za-z.:\[\]_-]{0,80}\Z")]
"""`ip:port`, or empty: "where you saw this datagram come from"."""

State = Literal["alive", "suspect", "gone", "left"]
"""As it is told: of two things said of one life of a host the later in this order counts."""
HostState = Literal["alive", "suspect", "away", "gone", "left"]
"""As it is shown: who left and said that it would be back is away until then, and gone afterwards."""


@lru_cache(maxsize=4096)
def identity(host: HostId, uuid: bytes) -> int:
    """63 bits of a hash of name and uuid. Two of 256 hosts share one with a chance of 4e-15."""
    digest = hashlib.blake2b(host.encode() + b"\0" + uuid, digest_size=8, person=b"covey-host").digest()
    return int.from_bytes(digest, "big") >> 1


class Sender(msgspec.Struct, frozen=True):
    """Who sealed a datagram: proven up to "a holder of the key" (gossip does not defend against its own members)."""

    host: HostId
    uuid: bytes
    boot: int
    identity: int = 0
    """Of name and uuid; always computed, once."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "identity", identity(self.host, self.uuid))


# ---- what is told to the agent ---------------------------------------------------------------------------------------


class HostUp(Fact, frozen=True):
    """Joined, came back, restarted, or proved a suspicion wrong."""

    host: HostId


class MemberSuspected(Fact, frozen=True):
    """`by` could not reach it."""

    host: HostId
    by: HostId


class HostDown(Fact, frozen=True):
    """Dead to the rack, or gone on purpose (`left`)."""

    host: HostId
    left: bool


class MemberAway(Fact, frozen=True):
    """It restarts: it said that it is back within `for_s`, and that its processes go on meanwhile. `HostUp` follows,
    or `HostDown` once the time is over."""

    host: HostId
    for_s: float


class NameConflict(Fact, frozen=True):
    """Two machines claim this name. The first one keeps it; the other is not let in until the first is gone."""

    host: HostId


GossipEvent = HostUp | MemberSuspected | MemberAway | HostDown | NameConflict


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """One host, as seen here and now."""

    host: HostId
    state: HostState
    address: Address = ""
    """Where its gossip is reached; empty for this host itself until a peer told it."""
    boot: int = 0
    incarnation: int = 0
    since_s: float = 0.0
    """Monotonic clock of this host at the last change of state."""
    age_s: float = 0.0
    """Seconds since the newest fact of it was made, told-on time included; 0 for this host itself."""
    suspected_by: HostId | None = None
    """Who could not reach it, for a suspect host and for one that is gone."""
    values: Mapping[str, bytes] = {}
    """What it published in its present life, still encoded; read with `value`."""
    away_s: float = 0.0
    """Of one that is away: seconds within which it said it is back."""

    def value(self, key: str, kind: type[msgspec.Struct]) -> msgspec.Struct | None:
        """A published value, or None when absent or malformed (a host of another version)."""
        found = self.values.get(key)
        if found is None:
            return None
        try:
            return msgspec.msgpack.decode(found, type=kind)
        except msgspec.DecodeError:
            return None


# ---- settings --------------------------------------------------------------------------------------------------------

DATAGRAM_BYTES = 1232
"""Longest UDP payload sent: the smallest MTU of IPv6, 1280, less 48 bytes of headers. Never rely on fragments."""
DATAGRAM_BYTES_MAX = 1472
"""Longest accepted: an Ethernet frame."""


class GossipSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """[gossip]. Probe and suspicion constants are those of memberlist for a LAN."""

    bind: str = "0.0.0.0:7946"
    """`ip:port` of the UDP socket; 7946 is Serf's port, known to firewalls. Port 0 takes a free one."""
    advertise: str = ""
    """IP that others are told; default: the bound one, or, bound to all, the one that the first peer saw."""
    seeds: tuple[str, ...] = ()
    """`name:port`, `ip:port` or `[ipv6]:port` of hosts to join through; a name stands for all its addresses. Asked
    while alone, and later as long as one of them is missing."""
    cluster: str = "covey"
    """Racks with different labels ignore each other even under one key."""
    key_file: str = ""
    """File with up to three keys (64 hex digits a line), the first one seals. Read by the agent."""
    probe_interval_s: float = 1.0
    """One host is probed this often (SWIM's protocol period; memberlist LAN: 1 s)."""
    probe_timeout_s: float = 0.5
    """Before others are asked to try (memberlist LAN: 0.5 s)."""
    indirect_probes: int = 3
    """How many others are asked (SWIM's k; memberlist: 3)."""
    suspicion_factor: int = 4
    """Shortest suspicion = factor * log10(hosts) * probe interval (memberlist LAN: 4); the longest is 6 times that."""
    retransmit_factor: int = 4
    """A rumour is sent factor * ceil(log10(hosts + 1)) times by each host (memberlist LAN: 4)."""
    gossip_interval_s: float = 0.2
    """Rumours that found no probe to ride on are sent this often (memberlist LAN: 0.2 s)."""
    gossip_fanout: int = 3
    """... to so many hosts (memberlist LAN: 3)."""
    sync_interval_s: float = 30.0
    """Member tables are compared with one host this often (memberlist: push-pull every 30 s)."""
    announce_interval_s_max: float = 60.0
    """A missing seed or a gone host is called at least this often, forever, so that split racks merge."""
    spread_interval_s: float = 0.5
    """Facts are compared with a random host this often (two rounds a second kept 99 % of ages under 3.4 s at 200)."""
    heartbeat_s: float = 2.0
    """A host's facts get a new version this often, so that their age means something."""
    away_s: int = 60
    """Told at SIGTERM: this host restarts and is back within so many seconds, its processes go on, nobody need take
    anything back. 0: it leaves. SIGINT always leaves."""
    datagram_bytes: int = DATAGRAM_BYTES
    """Longest UDP payload sent, 1232 to 1472."""
    hosts_max: int = 512
    """More are not remembered; zones of up to 256 hosts are what this is made for."""

    def __post_init__(self) -> None:
        _in_range("probe_interval_s", self.probe_interval_s, 0.05, 60)
        _in_range("probe_timeout_s", self.probe_timeout_s, 0.01, self.probe_interval_s * 0.75)
        _in_range("indirect_probes", self.indirect_probes, 0, 16)
        _in_range("suspicion_factor", self.suspicion_factor, 1, 20)
        _in_range("retransmit_factor", self.retransmit_factor, 1, 20)
        _in_range("gossip_interval_s", self.gossip_interval_s, 0.02, 10)
        _in_range("gossip_fanout", self.gossip_fanout, 1, 16)
        _in_range("sync_interval_s", self.sync_interval_s, 1, 3600)
        _in_range("announce_interval_s_max", self.announce_interval_s_max, 1, 3600)
        _in_range("spread_interval_s", self.spread_interval_s, 0.05, 60)
        _in_range("heartbeat_s", self.heartbeat_s, 0.1, 60)
        _in_range("datagram_bytes", self.datagram_bytes, DATAGRAM_BYTES, DATAGRAM_BYTES_MAX)
        _in_range("away_s", self.away_s, 0, AWAY_S_MAX)
        _in_range("hosts_max", self.hosts_max, 2, 4096)
        if len(self.cluster.encode()) > 64:
            raise ValueError(f"cluster = {self.cluster!r}: expected at most 64 bytes")


def _in_range(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{key} = {value}: expected {low:g} to {high:g}")


# ---- fitting into datagrams ------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()


def encoded(message: Message) -> bytes:
    return _encoder.encode(message)


def size(message: Message) -> int:
    """Bytes of a message in a datagram."""
    return len(_encoder.encode(message))


class SendDatagram(msgspec.Struct, frozen=True):
    """Action: put these into one datagram, which may be lost."""

    to: Address
    messages: tuple[Message, ...]


def batches(items: Iterable[T], size_of: Callable[[T], int], budget: int) -> list[list[T]]:
    """The items in order, cut so that the sizes of each batch sum to at most `budget`. An item larger than that gets
    a batch of its own."""
    found: list[list[T]] = []
    room = -1
    for item in items:
        needed = size_of(item)
        if needed > room:
            found.append([])
            room = budget
        found[-1].append(item)
        room -= needed
    return found
