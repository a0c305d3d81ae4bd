"""The types of gossip: the identity of a host, the events for the agent, and bounds for decoding.

A host is a *name* (for people), a *uuid* (16 bytes, made once, kept on disk) and a *boot* (counts starts of its agent).
Name and uuid together are its *identity*, 63 bits of a hash; a name claimed under two identities is a conflict. Within
one identity `(boot, incarnation)` orders all messages about it: a restart is a new boot and so supersedes all messages
about the last one, also that it is gone.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from covey.core.events import Fact, Message
from covey.core.ids import ID_PATTERN, HostId
from covey.ports.addresses import Address

T = TypeVar("T")

# ---- bounds of what comes from the network ---------------------------------------------------------------------------

U32_MAX = 2**32 - 1
U63_MAX = 2**63 - 1
KEY_BYTES = 32
"""The length of a key in bytes, that of AES-256."""
UUID_BYTES = 16

AWAY_S_MAX = 3600
"""The longest absence that a host may announce, seconds."""
AwaySeconds = Annotated[int, Meta(ge=0, le=AWAY_S_MAX)]
U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]
Boot = Annotated[int, Meta(ge=0, le=U63_MAX)]
Identity = Annotated[int, Meta(ge=0, le=U63_MAX)]
HostName = Annotated[HostId, Meta(pattern=ID_PATTERN)]
"""A host's name, whose pattern ends in `\\Z`, since `$` would let a name end in a line feed."""
MaybeHostName = Annotated[HostId, Meta(pattern=rf"(?:\A\Z|{ID_PATTERN})")]
Uuid = Annotated[bytes, Meta(min_length=UUID_BYTES, max_length=UUID_BYTES)]
PeerAddress = Annotated[Address, Meta(pattern=r"\A[0-9A-Za-z.:\[\]_-]{0,80}\Z")]
"""An address `ip:port`, or empty: the source address of the datagram."""

State = Literal["alive", "suspect", "gone", "left"]
"""A host's state in messages: of two messages about one boot and incarnation the one with the later state in this order
counts."""
HostState = Literal["alive", "suspect", "away", "gone", "left"]
"""A host's state in views: a host that left and announced its return is away until then, and gone afterwards."""


@lru_cache(maxsize=4096)
def identity(host: HostId, uuid: bytes) -> int:
    """63 bits of a hash of name and uuid. Two of 256 hosts share one with a chance of 4e-15."""
    digest = hashlib.blake2b(host.encode() + b"\0" + uuid, digest_size=8, person=b"covey-host").digest()
    return int.from_bytes(digest, "big") >> 1


class Sender(msgspec.Struct, frozen=True):
    """The host that a datagram names as its sender: authenticated only as a holder of the key (gossip does not defend
    against its own members)."""

    host: HostId
    uuid: bytes
    boot: int
    identity: int = 0
    """The identity number computed from name and uuid, once; the argument is ignored."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "identity", identity(self.host, self.uuid))


# ---- events for the agent -------------------------------------------------------------------------------------------


class HostUp(Fact, frozen=True):
    """The host joined, came back, restarted, or refuted a suspicion."""

    host: HostId


class MemberSuspected(Fact, frozen=True):
    """The host became suspect: `by` could not reach it."""

    host: HostId
    by: HostId


class HostDown(Fact, frozen=True):
    """The host is gone, or went on purpose (`left`)."""

    host: HostId
    left: bool


class MemberAway(Fact, frozen=True):
    """The host restarts: it announced that it is back within `for_s` seconds, and that its processes keep running
    meanwhile. `HostUp` follows, or `HostDown` once the time is over."""

    host: HostId
    for_s: float


class NameConflict(Fact, frozen=True):
    """Two machines claim this name. The first one keeps it; the other is not let in until the first is gone.
    A later one at the address of the first is the same machine, which lost its identity file. Told again about every
    `CONFLICT_INTERVAL_S` while it lasts."""

    host: HostId
    at: Address = ""
    """The address of the machine that is not let in, or of the one that has the name; empty: only another host saw
    it."""


class TableFull(Fact, frozen=True):
    """This host is not let in: `hosts_max` hosts are known here, and all of them live. Told again about every
    `CONFLICT_INTERVAL_S` while it lasts."""

    host: HostId


class LaterBootKnown(Fact, frozen=True):
    """Other hosts know this host, which they take for gone, under a later boot than it has: they drop what it says as
    repeated."""

    boot: int


GossipEvent = HostUp | MemberSuspected | MemberAway | HostDown | NameConflict | TableFull | LaterBootKnown


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """One host, as seen here and now."""

    host: HostId
    state: HostState
    address: Address = ""
    """The address of the host's gossip; empty for this host itself until a peer has sent it."""
    boot: int = 0
    incarnation: int = 0
    since_s: float = 0.0
    """When the state last changed, on this host's monotonic clock."""
    age_s: float = 0.0
    """Seconds since what is known of the host was certainly its newest, by its own word, passed on by any hosts; 0 for
    this host itself."""
    suspected_by: HostId | None = None
    """The host that could not reach it, for a suspect host and for one that is gone."""
    values: Mapping[str, bytes] = {}
    """The values that the host published in its present boot, still encoded; read with `value`."""
    away_s: float = 0.0
    """Seconds within which a host that is away announced to be back."""

    def value(self, key: str, kind: type[msgspec.Struct]) -> msgspec.Struct | None:
        """A published value, or None when absent or malformed (a host of another version)."""
        found = self.values.get(key)
        return None if found is None else _decoded(found, kind)


@lru_cache(maxsize=8192)
def _decoded(value: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct | None:
    """A value, decoded once for all who read it."""
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except msgspec.DecodeError:
        return None


# ---- fitting into datagrams ------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()


def encoded(message: Message) -> bytes:
    return _encoder.encode(message)


def size(message: Message) -> int:
    """Bytes of a message in a datagram."""
    return len(_encoder.encode(message))


class SendDatagram(msgspec.Struct, frozen=True):
    """Action: put these messages into one datagram, which may be lost."""

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
