"""The messages between leader, voters and observers, and how they are decoded.

Raft's own messages travel raw, at most once, and may be lost, doubled, delayed and reordered: the core allows for it.
They are wrapped in an `RaftEnvelope` that names the rack, by eight random bytes which its first leader put into the
first entry of its log: two racks, or a host that used to be alone and one that belongs to a rack, can never mix their
logs, whatever their voters are called. A host learns the name when it knows that entry to be committed; until then it
sends `NO_RACK`. `ProposeEntry` is a question through the messenger instead.

Everything is decoded with bounds, once, here; what passes is trusted by the machine.
"""

import itertools
import zlib
from functools import cached_property
from typing import Annotated

import msgspec

from covey.core.events import Message
from covey.core.ids import HostId

COMMAND_BYTES_MAX = 256 * 1024
"""The longest command, bytes; job records are about 1 KiB."""
ENTRIES_MAX = 1024
"""The most entries in one Append."""
MESSAGE_BYTES_MAX = 900 * 1024
"""The longest message, bytes: an envelope of the messenger holds 1 MiB."""
CHUNK_BYTES_MAX = 256 * 1024
"""The most snapshot bytes in one message."""
SNAPSHOT_BYTES_MAX = 256 * 1024 * 1024
"""The longest snapshot, bytes; a follower allocates only what has arrived."""
ID_BYTES = 16
"""The length of a proposal's id, bytes."""

RACK_BYTES = 8
NO_RACK = bytes(RACK_BYTES)
"""The rack that a host sends which does not know yet which one it belongs to."""
IDENTITY_BYTES = 16
"""The length of a voter's identity, bytes."""
VOTERS_MAX = 16
"""The most hosts that one configuration names: five that vote, and those on their way in or out."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A term, an index, a round or an offset."""
Crc = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
Identity = Annotated[bytes, msgspec.Meta(max_length=IDENTITY_BYTES)]
"""Random bytes that a host draws when its log is made; a host that lost its log has another one. Empty: not known."""

Rack = Annotated[bytes, msgspec.Meta(min_length=RACK_BYTES, max_length=RACK_BYTES)]
"""A rack's identity."""
Name = Annotated[HostId, msgspec.Meta(max_length=64)]
"""A host's name; empty: no host."""


class MalformedMessage(Exception):
    """The bytes are not a message of the log; they are dropped and counted."""


class Voter(msgspec.Struct, frozen=True, array_like=True):
    """A host that votes: its name *and* the log it votes with. Answers of another log under that name do not count."""

    host: Annotated[HostId, msgspec.Meta(min_length=1, max_length=64)]
    identity: Identity = b""
    """The identity of the voter's log; empty: no leader has had an answer of this host yet, so the log that answers
    first is the one that votes."""
    since: Count = 0
    """The index of the entry that put this identity in the place of another one: the voter counts once that is
    committed."""


class Configuration(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The configuration from an entry of the log on: which hosts vote, and which change is under way. It is in force as
    soon as the entry is in a host's log (Raft thesis §4.1).

    add NEW            learner=NEW                    -> NEW votes
    remove OLD                         leaving=OLD    -> OLD does not vote
    replace OLD NEW    learner=NEW     leaving=OLD    -> NEW votes, leaving=OLD -> OLD does not vote

    Whoever leads takes the next step, so that a change outlives the leader that began it."""

    voters: Annotated[tuple[Voter, ...], msgspec.Meta(max_length=VOTERS_MAX)] = ()
    rack: Rack = NO_RACK
    learner: Name = HostId("")
    """The host that receives the whole log, and votes once it has caught up."""
    leaving: Name = HostId("")
    """The voter that stops voting when there is no learner any more; a leader hands over first."""
    by_people: bool = False
    """Whether a person has decided how many vote: from then on no leader adds a voter by itself. Replacing a voter, and
    removing one that does not answer, are no such decisions."""

    @cached_property
    def hosts(self) -> tuple[HostId, ...]:
        """The hosts of the voters."""
        return tuple(voter.host for voter in self.voters)

    def voter(self, host: HostId) -> Voter | None:
        for voter in self.voters:
            if voter.host == host:
                return voter
        return None


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One entry of the log; its index is its position."""

    term: Count
    id: Annotated[bytes, msgspec.Meta(max_length=ID_BYTES)]
    """The id of the proposal, so that a repeated one is applied once; empty: it is the leader's own, whose command is
    nothing, or a Configuration (`configuration_of`)."""
    base: Count
    """An index that was committed before the first try of this proposal (see `machine.session_table`)."""
    command: Annotated[bytes, msgspec.Meta(max_length=COMMAND_BYTES_MAX)]


class RequestVote(Message, frozen=True, array_like=True):
    """A candidate asks for a vote in `term`. With `pre_vote`: whether it would get one; no host's term changes by that
    (Raft thesis §9.6)."""

    term: Count
    pre_vote: bool
    last_index: Count
    last_term: Count
    handed_over: bool = False
    """Whether the leader of the term before handed over to this candidate: then no lease of it still runs (Raft thesis
    §4.2.3)."""
    counts: Identity = b""
    """The log of the asked host that is known to be one that votes: that host may not know it yet."""
    rack: Rack = NO_RACK
    """The rack that the candidate is certain to belong to."""


class TimeoutNow(Message, frozen=True, array_like=True):
    """The leader of `term` has stepped down: stand for election at once (Raft thesis §3.10)."""

    term: Count


class VoteReply(Message, frozen=True, array_like=True):
    term: Count
    """The asked term when granted, else the voter's own."""
    pre_vote: bool
    granted: bool
    identity: Identity = b""
    """The log that votes."""


class Append(Message, frozen=True, array_like=True):
    """Entries after (prev_index, prev_term), and how far the log is committed. An Append without entries is a
    heartbeat."""

    term: Count
    prev_index: Count
    prev_term: Count
    commit: Count
    round: Count
    """The leader's heartbeat round, sent back in the reply: the leader's lease counts from when the round began."""
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=ENTRIES_MAX)]
    acknowledged: Count = 0
    """The index up to which the receiver has acknowledged entries to this leader; one that holds less has lost a part
    of its log."""
    by: Identity = b""
    """The identity of the receiver's log that acknowledged it."""
    invited: bool = False
    """Whether the receiver is the learner: an operator made it one, so it follows whatever its agent.toml says."""


class AppendReply(Message, frozen=True, array_like=True):
    """An answer to Append. Accepted: durable and equal to the leader's log up to `match`. Refused: where the leader
    should try next."""

    term: Count
    round: Count
    accepted: bool
    match: Count
    """The index up to which the logs are equal, when accepted; the prev_index that did not fit, when refused."""
    hint_index: Count = 0
    hint_term: Count = 0
    """The term of the last entry here, at or below prev_index, whose term is not above prev_term (Raft §5.3, end), when
    refused."""
    identity: Identity = b""
    """The identity of the log that answers."""
    lost: bool = False
    """Whether the log replaces one that voted before and is missing, or holds less than it acknowledged."""
    last_index: Count = 0
    """The durable end of the log that answers."""
    commit: Count = 0
    """The index up to which the host that answers knows that entries are committed, when accepted."""


class InstallSnapshot(Message, frozen=True, array_like=True):
    """One piece of the state after `index`; the receiver asks for one piece after the other."""

    term: Count
    index: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    entry_term: Count
    round: Count
    total: Annotated[int, msgspec.Meta(ge=0, le=SNAPSHOT_BYTES_MAX)]
    crc: Crc
    """CRC-32 of the whole snapshot."""
    offset: Count
    data: Annotated[bytes, msgspec.Meta(max_length=CHUNK_BYTES_MAX)]
    configuration: Configuration = Configuration()
    """The configuration after `index`."""
    invited: bool = False
    """Whether the receiver is the learner, as in `Append`."""


class SnapshotReply(Message, frozen=True, array_like=True):
    """The next byte wanted of the snapshot at `index`. The whole of it is acknowledged by an AppendReply."""

    term: Count
    round: Count
    index: Count
    offset: Count
    identity: Identity = b""
    lost: bool = False
    last_index: Count = 0
    """The durable end of the log that answers; `identity`, `lost` and this are as in `AppendReply`."""


class ProposeEntry(Message, frozen=True, array_like=True):
    """To the leader: append this command. Asking again with an unchanged id is harmless."""

    rack: Rack
    id: Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    attempt: Count
    """The number of the try: it grows when the proposer tries again after an answer; a refused attempt stays
    refused."""
    base: Count
    command: Annotated[bytes, msgspec.Meta(max_length=COMMAND_BYTES_MAX)]


class ProposeReply(Message, frozen=True, array_like=True):
    outcome: Annotated[str, msgspec.Meta(max_length=16)]
    """What became of it: `applied`; `not leader` and `busy`: certainly not appended; `perhaps`: the host that answers
    does not lead, and may have appended it before; `lost`, `expired`: it cannot be known any more."""
    index: Count = 0
    result: bytes = b""


class ForwardedCommand(msgspec.Struct, frozen=True, array_like=True):
    """One of several proposals in a message; the fields are those of `ProposeEntry`."""

    id: Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    attempt: Count
    base: Count
    command: Annotated[bytes, msgspec.Meta(max_length=COMMAND_BYTES_MAX)]


class ProposeEntries(Message, frozen=True, array_like=True):
    """To the leader: append these commands, each as if it came in a `ProposeEntry` of its own."""

    rack: Rack
    commands: Annotated[tuple[ForwardedCommand, ...], msgspec.Meta(min_length=1, max_length=ENTRIES_MAX)]


class ProposeReplies(Message, frozen=True, array_like=True):
    """An answer to ProposeEntries: one reply per command, in their order."""

    replies: Annotated[tuple[ProposeReply, ...], msgspec.Meta(max_length=ENTRIES_MAX)]


class ReadIndex(Message, frozen=True, array_like=True):
    """To the leader: which entry must a copy have applied to hold all that was decided before this question? The leader
    asks a majority whether it still leads before it answers (Raft thesis §6.4)."""

    rack: Rack


class ReadIndexReply(Message, frozen=True, array_like=True):
    leads: bool
    """Whether a majority confirmed, after the question came, that the host that answers leads."""
    index: Count = 0


class ChangeVoters(Message, frozen=True, array_like=True):
    """To the leader: `add` is to vote, or `remove` not to; both: one in the place of the other. Asking again is
    harmless."""

    rack: Rack
    add: Name = HostId("")
    remove: Name = HostId("")
    force: bool = False
    """Whether to change the voters also when `add` is away."""


class ChangeReply(Message, frozen=True, array_like=True):
    """The result: an exit code of agentctl, and text for people. Code 0 has the first line only."""

    code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    what: Annotated[str, msgspec.Meta(max_length=400)]
    why: Annotated[str, msgspec.Meta(max_length=400)] = ""
    next: Annotated[str, msgspec.Meta(max_length=400)] = ""


Words = RequestVote | TimeoutNow | VoteReply | Append | AppendReply | InstallSnapshot | SnapshotReply
"""Messages that travel raw."""
Asked = (
    ProposeEntry
    | ProposeReply
    | ProposeEntries
    | ProposeReplies
    | ReadIndex
    | ReadIndexReply
    | ChangeVoters
    | ChangeReply
)
"""Messages that travel as a question and its answer."""


class RaftEnvelope(msgspec.Struct, frozen=True, array_like=True):
    rack: Rack
    message: Words


_encode = msgspec.msgpack.Encoder().encode
_configuration = msgspec.msgpack.Decoder(Configuration)
_envelope = msgspec.msgpack.Decoder(RaftEnvelope)
_asked = msgspec.msgpack.Decoder(Asked)


def configuration_entry(term: int, configuration: Configuration) -> Entry:
    """The entry that says who votes from itself on."""
    return Entry(term, b"", 0, _encode(configuration))


def configuration_of(entry: Entry) -> Configuration | None:
    """The configuration in this entry; None when it is of another kind. DecodeError for one that cannot be read, which
    `decode` refuses from other hosts."""
    return None if entry.id or not entry.command else _configuration.decode(entry.command)


def crc(data: bytes) -> int:
    """CRC-32 of a whole snapshot."""
    return zlib.crc32(data)


def another_rack(one: bytes, other: bytes) -> bool:
    """Whether these are certain to be different racks."""
    return NO_RACK not in (one, other) and one != other


def encode(rack: bytes, message: Words) -> bytes:
    """The bytes of one raw message."""
    return _encode(RaftEnvelope(rack, message))


def decode(data: bytes) -> RaftEnvelope:
    """The message in `data`. Malformed when it is not one, too long, or contradicts itself."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise MalformedMessage(f"{len(data)} bytes are over the limit of {MESSAGE_BYTES_MAX}")
    try:
        envelope = _envelope.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedMessage(str(error)) from error
    if fault := _contradiction(envelope.message):
        raise MalformedMessage(fault)
    return envelope


def encode_asked(message: Asked) -> bytes:
    """The bytes of a forwarded proposal or of its answer."""
    return _encode(message)


def decode_asked(data: bytes) -> Asked:
    """A forwarded proposal or its answer; Malformed when `data` is neither."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise MalformedMessage(f"{len(data)} bytes are over the limit of {MESSAGE_BYTES_MAX}")
    try:
        asked: Asked = _asked.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedMessage(str(error)) from error
    return asked


def _contradiction(message: Words) -> str:
    """Why no correct peer sends this; empty when the message is consistent in itself."""
    if isinstance(message, Append):
        return _append_contradiction(message)
    if isinstance(message, InstallSnapshot):
        if fault := _configuration_contradiction(message.configuration):
            return fault
        if message.offset + len(message.data) > message.total:
            return "a snapshot's piece reaches beyond its end"
        if message.entry_term > message.term:
            return "a snapshot is of a term after its leader's"
    if isinstance(message, RequestVote):
        if message.last_term > message.term:
            return "a candidate's log is of a term after its own"
        if message.pre_vote and message.handed_over:
            return "a pre-vote of a candidate that was handed the leadership"
    return ""


def _append_contradiction(message: Append) -> str:
    terms = [message.prev_term, *(entry.term for entry in message.entries), message.term]
    if any(earlier > later for earlier, later in itertools.pairwise(terms)):
        return "terms go back within an append"
    if message.prev_index == 0 and message.prev_term != 0:
        return "the empty log has no term"
    for entry in message.entries:
        if fault := _entry_contradiction(entry):
            return fault
    return ""


def _entry_contradiction(entry: Entry) -> str:
    try:
        configuration = configuration_of(entry)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return "an entry of the leader's own that cannot be read"
    if configuration is None:
        return ""
    return _configuration_contradiction(configuration) if configuration.voters else "a configuration without voters"


def _configuration_contradiction(configuration: Configuration) -> str:
    hosts = configuration.hosts
    if list(hosts) != sorted(set(hosts)):
        return "the voters are not different hosts in order"
    if configuration.learner in hosts:
        return "a learner that votes already"
    if configuration.leaving and configuration.leaving not in hosts:
        return "a host that does not vote cannot leave the voters"
    return ""
