"""Parts of the membership machine's memory: members, suspicions, rumours, the order of probes."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from covey.core import HostId, Message
from covey.ports import Address
from gossip.membership import policy
from gossip.membership.messages import Gone, Left, Record, Suspect
from gossip.words import State, identity, size


@dataclass
class Suspicion:
    """A host is suspected since `start_s`. `extra_s` is time in which we could not listen and that does not count."""

    start_s: float
    by: list[HostId]
    """The first one, then everybody who confirmed it independently."""
    extra_s: float = 0.0
    timer_s: float = float("inf")
    """When the next timer for it fires."""


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
    """Known from before a restart of this host only: not heard of since."""
    identity: int = field(init=False)

    def __post_init__(self) -> None:
        self.identity = identity(self.host, self.uuid)

    @property
    def live(self) -> bool:
        return self.state in ("alive", "suspect")

    @property
    def order(self) -> tuple[int, int, State]:
        return (self.boot, self.incarnation, self.state)

    def record(self) -> Record:
        return Record(
            self.host,
            self.uuid,
            self.boot,
            self.incarnation,
            self.address,
            policy.rank(self.state),
            self.suspected_by or HostId(""),
        )

    def accusation(self) -> Suspect | Gone | Left | None:
        """What is said of it that it would want to refute."""
        by = self.suspected_by or self.host
        match self.state:
            case "alive":
                return None
            case "suspect":
                return Suspect(self.host, self.identity, self.boot, self.incarnation, by)
            case "gone":
                return Gone(self.host, self.identity, self.boot, self.incarnation, by)
            case "left":
                return Left(self.host, self.identity, self.boot, self.incarnation)


@dataclass
class Rumour:
    message: Message
    bytes: int
    serial: int
    sends: int = 0


class Rumours:
    """What is to be told on: the newest of each host, those sent least first (memberlist, TransmitLimitedQueue)."""

    def __init__(self) -> None:
        self._by_host: dict[HostId, Rumour] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._by_host)

    def tell(self, host: HostId, message: Message) -> None:
        """From now on tell this about `host`, and nothing older."""
        self._serial += 1
        self._by_host[host] = Rumour(message, size(message), self._serial)

    def drop(self, host: HostId) -> None:
        self._by_host.pop(host, None)

    def take(self, budget: int, sends_max: int) -> list[Message]:
        """What fits into `budget` bytes; told `sends_max` times a rumour is over."""
        found: list[Message] = []
        for host, rumour in sorted(self._by_host.items(), key=lambda item: (item[1].sends, -item[1].serial)):
            if rumour.bytes > budget:
                continue
            found.append(rumour.message)
            budget -= rumour.bytes
            rumour.sends += 1
            if rumour.sends >= sends_max:
                del self._by_host[host]
        return found


@dataclass
class Probe:
    """Is `target` there? Open from its ping to the next `ProbeDue`."""

    seq: int
    target: HostId
    identity: int
    sent_s: float
    acked: bool = False
    helpers: tuple[HostId, ...] = ()
    nacks: set[HostId] = field(default_factory=set)


@dataclass
class Relay:
    """A ping on behalf of another host."""

    origin: Address
    origin_seq: int
    target: HostId


class ProbeOrder:
    """Every host once per round, in an order shuffled for each round: so a dead one is probed within 2n - 1 periods
    at worst (SWIM 4.3). New hosts come in at a random place."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._order: list[HostId] = []
        self._next = 0

    def add(self, host: HostId) -> None:
        place = self._rng.randint(self._next, len(self._order))
        self._order.insert(place, host)

    def again(self, host: HostId) -> None:
        """Probe this one next."""
        self._order.insert(self._next, host)

    def next(self, live: Iterable[HostId]) -> HostId | None:
        """The next one of `live`; None when there is none."""
        wanted = set(live)
        while self._next < len(self._order):
            host = self._order[self._next]
            self._next += 1
            if host in wanted:
                return host
        self._order = sorted(wanted)
        self._rng.shuffle(self._order)
        self._next = 1
        return self._order[0] if self._order else None
