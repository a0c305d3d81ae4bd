"""The Raft core of one host: roles, votes and what a follower does. It leads through `leading.Leading`.

    follower --silence--> precandidate --majority would--> candidate --majority did--> leader
        ^                     |                                |                         |
        +---------------------+---- a leader, a later term ----+---- no majority answers-+

PreVote (Raft thesis §9.6): before a host enters a new term it asks whether a majority would vote for it. A host that
was cut off or restarts therefore deposes nobody: whoever heard the leader within `election_min_s` says no, and
nobody's term grows by asking. A voter also treats its own start as if it had just heard a leader, because it has
forgotten whether it did: the old leader's lease may still run.

A leader that is to be stopped hands over (Raft thesis §3.10): it steps down first, so that no lease of its can run, and
then tells the voter with the whole log to stand at once. That one asks in the next term with `handed_over`, and nobody
stays loyal to a leader that left: of a later leader the request's term says that it is out of date. The order is for
the term in which it was given and no other; whoever gets it late ignores it.

A host that is not among the voters is an observer: a follower that never stands for election and whose vote nobody
asks. So is a voter whose log is not the one that votes under its name (`messages.Voter`): one that lost its log, or
finds less in it than it acknowledged, has forgotten whom it voted for. It follows, and votes again when a leader has
written its new identity down and brought it to where the other voters have committed that. It learns of its loss from
its own second record (`disk`), or from the leader, who says in each Append what this log has acknowledged to it.
"""

import enum
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import assert_never

from agent.consensus import policy
from agent.consensus.machine.disk_pace import DiskPace
from agent.consensus.machine.leading import Leading
from agent.consensus.machine.ledger import Ledger
from agent.consensus.machine.parcel import Parcel
from agent.consensus.machine.patience import Patience, Stall
from agent.consensus.machine.words import (
    Action,
    Event,
    HandOver,
    Image,
    Led,
    ObserversChanged,
    Persisted,
    Proposed,
    Saved,
    SnapshotTaken,
    Started,
    Woken,
)
from agent.consensus.messages import (
    IDENTITY_BYTES,
    Append,
    AppendReply,
    RequestVote,
    Snapshot,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    Words,
)
from agent.consensus.policy import Timing
from covey.core import Heard, HostId

OFFER_S = 5.0
"""How long a leader with a slow disk waits for a successor before it takes commands again, for a while."""
OBSERVER_SILENCE = 3.5
"""Heartbeats to observers that must be missed before an observer says that it knows no leader."""


class Role(enum.Enum):
    FOLLOWER = enum.auto()
    PRECANDIDATE = enum.auto()
    CANDIDATE = enum.auto()
    LEADER = enum.auto()


class Raft:
    def __init__(
        self,
        me: HostId,
        voters: Sequence[HostId],
        saved: Saved,
        timing: Timing,
        rng: random.Random,
        now_s: float,
    ) -> None:
        self.me, self.voters = me, tuple(sorted(voters))
        self.role = Role.FOLLOWER
        self.leader: HostId | None = None
        self.leading: Leading | None = None
        self.counters: Counter[str] = Counter()
        self._others = tuple(host for host in self.voters if host != me)
        self._observers: tuple[HostId, ...] = ()
        self._ledger = Ledger(saved, self.voters, timing.keep_entries, timing.hint_s)
        self._timing, self._rng, self._now_s = timing, rng, now_s
        self._votes: dict[HostId, bool] = {}
        self._voted_with: dict[HostId, bytes] = {}
        """Which logs gave these votes."""
        self._voted_here = True
        """Before this event."""
        self._own_vote = 0
        """Candidate: the write that makes our vote for ourselves durable."""
        self._heard_s = now_s
        """When a leader was last heard; see the module's essay for the start."""
        self._heard_in: tuple[int, HostId | None] = (0, None)
        """Term and name of that leader."""
        self._silences, self._stall = Patience(), Stall(timing.heartbeat_s, now_s)
        self._excused = False
        """We were late ourselves when `_deadline_s` came, and listen once more."""
        self._disk = DiskPace()
        self._deadline_s = now_s + self._patience()
        self.current_s: float | None = None
        """When a leader last confirmed that all it had committed is applied here."""
        self._parcel = Parcel()
        self._told: tuple[int, HostId | None] = (0, None)

    # ---- what others may know ----

    @property
    def term(self) -> int:
        return self._ledger.term

    @property
    def commit(self) -> int:
        return self._ledger.commit

    @property
    def last_index(self) -> int:
        return self._ledger.log.last_index

    @property
    def image(self) -> Image | None:
        return self._ledger.image

    @property
    def identity(self) -> bytes:
        """Which log this is."""
        return self._ledger.identity

    @property
    def _votes_here(self) -> bool:
        """This log votes: see the module's essay."""
        voter = self._ledger.configuration.voter(self.me)
        if voter is None:
            return False
        if not voter.identity:
            return not self._ledger.lost
        return voter.identity == self._ledger.identity and voter.since <= self._ledger.commit

    @property
    def forgotten(self) -> bool:
        """This host should vote, but its log is not the one that votes."""
        return self.me in self.voters and not self._votes_here

    @property
    def wake_s(self) -> float:
        """When `Woken` is due."""
        return self.leading.tick_s if self.leading else self._deadline_s

    def confirmed_s(self, now_s: float) -> float | None:
        """Leader: when a majority last stood behind us, -inf for never; None when we do not lead."""
        return self.leading.confirmed_s(now_s) if self.leading else None

    def holds_lease(self, now_s: float) -> bool:
        """We lead, nobody else can, and our no-op is committed: what is applied here is the newest there is."""
        leading = self.leading
        if leading is None or self._ledger.commit < leading.first_index:
            return False
        return now_s - leading.confirmed_s(now_s) < self._timing.lease_s

    # ---- events ----

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        self._now_s = now_s
        self._stall.passed(self.wake_s, now_s)
        if self.leading and self.leading.deserted(now_s, self._stall.holds(now_s)):
            self.counters["stepped down"] += 1
            self._follow(None)
        match event:
            case Heard():
                self._heard(event.sender, event.message)
            case Persisted():
                self._persisted(event.number)
            case Woken():
                self._woken()
            case Proposed():
                if self.leading and not self.leading.leaving(now_s):
                    self.leading.propose(event.proposals, now_s)
            case ObserversChanged():
                self._observers = tuple(host for host in event.hosts if host != self.me and host not in self.voters)
                if self.leading:
                    self.leading.observe(self._observers)
            case HandOver():
                if self.leading:
                    self.leading.hand_over(event.until_s, now_s)
            case SnapshotTaken():
                self._ledger.compact(event)
            case Started():
                self._started()
            case _:
                assert_never(event)
        self._spare_a_slow_disk()
        self._hand_over()
        if self._votes_here and not self._voted_here:
            self._ledger.write_commit()
        self._voted_here = self._votes_here
        if self._told != (self.term, self.leader):
            self._told = (self.term, self.leader)
            self._ledger.act(Led(self.term, self.leader))
        actions = self._ledger.finish(now_s)
        self._disk.began(actions, now_s)
        return actions

    def _spare_a_slow_disk(self) -> None:
        """A leader whose disk hangs offers its office, again and again while nobody can take it."""
        if self.leading and self._others and self._disk.hangs(self._now_s) and not self.leading.leaving(self._now_s):
            self.counters["offices offered for a slow disk"] += 1
            self.leading.hand_over(self._now_s + OFFER_S, self._now_s)

    def _hand_over(self) -> None:
        """First down, then the order: from here on nothing of ours counts in this term."""
        successor = self.leading.successor(self._now_s) if self.leading else None
        if successor is not None:
            self.counters["handed over"] += 1
            self._follow(None)
            self._ledger.say(successor, TimeoutNow(self.term))

    def _started(self) -> None:
        self._ledger.begin()
        if self.voters == (self.me,) and self._votes_here:
            self._stand()

    def _woken(self) -> None:
        if self.leading:
            if self._now_s >= self.leading.tick_s:
                self.leading.beat(self._now_s)
        elif self._now_s >= self._deadline_s:
            if self._stall.holds(self._now_s) and not self._excused:
                self._excused, self._deadline_s = True, self._now_s + self._timing.heartbeat_s
                return
            self.leader = None
            self._wait()
            if self._votes_here and not self._disk.hangs(self._now_s):
                self._ask()

    def _persisted(self, number: int) -> None:
        self._disk.done(number, self._now_s)
        self._ledger.persisted(number)
        if self.role is Role.CANDIDATE and number >= self._own_vote:
            self._votes[self.me] = True
            self._count()
        if self.leading:
            self.leading.advance(self._now_s)

    def _heard(self, sender: HostId, message: Words) -> None:
        if isinstance(message, RequestVote | VoteReply | TimeoutNow):
            if sender not in self._others or not self._votes_here:
                self.counters["votes of strangers"] += 1
            elif isinstance(message, RequestVote):
                self._vote_asked(sender, message)
            elif isinstance(message, TimeoutNow):
                self._told_to_stand(sender, message)
            else:
                self._vote_heard(sender, message)
        elif isinstance(message, Append | Snapshot):
            self._leader_heard(sender, message)
        else:
            self._answer_heard(sender, message)

    # ---- elections ----

    def _patience(self) -> float:
        if self._votes_here:
            least_s = self._silences.stretched(self._timing.election_min_s, self._now_s)
            return policy.election_timeout(self._timing, self._rng, least_s) * self._disk.reluctance
        return OBSERVER_SILENCE * self._timing.observer_s

    def _wait(self) -> None:
        self._deadline_s, self._excused = self._now_s + self._patience(), False

    def _follow(self, leader: HostId | None, term: int | None = None) -> None:
        if self.leading and (confirmed_s := self.leading.confirmed_s(self._now_s)) > -math.inf:
            self.current_s = confirmed_s
        if term is not None and term > self.term:
            self._ledger.enter(term)
        self.role, self.leader, self.leading = Role.FOLLOWER, leader, None
        self._votes, self._voted_with = {}, {}
        self._wait()

    def _ask(self) -> None:
        """Would a majority vote for us? No term changes yet."""
        self.role, self._votes, self._voted_with = Role.PRECANDIDATE, {self.me: True}, {}
        self.counters["prevotes asked"] += 1
        for host in self._others:
            self._ledger.say(host, self._request(self.term + 1, pre_vote=True))
        self._count()

    def _told_to_stand(self, sender: HostId, order: TimeoutNow) -> None:
        fit = self.role is Role.FOLLOWER and not self._disk.hangs(self._now_s)
        if fit and order.term == self.term and self.leader == sender:
            self._stand(handed_over=True)
        else:
            self.counters["orders out of date"] += 1

    def _stand(self, handed_over: bool = False) -> None:
        """Stand for election: a new term, our own vote first, and nobody hears of it before it is durable."""
        self.role, self.leader, self._votes, self._voted_with = Role.CANDIDATE, None, {}, {}
        self.counters["elections"] += 1
        self._ledger.enter(self.term + 1, self.me)
        self._own_vote = self._ledger.next_number
        self._wait()
        for host in self._others:
            self._ledger.promise(host, self._request(self.term, False, handed_over))

    def _request(self, term: int, pre_vote: bool, handed_over: bool = False) -> RequestVote:
        return RequestVote(term, pre_vote, self._ledger.log.last_index, self._ledger.log.last_term, handed_over)

    def _vote_asked(self, sender: HostId, asked: RequestVote) -> None:
        ledger = self._ledger
        if asked.term > self.term and not asked.handed_over and self._loyal():
            self.counters["votes refused: a leader lives"] += 1
            return
        fits = policy.up_to_date(asked.last_index, asked.last_term, ledger.log.last_index, ledger.log.last_term)
        if asked.pre_vote:
            granted = asked.term > self.term and fits
            ledger.say(sender, VoteReply(asked.term if granted else self.term, True, granted, ledger.identity))
            return
        if asked.term > self.term:
            self._follow(None, asked.term)
        granted = asked.term == self.term and ledger.vote in ("", sender) and fits
        if not granted:
            ledger.say(sender, VoteReply(self.term, False, False, ledger.identity))
            return
        ledger.vote_for(sender)
        self._wait()
        ledger.promise(sender, VoteReply(self.term, False, True, ledger.identity))

    def _loyal(self) -> bool:
        """A leader was heard so recently that its lease may still run."""
        least_s = self._silences.stretched(self._timing.election_min_s, self._now_s)
        return self.leading is not None or self._now_s - self._heard_s < least_s

    def _vote_heard(self, sender: HostId, reply: VoteReply) -> None:
        if reply.term > self.term and not (reply.pre_vote and reply.granted):
            self._follow(None, reply.term)
            return
        wanted = Role.PRECANDIDATE if reply.pre_vote else Role.CANDIDATE
        asked_term = self.term + 1 if reply.pre_vote else self.term
        if self.role is not wanted or (reply.granted and reply.term != asked_term):
            return
        if not reply.granted and not reply.pre_vote and reply.term != self.term:
            return
        voter = self._ledger.configuration.voter(sender)
        if voter is None or voter.identity not in (b"", reply.identity):
            self.counters["votes of another log"] += 1
            return
        self._votes.setdefault(sender, reply.granted)
        self._voted_with.setdefault(sender, reply.identity)
        self._count()

    def _count(self) -> None:
        """Each voter counts once, with its first answer (Raft §5.2)."""
        majority = policy.quorum(len(self.voters))
        granted = sum(self._votes.values())
        if granted >= majority:
            if self.role is Role.PRECANDIDATE:
                self._stand()
            elif self.role is Role.CANDIDATE:
                self._lead()
        elif len(self._votes) - granted >= majority:
            self.role = Role.FOLLOWER

    def _lead(self) -> None:
        identities = {host: self._voted_with.get(host, b"") for host, granted in self._votes.items() if granted}
        identities[self.me] = self._ledger.identity
        self.role, self.leader, self._votes = Role.LEADER, self.me, {}
        self.counters["elected"] += 1
        self.leading = Leading(self._ledger, self._timing, self._others, self._observers, self._now_s, identities)

    # ---- following ----

    def _leader_heard(self, sender: HostId, message: Append | Snapshot) -> None:
        if sender not in self._others:
            self.counters["appends of strangers"] += 1
            return
        if message.term < self.term:
            self._refuse(sender, message.round, 0, (0, 0))
            return
        if message.term == self.term and self.leader not in (None, sender):
            self.counters["two leaders in one term"] += 1
            return
        if message.term > self.term or self.role is not Role.FOLLOWER or self.leader is None:
            self._follow(sender, message.term)
        if self._heard_in == (message.term, sender):
            self._silences.ended(self._now_s - self._heard_s, self._now_s)
        self._heard_s, self._heard_in = self._now_s, (message.term, sender)
        self._wait()
        if isinstance(message, Append):
            self._append(sender, message)
        else:
            self._snapshot(sender, message)

    def _append(self, sender: HostId, message: Append) -> None:
        ledger, log = self._ledger, self._ledger.log
        if message.acknowledged > log.last_index and message.by == ledger.identity != b"":
            self.counters["acknowledged entries lost"] += 1
            ledger.lose(self._rng.randbytes(IDENTITY_BYTES))
        if message.prev_index < log.base_index:
            self._accept(sender, message.round, min(ledger.commit, ledger.durable), durable=True)
            return
        if log.term_at(message.prev_index) != message.prev_term:
            hint = log.hint(message.prev_index, message.prev_term)
            self._refuse(sender, message.round, message.prev_index, hint)
            return
        ledger.merge(message.prev_index, message.entries)
        verified = message.prev_index + len(message.entries)
        ledger.commit_to(min(message.commit, verified))
        if ledger.commit >= message.commit:
            self.current_s = self._now_s
        if message.entries:
            self._accept(sender, message.round, verified, durable=False)
        else:
            self._accept(sender, message.round, min(verified, ledger.durable), durable=True)

    def _accept(self, sender: HostId, number: int, match: int, durable: bool) -> None:
        """A heartbeat is answered at once with what is already durable, so that a slow disk does not look like a lost
        host; entries are answered when they are on the disk."""
        ledger = self._ledger
        reply = AppendReply(self.term, number, True, match, 0, 0, ledger.identity, ledger.lost, ledger.durable)
        (ledger.answer if durable else ledger.promise)(sender, reply)

    def _refuse(self, sender: HostId, number: int, prev_index: int, hint: tuple[int, int]) -> None:
        ledger = self._ledger
        index, term = hint
        who = (ledger.identity, ledger.lost, ledger.durable)
        ledger.answer(sender, AppendReply(self.term, number, False, prev_index, index, term, *who))

    def _snapshot(self, sender: HostId, piece: Snapshot) -> None:
        ledger = self._ledger
        if piece.index <= ledger.commit:
            self._accept(sender, piece.round, ledger.commit, durable=False)
            return
        if ledger.log.term_at(piece.index) == piece.entry_term:
            ledger.commit_to(piece.index)
            self._accept(sender, piece.round, piece.index, durable=False)
            return
        image = self._parcel.add(sender, piece)
        if image is None:
            who = (ledger.identity, ledger.lost, ledger.durable)
            ledger.answer(sender, SnapshotReply(self.term, piece.round, piece.index, self._parcel.length, *who))
            return
        self.counters["snapshots installed"] += 1
        ledger.install(image)
        self._accept(sender, piece.round, image.index, durable=False)

    def _answer_heard(self, sender: HostId, reply: AppendReply | SnapshotReply) -> None:
        if reply.term > self.term:
            if sender in self._others:
                self._follow(None, reply.term)
            return
        if self.leading is None or reply.term < self.term or sender not in self.leading.peers:
            return
        if isinstance(reply, AppendReply):
            self.leading.appended(sender, reply, self._now_s)
        else:
            self.leading.wanted(sender, reply, self._now_s)

    def check(self) -> None:
        self._ledger.check()
        assert (self.role is Role.LEADER) == (self.leading is not None), "a leader without its state"
        assert self.role is not Role.LEADER or self.leader == self.me, "a leader that follows"
        assert self.role is Role.FOLLOWER or self._votes_here, "an observer stands for election"
