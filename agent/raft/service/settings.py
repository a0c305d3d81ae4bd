"""The section [leader] of agent.toml."""

import re

import msgspec

from agent.raft.policy import Timing
from covey.core.ids import ID_PATTERN

VOTERS = (1, 3, 5)
"""The numbers of hosts that may vote; a second or a fourth voter lets the log survive no further loss."""


class LeaderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[leader]: which hosts vote, and after what timeouts."""

    voters: tuple[str, ...] = ()
    """The names of one, three or five hosts, which must be equal on every host; empty: this host alone (a rack of
    one)."""
    voters_wanted: int = 3
    """The number of voters, 1, 3 or 5, up to which the leader adds hosts that have been alive for 30 s, one at a time
    and two in a row; it removes none. From the first change by `agentctl voters` on it adds none either. 1: it never
    does."""
    heartbeat_s: float = 0.15
    """Seconds between two heartbeats of a leader."""
    election_min_s: float = 1.2
    """The least seconds of silence after which a voter stands for election; it waits a random time from this to
    `election_max_s`."""
    election_max_s: float = 1.75
    """The most seconds of silence after which a voter stands for election. The defaults give a failover of about 1.5 s.
    Both grow with the silences seen on a busy machine."""
    step_down_s: float = 1.55
    """Seconds after which a leader that no majority answers steps down."""
    observer_s: float = 1.0
    """Seconds between two heartbeats to hosts that do not vote."""
    snapshot_entries: int = 4096
    """The number of entries applied between two snapshots."""
    keep_entries: int = 1024
    """The number of entries kept below a snapshot for hosts that are a little behind."""

    def __post_init__(self) -> None:
        if self.voters and (len(self.voters) not in VOTERS or len(set(self.voters)) != len(self.voters)):
            raise ValueError(f"voters = {list(self.voters)}: expected one, three or five different hosts")
        for voter in self.voters:
            if not re.match(ID_PATTERN, voter):
                raise ValueError(f"voters: {voter!r} is not a host name (a-z, 0-9, '-' and '.')")
        if self.voters_wanted not in VOTERS:
            raise ValueError(f"voters_wanted = {self.voters_wanted}: expected 1, 3 or 5")
        if not 0.01 <= self.heartbeat_s <= self.election_min_s / 3:
            raise ValueError("heartbeat_s: expected at least 0.01 and at most a third of election_min_s")
        if not self.election_min_s < self.election_max_s <= 60:
            raise ValueError("election_max_s: expected more than election_min_s and at most 60")
        if not self.election_min_s <= self.step_down_s <= 60:
            raise ValueError("step_down_s: expected at least election_min_s and at most 60")
        if not self.heartbeat_s <= self.observer_s <= 60:
            raise ValueError("observer_s: expected at least heartbeat_s and at most 60")
        if self.snapshot_entries < 16 or self.keep_entries < 0:
            raise ValueError("snapshot_entries: expected at least 16; keep_entries: at least 0")

    def timing(self) -> Timing:
        """The timing for the core."""
        return Timing(
            heartbeat_s=self.heartbeat_s,
            election_min_s=self.election_min_s,
            election_max_s=self.election_max_s,
            step_down_s=self.step_down_s,
            observer_s=self.observer_s,
            keep_entries=self.keep_entries,
        )
