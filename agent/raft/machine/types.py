"""The events and the actions of the Raft core.

The contract of durability: what the core promises to others (a vote, an accepted entry) is held back until the service
has sent `Persisted` for everything before it. The service performs `Persist` and `SaveSnapshot` strictly in order and
may join several into one write; it sends `Persisted(number)` with the highest number that is on the disk. `SendRaft`
and `Apply` may be performed at once.
"""

from collections.abc import Sequence

import msgspec

from agent.raft.messages import NO_RACK, Configuration, Entry, Rack, Words
from covey.core.events import Heard
from covey.core.ids import HostId


class HardState(msgspec.Struct, frozen=True, array_like=True):
    """What must be on the disk before it is sent to other hosts, and how far the log was known to be committed."""

    term: int = 0
    vote: str = ""
    """The host that this one voted for in `term`; empty: none."""
    commit: int = 0
    """The commit index, a hint: entries up to here may be applied again after a restart. More may be committed."""
    identity: bytes = b""
    """The identity of this log: see `messages.Voter`."""
    lost: bool = False
    """Whether the log replaces one that is missing, or that holds less than it acknowledged: see `machine.raft`."""
    rack: Rack = NO_RACK
    """The rack that this host belongs to, or belonged to with the log that is missing."""


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot: the state after the entry (index, term)."""

    index: int
    term: int
    data: bytes
    crc: int
    configuration: Configuration = Configuration()
    """The configuration after that entry."""


class Saved(msgspec.Struct, frozen=True):
    """What the disk held at the start."""

    hard: HardState = HardState()
    image: Snapshot | None = None
    base_index: int = 0
    base_term: int = 0
    entries: tuple[Entry, ...] = ()
    configuration: Configuration = Configuration()
    """The configuration after `base_index`; without voters: that of leader.voters."""


# ---- events ----


class RaftStarted(msgspec.Struct, frozen=True):
    """The service has started; what the disk held is to be applied."""


class Tick(msgspec.Struct, frozen=True):
    """`wake_s` is due."""


class Persisted(msgspec.Struct, frozen=True):
    """Everything up to this number is durable."""

    number: int


class Proposal(msgspec.Struct, frozen=True):
    id: bytes
    base: int
    command: bytes


class Proposed(msgspec.Struct, frozen=True):
    """Commands to append; a host that does not lead ignores them."""

    proposals: Sequence[Proposal]


class RaftHostsChanged(msgspec.Struct, frozen=True):
    """The other living hosts have changed; those that do not vote observe."""

    hosts: tuple[HostId, ...]


class ConfigurationWanted(msgspec.Struct, frozen=True):
    """Append this configuration, if this host leads, `instead_of` is in force and committed, and the two are one step
    apart."""

    instead_of: Configuration
    configuration: Configuration


class HandOver(msgspec.Struct, frozen=True):
    """This host is to be stopped: if it leads, another voter should, once one has the whole log (Raft thesis §3.10).
    Until `until_s` no command is appended; if no voter was ready by then, it continues as leader."""

    until_s: float


class ReadAsked(msgspec.Struct, frozen=True):
    """A read that decides has come; `ReadFrom` with this number answers it."""

    number: int


class SnapshotTaken(msgspec.Struct, frozen=True):
    """A snapshot of the applied state after `index` was taken; the log below it may be forgotten."""

    index: int
    data: bytes


Event = (
    RaftStarted
    | Tick
    | Heard
    | Persisted
    | Proposed
    | ReadAsked
    | RaftHostsChanged
    | HandOver
    | SnapshotTaken
    | ConfigurationWanted
)


# ---- actions ----


class SendRaft(msgspec.Struct, frozen=True):
    """Send once, now; it may be lost."""

    to: HostId
    message: Words


class Persist(msgspec.Struct, frozen=True):
    """Write this durably. `entries` begin at `first`; whatever the disk holds from there on is replaced."""

    number: int
    hard: HardState
    first: int
    entries: tuple[Entry, ...]


class SaveSnapshot(msgspec.Struct, frozen=True):
    """Write the snapshot durably, and with it all that is left of the log: older files may go."""

    number: int
    hard: HardState
    image: Snapshot
    base_index: int
    base_term: int
    entries: tuple[Entry, ...]
    configuration: Configuration = Configuration()
    """The configuration after `base_index`."""


class Apply(msgspec.Struct, frozen=True):
    """Apply these committed entries in order, once."""

    first: int
    entries: tuple[Entry, ...]


class Restore(msgspec.Struct, frozen=True):
    """Replace the applied state by this snapshot."""

    image: Snapshot


class ReadFrom(msgspec.Struct, frozen=True):
    """Answer the read of this number from a state that has applied `index`: it holds all that was decided before the
    read came. None: this host does not lead, or not any more."""

    number: int
    index: int | None


class SoftState(msgspec.Struct, frozen=True):
    """The term or its known leader changed."""

    term: int
    leader: HostId | None


class ConfigurationChanged(msgspec.Struct, frozen=True):
    """The configuration of this host's log changed, or became `committed`."""

    configuration: Configuration
    committed: bool


Action = SendRaft | Persist | SaveSnapshot | Apply | Restore | ReadFrom | SoftState | ConfigurationChanged
