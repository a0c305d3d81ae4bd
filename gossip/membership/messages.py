"""Messages about the state of hosts (SWIM 4; names as in the paper where it has one).

A message names a host by `identity` (name and uuid); `boot` and `incarnation` order the messages about it.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta

from covey.core.events import Message
from gossip.types import U32, AwaySeconds, Boot, HostName, Identity, MaybeHostName, PeerAddress, Uuid


class Ping(Message, frozen=True, array_like=True, tag=1):
    """Asks for an Ack. `to` is the identity it is meant for: another machine may have the address or the name now."""

    seq: U32
    to: Identity


class Ack(Message, frozen=True, array_like=True, tag=2):
    """The sender is alive, or, for a PingReq, the target answered the sender."""

    seq: U32


class Nack(Message, frozen=True, array_like=True, tag=3):
    """The sender got no answer of the target either (Lifeguard: it shows that the asker itself is not cut off)."""

    seq: U32


class PingReq(Message, frozen=True, array_like=True, tag=4):
    """Asks the receiver to ping `target` for the sender."""

    seq: U32
    target: HostName
    identity: Identity


class Alive(Message, frozen=True, array_like=True, tag=5):
    """Sent first by the host itself. An empty address, only valid from itself, is the source of its datagram."""

    host: HostName
    uuid: Uuid
    boot: Boot
    incarnation: U32
    address: PeerAddress


class Suspect(Message, frozen=True, array_like=True, tag=6):
    """Says that `by` could not reach the host. Only the host itself can refute, by a higher incarnation."""

    host: HostName
    identity: Identity
    boot: Boot
    incarnation: U32
    by: HostName


class Gone(Message, frozen=True, array_like=True, tag=7):
    """Says that the host was suspected for too long: SWIM's Confirm."""

    host: HostName
    identity: Identity
    boot: Boot
    incarnation: U32
    by: HostName


class Left(Message, frozen=True, array_like=True, tag=8):
    """Says that the host is gone on purpose; sent first by the host itself."""

    host: HostName
    identity: Identity
    boot: Boot
    incarnation: U32
    away_s: AwaySeconds = 0
    """Seconds within which the host comes back, while its processes keep running; 0: it leaves for good."""


class SyncAsk(Message, frozen=True, array_like=True, tag=9):
    """Asks whether the receiver's member table has this checksum."""

    checksum: Identity


class SyncSame(Message, frozen=True, array_like=True, tag=10):
    """Says that the receiver's member table has the checksum."""


class SyncPull(Message, frozen=True, array_like=True, tag=11):
    """The checksums differ: asks for the receiver's records (the sender's own are on their way)."""


class MemberRecord(Message, frozen=True, array_like=True, tag=12):
    """One line of a member table."""

    host: HostName
    uuid: Uuid
    boot: Boot
    incarnation: U32
    address: PeerAddress
    state: Annotated[int, Meta(ge=0, le=3)]
    """The state's number: 0 alive, 1 suspect, 2 gone, 3 left."""
    by: MaybeHostName
    """The host that suspected it first; empty when none did."""
    away_s: AwaySeconds = 0
    """Seconds left of the announced absence of a host that left."""


class WhoAreYou(Message, frozen=True, array_like=True, tag=13):
    """Says that the sender does not know the receiver in its present boot. Answer: `Alive`."""


class SeenAt(Message, frozen=True, array_like=True, tag=14):
    """Says the source address of the receiver's datagram, for hosts that are bound to all addresses."""

    address: PeerAddress


class NameTaken(Message, frozen=True, array_like=True, tag=15):
    """Says that another live machine has the receiver's name: the receiver is not let in."""

    host: HostName


AnyMessage: TypeAlias = (
    Ping
    | Ack
    | Nack
    | PingReq
    | Alive
    | Suspect
    | Gone
    | Left
    | SyncAsk
    | SyncSame
    | SyncPull
    | MemberRecord
    | WhoAreYou
    | SeenAt
    | NameTaken
)
