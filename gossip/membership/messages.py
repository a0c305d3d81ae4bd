"""What hosts say about who is there (SWIM 4; names as in the paper where it has one).

About a host are said `identity` (name and uuid), `boot` and `incarnation`; together they order what was said.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta

from covey.core import Message
from gossip.types import U32, AwaySeconds, Boot, HostName, Identity, MaybeHostName, PeerAddress, Uuid


class Ping(Message, frozen=True, array_like=True, tag=1):
    """Are you there? `to` is the identity this is meant for: another machine may have the address now, or the name."""

    seq: U32
    to: Identity


class Ack(Message, frozen=True, array_like=True, tag=2):
    """I am, or: I could reach it."""

    seq: U32


class Nack(Message, frozen=True, array_like=True, tag=3):
    """I could not reach it either; but you reached me (Lifeguard: tells a deaf host from a dead target)."""

    seq: U32


class PingReq(Message, frozen=True, array_like=True, tag=4):
    """Please ping `target` for me."""

    seq: U32
    target: HostName
    identity: Identity


class Alive(Message, frozen=True, array_like=True, tag=5):
    """Said first by the host itself. An empty address, only valid from itself, is where its datagram came from."""

    host: HostName
    uuid: Uuid
    boot: Boot
    incarnation: U32
    address: PeerAddress


class Suspect(Message, frozen=True, array_like=True, tag=6):
    """`by` could not reach it. Only the host itself can refute, by a higher incarnation."""

    host: HostName
    identity: Identity
    boot: Boot
    incarnation: U32
    by: HostName


class Gone(Message, frozen=True, array_like=True, tag=7):
    """Suspected for too long. SWIM's Confirm."""

    host: HostName
    identity: Identity
    boot: Boot
    incarnation: U32
    by: HostName


class Left(Message, frozen=True, array_like=True, tag=8):
    """Gone on purpose; said first by the host itself."""

    host: HostName
    identity: Identity
    boot: Boot
    incarnation: U32
    away_s: AwaySeconds = 0
    """It comes back within so many seconds, and what it left at work goes on; 0: for good."""


class SyncAsk(Message, frozen=True, array_like=True, tag=9):
    """Is this the checksum of your member table, too?"""

    checksum: Identity


class SyncSame(Message, frozen=True, array_like=True, tag=10):
    """Yes."""


class SyncPull(Message, frozen=True, array_like=True, tag=11):
    """No; send me all of yours (mine are on their way)."""


class MemberRecord(Message, frozen=True, array_like=True, tag=12):
    """One line of a member table."""

    host: HostName
    uuid: Uuid
    boot: Boot
    incarnation: U32
    address: PeerAddress
    state: Annotated[int, Meta(ge=0, le=3)]
    """0 alive, 1 suspect, 2 gone, 3 left."""
    by: MaybeHostName
    """Who suspected it first; empty when nobody did."""
    away_s: AwaySeconds = 0
    """Of one that left: the rest of what it said it would be away."""


class WhoAreYou(Message, frozen=True, array_like=True, tag=13):
    """I do not know you (in this life). Answer: `Alive`."""


class SeenAt(Message, frozen=True, array_like=True, tag=14):
    """Your datagram came from here. For hosts that are bound to all addresses."""

    address: PeerAddress


class NameTaken(Message, frozen=True, array_like=True, tag=15):
    """Another machine has your name, and it is alive: you are not let in."""

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
