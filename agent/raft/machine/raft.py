"""The Raft core of one host: roles, votes and what a follower does. It leads through `leading.Leading`.

    follower --silence--> precandidate --majority would--> candidate --majority did--> leader
        ^                     |                                |                         |
        +---------------------+---- a leader, a later term ----+---- no majority answers-+

PreVote (Raft thesis §9.6): before a host enters a new term it asks whether a majority would vote for it. A host that
was cut off or restarts therefore deposes no leader: voters that heard the leader within `election_min_s` refuse, and no
term grows by asking. A voter also treats its own start as if it had just heard a leader, because it cannot know whether
it did: the old leader's lease may still run.

A leader that is to be stopped hands over (Raft thesis §3.10): it steps down first, so that no lease of its can run, and
then tells the voter with the whole log to stand at once. That voter asks in the next term with `handed_over`, and the
others vote although they heard a leader just now; if there is a later leader, the request's term is out of date. The
order is for the term in which it was given and no other; a voter that receives it late ignores it.

A host that is not among the voters is an observer: a follower that never stands for election. Who votes is what the log
says (`raft_log`), and a host may not know yet that it was made a voter, or that it is none any more. Therefore it
follows any leader of its rack, and answers any candidate of its rack, whichever voters its own log names (Raft thesis
§4.2.1, §4.2.2): only the candidate counts votes, by its own log. A host whose log has not begun knows no rack and only
the voters of agent.toml: it follows one of these, or a leader whose log began with, or is now voted on by, one of
these. One that lost its log, or has heard only how it began, follows its rack; a learner the leader that made it one.

A voter whose log is not the one that votes under its name (`messages.Voter`) observes too: a host that lost its log, or
finds less in it than it acknowledged, has also lost its votes. It votes again when a leader has written its new
identity to the log and has sent it all entries up to the one with which the other voters committed that. It detects the
loss by its own second record (`disk`), or by the leader's Appends, each of which states what this log has acknowledged.

The leader of the time drives a change of voters (`leading.next_step`), one committed step after the other. A leader
that is to leave the voters hands over first and becomes an observer under the next one.
"""

import enum
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import assert_never

from agent.raft import policy
from agent.raft.machine.disk_pace import DiskPace
from agent.raft.machine.leading import Leading
from agent.raft.machine.outlook import Outlook
from agent.raft.machine.patience import ElectionPatience, Stall
from agent.raft.machine.raft_log import Contradiction, RaftLog
from agent.raft.machine.snapshot_receiver import SnapshotReceiver
from agent.raft.machine.types import (
    Action,
    ConfigurationChanged,
    ConfigurationWanted,
    Event,
    HandOver,
    Persisted,
    Proposed,
    RaftHostsChanged,
    RaftStarted,
    ReadAsked,
    ReadFrom,
    Saved,
    SnapshotTaken,
    SoftState,
    Tick,
)
from agent.raft.messages import (
    IDENTITY_BYTES,
    NO_RACK,
    Append,
    AppendReply,
    Configuration,
    InstallSnapshot,
    RequestVote,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    Words,
    configuration_of,
)
from agent.raft.policy import Timing
from covey.core.events import Heard
from covey.core.ids import HostId

OFFER_S = 5.0
"""Seconds for which a leader with a slow disk waits for a successor before it takes commands again, for a while."""
GIVE_WAY_S = 0.7
"""Seconds for which a leader that is to leave the voters looks for a successor; usually one message."""
OBSERVER_SILENCE = 3.5
"""The number of missed heartbeats to observers after which an observer says that it knows no leader."""


class Role(enum.Enum):
    FOLLOWER = enum.auto()
    PRECANDIDATE = enum.auto()
    CANDIDATE = enum.auto()
    LEADER = enum.auto()


class Raft(Outlook):
    def __init__(
        self,
        me: HostId,
        voters: Sequence[HostId],
        saved: Saved,
        timing: Timing,
        rng: random.Random,
        now_s: float,
    ) -> None:
        """`voters` are those of agent.toml: they count as long as the log has not begun."""
        self.me = me
        self.role = Role.FOLLOWER
        self.leader: HostId | None = None
        self.leading: Leading | None = None
        self.counters: Counter[str] = Counter()
        self._alive: tuple[HostId, ...] = ()
        self._raft_log = RaftLog(saved, policy.founders(voters, NO_RACK), timing.keep_entries, timing.hint_s)
        self._timing, self._rng, self._now_s = timing, rng, now_s
        self._votes: dict[HostId, bool] = {}
        self._voted_with: dict[HostId, bytes] = {}
        """The identities of the logs that gave these votes."""
        self._voted_here = True
        """Whether this log voted before this event."""
        self._own_vote = 0
        """The number of the write that makes a candidate's vote for itself durable."""
        self._heard_s = now_s
        """When a leader was last heard; the module's essay tells of the start."""
        self._heard_in: tuple[int, HostId | None] = (0, None)
        """The term and name of that leader."""
        self._silences, self._stall = ElectionPatience(), Stall(timing.heartbeat_s, now_s)
        self._excused = False
        """Whether this host was late itself when `_deadline_s` came, and waits for one more heartbeat."""
        self._disk = DiskPace()
        self._deadline_s = now_s + self._patience()
        self.current_s: float | None = None
        """When a leader last confirmed that all it had committed is applied here."""
        self._receiver = SnapshotReceiver()
        self.stranger: HostId | None = None
        """A leader that is not one of agent.toml's voters, while this host knows no rack."""
        self._told: tuple[int, HostId | None] = (0, None)
        self._told_configuration: tuple[Configuration, bool] | None = None

    # ---- events ----

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        self._now_s = now_s
        self._stall.passed(self.wake_s, now_s)
        if self.leading and self.leading.deserted(now_s, self._stall.ended_s):
            self.counters["stepped_down"] += 1
            self._follow(None)
        match event:
            case Heard():
                self._heard(event.sender, event.message)
            case Persisted():
                self._persisted(event.number)
            case Tick():
                self._woken()
            case Proposed():
                if self.leading and not self.leading.leaving(now_s):
                    self.leading.propose(event.proposals, now_s)
            case ReadAsked():
                if self.leading:
                    self.leading.read(event.number, now_s)
                else:
                    self._raft_log.act(ReadFrom(event.number, None))
            case RaftHostsChanged():
                self._alive = tuple(host for host in event.hosts if host != self.me)
                if self.leading:
                    self.leading.observe(self._alive)
            case ConfigurationWanted():
                self._configuration_wanted(event)
            case HandOver():
                if self.leading:
                    self.leading.hand_over(event.until_s, now_s)
            case SnapshotTaken():
                self._raft_log.compact(event)
            case RaftStarted():
                self._started()
            case _:
                assert_never(event)
        self._spare_a_slow_disk()
        self._drive()
        self._hand_over()
        voted, self._voted_here = self._voted_here, self._votes_here
        if self._voted_here and not voted:
            self._raft_log.write_commit()
        self._tell()
        actions = self._raft_log.finish(now_s)
        self._disk.began(actions, now_s)
        return actions

    def _tell(self) -> None:
        if self._told != (self.term, self.leader):
            self._told = (self.term, self.leader)
            self._raft_log.act(SoftState(self.term, self.leader))
        configuration = (self._raft_log.configuration, self._raft_log.configuration_committed)
        if self._told_configuration != configuration:
            self._told_configuration = configuration
            self._raft_log.act(ConfigurationChanged(*configuration))

    # ---- who takes part ----

    def _configuration_wanted(self, wanted: ConfigurationWanted) -> None:
        leading, configuration = self.leading, self._raft_log.configuration
        fits = wanted.instead_of == configuration and policy.one_step(configuration, wanted.configuration)
        if leading and fits and leading.may_change and not leading.leaving(self._now_s):
            leading.change(wanted.configuration, self._now_s)

    def _drive(self) -> None:
        """Take the next step of a change that is under way, also of one that another leader began."""
        if self.leading is None or not (self._raft_log.configuration.learner or self._raft_log.configuration.leaving):
            return
        wanted = self.leading.next_step(self._now_s)
        if wanted is not None:
            self.leading.change(wanted, self._now_s)
        elif self.leading.gives_way(self._now_s):
            self.leading.hand_over(self._now_s + GIVE_WAY_S, self._now_s)

    # ---- handing over ----

    def _spare_a_slow_disk(self) -> None:
        """Offer to hand over, as a leader whose disk hangs, again and again while no voter can take over."""
        if self.leading and self._others and self._disk.hangs(self._now_s) and not self.leading.leaving(self._now_s):
            self.counters["handovers_for_slow_disk"] += 1
            self.leading.hand_over(self._now_s + OFFER_S, self._now_s)

    def _hand_over(self) -> None:
        """Step down, then send the order: from here on this host leads no more in this term."""
        successor = self.leading.successor(self._now_s) if self.leading else None
        if successor is not None:
            self.counters["handovers"] += 1
            self._follow(None)
            self._raft_log.send(successor, TimeoutNow(self.term))

    def _started(self) -> None:
        self._raft_log.begin()
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
        self._raft_log.persisted(number)
        if self.role is Role.CANDIDATE and number >= self._own_vote:
            self._votes[self.me] = True
            self._count()
        if self.leading:
            self.leading.advance(self._now_s)

    def _heard(self, sender: HostId, message: Words) -> None:
        if isinstance(message, RequestVote | VoteReply | TimeoutNow):
            asked = isinstance(message, RequestVote) and self._may_vote(message)
            if not asked and (sender not in self._others or not self._votes_here):
                self.counters["votes_of_strangers"] += 1
            elif isinstance(message, RequestVote):
                self._vote_asked(sender, message)
            elif isinstance(message, TimeoutNow):
                self._told_to_stand(sender, message)
            else:
                self._vote_heard(sender, message)
        elif isinstance(message, Append | InstallSnapshot):
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
        if (confirmed_s := self.confirmed_s(self._now_s)) not in (None, -math.inf):
            self.current_s = confirmed_s
        if term is not None and term > self.term:
            self._raft_log.enter(term)
        if self.leading:
            self.leading.drop_reads()
        self.role, self.leader, self.leading = Role.FOLLOWER, leader, None
        self._votes, self._voted_with = {}, {}
        self._wait()

    def _ask(self) -> None:
        """Ask, by a pre-vote, whether a majority would vote for this host. No term changes yet."""
        self.role, self._votes, self._voted_with = Role.PRECANDIDATE, {self.me: True}, {}
        self.counters["prevotes"] += 1
        for host in self._others:
            self._raft_log.send(host, self._request(host, self.term + 1, pre_vote=True))
        self._count()

    def _told_to_stand(self, sender: HostId, order: TimeoutNow) -> None:
        fit = self.role is Role.FOLLOWER and not self._disk.hangs(self._now_s)
        if fit and order.term == self.term and self.leader == sender:
            self._stand(handed_over=True)
        else:
            self.counters["handover_orders_stale"] += 1

    def _stand(self, handed_over: bool = False) -> None:
        """Stand for election: a new term; the requests leave once this host's own vote is durable."""
        self.role, self.leader, self._votes, self._voted_with = Role.CANDIDATE, None, {}, {}
        self.counters["elections"] += 1
        self._raft_log.enter(self.term + 1, self.me)
        self._own_vote = self._raft_log.next_number
        self._wait()
        for host in self._others:
            self._raft_log.promise(host, self._request(host, self.term, False, handed_over))

    def _request(self, host: HostId, term: int, pre_vote: bool, handed_over: bool = False) -> RequestVote:
        own, voter = self._raft_log, self._raft_log.configuration.voter(host)
        counts = voter.identity if voter and voter.since <= own.commit else b""
        return RequestVote(term, pre_vote, own.log.last_index, own.log.last_term, handed_over, counts, own.rack)

    def _may_vote(self, asked: RequestVote) -> bool:
        """Whether this host may vote, for any candidate of its rack, if its log is not known to be one that does not
        vote."""
        if asked.counts and asked.counts == self._raft_log.identity:
            return True
        return (self.rack != NO_RACK or self._raft_log.may_be_of(asked.rack)) and not self.forgotten

    def _vote_asked(self, sender: HostId, asked: RequestVote) -> None:
        raft_log = self._raft_log
        if asked.term > self.term and not asked.handed_over and self._loyal():
            self.counters["votes_refused_leader_alive"] += 1
            return
        fits = policy.up_to_date(asked.last_index, asked.last_term, raft_log.log.last_index, raft_log.log.last_term)
        if asked.pre_vote:
            granted = asked.term > self.term and fits
            raft_log.send(sender, VoteReply(asked.term if granted else self.term, True, granted, raft_log.identity))
            return
        if asked.term > self.term:
            self._follow(None, asked.term)
        granted = asked.term == self.term and raft_log.vote in ("", sender) and fits
        if not granted:
            raft_log.send(sender, VoteReply(self.term, False, False, raft_log.identity))
            return
        raft_log.vote_for(sender)
        self._wait()
        raft_log.promise(sender, VoteReply(self.term, False, True, raft_log.identity))

    def _loyal(self) -> bool:
        """Whether a leader was heard so recently that its lease may still run."""
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
        voter = self._raft_log.configuration.voter(sender)
        if voter is None or voter.identity not in (b"", reply.identity):
            self.counters["votes_of_another_log"] += 1
            return
        self._votes.setdefault(sender, reply.granted)
        self._voted_with.setdefault(sender, reply.identity)
        self._count()

    def _count(self) -> None:
        """Count the votes: each voter counts once, with its first answer (Raft §5.2)."""
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
        identities[self.me] = self._raft_log.identity
        self.role, self.leader, self._votes = Role.LEADER, self.me, {}
        self.counters["elected"] += 1
        self.leading = Leading(self._raft_log, self._timing, self.me, self._alive, identities, self._now_s, self._rng)

    # ---- following ----

    def _leader_heard(self, sender: HostId, message: Append | InstallSnapshot) -> None:
        if not self._one_of_us(sender, message):
            self.counters["appends_of_strangers"] += 1
            self.stranger = sender
            if isinstance(message, Append) and message.prev_index:  # the first entry names the rack
                self._refuse(sender, message.round, message.prev_index, (0, 0), message.term)
            return
        if message.term < self.term:
            self._refuse(sender, message.round, 0, (0, 0))
            return
        if message.term == self.term and self.leader not in (None, sender):
            self.counters["two_leaders_in_one_term"] += 1
            return
        if message.term > self.term or self.role is not Role.FOLLOWER or self.leader is None:
            self._follow(sender, message.term)
        self.stranger = None
        if self._heard_in == (message.term, sender):
            self._silences.ended(self._now_s - self._heard_s, self._now_s)
        self._heard_s, self._heard_in = self._now_s, (message.term, sender)
        self._wait()
        if isinstance(message, Append):
            self._append(sender, message)
        else:
            self._snapshot(sender, message)

    def _one_of_us(self, sender: HostId, message: Append | InstallSnapshot) -> bool:
        """Whether this leader may lead this host. Once a log has begun here, envelopes name the rack; see the essay
        above."""
        if self.rack != NO_RACK or sender in self._raft_log.configuration.hosts or message.invited:
            return True
        if isinstance(message, InstallSnapshot):
            says: Configuration | None = message.configuration
        else:
            says = configuration_of(message.entries[0]) if message.prev_index == 0 and message.entries else None
        if says is None:
            return False
        ours = self._raft_log.configuration.hosts
        return self._raft_log.may_be_of(says.rack) or not {*says.hosts}.isdisjoint(ours)

    def _append(self, sender: HostId, message: Append) -> None:
        raft_log, log = self._raft_log, self._raft_log.log
        if message.acknowledged > log.last_index and message.by == raft_log.identity != b"":
            self.counters["acknowledged_entries_lost"] += 1
            raft_log.lose(self._rng.randbytes(IDENTITY_BYTES))
        if message.prev_index < log.base_index:
            self._accept(sender, message.round, min(raft_log.commit, raft_log.durable), durable=True)
            return
        if log.term_at(message.prev_index) != message.prev_term:
            known = log.term_at(message.prev_index)
            if known is not None and message.prev_index <= raft_log.commit:
                raise Contradiction(message.prev_index, known, message.prev_term)
            hint = log.hint(message.prev_index, message.prev_term)
            self._refuse(sender, message.round, message.prev_index, hint)
            return
        raft_log.merge(message.prev_index, message.entries)
        verified = message.prev_index + len(message.entries)
        raft_log.commit_to(min(message.commit, verified))
        knows = log.term_at(message.commit) == self.term  # by an entry of its own term, what is committed (Raft §8)
        if knows and raft_log.commit >= message.commit and not self._stall.holds(self._now_s):  # nor did it lie unread
            self.current_s = self._now_s
        if message.entries:
            self._accept(sender, message.round, verified, durable=False)
        else:
            self._accept(sender, message.round, min(verified, raft_log.durable), durable=True)

    def _accept(self, sender: HostId, number: int, match: int, durable: bool) -> None:
        """Answer a leader. A heartbeat is answered at once with what is already durable, so that a slow disk does not
        look like a lost host; entries are answered when they are on the disk."""
        raft_log = self._raft_log
        who = (raft_log.identity, raft_log.lost, raft_log.durable, raft_log.commit)
        reply = AppendReply(self.term, number, True, match, 0, 0, *who)
        (raft_log.answer if durable else raft_log.promise)(sender, reply)

    def _refuse(
        self, sender: HostId, number: int, prev_index: int, hint: tuple[int, int], term: int | None = None
    ) -> None:
        raft_log = self._raft_log
        who = (raft_log.identity, raft_log.lost, raft_log.durable)
        (index, index_term), in_term = hint, self.term if term is None else term
        raft_log.answer(sender, AppendReply(in_term, number, False, prev_index, index, index_term, *who))

    def _snapshot(self, sender: HostId, piece: InstallSnapshot) -> None:
        raft_log = self._raft_log
        if piece.index <= raft_log.commit:
            self._accept(sender, piece.round, raft_log.commit, durable=False)
            return
        if raft_log.log.term_at(piece.index) == piece.entry_term:
            raft_log.commit_to(piece.index)
            self._accept(sender, piece.round, piece.index, durable=False)
            return
        image = self._receiver.add(sender, piece)
        if image is None:
            who = (raft_log.identity, raft_log.lost, raft_log.durable)
            raft_log.answer(sender, SnapshotReply(self.term, piece.round, piece.index, self._receiver.length, *who))
            return
        self.counters["snapshots_installed"] += 1
        raft_log.install(image)
        self._accept(sender, piece.round, image.index, durable=False)

    def _answer_heard(self, sender: HostId, reply: AppendReply | SnapshotReply) -> None:
        if reply.term > self.term:
            if sender in self._others or (self.leading and sender in self.leading.peers and self.rack != NO_RACK):
                self._follow(None, reply.term)
            return
        if self.leading is None or reply.term < self.term or sender not in self.leading.peers:
            return
        if isinstance(reply, AppendReply):
            self.leading.appended(sender, reply, self._now_s)
        else:
            self.leading.wanted(sender, reply, self._now_s)

    def check(self) -> None:
        self._raft_log.check()
        assert (self.role is Role.LEADER) == (self.leading is not None), "a leader without its state"
        assert self.role is not Role.LEADER or self.leader == self.me, "a leader that follows"
        assert self.role is Role.FOLLOWER or self._votes_here, "an observer stands for election"
