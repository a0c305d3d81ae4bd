"""Raft's decisions as functions: no state, no clock, no random numbers of their own."""

import random
from collections.abc import Callable, Iterable, Sequence

import msgspec

from agent.raft.messages import CHUNK_BYTES_MAX, ENTRIES_MAX, Configuration, Entry, ForwardedCommand, Voter
from covey.core.ids import HostId

BATCH_BYTES_MAX = 512 * 1024
"""The most command bytes in one Append, unless a single entry is longer; well below an envelope's 1 MiB."""
ENTRY_OVERHEAD_BYTES = 48
"""The most bytes that an entry adds to its command on the wire and on disk."""
LEASE_SHARE = 0.9
"""The part of the shortest election timeout for which a leader trusts its lease: clocks may differ in rate by 10 %."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts in seconds, and how much is kept and sent at once. The defaults give a failover of about 1.5 s in the
    median and under 2 s at worst, let an isolated leader step down within 1.8 s, and outlast a leader that is late by
    a second. Where silences were seen to be longer, every host waits longer (`machine/patience.py`)."""

    heartbeat_s: float = 0.15
    """Seconds between two rounds of heartbeats to the voters."""
    election_min_s: float = 1.2
    """Seconds since it heard the leader within which a voter gives no vote against it (Raft thesis §4.2.3)."""
    election_max_s: float = 1.75
    """The most seconds for which a voter waits, a random time from `election_min_s` on, before it stands for election
    (Raft §5.2)."""
    step_down_s: float = 1.55
    """Seconds after which a leader that no majority has answered steps down (CheckQuorum, Raft thesis §6.2)."""
    observer_s: float = 1.0
    """Seconds between two heartbeats to an observer that has everything."""
    hint_s: float = 1.0
    """The least seconds between two writes of the commit index when nothing else is written."""
    keep_entries: int = 1024
    """The number of entries kept below a snapshot, so that a host a little behind needs no snapshot."""
    chunk_bytes: int = CHUNK_BYTES_MAX
    """The snapshot bytes in one message."""

    @property
    def lease_s(self) -> float:
        """Seconds for which the leader may act as one, from the start of a round that a majority answered."""
        return self.election_min_s * LEASE_SHARE


def quorum(voters: int) -> int:
    """The smallest majority: 1 of 1, 2 of 3, 3 of 5."""
    return voters // 2 + 1


def up_to_date(last_index: int, last_term: int, own_index: int, own_term: int) -> bool:
    """Whether a candidate's log is at least as complete as this host's: the later last term wins, then the longer log
    (Raft §5.4.1)."""
    return (last_term, last_index) >= (own_term, own_index)


def commit_index(matches: Sequence[int]) -> int:
    """The highest index that a majority holds durably; `matches` has one number per voter, the leader's own included
    (Raft §5.3). Whether it may be committed depends on its term as well (§5.4.2)."""
    return sorted(matches, reverse=True)[quorum(len(matches)) - 1]


def quorum_round(answered: Sequence[int]) -> int:
    """The latest round that a majority answered; one number per voter, the leader's own newest round included."""
    return sorted(answered, reverse=True)[quorum(len(answered)) - 1]


def quorum_time(confirmed_s: Sequence[float]) -> float:
    """The start of the latest round that a majority answered; one time per voter, the leader's own included."""
    return sorted(confirmed_s, reverse=True)[quorum(len(confirmed_s)) - 1]


def successor(voters: Iterable[tuple[HostId, int, float]], last_index: int, since_s: float) -> HostId | None:
    """The voter that should lead next, of other voters given as (host, durable up to, start of the last round it
    answered): one that has the whole log and has answered a round that began at `since_s` or later, the freshest first;
    None when there is none (Raft thesis §3.10)."""
    ready = [
        (confirmed_s, host) for host, match, confirmed_s in voters if match == last_index and confirmed_s >= since_s
    ]
    return max(ready)[1] if ready else None


def founders(voters: Iterable[HostId], rack: bytes) -> Configuration:
    """The configuration of a log that has not begun, as agent.toml says."""
    return Configuration(tuple(Voter(host) for host in sorted(voters)), rack)


def promoted(configuration: Configuration, voter: Voter) -> Configuration:
    """The configuration in which the learner votes; the voter that leaves does so in a step of its own."""
    assert configuration.learner == voter.host, f"{voter.host} is not learning"
    voters = tuple(sorted((*configuration.voters, voter), key=lambda each: each.host))
    return msgspec.structs.replace(configuration, voters=voters, learner=HostId(""))


def removed(configuration: Configuration) -> Configuration:
    """The configuration in which the voter that leaves does not vote any more."""
    voters = tuple(voter for voter in configuration.voters if voter.host != configuration.leaving)
    assert len(voters) < len(configuration.voters), "nobody is leaving"
    return msgspec.structs.replace(configuration, voters=voters, leaving=HostId(""))


def one_step(old: Configuration, new: Configuration) -> bool:
    """Whether every majority of `old` and every majority of `new` share a voter: they differ by one at most, so that no
    two leaders can be elected beside one another (Raft thesis §4.1)."""
    return bool(new.voters) and new.rack == old.rack and len({*old.hosts} ^ {*new.hosts}) <= 1


def stands(voters: Iterable[HostId], confirmed_s: Callable[[HostId], float], since_s: float) -> bool:
    """Whether a majority of these answered a round that began at `since_s` or later."""
    answered = [confirmed_s(voter) >= since_s for voter in voters]
    return sum(answered) >= quorum(len(answered))


def election_timeout(timing: Timing, rng: random.Random, least_s: float = 0.0) -> float:
    """Seconds of silence after which this voter stands for election, at least `least_s`; random, so that votes seldom
    split (Raft §5.2)."""
    return max(timing.election_min_s, least_s) + rng.random() * (timing.election_max_s - timing.election_min_s)


def batch_length(entries: Iterable[Entry | ForwardedCommand]) -> int:
    """The number of these entries that go into one message: at least one, at most ENTRIES_MAX, of about
    BATCH_BYTES_MAX in all."""
    count, size = 0, 0
    for entry in entries:
        size += len(entry.command) + ENTRY_OVERHEAD_BYTES
        if count and (size > BATCH_BYTES_MAX or count == ENTRIES_MAX):
            break
        count += 1
    return count
