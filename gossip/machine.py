"""Both planes of gossip as one machine: which hosts are alive, and the facts that they publish.

`Membership` decides whose facts are accepted; `Spread` passes facts on between those hosts. The service feeds
authenticated datagrams and timers, and performs the actions; many of these machines on a heap of events are a rack
without sockets.
"""

import random
from collections.abc import Sequence
from typing import assert_never

import msgspec

from covey.core.events import Message, Publish, SetTimer
from covey.core.ids import HostId
from covey.ports.addresses import Address
from gossip.membership.machine import Membership
from gossip.membership.machine import events as members
from gossip.membership.machine.table import Member
from gossip.membership.messages import AnyMessage as AboutMembers
from gossip.membership.messages import MemberRecord, Ping
from gossip.settings import GossipSettings
from gossip.spread import machine as spread
from gossip.spread.machine import Spread
from gossip.spread.messages import AnyMessage as AboutFacts
from gossip.types import HostDown, HostState, HostUp, HostView, MemberAway, SendDatagram, Sender, size


class GossipStarted(msgspec.Struct, frozen=True):
    """Event: gossip begins."""

    address: Address
    """This host's address for the others; empty while no peer has told it."""
    remembered: tuple[MemberRecord, ...] = ()
    seeds: tuple[Address, ...] = ()
    """The addresses to join through, as far as they are known yet."""


class DatagramHeard(msgspec.Struct, frozen=True):
    """Event: one authenticated datagram."""

    sender: Sender
    source: Address
    messages: tuple[Message, ...]


Timer = members.Timer | spread.Timer
Event = (
    GossipStarted
    | DatagramHeard
    | members.SeedsFound
    | members.EarlierHeard
    | members.Forget
    | members.LoopStalled
    | members.Leaving
    | spread.Published
    | Timer
)
Action = SendDatagram | SetTimer[members.Timer] | SetTimer[spread.Timer] | Publish


class Gossip:
    """Both planes of gossip on one host. `budget`: bytes of messages that fit into a datagram of this host."""

    def __init__(self, me: Sender, settings: GossipSettings, budget: int, rng: random.Random) -> None:
        self.me = me
        self.membership = Membership(me, settings, budget, rng)
        self.spread = Spread(me, settings, budget, rng)
        self.refused = 0
        """The number of datagrams with facts from hosts that are not alive here."""
        self._since_s = 0.0
        self._moves = 0
        """How often the state of a host changed."""

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        match event:
            case GossipStarted():
                self._since_s = now_s
                started = self._members(members.MembershipStarted(event.address, event.remembered, event.seeds), now_s)
                return [*started, *self._spread(spread.SpreadStarted(), now_s)]
            case DatagramHeard():
                return self._heard(event, now_s)
            case (
                members.Leaving()
                | members.LoopStalled()
                | members.SeedsFound()
                | members.EarlierHeard()
                | members.Forget()
            ):
                return self._members(event, now_s)
            case spread.Published():
                return self._spread(event, now_s)
            case spread.RoundDue() | spread.PushDue():
                return () if self.membership.leaving else self._spread(event, now_s)
            case (
                members.ProbeDue()
                | members.ProbeLate()
                | members.RelayLate()
                | members.SuspicionDue()
                | members.AwayOver()
                | members.GossipDue()
                | members.CallDue()
                | members.SyncDue()
            ):
                return self._members(event, now_s)
            case _:
                assert_never(event)

    def _heard(self, heard: DatagramHeard, now_s: float) -> Sequence[Action]:
        facts: list[AboutFacts] = []
        about: list[AboutMembers] = []
        for message in heard.messages:
            if isinstance(message, AboutFacts):
                facts.append(message)
            elif isinstance(message, AboutMembers):
                about.append(message)
        actions = self._members(members.PacketHeard(heard.sender, heard.source, tuple(about)), now_s)
        if not facts:
            return actions
        if not self.membership.accepts(heard.sender) or self.membership.leaving:
            self.refused += 1
            return actions
        answers = self._spread(spread.Told(heard.sender, heard.source, tuple(facts)), now_s)
        return joined([*actions, *answers], self.spread.budget)

    def _members(self, event: members.Event, now_s: float) -> list[Action]:
        """Hand an event to membership, and return its actions. `Spread` receives first which hosts came and went."""
        actions: list[Action] = []
        for action in self.membership.handle(event, now_s):
            match action:
                case members.ForgetMember():
                    self._moves += 1
                    actions += self._spread(spread.PeerForgotten(action.host), now_s)
                case Publish():
                    self._moves += 1
                    actions += self._changed(action, now_s)
                    actions.append(action)
                case SendDatagram():
                    actions.append(self._with_digest(action, now_s))
                case SetTimer():
                    actions.append(action)
        return actions

    def _with_digest(self, say: SendDatagram, now_s: float) -> SendDatagram:
        """The datagram; a probe carries the digest as far as there is room."""
        if self.membership.leaving or not any(isinstance(message, Ping) for message in say.messages):
            return say
        digest = self.spread.digest(self.spread.budget - sum(map(size, say.messages)), now_s)
        return say if digest is None else SendDatagram(say.to, (*say.messages, digest))

    def _changed(self, tell: Publish, now_s: float) -> list[Action]:
        match tell.fact:
            case HostUp(host):
                member = self.membership.members.get(host)
                return [] if member is None else self._spread(spread.PeerUp(host, member.identity, member.boot), now_s)
            case HostDown(host) | MemberAway(host):
                return self._spread(spread.PeerDown(host), now_s)
            case _:
                return []

    def _spread(self, event: spread.Event, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for action in self.spread.handle(event, now_s):
            match action:
                case spread.SayTo():
                    member = self.membership.members.get(action.to)
                    if member is not None:
                        actions.append(SendDatagram(member.address, action.messages))
                case SendDatagram() | SetTimer():
                    actions.append(action)
        return actions

    # ---- what is known ----

    @property
    def changes(self) -> int:
        """It grows with each change of a host's state or facts, and not with their ages."""
        return self._moves + self.spread.changes

    def hosts(self, now_s: float) -> list[HostView]:
        """Every host that is remembered, this one included, sorted by name."""
        peers = [self._peer(member, now_s) for member in self.membership.members.values()]
        return sorted([self._self(), *peers], key=lambda peer: peer.host)

    def peer(self, host: HostId, now_s: float) -> HostView | None:
        """One host, or None when it is not known."""
        if host == self.me.host:
            return self._self()
        member = self.membership.members.get(host)
        return None if member is None else self._peer(member, now_s)

    def said(self, key: str, now_s: float) -> list[tuple[HostId, HostState, bytes | None]]:
        """Every other host, its state, and the value it published under this key in its present boot, by name."""
        found: list[tuple[HostId, HostState, bytes | None]] = []
        for host, member in sorted(self.membership.members.items()):
            facts = self.spread.of(host)
            entry = facts.entries.get(key) if facts is not None and facts.boot >= member.boot else None
            found.append((host, member.shown(now_s), None if entry is None else entry.value))
        return found

    def _self(self) -> HostView:
        mine = self.spread.facts[self.spread.identity]
        return HostView(
            host=self.me.host,
            state="alive",
            address=self.membership.address,
            boot=self.me.boot,
            incarnation=self.membership.incarnation,
            since_s=self._since_s,
            age_s=0.0,
            suspected_by=None,
            values=mine.values,
        )

    def _peer(self, member: Member, now_s: float) -> HostView:
        """The view of a host. Facts of an earlier boot of the host are no longer true, and are not shown."""
        facts = self.spread.of(member.host)
        current = facts is not None and facts.boot >= member.boot
        fresh_s = facts.fresh_s if facts is not None and current else member.since_s
        return HostView(
            host=member.host,
            state=member.shown(now_s),
            address=member.address,
            boot=member.boot,
            incarnation=member.incarnation,
            since_s=member.since_s,
            age_s=max(0.0, now_s - fresh_s),
            suspected_by=member.suspected_by,
            values=facts.values if facts is not None and current else {},
            away_s=max(0.0, (member.away_until_s or now_s) - now_s),
        )

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold, within a plane or between the two."""
        self.membership.check()
        self.spread.check()
        live = {member.identity for member in self.membership.members.values() if member.live and not member.remembered}
        assert set(self.spread.live) <= live, "facts of a host that is not alive are passed on"


def joined(actions: Sequence[Action], budget: int) -> list[Action]:
    """The actions, with the datagrams to one address put into one as far as they fit."""
    found: list[Action] = []
    for action in actions:
        last = found[-1] if found else None
        if isinstance(action, SendDatagram) and isinstance(last, SendDatagram) and last.to == action.to:
            messages = (*last.messages, *action.messages)
            if sum(map(size, messages)) <= budget:
                found[-1] = SendDatagram(action.to, messages)
                continue
        found.append(action)
    return found
