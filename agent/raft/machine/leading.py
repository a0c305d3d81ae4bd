"""A leader's own state: what each other host has, and whether a majority still answers.

It is created at each election and dropped when the leader steps down (Raft Figure 2, "volatile state on leaders").

CheckQuorum and the lease. Each round of heartbeats has a number, every answer names it, and what counts is when the
round *began*: at that moment the voter had not yet voted for another host, and for `election_min_s` after it received
this leader's heartbeat it will not (Raft thesis §4.2.3, §6.4.1). So until `lease_s` after the latest round that a
majority answered, no other leader can exist.

Who counts. A voter is a name and the log that it votes with (`messages.Voter`). The leader writes down which log that
is before it counts an answer of it: of a host that has answered no leader yet, with the first answer; of one that
answers with another log than before - the former log is lost, with the entries it acknowledged and its votes - as an
entry that the *other* voters have to commit. From that entry on the former log's votes do not count, and once it is
committed the new log counts. Two majorities that follow one another in this way always share a voter that still has its
log, as when one voter is taken out of a configuration and another one put in (Raft thesis §4.1).
"""

import math
import random
from collections.abc import Mapping, Sequence

import msgspec

from agent.raft import policy
from agent.raft.machine.patience import LATE_S_MAX, ElectionPatience
from agent.raft.machine.progress import Progress, ProgressState
from agent.raft.machine.raft_log import RaftLog
from agent.raft.machine.reads import RoundReads
from agent.raft.machine.types import Proposal, ReadFrom, Snapshot
from agent.raft.messages import (
    ENTRIES_MAX,
    RACK_BYTES,
    Append,
    AppendReply,
    Configuration,
    Entry,
    InstallSnapshot,
    SnapshotReply,
    Voter,
    configuration_entry,
)
from agent.raft.policy import Timing
from covey.core.ids import HostId

ROUNDS_MAX = 256
"""The number of rounds whose start is remembered; an answer to an older one is ignored."""
RETRY_ROUNDS = 4
"""The number of heartbeats after which a piece of a snapshot is sent again."""
OBSERVER_PATIENCE_S = 5.0
"""Seconds after which a silent observer is tried at the slow pace."""


class Leading:
    def __init__(
        self,
        raft_log: RaftLog,
        timing: Timing,
        me: HostId,
        alive: Sequence[HostId],
        identities: Mapping[HostId, bytes],
        now_s: float,
        rng: random.Random,
    ) -> None:
        """`alive`: the other living hosts; those that do not vote observe. `identities`: the logs that voted for this
        leader, its own among them. `rng` draws the identity of a rack whose log begins with this leader."""
        self._raft_log, self._timing, self._me, self._alive, self._rng = raft_log, timing, me, alive, rng
        self._elected_s = now_s
        self._round = 0
        self._rounds: dict[int, float] = {}
        self._reads = RoundReads()
        self._patience = ElectionPatience()
        self._changed_s = now_s
        """When the configuration in force was appended: a host that answers a later round answers under it."""
        self._leaving: tuple[float, float] | None = None
        """The times since when, and until when, this leader offers to hand over; None: it does not."""
        self.tick_s = now_s
        """When the next round of heartbeats is due."""
        self.first_index = raft_log.log.last_index + 1
        """The index of this leader's no-op: once that is committed, so is everything before it (Raft §5.4.2, §8)."""
        self.peers: dict[HostId, Progress] = {}
        self._arrange()
        raft_log.append([self._first_entry(identities)])
        self.beat(now_s)

    def _first_entry(self, identities: Mapping[HostId, bytes]) -> Entry:
        """The first entry: a no-op, or the configuration where it is not written yet; in a new log also with the rack's
        identity."""
        raft_log, known = self._raft_log, self._raft_log.configuration
        voters = tuple(
            voter if voter.identity else Voter(voter.host, identities.get(voter.host, b"")) for voter in known.voters
        )
        rack = known.rack if raft_log.log.last_index else self._rng.randbytes(RACK_BYTES)
        now = msgspec.structs.replace(known, voters=voters, rack=rack)
        return Entry(raft_log.term, b"", 0, b"") if now == known else configuration_entry(raft_log.term, now)

    # ---- who takes part ----

    def observe(self, alive: Sequence[HostId]) -> None:
        """Take these hosts as the living ones from now on."""
        self._alive = alive
        self._arrange()

    def _arrange(self) -> None:
        """Set which hosts receive the log and which are voters; a host that stays keeps its progress."""
        configuration, known = self._raft_log.configuration, self.peers
        voters = configuration.hosts
        whole = [host for host in (*voters, configuration.learner) if host not in ("", self._me)]
        observers = [host for host in self._alive if host not in whole]
        self.peers = {}
        for host in (*whole, *observers):
            start = self.first_index if host in voters else self._raft_log.commit + 1
            progress = self.peers[host] = known.get(host) or Progress(start)
            progress.whole, progress.voter = host in whole, host in voters

    @property
    def may_change(self) -> bool:
        """Whether a change of voters may begin: one at a time, and none before an entry of this term is committed: else
        two leaders could each have appended a change that the other does not know, and their majorities need not meet
        (Ongaro, raft-dev, July 2015)."""
        return self._raft_log.commit >= self.first_index and self._raft_log.configuration_committed

    def change(self, configuration: Configuration, now_s: float) -> None:
        """Append a configuration, which holds from now on."""
        raft_log = self._raft_log
        assert self.may_change and policy.one_step(raft_log.configuration, configuration), "two changes at a time"
        assert self._me in configuration.hosts, "a leader that does not vote"
        raft_log.append([configuration_entry(raft_log.term, configuration)])
        self._changed_s = math.nextafter(now_s, math.inf)  # a round that began at this moment began before it
        self._arrange()
        self._feed_all(now_s)

    def next_step(self, now_s: float) -> Configuration | None:
        """The next configuration, when a change is under way and its next step can be taken now."""
        configuration = self._raft_log.configuration
        if not self.may_change:
            return None
        if configuration.learner:
            return self._with_learner(configuration, now_s)
        if configuration.leaving and configuration.leaving != self._me:
            wanted = policy.removed(configuration)
            return wanted if self._stands(wanted, now_s) else None
        return None

    def _with_learner(self, configuration: Configuration, now_s: float) -> Configuration | None:
        """The configuration in which the learner votes, with the log that answers now; None until it has caught up and
        a majority with it answers."""
        host = configuration.learner
        wanted = policy.promoted(configuration, Voter(host, self.peers[host].identity))
        return wanted if self._caught_up(host, now_s) and self._stands(wanted, now_s) else None

    def gives_way(self, now_s: float) -> bool:
        """Whether this leader is to leave the voters, and another voter could lead."""
        configuration = self._raft_log.configuration
        if configuration.leaving != self._me or configuration.learner or not self.may_change:
            return False
        since_s = now_s - self._timing.election_min_s
        return not self.leaving(now_s) and self._follower_with_everything(since_s) is not None

    def heard_since(self, since_s: float) -> list[HostId]:
        """Hosts that answered a round that began then or later."""
        return [host for host, progress in self.peers.items() if progress.confirmed_s >= since_s]

    def _caught_up(self, host: HostId, now_s: float) -> bool:
        progress = self.peers[host]
        heard = progress.confirmed_s >= self._lately(now_s)
        return heard and progress.state is ProgressState.STREAM and progress.match >= self._raft_log.commit

    def _stands(self, configuration: Configuration, now_s: float) -> bool:
        """Whether a majority of these voters answered so lately that it can commit the next entry."""

        def confirmed_s(host: HostId) -> float:
            if host == self._me:
                return now_s
            counts = self._counts(host) or host == self._raft_log.configuration.learner
            return self.peers[host].confirmed_s if counts else -math.inf

        return policy.stands(configuration.hosts, confirmed_s, self._lately(now_s))

    def _lately(self, now_s: float) -> float:
        """The start of the earliest round whose answers are recent: a host that answered it or a later one still has
        the log that counts. Each step of a change needs new answers, so that a host that lost its log meanwhile does
        not count."""
        return max(now_s - self._timing.election_min_s, self._changed_s)

    # ---- time ----

    def beat(self, now_s: float) -> None:
        """Send a round of heartbeats; an Append that got lost is sent again."""
        self._round += 1
        self._rounds[self._round] = now_s
        self._rounds.pop(self._round - ROUNDS_MAX, None)
        self._reads.began(self._round)
        alone = not self.peers
        self.tick_s = now_s + (self._timing.observer_s if alone else self._timing.heartbeat_s)
        for host, progress in self.peers.items():
            if progress.whole or now_s >= progress.beat_s:
                self._beat_one(host, progress, now_s)

    def _beat_one(self, host: HostId, progress: Progress, now_s: float) -> None:
        progress.beat_s = now_s + self._pause(progress, now_s)
        if progress.state is ProgressState.SNAPSHOT:
            if now_s - progress.sent_s >= RETRY_ROUNDS * self._timing.heartbeat_s:
                self._piece(host, progress, now_s)
            else:
                self._say_append(host, progress, 0, ())
        elif progress.state is ProgressState.PROBE:
            progress.waiting = False
            self.feed(host, progress, now_s)
        elif progress.next <= self._raft_log.log.base_index:
            self._begin_snapshot(host, progress, now_s)
        else:
            self._say_append(host, progress, progress.next - 1, ())

    def _pause(self, progress: Progress, now_s: float) -> float:
        behind = progress.match < self._raft_log.commit or progress.state is not ProgressState.STREAM
        silent = now_s - max(progress.confirmed_s, self._elected_s) > OBSERVER_PATIENCE_S
        return 2 * self._timing.heartbeat_s if behind and not silent else self._timing.observer_s

    def confirmed_s(self, now_s: float) -> float:
        """The start of the latest round that a majority, this host included, answered; -inf before the first."""
        others = [
            progress.confirmed_s if self._counts(host) else -math.inf
            for host, progress in self.peers.items()
            if progress.voter
        ]
        return policy.quorum_time([now_s, *others])

    def deserted(self, now_s: float, stalled_until_s: float = -math.inf) -> bool:
        """Whether no majority has answered for `step_down_s`, or longer where answers were late before. While this host
        itself was stopped it asked no voter: they have as long again from then on, up to `LATE_S_MAX` in all."""
        heard_s = max(self.confirmed_s(now_s), self._elected_s)
        if now_s - heard_s <= LATE_S_MAX:
            heard_s = max(heard_s, stalled_until_s)
        return now_s - heard_s > self._patience.stretched(self._timing.step_down_s, now_s)

    # ---- reads ----

    def read(self, number: int, now_s: float) -> None:
        """Answer this read once a majority has answered a round that begins now or later. Whatever an earlier leader
        committed lies before this one's first entry."""
        self._reads.ask(number, max(self._raft_log.commit, self.first_index))
        self._look_at_reads(now_s)

    def _look_at_reads(self, now_s: float) -> None:
        self._answer_reads()
        if self._reads.wants_round:
            self.beat(now_s)
            self._answer_reads()

    def _answer_reads(self) -> None:
        others = [
            progress.answered_round if self._counts(host) else 0
            for host, progress in self.peers.items()
            if progress.voter
        ]
        for number, index in self._reads.confirmed(policy.quorum_round([self._round, *others])):
            self._raft_log.act(ReadFrom(number, index))

    def drop_reads(self) -> None:
        """Say of all reads that wait that this host leads no more."""
        for number, _ in self._reads.all:
            self._raft_log.act(ReadFrom(number, None))

    # ---- handing over ----

    def hand_over(self, until_s: float, now_s: float) -> None:
        """Offer to hand over: take no more commands, and send heartbeats at once to see which voters answer."""
        self._leaving = (now_s, until_s)
        self.beat(now_s)

    def leaving(self, now_s: float) -> bool:
        return self._leaving is not None and now_s < self._leaving[1]

    def successor(self, now_s: float) -> HostId | None:
        """The voter that can take over now; None when there is none, or when this leader does not hand over."""
        if self._leaving is None or not self.leaving(now_s):
            return None
        return self._follower_with_everything(self._leaving[0])

    def _follower_with_everything(self, since_s: float) -> HostId | None:
        voters = [(host, each.match, each.confirmed_s) for host, each in self.peers.items() if self._counts(host)]
        return policy.successor(voters, self._raft_log.log.last_index, since_s)

    # ---- who counts ----

    def _counts(self, host: HostId) -> bool:
        """Whether the host's answers count towards majorities: it votes, and with the log that answers."""
        voter, progress = self._raft_log.configuration.voter(host), self.peers[host]
        if voter is None or not progress.voter:
            return False
        return voter.identity == progress.identity and voter.since <= self._raft_log.commit

    def uncounted(self) -> tuple[HostId, ...]:
        """The voters that answer with a log that does not count."""
        return tuple(
            host
            for host, progress in self.peers.items()
            if progress.voter and progress.identity and not self._counts(host)
        )

    def _answered(self, host: HostId, reply: AppendReply | SnapshotReply) -> bool:
        """Whether this answer is of the newest log of its sender; a log that is not in the configuration yet is
        written there."""
        progress = self.peers[host]
        if not progress.answered(reply.identity, reply.lost, reply.last_index, reply.round, self._round):
            return False
        voter = self._raft_log.configuration.voter(host)
        if progress.voter and voter is not None and voter.identity != reply.identity:
            self._write_down(voter, progress)
        return True

    def _write_down(self, voter: Voter, progress: Progress) -> None:
        """Write a voter's log down, one change at a time, and after this leader's first entry is committed; the next
        answer comes soon."""
        raft_log, since = self._raft_log, 0
        if voter.identity or progress.lost:
            since = raft_log.log.last_index + 1
            if max(raft_log.configuration_index, self.first_index) > raft_log.commit:
                return
        now = Voter(voter.host, progress.identity, since)
        voters = tuple(now if each.host == voter.host else each for each in raft_log.configuration.voters)
        configuration = msgspec.structs.replace(raft_log.configuration, voters=voters)
        raft_log.append([configuration_entry(raft_log.term, configuration)])

    # ---- entries ----

    def propose(self, proposals: Sequence[Proposal], now_s: float) -> None:
        term = self._raft_log.term
        self._raft_log.append([Entry(term, each.id, each.base, each.command) for each in proposals])
        self._feed_all(now_s)

    def _feed_all(self, now_s: float) -> None:
        """Send new entries to all that receive them at once."""
        for host, progress in self.peers.items():
            if progress.whole:
                self.feed(host, progress, now_s)

    def advance(self, now_s: float) -> None:
        """Commit what a majority holds durably, if it is of this term (Raft §5.3, §5.4.2), and tell the others."""
        raft_log = self._raft_log
        voters = [host for host, progress in self.peers.items() if progress.voter]
        matches = [self.peers[host].match if self._counts(host) else 0 for host in voters]
        index = policy.commit_index([raft_log.durable, *matches])
        if raft_log.log.term_at(index) == raft_log.term:
            self._commit_to(index, now_s)

    def _commit_to(self, index: int, now_s: float) -> None:
        if self._raft_log.commit_to(index):
            for host, progress in self.peers.items():
                self.feed(host, progress, now_s)

    def feed(self, host: HostId, progress: Progress, now_s: float) -> None:
        """Send what this host lacks, as far as its window allows. Observers get only what is committed."""
        raft_log = self._raft_log
        last = raft_log.log.last_index if progress.whole else raft_log.commit
        while progress.may_send:
            if progress.next <= raft_log.log.base_index:
                self._begin_snapshot(host, progress, now_s)
                return
            lacks = progress.next <= last
            news = progress.told_commit < min(raft_log.commit, progress.next - 1)
            if not lacks and not news and progress.state is ProgressState.STREAM:
                return
            entries = raft_log.log.slice(progress.next, min(last, progress.next + ENTRIES_MAX))
            entries = entries[: policy.batch_length(entries)]
            self._say_append(host, progress, progress.next - 1, entries)

    def _say_append(self, host: HostId, progress: Progress, prev_index: int, entries: tuple[Entry, ...]) -> None:
        raft_log = self._raft_log
        prev_term = 0 if prev_index == 0 else raft_log.log.term_at(prev_index)
        assert prev_term is not None, f"entry {prev_index} is compacted"
        known = (progress.match, progress.identity, host == raft_log.configuration.learner)
        raft_log.send(host, Append(raft_log.term, prev_index, prev_term, raft_log.commit, self._round, entries, *known))
        if progress.state is not ProgressState.SNAPSHOT:
            progress.sent(prev_index + len(entries), raft_log.commit)

    def appended(self, sender: HostId, reply: AppendReply, now_s: float) -> None:
        """Take an answer to an Append, or to a whole snapshot."""
        if not self._answered(sender, reply):
            return
        progress = self.peers[sender]
        self._confirm(progress, reply.round, now_s)
        if not reply.accepted:
            try_next = self._raft_log.log.hint(reply.hint_index, reply.hint_term)[0] + 1
            if progress.refused(reply.match, try_next):
                self.feed(sender, progress, now_s)
            return
        if reply.match > self._raft_log.log.last_index:
            return
        if progress.accepted(reply.match) and progress.voter:
            self.advance(now_s)
        # What was committed before this leader's time it may hear from one that knows, up to where the logs are equal:
        # by counting alone it could not, while a voter whose log the newest entries write down does not count yet.
        self._commit_to(min(reply.commit, reply.match), now_s)
        self.feed(sender, progress, now_s)

    def _confirm(self, progress: Progress, number: int, now_s: float) -> None:
        before_s = self.confirmed_s(now_s)
        progress.confirmed_s = max(progress.confirmed_s, self._rounds.get(number, -math.inf))
        if number <= self._round:
            progress.answered_round = max(progress.answered_round, number)
        if self.confirmed_s(now_s) > before_s:
            self._patience.ended(now_s - max(before_s, self._elected_s), now_s)
        self._look_at_reads(now_s)

    # ---- snapshots ----

    def _begin_snapshot(self, host: HostId, progress: Progress, now_s: float) -> None:
        image = self._raft_log.image
        assert image is not None, "the log is compacted, but there is no snapshot"
        progress.begin_snapshot(image)
        self._piece(host, progress, now_s)

    def _piece(self, host: HostId, progress: Progress, now_s: float) -> None:
        if progress.offset == 0:
            progress.image = self._raft_log.image  # nothing has arrived yet: the newest is the shortest way
        image = progress.image
        assert image is not None
        progress.sent_s = now_s
        data = image.data[progress.offset : progress.offset + self._timing.chunk_bytes]
        piece = _piece_of(image, self._raft_log.term, self._round, progress.offset, data)
        invited = host == self._raft_log.configuration.learner
        self._raft_log.send(host, msgspec.structs.replace(piece, invited=True) if invited else piece)

    def wanted(self, sender: HostId, reply: SnapshotReply, now_s: float) -> None:
        """Send the next piece of a snapshot, which was asked for."""
        if not self._answered(sender, reply):
            return
        progress = self.peers[sender]
        self._confirm(progress, reply.round, now_s)
        image = progress.image
        if image is None or reply.index != image.index or reply.offset > len(image.data):
            return
        if reply.offset != progress.offset:
            progress.offset = reply.offset
            self._piece(sender, progress, now_s)


def _piece_of(image: Snapshot, term: int, number: int, offset: int, data: bytes) -> InstallSnapshot:
    return InstallSnapshot(
        term, image.index, image.term, number, len(image.data), image.crc, offset, data, image.configuration
    )
