"""The table of members, and how the parts of the machine send messages."""

import math
import random
from dataclasses import dataclass, field

from covey.core.events import Fact, Message, Publish, SetTimer
from covey.core.ids import HostId
from covey.core.metrics import Tally
from covey.ports.addresses import Address
from gossip import metrics
from gossip.membership import messages as m
from gossip.membership import policy
from gossip.membership.machine.events import Action, CallDue, ForgetMember, GossipDue, Timer
from gossip.membership.machine.rumours import Rumours
from gossip.membership.messages import Gone, Left, MemberRecord, Suspect
from gossip.settings import GossipSettings
from gossip.types import (
    U32_MAX,
    HostState,
    LaterBootKnown,
    NameConflict,
    SendDatagram,
    Sender,
    State,
    TableFull,
    identity,
    size,
)

CONFLICT_INTERVAL_S = 30.0
"""Seconds between two reports of one conflict, or of a full table."""
GOSSIP_TO_THE_DEAD_S = 30.0
"""Seconds since it was gone within which a host still gets rumours, so that it can refute (memberlist: 30 s)."""


@dataclass
class Suspicion:
    """The suspicion of a host since `start_s`. `extra_s` is time in which this process was stalled; it does not
    count."""

    start_s: float
    by: list[HostId]
    """The first host that suspected it, then all that confirmed it independently."""
    extra_s: float = 0.0
    timer_s: float = float("inf")
    """When the next timer for the suspicion fires."""


@dataclass
class Member:
    """Another host, as known here. Fields change together, in `Membership` only."""

    host: HostId
    uuid: bytes
    boot: int
    incarnation: int
    address: Address
    state: State
    since_s: float
    suspected_by: HostId | None = None
    suspicion: Suspicion | None = None
    remembered: bool = False
    """Whether the host is known only from before a restart of this one: no message about it came since."""
    away_until_s: float | None = None
    """When a host that left announced to be back, on this host's clock, s; None: never."""
    identity: int = field(init=False)

    def __post_init__(self) -> None:
        self.identity = identity(self.host, self.uuid)

    @property
    def claimant(self) -> policy.Claimant:
        return policy.Claimant(self.identity, self.boot, self.address)

    @property
    def live(self) -> bool:
        return self.state in ("alive", "suspect")

    @property
    def missing(self) -> bool:
        """Whether the host is gone, left with an announced return, or known only from before this one's restart."""
        return self.state == "gone" or self.remembered or (self.state == "left" and self.away_until_s is not None)

    def shown(self, now_s: float) -> HostState:
        if self.state != "left" or self.away_until_s is None:
            return self.state
        return "away" if now_s < self.away_until_s else "gone"

    def has_name(self, now_s: float) -> bool:
        """Whether no other machine may have its name now: it is live, or has said when it will be back."""
        return (self.live and not self.remembered) or self.shown(now_s) == "away"

    def away_s(self, now_s: float) -> int:
        return 0 if self.away_until_s is None else max(0, math.ceil(self.away_until_s - now_s))

    @property
    def order(self) -> tuple[int, int, State]:
        return (self.boot, self.incarnation, self.state)

    def record(self, now_s: float) -> MemberRecord:
        return MemberRecord(
            self.host,
            self.uuid,
            self.boot,
            self.incarnation,
            self.address,
            policy.rank(self.state),
            self.suspected_by or HostId(""),
            self.away_s(now_s),
        )

    def accusation(self, now_s: float) -> Suspect | Gone | Left | None:
        """The message about it that it would refute if it lives; None while it is alive here."""
        by = self.suspected_by or self.host
        match self.state:
            case "alive":
                return None
            case "suspect":
                return Suspect(self.host, self.identity, self.boot, self.incarnation, by)
            case "gone":
                return Gone(self.host, self.identity, self.boot, self.incarnation, by)
            case "left":
                return Left(self.host, self.identity, self.boot, self.incarnation, self.away_s(now_s))


class Table:
    """What all parts of the machine share: this host, its members, and the actions that are being collected."""

    def __init__(self, me: Sender, settings: GossipSettings, budget: int, rng: random.Random) -> None:
        self.me, self.identity = me, me.identity
        self.address: Address = ""
        """This host's address for the others; empty while no peer has told it."""
        self.seeds: tuple[Address, ...] = ()
        """The addresses to join through: those known of `settings.seeds`, a name as all its addresses."""
        self.settings, self.budget, self.rng = settings, budget, rng
        self.now_s = 0.0
        """The time of the event that is being handled."""
        self.incarnation = 0
        self.health = 0
        self.members: dict[HostId, Member] = {}
        self.counts = {"probes": 0, "probes_failed": 0, "probes_void": 0, "refutations": 0, "relays": 0, "full": 0}
        self.round_trips = Tally(metrics.ROUND_TRIP_SECONDS)
        """How long probes took that were answered directly."""
        self.rumours = Rumours()
        self.out: list[Action] = []
        self.call_s = policy.CALL_FIRST_S
        """Seconds to pause before the next call of missing hosts."""
        self.call_generation = 0
        self._gossip_set = False
        self._conflicts: dict[HostId, float] = {}
        self._full_s = float("-inf")
        """When it was last told that this table is full."""
        self._later_boot = me.boot
        """The latest boot number of this agent that any host spoke of."""

    # ---- what is known ----

    @property
    def claimant(self) -> policy.Claimant:
        return policy.Claimant(self.identity, self.me.boot, self.address)

    @property
    def alone(self) -> bool:
        return not any(member.live and not member.remembered for member in self.members.values())

    def records(self) -> tuple[m.MemberRecord, ...]:
        """The whole table, this host included, sorted by name."""
        mine = m.MemberRecord(self.me.host, self.me.uuid, self.me.boot, self.incarnation, self.address, 0, HostId(""))
        all_ = [mine, *(member.record(self.now_s) for member in self.members.values())]
        return tuple(sorted(all_, key=lambda record: record.host))

    def told(self) -> tuple[m.MemberRecord, ...]:
        """What others are told of the table: nothing of hosts that are only remembered from before a restart, which
        may have been forgotten since."""
        known = self.members
        return tuple(each for each in self.records() if each.host not in known or not known[each.host].remembered)

    def checksum(self) -> int:
        return policy.checksum(self.told())

    def by_name(self) -> list[Member]:
        return [self.members[host] for host in sorted(self.members)]

    def hosts(self) -> int:
        """The number of live hosts, this one included."""
        return 1 + sum(member.live for member in self.members.values())

    def mine(self) -> m.Alive:
        return m.Alive(self.me.host, self.me.uuid, self.me.boot, self.incarnation, self.address)

    # ---- sending ----

    def timer(self, after_s: float, event: Timer) -> None:
        self.out.append(SetTimer(after_s, event))

    def publish(self, fact: Fact) -> None:
        self.out.append(Publish(fact))

    def send(self, to: Address, *messages: Message) -> None:
        """Send one datagram, filled up with rumours."""
        if not to:
            return
        room = self.budget - sum(size(message) for message in messages)
        limit = policy.retransmits(self.settings.retransmit_factor, self.hosts())
        rumours = self.rumours.take(room, limit) if len(self.rumours) else ()
        self.out.append(SendDatagram(to, (*messages, *rumours)))

    def rumour(self, host: HostId, message: Message) -> None:
        self.rumours.publish(host, message)
        if not self._gossip_set:
            self._gossip_set = True
            self.timer(self.rng.uniform(0, self.settings.gossip_interval_s), GossipDue())

    def gossip(self, now_s: float) -> None:
        self._gossip_set = False
        if not len(self.rumours):
            return
        reachable = [
            member.address
            for member in self.by_name()
            if member.live or (member.state == "gone" and now_s - member.since_s < GOSSIP_TO_THE_DEAD_S)
        ]
        for address in policy.some(reachable, self.settings.gossip_fanout, self.rng):
            if len(self.rumours):
                self.send(address)
        if reachable:
            self._gossip_set = True
            self.timer(self.settings.gossip_interval_s, GossipDue())

    def refute(self, incarnation: int) -> None:
        self.counts["refutations"] += 1
        self.incarnation = min(U32_MAX, max(self.incarnation, incarnation) + 1)
        self.rumour(self.me.host, self.mine())

    def conflict(self, host: HostId, at: Address, now_s: float) -> None:
        if now_s - self._conflicts.get(host, float("-inf")) >= CONFLICT_INTERVAL_S:
            self._conflicts[host] = now_s
            self.publish(NameConflict(host, at))

    def outrun(self, boot: int) -> None:
        """Note that others know a later boot of this host, and take it for gone."""
        if boot > self._later_boot:
            self._later_boot = boot
            self.publish(LaterBootKnown(boot))

    def call_soon(self) -> None:
        """Call missing hosts with short pauses again, since another one is missing."""
        self.call_generation += 1
        self.call_s = self.settings.probe_interval_s
        self.timer(self.call_s, CallDue(self.call_generation))

    # ---- changes ----

    def feel(self, change: int) -> None:
        self.health = policy.health(self.health, change)

    def make_room(self, host: HostId, now_s: float) -> bool:
        """False when the table is full of live hosts; otherwise the host that is dead for longest is dropped, and this
        one can be let in."""
        if len(self.members) + 1 < self.settings.hosts_max:
            return True
        dead = [member for member in self.by_name() if not member.live]
        if not dead:
            self.counts["full"] += 1
            if now_s - self._full_s >= CONFLICT_INTERVAL_S:
                self._full_s = now_s
                self.publish(TableFull(host))
            return False
        self.drop(min(dead, key=lambda member: (member.state != "left", member.since_s)))
        return True

    def drop(self, member: Member) -> None:
        del self.members[member.host]
        self.rumours.drop(member.host)
        self._conflicts.pop(member.host, None)
        self.out.append(ForgetMember(member.host))
