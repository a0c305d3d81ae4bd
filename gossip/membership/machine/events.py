"""What the membership machine is told, and what it asks for."""

import msgspec

from covey.core import HostId, Publish, SetTimer
from covey.ports import Address
from gossip.membership.messages import AnyMessage, MemberRecord
from gossip.types import SendDatagram, Sender


class MembershipStarted(msgspec.Struct, frozen=True):
    """Begin."""

    address: Address
    """What others are told; empty when only they can see it."""
    remembered: tuple[MemberRecord, ...] = ()
    """Hosts that were known before a restart."""
    seeds: tuple[Address, ...] = ()
    """Where to join, as far as it is known yet."""


class SeedsFound(msgspec.Struct, frozen=True):
    """Where the seeds are now: their names were looked up. Replaces what was known."""

    seeds: tuple[Address, ...]


class PacketHeard(msgspec.Struct, frozen=True):
    """One proven datagram, also one without a word about membership: it shows that the sender lives."""

    sender: Sender
    source: Address
    messages: tuple[AnyMessage, ...]


class LoopStalled(msgspec.Struct, frozen=True):
    """This process did not run from `start_s` to `end_s`: what it did not hear then proves nothing."""

    start_s: float
    end_s: float


class Leaving(msgspec.Struct, frozen=True):
    """Say goodbye (may be said more than once, since datagrams are lost). After it the machine only listens."""

    away_s: int = 0
    """Back within so many seconds; 0: for good."""


class AwayOver(msgspec.Struct, frozen=True):
    """A host said that it would be back by now."""

    host: HostId
    identity: int
    boot: int


class ProbeDue(msgspec.Struct, frozen=True):
    """The last probe is over, the next one begins."""


class ProbeLate(msgspec.Struct, frozen=True):
    """No answer to the direct ping in time: ask others."""

    seq: int


class RelayLate(msgspec.Struct, frozen=True):
    """The host that we pinged for somebody else does not answer."""

    seq: int


class SuspicionDue(msgspec.Struct, frozen=True):
    host: HostId
    identity: int
    boot: int
    incarnation: int


class GossipDue(msgspec.Struct, frozen=True):
    pass


class CallDue(msgspec.Struct, frozen=True):
    """Call hosts that are missing. `generation`: an older timer is stale."""

    generation: int


class SyncDue(msgspec.Struct, frozen=True):
    pass


Timer = ProbeDue | ProbeLate | RelayLate | SuspicionDue | AwayOver | GossipDue | CallDue | SyncDue
Event = MembershipStarted | SeedsFound | PacketHeard | LoopStalled | Leaving | Timer


class ForgetMember(msgspec.Struct, frozen=True):
    """Action: this host is no longer in the table."""

    host: HostId


Action = SendDatagram | SetTimer[Timer] | Publish | ForgetMember
