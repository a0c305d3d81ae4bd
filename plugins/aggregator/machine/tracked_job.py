"""One job as an agent that may coordinate it knows it: its state, and one method for each transition.

A state has what is known in it and in no other: an open offer exists only while a host is asked, a promise only while
a host sums the job. What outlives states is on `TrackedJob`. Only `JobCoordinator` calls the transitions.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Self, assert_never

import msgspec

from covey.core.ids import HostId, JobId
from covey.core.transitions import CheckedState, StateTable
from plugins.aggregator import policy
from plugins.aggregator.machine.events import GangPlaced
from plugins.aggregator.machine.profiler import Profiler
from plugins.aggregator.messages import Assigned, Demand
from plugins.aggregator.policy import Candidate

TRIES_MAX = 16
"""Hosts that are asked for room; after that the job is offered without a promise."""
HOME_S = (10.0, 1800.0)
"""First and longest pause in seconds between offers of a table to the host that it is to stay on, while another sums
it."""
FORGIVE_S = 10.0
"""Seconds between complaints beyond which they are separate ones."""


def stays_on(placed: GangPlaced) -> HostId | None:
    """The host that the job is to stay on; None: it may be anywhere."""
    return placed.prefers if placed.stays else None


class AnySearch(msgspec.Struct, frozen=True, kw_only=True):
    """A search for an aggregator."""

    declined: Mapping[HostId, str] = {}
    """Host that was asked -> why it declined."""
    direct: bool = False
    """Ranks of the job are asked, by their hosts; False: aggregators."""
    or_aggd: bool = True
    """When no rank takes it, aggregators are asked."""
    some_cannot: bool = False
    """There are ranks, on hosts that declined, which cannot own it or do not answer."""

    def asks_aggregators(self) -> Self:
        """The search after no rank took the job."""
        return msgspec.structs.replace(self, declined={}, direct=False)

    def declining(self, host: HostId, why: str, no_ranks: bool = False) -> Self:
        """The search after one more host declined. `no_ranks`: since no rank with tensors is there."""
        some_cannot = self.some_cannot or (self.direct and not no_ranks)
        return msgspec.structs.replace(self, declined={**self.declined, host: why}, some_cannot=some_cannot)


class OwnerSearch(AnySearch, frozen=True):
    """A search for an aggregator of a job that no host sums."""

    promised: bool
    """The offer includes what the job needs; False: some host must sum it, and promises nothing."""
    avoid: HostId | None = None
    """The former owner, which is asked last."""

    def hosts_to_ask(
        self, placed: GangPlaced, demand: Demand | None, candidates: Sequence[Candidate]
    ) -> Sequence[HostId]:
        """Aggregators that have not declined, best first."""
        usable = [one for one in candidates if one.host not in self.declined]
        if demand is None or not self.promised:
            avoid = () if self.avoid is None else (self.avoid,)
            return policy.ranked(placed.job, usable, avoid, placed.prefers, placed.stays)
        likely, rest = policy.ranked_for(placed.job, demand, usable, stays_on=stays_on(placed))
        hosts = [*likely, *rest] if len(self.declined) < TRIES_MAX else []
        return sorted(hosts, key=lambda host: host == self.avoid)

    def rank_hosts(self, placed: GangPlaced, gone: Collection[HostId]) -> Sequence[HostId]:
        """Hosts whose ranks have not been asked, best first."""
        avoid = () if self.avoid is None else (self.avoid,)
        hosts = policy.ranks_ranked(placed.places, gone, placed.prefers, avoid)
        return [host for host in hosts if host not in self.declined]


class MoveSearch(AnySearch, frozen=True):
    """A search for another aggregator of a job whose owner keeps summing meanwhile."""

    assigned: Assigned
    """The assignment to the present owner, which keeps summing."""
    promised: bool
    """The offer includes what the job needs; False: its trial is not over."""
    wanted: HostId | None
    """The only host to offer it to, which holds room; None: any may be asked."""
    quiet: bool
    """Only aggregators with little to do are asked: the job hurt another one, or was hurt."""

    def hosts_to_ask(
        self, placed: GangPlaced, demand: Demand | None, candidates: Sequence[Candidate]
    ) -> Sequence[HostId]:
        """The host that holds room, or those that have some by gossip, best first."""
        usable = [one for one in candidates if one.host not in self.declined and one.host != self.assigned.owner]
        if self.wanted is not None or demand is None:
            return [one.host for one in usable if one.host == self.wanted]
        return policy.ranked_for(placed.job, demand, usable, self.quiet, stays_on(placed))[0]

    def rank_hosts(self, placed: GangPlaced, gone: Collection[HostId]) -> Sequence[HostId]:
        """The host that is wanted, if ranks of the job are there and none of them owns it."""
        own = self.assigned.owner if self.assigned.direct else None
        hosts = policy.ranks_ranked(placed.places, gone, self.wanted)
        return [host for host in hosts if host == self.wanted != own and host not in self.declined]


class Away(msgspec.Struct, frozen=True):
    """Another host is its coordinator, or all its hosts are gone."""

    offered: tuple[HostId, int] | None = None
    """Host that was asked, and under which epoch, when this host gave the job back: an acceptance would be unknown
    elsewhere."""


class Surveying(msgspec.Struct, frozen=True):
    """The hosts of its ranks are asked which assignment they know."""

    asked: Sequence[HostId]
    """Hosts that have not answered."""
    found: Assigned | None = None
    """The newest assignment that one of them knew."""


class Offering(msgspec.Struct, frozen=True):
    """Nobody sums it, and one host is asked to."""

    search: OwnerSearch
    to: HostId
    epoch: int
    secret: bytes


class ChangingOwner(msgspec.Struct, frozen=True):
    """Its owner goes on, and one host is asked to take it over."""

    search: MoveSearch
    to: HostId
    epoch: int
    secret: bytes


class Summed(msgspec.Struct, frozen=True):
    """Its owner sums it."""

    assigned: Assigned
    promised: bool
    """The owner promised what the job needs."""
    complaints: tuple[float, float] | None = None
    """Time of the first and last complaint of the present series, seconds."""
    checking: bool = False
    """The owner was asked whether it serves the job."""


class Nobody(msgspec.Struct, frozen=True):
    """Nobody takes it; hosts are asked again each second."""


State = Away | Surveying | Offering | ChangingOwner | Summed | Nobody
ELSEWHERE = "a host of lower ranks is back, or this host is taken for gone: another one is its coordinator"
NEWER = "a host of its ranks says that a newer owner sums it"
HIGHER = "it accepted under an epoch below one heard meanwhile: asked again, above that"
TRANSITIONS: StateTable[State] = StateTable(
    "a job that looks for an aggregator",
    {
        Away: {Surveying: "this host is its coordinator now: that of its lowest live rank"},
        Surveying: {
            Surveying: "some answered or are gone, others have not",
            Summed: f"all answered, and the newest owner that they know goes on; or {NEWER}",
            Offering: "all answered, nobody sums it: the best host is asked",
            Nobody: "all answered, nobody sums it, and no host can be asked",
            Away: ELSEWHERE,
        },
        Offering: {
            Offering: f"the host asked declined, is gone or did not answer: the next one is asked; or {HIGHER}",
            Summed: f"the host asked accepted; or {NEWER}",
            Nobody: "nobody is left to be asked",
            Away: ELSEWHERE,
        },
        ChangingOwner: {
            ChangingOwner: f"the host asked declined, is gone or did not answer: the next one is asked; or {HIGHER}",
            Summed: f"the host asked accepted, and its owner is retired; or nobody takes it, and it stays; or {NEWER}",
            Offering: "its owner is gone or dropped it while it moved",
            Nobody: "its owner is gone or dropped it while it moved, and no host can be asked",
            Away: ELSEWHERE,
        },
        Summed: {
            Summed: f"its promise or the complaints of its ranks change; or {NEWER}",
            ChangingOwner: "its owner has not enough room for it, or wants it to leave: another one is asked",
            Offering: "its owner is gone, dropped it or cannot be used: another one is asked",
            Nobody: "its owner is gone, dropped it or cannot be used, and no host can be asked",
            Away: ELSEWHERE,
        },
        Nobody: {
            Offering: "an aggregator appeared, or has declined a second ago",
            Summed: NEWER,
            Away: ELSEWHERE,
        },
    },
)


class TrackedJob:
    state = CheckedState(TRANSITIONS)

    def __init__(self, placed: GangPlaced, gauge: Profiler) -> None:
        self.placed = placed
        self._begin(gauge, Away())

    def _begin(self, gauge: Profiler, away: Away) -> None:
        self.state = away
        self.gauge = gauge
        self.epoch = 0
        """Highest epoch seen or used."""
        self.newest_epoch: int | None = None
        """Epoch of the newest assignment, also when that is over."""
        self.again_s = 0.0
        """Time at which to look for room again, if not promised."""
        self._home_s, self._home_pause_s = 0.0, HOME_S[0]
        """Time at which to offer it to the host that it is to stay on, if another sums it; and the pause after that."""
        self._wished: HostId | None = None
        """Host on which a person wants it."""
        self.refused = ""
        """The last refusal, for people."""
        self.not_direct = ""
        """Why none of its ranks owns it, for people."""
        self.seen = (0, 0)
        """Bytes of its largest tensor, and of all its tensors, as told to other plugins."""
        self.superseded: dict[HostId, int] = {}
        """Former owners that may not know it yet -> their epoch."""

    @property
    def job(self) -> JobId:
        return self.placed.job

    @property
    def assigned(self) -> Assigned | None:
        """The present assignment; None: no host sums it."""
        match self.state:
            case Summed(assigned=assigned) | ChangingOwner(search=MoveSearch(assigned=assigned)):
                return assigned
            case _:
                return None

    def summed_as(self, epoch: int) -> Summed | None:
        """The state, if its owner sums it under this epoch and it does not move."""
        state = self.state
        return state if isinstance(state, Summed) and state.assigned.epoch == epoch else None

    def open_offer(self, host: HostId, epoch: int) -> Offering | ChangingOwner | None:
        """The state, if this host is being asked under this epoch."""
        state = self.state
        if not isinstance(state, Offering | ChangingOwner):
            return None
        return state if (state.to, state.epoch) == (host, epoch) else None

    def is_of_run(self, epoch: int) -> bool:
        """Does an assignment of this epoch belong to this run of the job?"""
        return policy.of_run(epoch, self.placed.grant)

    def check(self) -> None:
        state = self.state
        match state:
            case Surveying():
                assert state.asked
            case Offering() | ChangingOwner():
                assert state.epoch <= self.epoch and state.to not in state.search.declined
            case Away() | Summed() | Nobody():
                pass
            case _:
                assert_never(state)
        if self.assigned is not None:
            assert self.assigned.epoch <= self.epoch and self.is_of_run(self.assigned.epoch)

    @property
    def server(self) -> HostId | None:
        """The host that the job is to stay on though none of its ranks is there; None: it has some, or may be
        anywhere."""
        home = stays_on(self.placed)
        return None if home in {place.host for place in self.placed.places} else home

    @property
    def home(self) -> HostId | None:
        """The host that the job is to stay on; None: it may be anywhere."""
        return self._wished or stays_on(self.placed)

    def wish(self, host: HostId | None) -> None:
        """A person wants the job on this host."""
        self._wished, self._home_pause_s = host, HOME_S[0]

    def assigned_at(self, now_s: float) -> None:
        """A host accepted the job."""
        assigned = self.assigned
        direct = self.placed.direct and self.home != self.server
        if assigned is not None and assigned.owner == self.home and assigned.direct >= direct:
            self._home_pause_s = HOME_S[0]
        self._home_s = now_s + self._home_pause_s

    def due_home(self, assigned: Assigned, gone: Collection[HostId], now_s: float) -> MoveSearch | None:
        """A search that offers the job now to the host that it is to stay on, since another sums it, or the host's
        `aggd` although one of its ranks may; a host that declines is asked less and less often."""
        home, direct, is_there = self.home, self.placed.direct, assigned.owner == self.home
        as_aggd = self._wished is not None or (home is not None and home == self.server)
        if is_there and (assigned.direct or not direct or as_aggd):
            return None
        if home is None or home in gone or now_s < self._home_s:
            return None
        self._home_pause_s = min(2 * self._home_pause_s, HOME_S[1])
        self._home_s = now_s + self._home_pause_s
        or_aggd = as_aggd or not (is_there or assigned.direct)
        return self.move_search(assigned, home, or_aggd)

    def move_search(self, assigned: Assigned, to: HostId, or_aggd: bool = True) -> MoveSearch:
        """A search that offers the job to one host alone, first to the job's ranks there where these may own it."""
        known, direct = self.gauge.demand is not None, self.placed.direct
        return MoveSearch(assigned=assigned, promised=known, wanted=to, quiet=False, direct=direct, or_aggd=or_aggd)

    def restay(self, placed: GangPlaced) -> None:
        """Take over where the job is to stay, which is now known, if the gang is still the same. A host that somebody
        says now for it comes before the one that a person wished, and is asked at once."""
        if placed.grant != self.placed.grant:
            return
        before, self.placed = self.placed, placed
        if placed.said_since > before.said_since:
            self.wish(None)
        if placed.said_since != before.said_since or stays_on(placed) != stays_on(before):
            self._home_s, self._home_pause_s = 0.0, HOME_S[0]

    # ---- transitions ----

    def leave(self, gauge: Profiler) -> None:
        """Another host coordinates the job: forget all but an open offer."""
        state = self.state
        offered = (state.to, state.epoch) if isinstance(state, Offering | ChangingOwner) else None
        self._begin(gauge, Away(offered))

    def survey(self, hosts: Sequence[HostId]) -> None:
        self.state = Surveying(hosts)

    def wait_for(self, hosts: Sequence[HostId], found: Assigned | None) -> None:
        """Wait for the hosts that have not answered the survey."""
        self.state = Surveying(hosts, found)

    def offer(self, search: OwnerSearch | MoveSearch, to: HostId, epoch: int, secret: bytes) -> None:
        """Offer the job to one host; an owner that can keep summing does."""
        self.epoch = epoch
        match search:
            case OwnerSearch():
                self.state = Offering(search, to, epoch, secret)
            case MoveSearch():
                self.state = ChangingOwner(search, to, epoch, secret)
            case _:
                assert_never(search)

    def accept(self, state: Offering | ChangingOwner, address: str) -> Assigned:
        """Make the host that was asked its owner; a former one is to be retired."""
        match state:
            case ChangingOwner(search=MoveSearch(assigned=former)):
                self.superseded[former.owner] = former.epoch
            case _:
                pass
        handed_over, direct = isinstance(state, ChangingOwner), state.search.direct
        assigned = Assigned(self.job, state.epoch, state.to, address, state.secret, handed_over, direct)
        self.state, self.newest_epoch = Summed(assigned, state.search.promised), assigned.epoch
        return assigned

    def adopt(self, found: Assigned) -> None:
        """Take over the assignment of another coordinator; the owner's counters will tell what it promised."""
        self.state, self.newest_epoch = Summed(found, promised=False), found.epoch
        self.epoch = max(self.epoch, found.epoch)

    def stay(self, state: ChangingOwner) -> None:
        """No host took the job: it stays with its owner, which has never stopped."""
        self.state = Summed(state.search.assigned, promised=False)

    def give_up(self) -> None:
        """Give up for now: no host can be asked."""
        self.state = Nobody()

    def promise(self, state: Summed, promised: bool) -> None:
        """Note whether the owner keeps what the job needs free for it."""
        if state.promised != promised:
            self.state = msgspec.structs.replace(state, promised=promised)

    def complain(self, state: Summed, now_s: float) -> tuple[Summed, float]:
        """Note that a rank cannot use the owner; returns the new state and for how many seconds that has been so."""
        first, last = state.complaints or (now_s, now_s)
        first = first if now_s - last < FORGIVE_S else now_s
        after = msgspec.structs.replace(state, complaints=(first, now_s))
        self.state = after
        return after, now_s - first

    def question(self, state: Summed, checking: bool) -> None:
        """Note that the owner is asked whether it serves the job, or has answered."""
        self.state = msgspec.structs.replace(state, checking=checking)
