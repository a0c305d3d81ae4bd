"""What other modules may ask of the Raft core of one host: which host leads, which vote, how far its log goes."""

from agent.raft.machine.leading import Leading
from agent.raft.machine.raft_log import RaftLog
from agent.raft.machine.types import Snapshot
from agent.raft.messages import Configuration, Entry
from agent.raft.policy import Timing
from covey.core.ids import HostId


class Outlook:
    """The part of `raft.Raft` that changes nothing."""

    me: HostId
    leading: Leading | None
    _raft_log: RaftLog
    _timing: Timing
    _now_s: float
    _deadline_s: float

    @property
    def term(self) -> int:
        return self._raft_log.term

    @property
    def configuration(self) -> Configuration:
        """The voters and the learner, according to this host's log."""
        return self._raft_log.configuration

    @property
    def configuration_committed(self) -> bool:
        return self._raft_log.configuration_committed

    @property
    def rack(self) -> bytes:
        """The rack's identity, NO_RACK until it is certain."""
        return self._raft_log.rack

    @property
    def voters(self) -> tuple[HostId, ...]:
        return self._raft_log.configuration.hosts

    @property
    def may_change(self) -> bool:
        """Whether this host leads and could append another configuration now."""
        return self.leading is not None and self.leading.may_change and not self.leading.leaving(self._now_s)

    def heard_lately(self, now_s: float) -> frozenset[HostId]:
        """The hosts that answered this leader within an election timeout, and itself."""
        return frozenset(
            {self.me, *(self.leading.heard_since(now_s - self._timing.election_min_s))} if self.leading else ()
        )

    @property
    def _others(self) -> tuple[HostId, ...]:
        """The other voters."""
        return tuple(host for host in self.voters if host != self.me)

    @property
    def commit(self) -> int:
        return self._raft_log.commit

    @property
    def last_index(self) -> int:
        return self._raft_log.log.last_index

    def entries_after(self, index: int) -> tuple[Entry, ...]:
        """The entries that this copy has behind that one, committed or not; nothing that only a snapshot has."""
        log = self._raft_log.log
        return log.slice(max(index, log.base_index) + 1, log.last_index)

    @property
    def image(self) -> Snapshot | None:
        return self._raft_log.image

    @property
    def identity(self) -> bytes:
        """The identity of this log."""
        return self._raft_log.identity

    @property
    def _votes_here(self) -> bool:
        """Whether this log votes: see the module's essay."""
        voter = self._raft_log.configuration.voter(self.me)
        if voter is None:
            return False
        if not voter.identity:
            return not self._raft_log.lost
        return voter.identity == self._raft_log.identity and voter.since <= self._raft_log.commit

    @property
    def forgotten(self) -> bool:
        """Whether this host is a voter, but its log is not the one that votes."""
        return self.me in self.voters and not self._votes_here

    @property
    def uncounted(self) -> tuple[HostId, ...]:
        """The voters whose answers to this leader make no majority yet, since another log answers under their names."""
        return self.leading.uncounted() if self.leading else ()

    @property
    def wake_s(self) -> float:
        """When `Tick` is due."""
        return self.leading.tick_s if self.leading else self._deadline_s

    def confirmed_s(self, now_s: float) -> float | None:
        """The start of the latest round that a majority answered; None: this host does not lead, or its no-op is not
        committed, so that the state applied here may be old."""
        leading = self.leading
        return leading.confirmed_s(now_s) if leading and self._raft_log.commit >= leading.first_index else None

    def holds_lease(self, now_s: float) -> bool:
        """Whether this host leads, no other can, and its no-op is committed: the state applied here is the newest there
        is."""
        confirmed_s = self.confirmed_s(now_s)
        return confirmed_s is not None and now_s - confirmed_s < self._timing.lease_s
