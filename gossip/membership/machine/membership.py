"""The state of every host: SWIM (Das, Gupta, Motivala 2002) with Lifeguard's local health (Dadgar et al. 2017).

                       ping unanswered, or another's Suspect
              +------------------------------------------------> suspect --+
              |   <----- Alive with a higher incarnation (refuted) -----   |  not refuted in time, or Gone
       alive -+                                                            v
              |   <----- Alive, incarnation or boot higher ------------- gone
              +--- Left, said by the host itself --> left ----- Alive, new boot ---> alive

A host that restarts sends a Left with the seconds until it is back: it is `away`, not probed, and not gone before that.

Each host probes one other a second, in a shuffled order: a ping, after half a second without an answer a ping-req
through three others, after a second a suspicion, told to all. At the end of a suspicion the host is gone unless it,
too, received the Suspect and refuted it with a higher incarnation; the more hosts confirm it by own probes, the sooner.

A host that is itself slow suspects others wrongly. Three remedies: the local health score stretches its probes
(Lifeguard); a probe during which its own loop stalled for half a probe timeout proves nothing, is void and lowers its
health; and the time of a suspicion does not run while it was stalled.

A message of another host alone makes no host gone: a Gone about a host that is not suspected here, and a gone host in
another's table, only make it suspect. So two halves of a rack that meet again do not declare each other gone.

Members are found through seeds; missing seeds and gone hosts are called forever, with growing pauses. Tables are
compared by checksum now and then, and exchanged whole when they differ: datagrams enough for hundreds of hosts, no TCP.
"""

import random
from collections.abc import Mapping, Sequence
from typing import assert_never

from covey.core.events import Message
from covey.core.ids import HostId
from covey.core.metrics import Tally
from covey.ports.addresses import Address
from gossip.membership import messages as m
from gossip.membership import policy
from gossip.membership.machine.anti_entropy import SYNC_SOON_S, AntiEntropy
from gossip.membership.machine.events import (
    Action,
    AwayOver,
    CallDue,
    EarlierHeard,
    Event,
    Forget,
    GossipDue,
    Leaving,
    LoopStalled,
    MembershipStarted,
    PacketHeard,
    ProbeDue,
    ProbeLate,
    RelayLate,
    SeedsFound,
    SuspicionDue,
    SyncDue,
)
from gossip.membership.machine.member_states import MemberStates
from gossip.membership.machine.probing import RELAYS_MAX, Prober
from gossip.membership.machine.table import Member, Table
from gossip.settings import GossipSettings
from gossip.types import SendDatagram, Sender

REMARK_INTERVAL_S = 0.2
"""Seconds between two unasked messages to one host about its state here."""
EARLIER_S = 10.0
"""Seconds after which an earlier boot of a live host that still speaks shows two machines with one identity: datagrams
are late for a second or two, and one whose later boot is over is suspected within that time."""


class Membership:
    """The membership of one host. `budget`: bytes of messages in a datagram."""

    def __init__(self, me: Sender, settings: GossipSettings, budget: int, rng: random.Random) -> None:
        self.leaving = False
        self._table = Table(me, settings, budget, rng)
        self._standing = MemberStates(self._table)
        self._prober = Prober(self._table, self._standing)
        self._meeting = AntiEntropy(self._table, self._standing)
        self._remarked: dict[int, float] = {}
        self._earlier: dict[int, tuple[int, int, float]] = {}
        """Earlier boots that spoke after the later one: identity -> boot, its newest counter, and since when."""

    # ---- what is known ----

    @property
    def members(self) -> Mapping[HostId, Member]:
        return self._table.members

    @property
    def incarnation(self) -> int:
        return self._table.incarnation

    @property
    def health(self) -> int:
        """The local health score, 0 (healthy) to 7."""
        return self._table.health

    @property
    def address(self) -> Address:
        """This host's address for the others; empty as long as it is not known."""
        return self._table.address

    @property
    def alone(self) -> bool:
        return self._table.alone

    @property
    def counts(self) -> Mapping[str, int]:
        return self._table.counts

    @property
    def round_trips(self) -> Tally:
        return self._table.round_trips

    def records(self) -> tuple[m.MemberRecord, ...]:
        return self._table.records()

    def accepts(self, sender: Sender) -> bool:
        """Whether this is a live member in its present boot: from others only membership messages are accepted."""
        member = self._table.members.get(sender.host)
        return member is not None and member.live and member.identity == sender.identity and member.boot == sender.boot

    # ---- events ----

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        self._table.now_s = now_s
        if not self.leaving or isinstance(event, Leaving):
            self._handle(event, now_s)
        found, self._table.out = self._table.out, []
        return found

    def _handle(self, event: Event, now_s: float) -> None:
        match event:
            case PacketHeard():
                self._packet(event, now_s)
            case EarlierHeard():
                self._heard_earlier(event, now_s)
            case LoopStalled():
                self._standing.stalled(event)
            case MembershipStarted():
                self._start(event, now_s)
            case SeedsFound():
                self._meeting.seeds_are(event.seeds)
            case Leaving():
                self._leave(event.away_s)
            case Forget():
                self._forget(event, now_s)
            case ProbeDue():
                self._prober.next(now_s)
            case ProbeLate():
                self._prober.ask_others(event.seq)
            case RelayLate():
                self._prober.relay_late(event.seq)
            case SuspicionDue():
                self._standing.due(event, now_s)
            case AwayOver():
                self._standing.away_over(event)
            case GossipDue():
                self._table.gossip(now_s)
            case CallDue():
                self._meeting.call(event.generation)
            case SyncDue():
                self._meeting.sync(now_s)
            case _:
                assert_never(event)

    def _start(self, event: MembershipStarted, now_s: float) -> None:
        self._table.address, self._table.seeds = event.address, event.seeds
        for record in event.remembered:
            self._standing.remember(record, now_s)
        self._table.timer(self._table.rng.uniform(0, self._table.settings.probe_interval_s), ProbeDue())
        self._table.timer(self._table.rng.uniform(0, SYNC_SOON_S), SyncDue())
        self._meeting.call(self._table.call_generation)

    def _leave(self, away_s: int) -> None:
        self.leaving = True
        me, incarnation = self._table.me, self._table.incarnation
        goodbye = m.Left(me.host, self._table.identity, me.boot, incarnation, away_s)
        for member in self._table.by_name():
            if member.live and member.address:
                self._table.out.append(SendDatagram(member.address, (goodbye,)))

    def _forget(self, event: Forget, now_s: float) -> None:
        """Drop a host that is gone, or only remembered; one that lives, or has begun anew since, is another one."""
        member = self._table.members.get(event.host)
        if member is None or member.boot > event.boot:
            return
        if member.remembered or member.shown(now_s) in ("gone", "left"):
            self._table.drop(member)

    # ---- messages of others ----

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
            self._table.send(event.source, *replies)

    def _heard_earlier(self, heard: EarlierHeard, now_s: float) -> None:
        """Take a datagram of an earlier boot: two machines have one identity file, as copies of one disk have; the
        earlier one is told, too."""
        sender = heard.sender
        member = self._table.members.get(sender.host)
        if member is None or member.identity != sender.identity or member.state != "alive" or member.remembered:
            self._earlier.pop(sender.identity, None)
            return
        boot, counter, since_s = self._earlier.get(sender.identity, (-1, 0, now_s))
        if boot == sender.boot and heard.counter <= counter:
            return  # a repeated datagram
        if len(self._earlier) >= self._table.settings.hosts_max:
            self._earlier.clear()
        since_s = since_s if boot == sender.boot else now_s
        self._earlier[sender.identity] = (sender.boot, heard.counter, since_s)
        if now_s - since_s >= EARLIER_S:
            self._table.conflict(sender.host, heard.source, now_s)
            if self._may_remark(sender.identity, now_s):
                self._table.out.append(SendDatagram(heard.source, (m.NameTaken(sender.host),)))

    def _may_remark(self, about: int, now_s: float) -> bool:
        """Whether a remark may be sent now: a limit per sender, since two hosts that cannot agree must not answer each
        other forever."""
        if now_s - self._remarked.get(about, float("-inf")) < REMARK_INTERVAL_S:
            return False
        if len(self._remarked) >= self._table.settings.hosts_max:
            self._remarked.clear()
        self._remarked[about] = now_s
        return True

    def _may_speak(self, sender: Sender, source: Address, now_s: float) -> bool:
        """Whether the sender may speak: False for a machine that has the name of another live one elsewhere, and for an
        earlier boot of a host."""
        if sender.host != self._table.me.host:
            member = self._table.members.get(sender.host)
            if member is None or (member.identity != sender.identity and not member.has_name(now_s)):
                return True
            match policy.claim(member.claimant, policy.Claimant(sender.identity, sender.boot, source)):
                case "same":
                    return member.boot <= sender.boot
                case "later":
                    return True
                case "earlier":
                    return False
                case "elsewhere":
                    pass
        self._table.conflict(sender.host, source, now_s)
        if self._may_remark(sender.identity, now_s):
            self._table.out.append(SendDatagram(source, (m.NameTaken(sender.host),)))
        return False

    def _remarks(self, sender: Sender) -> list[Message]:
        """What the sender should know about its state here."""
        member = self._table.members.get(sender.host)
        if member is None or member.identity != sender.identity or member.boot < sender.boot or member.remembered:
            return [m.WhoAreYou()]
        accusation = member.accusation(self._table.now_s)
        return [] if accusation is None else [accusation]

    def _message(self, sender: Sender, source: Address, message: m.AnyMessage, now_s: float) -> list[Message]:
        """Handle one message, and return the answers."""
        match message:
            case m.Ping():
                return [m.Ack(message.seq)] if message.to == self._table.identity else []
            case m.Ack():
                self._prober.acked(sender.host, message.seq)
            case m.Nack():
                self._prober.nacked(sender.host, message.seq)
            case m.PingReq():
                return self._prober.relay(source, message)
            case m.Alive():
                return self._standing.heard_alive(message, sender, source, now_s)
            case m.Suspect():
                self._standing.heard_suspect(message, now_s)
            case m.Gone():
                self._standing.heard_gone(message, now_s)
            case m.Left():
                self._standing.heard_left(message, now_s)
            case m.SyncAsk():
                return self._meeting.heard_sync(source, message.checksum)
            case m.SyncSame():
                pass
            case m.SyncPull():
                self._meeting.send_records(source)
            case m.MemberRecord():
                self._meeting.heard_record(message, sender, now_s)
            case m.WhoAreYou():
                return [self._table.mine()]
            case m.SeenAt():
                self._table.address = self._table.address or message.address
            case m.NameTaken():
                if message.host == self._table.me.host:
                    self._table.conflict(self._table.me.host, "", now_s)
            case _:
                assert_never(message)
        return []

    # ---- invariants ----

    def check(self) -> None:
        assert 0 <= self._table.health <= policy.HEALTH_MAX, f"health {self._table.health}"
        assert self._table.me.host not in self._table.members, "a host is not its own peer"
        assert len(self._table.members) < self._table.settings.hosts_max, "the table is too long"
        assert len(self._prober.relays) <= RELAYS_MAX
        for host, member in self._table.members.items():
            assert member.host == host
            assert (member.state == "suspect") == (member.suspicion is not None), f"{host}: suspicion without a suspect"
            assert member.address, f"{host} has no address"
            assert not member.remembered or member.state == "suspect"
            assert member.suspected_by is not None or member.state != "suspect", f"{host}: no host suspected it"
