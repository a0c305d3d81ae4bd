"""Probes: a host is pinged directly, then through others (SWIM 3.1, 4.3; Lifeguard IV-A)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from covey.core.events import Message
from covey.core.ids import HostId
from covey.ports.addresses import Address
from gossip.membership import messages as m
from gossip.membership import policy
from gossip.membership.machine.events import ProbeDue, ProbeLate, RelayLate
from gossip.membership.machine.member_states import MemberStates
from gossip.membership.machine.table import Member, Table
from gossip.types import U32_MAX

RELAYS_MAX = 256
"""The most pings for others that are open at a time."""
NACK_FRACTION = 0.6
"""The part of the probe timeout after which a helper reports that it got no answer: early enough for the asker's
interval."""


@dataclass
class ProbeUnderWay:
    """The probe of `target`: open from its ping to the next `ProbeDue`."""

    seq: int
    target: HostId
    identity: int
    sent_s: float
    acked: bool = False
    asked: bool = False
    """Whether the host was pinged again, and others were asked to: of an answer it is not known which ping it is to."""
    helpers: tuple[HostId, ...] = ()
    nacks: set[HostId] = field(default_factory=set)


@dataclass
class Relay:
    """A ping on behalf of another host."""

    origin: Address
    origin_seq: int
    target: HostId


class ProbeOrder:
    """The order of probes: every host once per round, in an order shuffled for each round: so a dead one is probed
    within 2n - 1 periods at worst (SWIM 4.3). A new host gets a random place in the present round."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._coming: list[HostId] = []
        """The rest of this round, the next one last."""
        self._round: set[HostId] = set()
        """Every host that has a place in this round."""

    def again(self, host: HostId) -> None:
        """Probe this host next."""
        self._coming.append(host)

    def next(self, live: Sequence[HostId]) -> HostId | None:
        """The next host of `live`, which is sorted; None when there is none."""
        for host in live:
            if host not in self._round:
                self._round.add(host)
                self._coming.insert(self._rng.randint(0, len(self._coming)), host)
        wanted = set(live)
        while self._coming:
            host = self._coming.pop()
            if host in wanted:
                return host
        self._round = wanted
        self._coming = list(live)
        self._rng.shuffle(self._coming)
        return self._coming.pop() if self._coming else None


class Prober:
    """Probes hosts, one at a time, and pings on behalf of others."""

    def __init__(self, table: Table, standing: MemberStates) -> None:
        self._table, self._standing = table, standing
        self._order = ProbeOrder(table.rng)
        self._probe: ProbeUnderWay | None = None
        self.relays: dict[int, Relay] = {}
        self._seq = table.rng.getrandbits(32)

    def next(self, now_s: float) -> None:
        self._end_probe(now_s)
        target = self._order.next([member.host for member in self._table.by_name() if member.live])
        if target is not None:
            self._begin_probe(self._table.members[target], now_s)
        self._table.timer(self._table.settings.probe_interval_s * (self._table.health + 1), ProbeDue())

    def _begin_probe(self, target: Member, now_s: float) -> None:
        self._seq = (self._seq + 1) & U32_MAX
        self._probe = ProbeUnderWay(self._seq, target.host, target.identity, now_s)
        self._table.counts["probes"] += 1
        self._ping(target, self._seq)
        self._table.timer(self._table.settings.probe_timeout_s, ProbeLate(self._seq))

    def _ping(self, target: Member, seq: int) -> None:
        """Ping a host. The ping to a suspect says that it is one: Lifeguard's buddy system."""
        accusation = None if target.remembered else target.accusation(self._table.now_s)
        self._table.send(target.address, m.Ping(seq, target.identity), *(() if accusation is None else (accusation,)))

    def ask_others(self, seq: int) -> None:
        """Ping through others; and directly once more, since one lost datagram proves nothing."""
        probe = self._probe
        if probe is None or probe.seq != seq or probe.acked:
            return
        target = self._table.members.get(probe.target)
        if target is None or not target.live:
            return
        probe.asked = True
        others = [member for member in self._table.by_name() if member.state == "alive" and member.host != probe.target]
        helpers = policy.some(others, self._table.settings.indirect_probes, self._table.rng)
        probe.helpers = tuple(helper.host for helper in helpers)
        for helper in helpers:
            self._table.send(helper.address, m.PingReq(seq, probe.target, probe.identity))
        self._ping(target, seq)

    def _end_probe(self, now_s: float) -> None:
        probe, self._probe = self._probe, None
        if probe is None or probe.acked:
            return
        target = self._table.members.get(probe.target)
        if target is None or target.identity != probe.identity or not target.live:
            return
        stalled_s = policy.overlap_s(self._standing.stalls, probe.sent_s, now_s)
        if stalled_s > self._table.settings.probe_timeout_s / 2:
            self._table.counts["probes_void"] += 1
            self._table.feel(1)
            self._order.again(probe.target)
            return
        self._table.counts["probes_failed"] += 1
        self._table.feel(policy.change_after_failed_probe(len(probe.helpers), len(probe.nacks)))
        self._standing.suspected(target, target.boot, target.incarnation, self._table.me.host, now_s)

    def acked(self, sender: HostId, seq: int) -> None:
        relay = self.relays.get(seq)
        if relay is not None and relay.target == sender:
            del self.relays[seq]
            self._table.send(relay.origin, m.Ack(relay.origin_seq))
            return
        probe = self._probe
        if probe is None or probe.seq != seq or probe.acked or sender not in (probe.target, *probe.helpers):
            return
        probe.acked = True
        if not probe.asked:
            self._table.round_trips.see(self._table.now_s - probe.sent_s)
        self._table.feel(-1)

    def nacked(self, sender: HostId, seq: int) -> None:
        probe = self._probe
        if probe is not None and probe.seq == seq and sender in probe.helpers:
            probe.nacks.add(sender)

    def relay(self, source: Address, request: m.PingReq) -> list[Message]:
        target = self._table.members.get(request.target)
        if target is None or target.identity != request.identity or not target.live or len(self.relays) >= RELAYS_MAX:
            return [m.Nack(request.seq)]
        self._seq = (self._seq + 1) & U32_MAX
        self.relays[self._seq] = Relay(source, request.seq, request.target)
        self._table.counts["relays"] += 1
        self._ping(target, self._seq)
        self._table.timer(self._table.settings.probe_timeout_s * NACK_FRACTION, RelayLate(self._seq))
        return []

    def relay_late(self, seq: int) -> None:
        relay = self.relays.pop(seq, None)
        if relay is not None:
            self._table.send(relay.origin, m.Nack(relay.origin_seq))
