"""Events and actions of the membership machine."""

import msgspec

from covey.core.events import Publish, SetTimer
from covey.core.ids import HostId
from covey.ports.addresses import Address
from gossip.membership.messages import AnyMessage, MemberRecord
from gossip.types import SendDatagram, Sender


class MembershipStarted(msgspec.Struct, frozen=True):
    """Event: membership begins."""

    address: Address
    """This host's address for the others; empty while no peer has told it."""
    remembered: tuple[MemberRecord, ...] = ()
    """The hosts that were known before a restart."""
    seeds: tuple[Address, ...] = ()
    """The addresses to join through, as far as they are known yet."""


class SeedsFound(msgspec.Struct, frozen=True):
    """Event: the addresses of the seeds, after their names were looked up. They replace those known before."""

    seeds: tuple[Address, ...]


class PacketHeard(msgspec.Struct, frozen=True):
    """Event: one authenticated datagram, also one without a membership message: it shows that the sender is alive."""

    sender: Sender
    source: Address
    messages: tuple[AnyMessage, ...]


class EarlierHeard(msgspec.Struct, frozen=True):
    """Event: one authenticated datagram of an earlier boot than the newest of this sender. Nothing in it counts."""

    sender: Sender
    source: Address
    counter: int
    """The datagram's number, which grows with each datagram of that sender and boot."""


class LoopStalled(msgspec.Struct, frozen=True):
    """Event: this process did not run from `start_s` to `end_s`: an answer missed then proves nothing."""

    start_s: float
    end_s: float


class Leaving(msgspec.Struct, frozen=True):
    """Event: tell the others `Left` (the event may come more than once, since datagrams get lost). After it the machine
    ignores every other event."""

    away_s: int = 0
    """Seconds within which this host is back; 0: it leaves for good."""


class AwayOver(msgspec.Struct, frozen=True):
    """Event: the time that a host announced for its absence is over."""

    host: HostId
    identity: int
    boot: int


class Forget(msgspec.Struct, frozen=True):
    """Event: a person says that this host, of this boot or an earlier one, will never come back."""

    host: HostId
    boot: int


class ProbeDue(msgspec.Struct, frozen=True):
    """Event: the last probe is over, the next one begins."""


class ProbeLate(msgspec.Struct, frozen=True):
    """Event: no answer to the direct ping in time: ask other hosts to ping."""

    seq: int


class RelayLate(msgspec.Struct, frozen=True):
    """Event: the host that was pinged for another host does not answer."""

    seq: int


class SuspicionDue(msgspec.Struct, frozen=True):
    host: HostId
    identity: int
    boot: int
    incarnation: int


class GossipDue(msgspec.Struct, frozen=True):
    pass


class CallDue(msgspec.Struct, frozen=True):
    """Event: call hosts that are missing. `generation`: an older timer is stale."""

    generation: int


class SyncDue(msgspec.Struct, frozen=True):
    pass


Timer = ProbeDue | ProbeLate | RelayLate | SuspicionDue | AwayOver | GossipDue | CallDue | SyncDue
Event = MembershipStarted | SeedsFound | PacketHeard | EarlierHeard | LoopStalled | Leaving | Forget | Timer


class ForgetMember(msgspec.Struct, frozen=True):
    """Action: this host is no longer in the table."""

    host: HostId


Action = SendDatagram | SetTimer[Timer] | Publish | ForgetMember
