"""Who is there: SWIM (Das, Gupta, Motivala 2002) with Lifeguard's local health (Dadgar et al. 2017).

                       ping unanswered, or somebody's Suspect
              +------------------------------------------------> suspect --+
              |   <----- Alive with a higher incarnation (refuted) -----   |  nobody refuted in time, or Gone
       alive -+                                                            v
              |   <----- Alive, incarnation or boot higher ------------- gone
              +--- Left, said by the host itself --> left ----- Alive, new boot ---> alive

Each host probes one other a second, in a shuffled order: a ping, after half a second without an answer a ping-req
through three others, after a second a suspicion, told to all. A suspicion ends in death unless the suspect, who hears
of it too, refutes it with a higher incarnation; the more hosts confirm it by probes of their own, the sooner.

A host that is itself slow suspects others wrongly. Three remedies: the local health score stretches its probes
(Lifeguard); a probe during which its own loop stood still for half a probe timeout proves nothing, is void and lowers
its health; and suspicions do not run while it could not listen.

Nobody dies by hearsay alone: a Gone about a host that is not even suspected here, and a dead one in somebody's table,
only make it suspect. So two halves of a rack that meet again do not bury each other.

Members are found through seeds; missing seeds and gone hosts are called forever, ever more slowly. Tables are compared
by checksum now and then, and exchanged whole when they differ: datagrams enough for hundreds of hosts, no TCP.
"""

import random
from collections.abc import Iterable, Sequence
from typing import assert_never

from covey.core import Fact, HostId, Message, SetTimer, Tell
from covey.ports import Address
from gossip.membership import messages as m
from gossip.membership import policy
from gossip.membership.machine.events import (
    Action,
    CallDue,
    Event,
    Forget,
    GossipDue,
    Leaving,
    LoopStalled,
    PacketHeard,
    ProbeDue,
    ProbeLate,
    RelayLate,
    Started,
    SuspicionDue,
    SyncDue,
    Timer,
)
from gossip.membership.machine.table import Member, Probe, ProbeOrder, Relay, Rumours, Suspicion
from gossip.words import (
    U32_MAX,
    GossipSettings,
    HostDown,
    HostSuspected,
    HostUp,
    NameConflict,
    Say,
    Sender,
    State,
    batches,
    identity,
    size,
)

SYNC_SOON_S = 3.0
"""Between two comparisons of tables as long as they differ."""
GOSSIP_TO_THE_DEAD_S = 30.0
"""Rumours are also sent to hosts that died so recently, so that they can object (memberlist: 30 s)."""
LEFT_REMEMBERED_S = 24 * 3600.0
"""How long a host that left is listed (Serf's TombstoneTimeout: 24 h)."""
CONFLICT_INTERVAL_S = 30.0
"""Between two reports of the same conflict."""
REMARK_INTERVAL_S = 0.2
"""Between two unasked remarks to the same host about what is thought of it."""
RELAYS_MAX = 256
NACK_FRACTION = 0.6
"""Of the probe timeout, before a helper says that it got no answer: early enough for the asker's interval."""


class Membership:
    """`address`: what others are told; empty when only they can see it. `budget`: bytes of messages in a datagram."""

    def __init__(self, me: Sender, address: Address, settings: GossipSettings, budget: int, rng: random.Random) -> None:
        self.me, self.identity, self.address = me, me.identity, address
        self.settings, self.budget, self.rng = settings, budget, rng
        self.incarnation = 0
        self.health = 0
        """Local health score, 0 (well) to 7."""
        self.members: dict[HostId, Member] = {}
        self.counts = {"probes": 0, "probes_failed": 0, "probes_void": 0, "refutations": 0, "relays": 0, "full": 0}
        self.leaving = False
        self._rumours = Rumours()
        self._order = ProbeOrder(rng)
        self._probe: Probe | None = None
        self._relays: dict[int, Relay] = {}
        self._seq = rng.getrandbits(32)
        self._stalls: list[tuple[float, float]] = []
        self._gossip_set = False
        self._call_s = 0.5
        self._call_generation = 0
        self._same_s = float("-inf")
        self._conflicts: dict[HostId, float] = {}
        self._remarked: dict[int, float] = {}
        self._out: list[Action] = []

    # ---- what is known ----

    @property
    def alone(self) -> bool:
        return not any(member.live and not member.remembered for member in self.members.values())

    def accepts(self, sender: Sender) -> bool:
        """Whether this is a live member in its present life: others are not listened to beyond membership."""
        member = self.members.get(sender.host)
        return member is not None and member.live and member.identity == sender.identity and member.boot == sender.boot

    def records(self) -> tuple[m.Record, ...]:
        """The whole table, this host included, sorted by name."""
        mine = m.Record(self.me.host, self.me.uuid, self.me.boot, self.incarnation, self.address, 0, HostId(""))
        all_ = [mine, *(member.record() for member in self.members.values())]
        return tuple(sorted(all_, key=lambda record: record.host))

    # ---- events ----

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        if not self.leaving or isinstance(event, Leaving):
            self._handle(event, now_s)
        found, self._out = self._out, []
        return found

    def _handle(self, event: Event, now_s: float) -> None:
        match event:
            case PacketHeard():
                self._packet(event, now_s)
            case LoopStalled():
                self._stalled(event)
            case Started():
                self._start(event.remembered, now_s)
            case Leaving():
                self._leave()
            case ProbeDue():
                self._probe_next(now_s)
            case ProbeLate():
                self._ask_others(event.seq)
            case RelayLate():
                self._relay_late(event.seq)
            case SuspicionDue():
                self._suspicion_due(event, now_s)
            case GossipDue():
                self._gossip(now_s)
            case CallDue():
                self._call(event.generation)
            case SyncDue():
                self._sync(now_s)
            case _:
                assert_never(event)

    def _start(self, remembered: Iterable[m.Record], now_s: float) -> None:
        for record in remembered:
            self._remember(record, now_s)
        self._timer(self.rng.uniform(0, self.settings.probe_interval_s), ProbeDue())
        self._timer(self.rng.uniform(0, SYNC_SOON_S), SyncDue())
        self._call(self._call_generation)

    def _remember(self, record: m.Record, now_s: float) -> None:
        """A host from before our restart: suspect until it is heard of, or gone if it was gone then."""
        if record.host == self.me.host or record.host in self.members or record.state == policy.rank("left"):
            return
        gone = record.state == policy.rank("gone")
        member = Member(
            record.host,
            record.uuid,
            record.boot,
            record.incarnation,
            record.address,
            "gone" if gone else "suspect",
            now_s,
            (record.by or None) if gone else self.me.host,
            remembered=not gone,
        )
        self.members[record.host] = member
        if not gone:
            self._order.add(record.host)
            member.suspicion = Suspicion(now_s, [self.me.host])
            self._hasten(member, now_s)

    def _leave(self) -> None:
        self.leaving = True
        goodbye = m.Left(self.me.host, self.identity, self.me.boot, self.incarnation)
        for member in self._sorted():
            if member.live and member.address:
                self._out.append(Say(member.address, (goodbye,)))

    # ---- saying things ----

    def _timer(self, after_s: float, event: Timer) -> None:
        self._out.append(SetTimer(after_s, event))

    def _tell(self, fact: Fact) -> None:
        self._out.append(Tell(fact))

    def _say(self, to: Address, *messages: Message) -> None:
        """One datagram, filled up with rumours."""
        if not to:
            return
        room = self.budget - sum(size(message) for message in messages)
        limit = policy.retransmits(self.settings.retransmit_factor, self._hosts())
        rumours = self._rumours.take(room, limit) if len(self._rumours) else ()
        self._out.append(Say(to, (*messages, *rumours)))

    def _rumour(self, host: HostId, message: Message) -> None:
        self._rumours.tell(host, message)
        if not self._gossip_set:
            self._gossip_set = True
            self._timer(self.rng.uniform(0, self.settings.gossip_interval_s), GossipDue())

    def _mine(self) -> m.Alive:
        return m.Alive(self.me.host, self.me.uuid, self.me.boot, self.incarnation, self.address)

    def _sorted(self) -> list[Member]:
        return [self.members[host] for host in sorted(self.members)]

    def _hosts(self) -> int:
        """Live hosts, this one included."""
        return 1 + sum(member.live for member in self.members.values())

    def _gossip(self, now_s: float) -> None:
        self._gossip_set = False
        if not len(self._rumours):
            return
        reachable = [
            member.address
            for member in self._sorted()
            if member.live or (member.state == "gone" and now_s - member.since_s < GOSSIP_TO_THE_DEAD_S)
        ]
        for address in policy.some(reachable, self.settings.gossip_fanout, self.rng):
            if len(self._rumours):
                self._say(address)
        if reachable:
            self._gossip_set = True
            self._timer(self.settings.gossip_interval_s, GossipDue())

    # ---- probing ----

    def _probe_next(self, now_s: float) -> None:
        self._end_probe(now_s)
        target = self._order.next(member.host for member in self._sorted() if member.live and member.address)
        if target is not None:
            self._begin_probe(self.members[target], now_s)
        self._timer(self.settings.probe_interval_s * (self.health + 1), ProbeDue())

    def _begin_probe(self, target: Member, now_s: float) -> None:
        self._seq = (self._seq + 1) & U32_MAX
        self._probe = Probe(self._seq, target.host, target.identity, now_s)
        self.counts["probes"] += 1
        self._ping(target, self._seq)
        self._timer(self.settings.probe_timeout_s, ProbeLate(self._seq))

    def _ping(self, target: Member, seq: int) -> None:
        """A suspect hears with the ping that it is one: Lifeguard's buddy system."""
        accusation = None if target.remembered else target.accusation()
        self._say(target.address, m.Ping(seq, target.host), *(() if accusation is None else (accusation,)))

    def _ask_others(self, seq: int) -> None:
        """Through others; and directly once more, since one lost datagram is not a sign of anything."""
        probe = self._probe
        if probe is None or probe.seq != seq or probe.acked:
            return
        target = self.members.get(probe.target)
        if target is None or not target.live:
            return
        others = [member for member in self._sorted() if member.state == "alive" and member.host != probe.target]
        helpers = policy.some(others, self.settings.indirect_probes, self.rng)
        probe.helpers = tuple(helper.host for helper in helpers)
        for helper in helpers:
            self._say(helper.address, m.PingReq(seq, probe.target))
        self._ping(target, seq)

    def _end_probe(self, now_s: float) -> None:
        probe, self._probe = self._probe, None
        if probe is None or probe.acked:
            return
        target = self.members.get(probe.target)
        if target is None or target.identity != probe.identity or not target.live:
            return
        stalled_s = policy.overlap_s(self._stalls, probe.sent_s, now_s)
        if stalled_s > self.settings.probe_timeout_s / 2:
            self.counts["probes_void"] += 1
            self._feel(1)
            self._order.again(probe.target)
            return
        self.counts["probes_failed"] += 1
        self._feel(policy.change_after_failed_probe(len(probe.helpers), len(probe.nacks)))
        self._suspected(target, target.boot, target.incarnation, self.me.host, now_s)

    def _feel(self, change: int) -> None:
        self.health = policy.health(self.health, change)

    def _stalled(self, stall: LoopStalled) -> None:
        """Time in which we could not listen counts against nobody."""
        start_s = max([stall.start_s, *(end_s for _, end_s in self._stalls[-1:])])
        if start_s >= stall.end_s:
            return
        self._stalls = [*self._stalls[-15:], (start_s, stall.end_s)]
        for member in self._sorted():
            if member.suspicion is not None:
                member.suspicion.extra_s += stall.end_s - start_s

    def _relay(self, source: Address, request: m.PingReq) -> list[Message]:
        target = self.members.get(request.target)
        if target is None or not target.live or len(self._relays) >= RELAYS_MAX:
            return [m.Nack(request.seq)]
        self._seq = (self._seq + 1) & U32_MAX
        self._relays[self._seq] = Relay(source, request.seq, request.target)
        self.counts["relays"] += 1
        self._ping(target, self._seq)
        self._timer(self.settings.probe_timeout_s * NACK_FRACTION, RelayLate(self._seq))
        return []

    def _relay_late(self, seq: int) -> None:
        relay = self._relays.pop(seq, None)
        if relay is not None:
            self._say(relay.origin, m.Nack(relay.origin_seq))

    def _acked(self, sender: HostId, seq: int) -> None:
        relay = self._relays.get(seq)
        if relay is not None and relay.target == sender:
            del self._relays[seq]
            self._say(relay.origin, m.Ack(relay.origin_seq))
            return
        probe = self._probe
        if probe is None or probe.seq != seq or probe.acked or sender not in (probe.target, *probe.helpers):
            return
        probe.acked = True
        self._feel(-1)

    def _nacked(self, sender: HostId, seq: int) -> None:
        probe = self._probe
        if probe is not None and probe.seq == seq and sender in probe.helpers:
            probe.nacks.add(sender)

    # ---- what others say ----

    def _packet(self, event: PacketHeard, now_s: float) -> None:
        sender = event.sender
        if not self._may_speak(sender, event.source, now_s):
            return
        replies: list[Message] = []
        for message in event.messages:
            replies += self._message(sender, event.source, message, now_s)
        remarks = self._remarks(sender)
        if remarks and self._may_remark(sender.identity, now_s):
            replies += remarks
        if replies:
            self._say(event.source, *replies)

    def _may_remark(self, about: int, now_s: float) -> bool:
        """At most so often per sender: two hosts that cannot agree must not answer each other forever."""
        if now_s - self._remarked.get(about, float("-inf")) < REMARK_INTERVAL_S:
            return False
        if len(self._remarked) >= self.settings.hosts_max:
            self._remarked.clear()
        self._remarked[about] = now_s
        return True

    def _may_speak(self, sender: Sender, source: Address, now_s: float) -> bool:
        """False for a machine that has the name of another one, which lives; and for an earlier life of a host."""
        if sender.host != self.me.host:
            member = self.members.get(sender.host)
            if member is None or (member.identity != sender.identity and (not member.live or member.remembered)):
                return True
            if member.identity == sender.identity:
                return member.boot <= sender.boot
        self._conflict(sender.host, now_s)
        if self._may_remark(sender.identity, now_s):
            self._say(source, m.NameTaken(sender.host))
        return False

    def _remarks(self, sender: Sender) -> list[Message]:
        """What the sender should know about what is thought of it here."""
        member = self.members.get(sender.host)
        if member is None or member.identity != sender.identity or member.boot < sender.boot or member.remembered:
            return [m.WhoAreYou()]
        accusation = member.accusation()
        return [] if accusation is None else [accusation]

    def _message(self, sender: Sender, source: Address, message: m.AnyMessage, now_s: float) -> list[Message]:
        """Takes one message; returns what to answer."""
        match message:
            case m.Ping():
                return [m.Ack(message.seq)] if message.to == self.me.host else []
            case m.Ack():
                self._acked(sender.host, message.seq)
            case m.Nack():
                self._nacked(sender.host, message.seq)
            case m.PingReq():
                return self._relay(source, message)
            case m.Alive():
                return self._heard_alive(message, sender, source, now_s)
            case m.Suspect():
                self._heard_suspect(message, now_s)
            case m.Gone():
                self._heard_gone(message, now_s)
            case m.Left():
                self._heard_left(message, now_s)
            case m.SyncAsk():
                return self._heard_sync(source, message.checksum)
            case m.SyncSame():
                self._same_s = now_s
            case m.SyncPull():
                self._send_records(source)
            case m.Record():
                self._heard_record(message, sender, now_s)
            case m.WhoAreYou():
                return [self._mine()]
            case m.SeenAt():
                self.address = self.address or message.address
            case m.NameTaken():
                if message.host == self.me.host:
                    self._conflict(self.me.host, now_s)
            case _:
                assert_never(message)
        return []

    def _heard_alive(self, alive: m.Alive, sender: Sender, source: Address, now_s: float) -> list[Message]:
        about = identity(alive.host, alive.uuid)
        first_hand = about == sender.identity
        address = alive.address or (source if first_hand else "")
        if address:
            self._alive(alive, about, address, now_s)
        return [m.SeenAt(source)] if first_hand and not alive.address else []

    def _alive(self, alive: m.Alive, about: int, address: Address, now_s: float) -> None:
        if alive.host == self.me.host:
            self._alive_self(alive, about, now_s)
            return
        member = self.members.get(alive.host)
        if member is None:
            if self._make_room():
                self._join(alive, address, now_s)
            return
        order = (alive.boot, alive.incarnation)
        known = (member.boot, member.incarnation)
        news = order > known or (member.remembered and order == known)
        match policy.claim(member.state, member.identity == about, news):
            case "none":
                pass
            case "conflict" if not member.remembered:
                self._conflict(alive.host, now_s)
            case "conflict" | "reclaim":
                self._drop(member)
                self._join(alive, address, now_s)
            case "news":
                self._renew(member, alive, address, now_s)

    def _alive_self(self, alive: m.Alive, about: int, now_s: float) -> None:
        """Others tell us about ourselves: what is not what we would say is corrected."""
        if about != self.identity or alive.boot > self.me.boot:
            self._conflict(self.me.host, now_s)
        elif alive.boot == self.me.boot and self._is_wrong(alive):
            self._refute(alive.incarnation)

    def _is_wrong(self, mine: m.Alive) -> bool:
        if mine.incarnation == self.incarnation:
            return bool(self.address and mine.address) and self.address != mine.address
        return mine.incarnation > self.incarnation

    def _join(self, alive: m.Alive, address: Address, now_s: float) -> None:
        self.members[alive.host] = Member(
            alive.host, alive.uuid, alive.boot, alive.incarnation, address, "alive", now_s
        )
        self._order.add(alive.host)
        self._rumour(alive.host, with_address(alive, address))
        self._tell(HostUp(alive.host))
        self._recount(now_s)

    def _renew(self, member: Member, alive: m.Alive, address: Address, now_s: float) -> None:
        was_live, restarted = member.live, alive.boot > member.boot
        changed = member.state != "alive" or restarted
        member.boot, member.incarnation, member.address = alive.boot, alive.incarnation, address
        member.remembered, member.suspicion, member.suspected_by = False, None, None
        self._rumour(alive.host, with_address(alive, address))
        if changed:
            member.state, member.since_s = "alive", now_s
            self._tell(HostUp(member.host))
        if not was_live:
            self._order.add(member.host)
        if changed:
            self._recount(now_s)

    def _accused(self, message: m.Suspect | m.Gone | m.Left) -> Member | None:
        """The member that is spoken of, unless it is us, unknown, or the news is old."""
        if message.host == self.me.host:
            mine = (message.identity, message.boot) == (self.identity, self.me.boot)
            if mine and message.incarnation >= self.incarnation:
                self._feel(1)
                self._refute(message.incarnation)
            return None
        member = self.members.get(message.host)
        if member is None or member.identity != message.identity:
            return None
        old = (message.boot, message.incarnation) < (member.boot, member.incarnation)
        return None if old else member

    def _refute(self, incarnation: int) -> None:
        self.counts["refutations"] += 1
        self.incarnation = min(U32_MAX, max(self.incarnation, incarnation) + 1)
        self._rumour(self.me.host, self._mine())

    def _heard_suspect(self, suspect: m.Suspect, now_s: float) -> None:
        member = self._accused(suspect)
        if member is not None:
            self._suspected(member, suspect.boot, suspect.incarnation, suspect.by, now_s)

    def _suspected(self, member: Member, boot: int, incarnation: int, by: HostId, now_s: float) -> None:
        """`by` could not reach it: a new suspicion, or one more confirmation."""
        if not member.live:
            return
        if member.state == "alive" or (boot, incarnation) > (member.boot, member.incarnation):
            self._begin_suspicion(member, boot, incarnation, by, now_s)
            return
        suspicion = member.suspicion
        assert suspicion is not None
        if by not in suspicion.by and len(suspicion.by) <= self.settings.suspicion_factor and not member.remembered:
            suspicion.by.append(by)
            self._rumour(member.host, m.Suspect(member.host, member.identity, boot, incarnation, by))
            self._hasten(member, now_s)

    def _begin_suspicion(self, member: Member, boot: int, incarnation: int, by: HostId, now_s: float) -> None:
        if member.state == "alive":
            member.since_s = now_s
        member.boot, member.incarnation, member.state = boot, incarnation, "suspect"
        member.suspected_by, member.remembered = by, False
        member.suspicion = Suspicion(now_s, [by])
        self._rumour(member.host, m.Suspect(member.host, member.identity, boot, incarnation, by))
        self._tell(HostSuspected(member.host, by))
        self._hasten(member, now_s)
        self._recount(now_s)

    def _ends_s(self, member: Member, suspicion: Suspicion) -> float:
        """When the suspicion ends, as things stand. Hosts that are themselves suspect confirm nothing."""
        could = {other.host for other in self.members.values() if other.state == "alive"}
        possible = len({self.me.host, *suspicion.by} | could) - 1
        expected = policy.confirmations_expected(self.settings.suspicion_factor, possible)
        shortest_s = policy.suspicion_shortest_s(
            self.settings.suspicion_factor, self._hosts(), self.settings.probe_interval_s
        )
        lasts_s = policy.suspicion_s(len(suspicion.by) - 1, expected, shortest_s)
        return suspicion.start_s + lasts_s + suspicion.extra_s

    def _hasten(self, member: Member, now_s: float) -> None:
        """Set a timer if the suspicion ends before the one that is set."""
        suspicion = member.suspicion
        if suspicion is None:
            return
        ends_s = max(now_s, self._ends_s(member, suspicion))
        if ends_s < suspicion.timer_s:
            suspicion.timer_s = ends_s
            about = SuspicionDue(member.host, member.identity, member.boot, member.incarnation)
            self._timer(ends_s - now_s, about)

    def _recount(self, now_s: float) -> None:
        """The number of hosts that could confirm a suspicion has changed."""
        for member in self._sorted():
            self._hasten(member, now_s)

    def _suspicion_due(self, due: SuspicionDue, now_s: float) -> None:
        member = self.members.get(due.host)
        if member is None or member.suspicion is None or member.identity != due.identity:
            return
        if (member.boot, member.incarnation) != (due.boot, due.incarnation):
            return
        if now_s + 1e-6 < self._ends_s(member, member.suspicion):
            if now_s + 1e-6 >= member.suspicion.timer_s:
                member.suspicion.timer_s = float("inf")
                self._hasten(member, now_s)
            return
        self._bury(member, "gone", now_s)

    def _heard_gone(self, gone: m.Gone, now_s: float) -> None:
        """Believed of a suspect; of a host in good standing it is one more suspicion."""
        member = self._accused(gone)
        if member is None or not member.live:
            return
        if member.state == "alive":
            self._suspected(member, gone.boot, gone.incarnation, gone.by, now_s)
            return
        member.boot, member.incarnation = gone.boot, gone.incarnation
        if member.remembered:
            member.suspected_by = gone.by
        self._bury(member, "gone", now_s)

    def _heard_left(self, left: m.Left, now_s: float) -> None:
        member = self._accused(left)
        if member is None or member.state == "left":
            return
        member.boot, member.incarnation = left.boot, left.incarnation
        self._bury(member, "left", now_s)

    def _bury(self, member: Member, state: State, now_s: float) -> None:
        was_live, told = member.live, not member.remembered
        member.state, member.since_s = state, now_s
        member.suspicion, member.remembered = None, False
        accusation = member.accusation()
        if told and accusation is not None:
            self._rumour(member.host, accusation)
        if was_live:
            self._tell(HostDown(member.host, state == "left"))
        self._recount(now_s)
        if was_live:
            self._call_soon()

    # ---- names ----

    def _conflict(self, host: HostId, now_s: float) -> None:
        if now_s - self._conflicts.get(host, float("-inf")) >= CONFLICT_INTERVAL_S:
            self._conflicts[host] = now_s
            self._tell(NameConflict(host))

    # ---- tables ----

    def _make_room(self) -> bool:
        """False when the table is full of live hosts; otherwise the one that is dead for longest makes room."""
        if len(self.members) + 1 < self.settings.hosts_max:
            return True
        dead = [member for member in self._sorted() if not member.live]
        if not dead:
            self.counts["full"] += 1
            return False
        self._drop(min(dead, key=lambda member: (member.state != "left", member.since_s)))
        return True

    def _drop(self, member: Member) -> None:
        del self.members[member.host]
        self._rumours.drop(member.host)
        self._conflicts.pop(member.host, None)
        self._out.append(Forget(member.host))

    def _sync(self, now_s: float) -> None:
        """Compare tables with one host; and forget who left long ago."""
        for member in self._sorted():
            if member.state == "left" and now_s - member.since_s > LEFT_REMEMBERED_S:
                self._drop(member)
        if now_s - self._same_s >= policy.sync_interval_s(self.settings.sync_interval_s, self._hosts()):
            peers = [member.address for member in self._sorted() if member.state == "alive"]
            for address in policy.some(peers, 1, self.rng):
                self._say(address, m.SyncAsk(self._checksum()))
        self._timer(SYNC_SOON_S * self.rng.uniform(0.8, 1.2), SyncDue())

    def _checksum(self) -> int:
        return policy.checksum(self.records())

    def _heard_sync(self, source: Address, checksum: int) -> list[Message]:
        if checksum == self._checksum():
            return [m.SyncSame()]
        self._send_records(source)
        return [m.SyncPull()]

    def _send_records(self, to: Address) -> None:
        for batch in batches(self.records(), size, self.budget):
            self._out.append(Say(to, tuple(batch)))

    def _heard_record(self, record: m.Record, sender: Sender, now_s: float) -> None:
        """A line of somebody's table. The dead in it become suspects here, for they may well live (memberlist)."""
        about = identity(record.host, record.uuid)
        state = policy.STATES[record.state]
        by = record.by or sender.host
        if state in ("alive", "suspect") and record.address:
            alive = m.Alive(record.host, record.uuid, record.boot, record.incarnation, record.address)
            self._alive(alive, about, record.address, now_s)
        match state:
            case "alive":
                pass
            case "suspect":
                self._heard_suspect(m.Suspect(record.host, about, record.boot, record.incarnation, by), now_s)
            case "gone":
                self._heard_record_gone(m.Gone(record.host, about, record.boot, record.incarnation, by), sender, now_s)
            case "left":
                self._heard_left(m.Left(record.host, about, record.boot, record.incarnation), now_s)

    def _heard_record_gone(self, gone: m.Gone, sender: Sender, now_s: float) -> None:
        member = self._accused(gone)
        if member is None:
            return
        if member.remembered:
            self._heard_gone(gone, now_s)
        else:
            self._suspected(member, gone.boot, gone.incarnation, sender.host, now_s)

    # ---- calling the missing ----

    def _call(self, generation: int) -> None:
        if generation != self._call_generation:
            return
        for address in self._to_call():
            self._say(address, self._mine(), m.SyncAsk(self._checksum()))
        self._call_s = policy.call_after_s(self._call_s, self.alone, self.settings.announce_interval_s_max)
        self._timer(self._call_s * self.rng.uniform(0.8, 1.0), CallDue(generation))

    def _to_call(self) -> list[Address]:
        there = {member.address for member in self.members.values() if member.state == "alive"}
        seeds = [seed for seed in self.settings.seeds if seed not in there and seed != self.address]
        missing = [
            member.address
            for member in self._sorted()
            if (member.state == "gone" or member.remembered) and member.address not in seeds
        ]
        if self.alone:
            return seeds + policy.some(missing, 8, self.rng)
        return policy.some(seeds + missing, policy.CALLED_AT_ONCE, self.rng)

    def _call_soon(self) -> None:
        """Somebody is newly missing: begin with short pauses again."""
        self._call_generation += 1
        self._call_s = self.settings.probe_interval_s
        self._timer(self._call_s, CallDue(self._call_generation))

    # ---- invariants ----

    def check(self) -> None:
        assert 0 <= self.health <= policy.HEALTH_MAX, f"health {self.health}"
        assert self.me.host not in self.members, "a host is not its own peer"
        assert len(self.members) < self.settings.hosts_max, "the table is too long"
        assert len(self._relays) <= RELAYS_MAX
        for host, member in self.members.items():
            assert member.host == host
            assert (member.state == "suspect") == (member.suspicion is not None), f"{host}: suspicion without a suspect"
            assert member.address, f"{host} has no address"
            assert not member.remembered or member.state == "suspect"
            assert member.suspected_by is not None or member.state != "suspect", f"{host}: nobody suspected it"


def with_address(alive: m.Alive, address: Address) -> m.Alive:
    """The same with an address that others can use."""
    return alive if alive.address else m.Alive(alive.host, alive.uuid, alive.boot, alive.incarnation, address)
