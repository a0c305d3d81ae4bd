"""The coordinator's part: find the GPUs of a granted gang, all of them or none.

    GrantSeen --> plan on the gossiped view --> Reserve to each host --> all yes --> propose Placed
                      ^                             |
                      +-- Release all, wait --------+ a no, or silence        (after n attempts: PlaceFailed)

The view may be old, so each host is asked, and a host that refuses says how many GPUs are free there; the next attempt
plans with that number. GPUs that the log keeps for another gang meanwhile are closed to the plan too. Nothing starts
here: committing Placed is the start, and a host that said yes holds its GPUs until the log says what became of the
grant.

A gang that runs, and has lost hosts or is to leave some, gets others in the same way: one for each of these places. A
host that has ranks of the gang already takes more if a person wants that, or if no other host has room. Replaced is the
start then.

An elastic job that is to grow gets places for new processes in the same way: hosts that have some of it come first,
then the freest, and where there is not room for all some are better than none. Arranged is their start.
"""

from collections.abc import Mapping, Sequence
from typing import assert_never

import msgspec

from covey.core.events import Heard, Send, SetTimer, Undelivered
from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.log.replacing import taken_over
from plugins.scheduler.messages.commands import (
    Applied,
    Arranged,
    Arrangement,
    NotApplied,
    Placed,
    PlaceFailed,
    Replaced,
    Result,
)
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.messages.wire import NotReserved, Release, Reserve, Reserved, ToGang
from plugins.scheduler.policy.carrying import Carried, carried_after
from plugins.scheduler.policy.place import grow, in_company, place, spread, stand_in
from plugins.scheduler.policy.settings import SchedulerSettings

RETRY_S = (0.2, 0.5, 1.0)
"""Seconds to wait before the 2nd, 3rd, ... attempt."""
ATTEMPTS = 1 << 42
"""The attempts of one search are numbered below this; those of the next search for the same grant are higher by it. In
the upper half are those of wishes (`machine/gang/wishes.py`), numbered by milliseconds."""
Placement = Placed | PlaceFailed | Replaced | Arranged
"""What a coordinator proposes to the log."""
REFUSALS_KEPT_S = 10.0
"""Seconds for which a host's own answer about its free GPUs counts before gossip."""


class PlacesSought(msgspec.Struct, frozen=True):
    """Places of a running gang that are to continue elsewhere, or places for more processes of an elastic job."""

    places: tuple[tuple[Place, HostId | None], ...]
    """Places that are to move, each with the host that somebody wants for it."""
    avoid: tuple[HostId, ...]
    """Hosts where ranks of the gang are."""
    since: int
    """`Place.since` of the new places."""
    number: int
    """The search's number: it grows each time that places of this grant are looked for."""
    prefer: HostId | None = None
    """The host where processes wait to become the gang's ranks (`submit --spares`): the first choice, if there is
    room."""
    stays: tuple[Place, ...] = ()
    """Places of the gang that more ranks may join; of an elastic job that is to grow all of them."""
    begins: int = 0
    """The number of processes that an elastic job is to grow by."""
    carried: Carried = {}
    """What each process of it carries now."""

    def joined(self, host: HostId) -> Place | None:
        """The gang's place on this host, which ranks that go there join."""
        return next((place for place in self.stays if place.host == host), None)


class GrantSeen(msgspec.Struct, frozen=True):
    """Event: the log makes this host the coordinator of a grant."""

    job: JobId
    epoch: int
    spec: JobSpec
    skew: float | None = None
    """The skew that placement goes by (`machine/log/models.py`)."""
    opportunistic: bool = False
    """Whether the job is opportunistic now."""
    apart_from: tuple[JobId, ...] = ()
    """Guaranteed jobs beside which it must not be (`JobTable.apart_from`)."""
    sought: PlacesSought | None = None
    """The places that are looked for, of a gang that runs; None: all of them."""


class GrantOver(msgspec.Struct, frozen=True):
    """Event: the log took the grant away, or placed it."""

    job: JobId
    epoch: int
    placed: bool


class RackSeen(msgspec.Struct, frozen=True):
    """Event: hosts that are alive, with the GPUs that gossip calls free for the job that is looked at next, and the
    ranks that run there."""

    free: dict[HostId, int]
    ranks: dict[HostId, int]
    packlimit: float | None = None
    """The packing limit fitted from history; None: the one that was set."""
    company: frozenset[HostId] = frozenset()
    """Hosts where jobs run with which the job that is looked at next takes turns."""
    most: dict[HostId, int] | None = None
    """How many workers more of the job that is looked at next each host has processors for; None: any number."""


class KeptForAnother(msgspec.Struct, frozen=True):
    """Event: the log keeps GPUs for another gang since this one was granted."""

    job: JobId
    epoch: int
    by: JobId
    free: dict[HostId, int]
    """GPUs on which this gang may still start, by the log, of each host where some are kept."""


class AttemptOver(msgspec.Struct, frozen=True):
    """Event (timer): the hosts had their time to answer."""

    job: JobId
    epoch: int
    attempt: int


class TryAgain(msgspec.Struct, frozen=True):
    """Event (timer): the pause after an attempt is over."""

    job: JobId
    epoch: int
    attempt: int


class PlacementProposed(msgspec.Struct, frozen=True):
    """Event: what the log answered to a proposal; None while that is not known."""

    command: Placement
    result: Result | None


class ProposePlacement(msgspec.Struct, frozen=True):
    """Action: propose this command to the log, and come back with `PlacementProposed`."""

    command: Placement


Event = (
    GrantSeen | GrantOver | RackSeen | KeptForAnother | AttemptOver | TryAgain | PlacementProposed | Heard | Undelivered
)
Action = Send | SetTimer[AttemptOver | TryAgain] | ProposePlacement


class HostSearch(msgspec.Struct):
    """One grant that is being placed."""

    job: JobId
    epoch: int
    spec: JobSpec
    skew: float | None = None
    opportunistic: bool = False
    apart_from: tuple[JobId, ...] = ()
    sought: PlacesSought | None = None
    goes: dict[HostId, Place] = {}
    """The plan's moves: host -> the place that it takes over."""
    attempt: int = 0
    plan: dict[HostId, int] = {}
    """Workers per host, in rank order; empty between attempts."""
    yes: dict[HostId, Reserved] = {}
    proposed: Placement | None = None
    trouble: str = ""
    """Why the newest attempt failed."""
    refusal: str = ""
    """Who refused last, and why: gossip of that host's free GPUs counts for nothing then."""

    @property
    def key(self) -> tuple[int, int]:
        """The epoch, and the number of the search under it."""
        return self.epoch, self.number

    @property
    def number(self) -> int:
        return self.sought.number if self.sought is not None else 0

    @property
    def tries(self) -> int:
        """The number of attempts so far."""
        return self.attempt - ATTEMPTS * self.number


class Gangs:
    """The searches of all grants whose coordinator is this host."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.searches: dict[JobId, HostSearch] = {}
        self.free: dict[HostId, int] = {}
        self.ranks: dict[HostId, int] = {}
        self.company: frozenset[HostId] = frozenset()
        self.packlimit = settings.packlimit
        self.most: dict[HostId, int] | None = None
        """How many workers more of the job that is looked at each host has processors for; None: any number."""
        self.memory_short: dict[tuple[HostId, JobId], float] = {}
        """Hosts that had no room for a job's memory by their own word -> until when that counts."""
        self.refusals: dict[tuple[HostId, bool], tuple[int, float]] = {}
        """Refusals: (host, whether parts were asked for) -> (free GPUs by the host's own word, until when that
        counts)."""

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        match event:
            case RackSeen():
                self.free, self.ranks, self.company = dict(event.free), dict(event.ranks), event.company
                self.most = event.most
                self.packlimit = self.settings.packlimit if event.packlimit is None else event.packlimit
                return ()
            case GrantSeen():
                return self._seen(event, now_s)
            case GrantOver():
                return self._grant_over(event)
            case KeptForAnother():
                return self._kept_for_another(event)
            case AttemptOver():
                search = self._find(event.job, event.epoch, event.attempt)
                if search is None or not search.plan or search.proposed is not None:
                    return ()
                silent = ", ".join(host for host in search.plan if host not in search.yes)
                return self._fail(search, f"no answer from {silent} in {self.settings.reserve_deadline_s:g} s")
            case TryAgain():
                search = self._find(event.job, event.epoch, event.attempt)
                return () if search is None or search.plan else self._attempt(search, now_s)
            case PlacementProposed():
                return self._proposed(event)
            case Heard():
                return self._heard(event.sender, event.message, now_s)
            case Undelivered():
                return self._undelivered(event)
            case _:
                assert_never(event)

    def check(self) -> None:
        """Raise AssertionError unless each gang is proposed whole: every host of its plan said yes to as many GPUs as
        its workers need."""
        for search in self.searches.values():
            assert set(search.yes) <= set(search.plan)
            if isinstance(search.proposed, Placed):
                assert [place.host for place in search.proposed.places] == list(search.plan) == sorted(search.yes)
                assert sum(len(place.ranks) for place in search.proposed.places) == search.spec.workers
            if isinstance(search.proposed, Arranged):
                assert search.sought is not None and set(search.plan) == set(search.yes)
                assert 0 < sum(search.plan.values()) <= search.sought.begins
            if isinstance(search.proposed, Replaced):
                assert search.sought is not None and set(search.plan) == set(search.yes)
                joined = {place.host for place in search.sought.stays}
                assert not set(search.plan) & (set(search.sought.avoid) - joined), "a host has two places of one gang"
                assert set(search.proposed.places) == {place.host for place, _ in search.sought.places}

    # ---- events ----

    def _seen(self, event: GrantSeen, now_s: float) -> Sequence[Action]:
        known = self.searches.get(event.job)
        search = HostSearch(
            event.job, event.epoch, event.spec, event.skew, event.opportunistic, event.apart_from, event.sought
        )
        if known is not None and known.key >= search.key:
            return ()
        before = self._release(known) if known is not None else []
        search.attempt = ATTEMPTS * search.number
        self.searches[event.job] = search
        return [*before, *self._attempt(search, now_s)]

    def _grant_over(self, event: GrantOver) -> Sequence[Action]:
        search = self.searches.get(event.job)
        if search is None or search.epoch > event.epoch:
            return ()
        del self.searches[event.job]
        return [] if event.placed else self._release(search)

    def _kept_for_another(self, event: KeptForAnother) -> Sequence[Action]:
        """Give a plan up that needs GPUs kept for another gang, unless it is proposed already: then it comes first."""
        search = self.searches.get(event.job)
        if search is None or search.epoch != event.epoch or search.proposed is not None:
            return ()
        each = search.spec.gpus_per_worker
        closed = [host for host, free in event.free.items() if search.plan.get(host, 0) * each > free]
        return self._fail(search, f"GPUs on {', '.join(closed)} are now reserved for {event.by}") if closed else ()

    def _attempt(self, search: HostSearch, now_s: float) -> Sequence[Action]:
        search.attempt += 1
        plan = self._plan(search, now_s)
        if not plan:
            have = ", ".join(f"{host} {count}" for host, count in sorted(self._known_free(search, now_s).items()))
            misfit = "not all ranks have room" if search.sought is None else "no other host has room"
            misfit = "no host has room for another process" if search.sought and search.sought.begins else misfit
            said = f" ({search.refusal})" if search.refusal else ""
            return self._fail(search, f"free GPUs by host are {have or 'none'}: {misfit}{said}")
        search.plan, search.yes = dict(sorted(plan.items())), {}
        first = next(iter(search.plan)) if search.sought is None else None
        asks: list[Action] = [
            Send(
                host,
                Reserve(
                    search.job,
                    search.epoch,
                    search.attempt,
                    workers,
                    search.spec.gpus_per_worker,
                    host == first or (host in search.goes and 0 in search.goes[host].ranks),
                    self.settings.reservation_lease_s,
                    search.opportunistic,
                    search.spec.gpu_memory,
                    search.apart_from,
                    search.sought is not None and search.sought.joined(host) is not None,
                    search.spec.host_memory,
                    search.spec.cpus,
                ),
                self.settings.reserve_deadline_s,
            )
            for host, workers in search.plan.items()
        ]
        timer = AttemptOver(search.job, search.epoch, search.attempt)
        return [*asks, SetTimer[AttemptOver | TryAgain](self.settings.reserve_deadline_s, timer)]

    def _heard(self, sender: HostId, message: ToGang, now_s: float) -> Sequence[Action]:
        match message:
            case Reserved():
                return self._said_yes(sender, message)
            case NotReserved():
                return self._said_no(sender, message, now_s)
            case _:
                assert_never(message)

    def _said_yes(self, host: HostId, answer: Reserved) -> Sequence[Action]:
        search = self._find(answer.job, answer.epoch, answer.attempt)
        wanted = search.plan.get(host) if search is not None else None
        if search is None or wanted is None:
            placed = self._placed_with(answer, host)
            return [] if placed else [Send(host, Release(answer.job, answer.epoch, answer.attempt))]
        if search.proposed is not None:
            return []
        if wrong := wrong_yes(host, answer, wanted * search.spec.gpus_per_worker):
            return self._fail(search, wrong)
        search.yes[host] = answer
        if len(search.yes) < len(search.plan):
            return []
        search.yes = dict(sorted(search.yes.items()))
        if search.sought is None:
            search.proposed = self._placed(search)
        elif search.sought.begins:
            search.proposed = self._arranged(search, search.sought)
        else:
            search.proposed = self._replaced(search, search.sought)
        return [ProposePlacement(search.proposed)]

    def _placed_with(self, answer: Reserved, host: HostId) -> bool:
        """Whether this yes is one that the proposal under way counts on (said twice)."""
        search = self.searches.get(answer.job)
        found = search.yes.get(host) if search is not None and search.proposed is not None else None
        return found is not None and (found.epoch, found.attempt) == (answer.epoch, answer.attempt)

    def _said_no(self, host: HostId, answer: NotReserved, now_s: float) -> Sequence[Action]:
        if answer.memory_short:
            self.memory_short[host, answer.job] = now_s + REFUSALS_KEPT_S
        else:
            self.refusals[host, answer.beside] = (answer.free, now_s + REFUSALS_KEPT_S)
        search = self._find(answer.job, answer.epoch, answer.attempt)
        if search is None or host not in search.plan or search.proposed is not None:
            return ()
        search.refusal = f"{host} refused: {answer.reason}"
        return self._fail(search, search.refusal)

    def _undelivered(self, event: Undelivered) -> Sequence[Action]:
        if not isinstance(event.message, Reserve):
            return ()
        ask = event.message
        search = self._find(ask.job, ask.epoch, ask.attempt)
        if search is None or event.to not in search.plan or search.proposed is not None:
            return ()
        return self._fail(search, f"{event.to} could not be reached")

    def _proposed(self, event: PlacementProposed) -> Sequence[Action]:
        search = self.searches.get(job_of(event.command))
        if search is None or search.proposed != event.command:
            return ()
        match event.result:
            case None:
                return [ProposePlacement(event.command)]
            case Applied():
                del self.searches[search.job]
                return []
            case NotApplied():
                search.proposed = None
                if isinstance(event.command, PlaceFailed):
                    del self.searches[search.job]
                    return []
                return self._fail(search, event.result.why)
            case _:
                assert_never(event.result)

    # ---- steps ----

    def _find(self, job: JobId, epoch: int, attempt: int) -> HostSearch | None:
        search = self.searches.get(job)
        return search if search is not None and (search.epoch, search.attempt) == (epoch, attempt) else None

    def _known_free(self, search: HostSearch, now_s: float) -> dict[HostId, int]:
        """Free GPUs per host: what gossip says, or less where the host itself said less a moment ago."""
        said = self.said(search.opportunistic, now_s)
        short = self._short_of_memory(search, now_s)
        return {host: min(free, said.get(host, free)) for host, free in self.free.items() if host not in short}

    def _ranks_now(self, search: HostSearch, now_s: float) -> dict[HostId, int]:
        """Ranks per host, of hosts that may take a job without GPUs."""
        short = self._short_of_memory(search, now_s)
        return {host: ranks for host, ranks in self.ranks.items() if host not in short}

    def _short_of_memory(self, search: HostSearch, now_s: float) -> set[HostId]:
        """Hosts that said a moment ago that they have no room for this job's memory."""
        self.memory_short = {key: until_s for key, until_s in self.memory_short.items() if until_s > now_s}
        return {host for host, job in self.memory_short if job == search.job}

    def said(self, opportunistic: bool, now_s: float) -> dict[HostId, int]:
        """GPUs that hosts which refused a moment ago really have for such a job."""
        self.refusals = {key: word for key, word in self.refusals.items() if word[1] > now_s}
        beside = opportunistic and self.settings.beside > 0
        return {host: free for (host, parts), (free, _) in self.refusals.items() if parts == beside}

    def _plan(self, search: HostSearch, now_s: float) -> Mapping[HostId, int] | None:
        spec = search.spec
        if search.sought is not None and search.sought.begins:
            return self._more(search, search.sought, now_s)
        if search.sought is not None:
            return self._stand_ins(search, search.sought, now_s)
        if not spec.gpus_per_worker:
            hosts = in_company(self._ranks_now(search, now_s), spec.share_host, self.company, spec.workers, spec.pack)
            return spread(hosts, spec.workers, spec.pack, self.most)
        free = self._known_free(search, now_s)
        return place(free, spec.workers, spec.gpus_per_worker, search.skew, self.packlimit, spec.pack)

    def _more(self, search: HostSearch, sought: PlacesSought, now_s: float) -> Mapping[HostId, int]:
        """New processes per host; empty: there is no room for any."""
        each, has = search.spec.gpus_per_worker, {place.host for place in sought.stays}
        free = self._known_free(search, now_s) if each else self._ranks_now(search, now_s)
        may = {host: count for host, count in free.items() if host in has or host not in sought.avoid}
        if not each:
            hosts, begins = in_company(may, search.spec.share_host, self.company, 1, "any"), sought.begins
            begins = begins if self.most is None else min(begins, sum(self.most.get(host, 0) for host in hosts))
            return spread(hosts, begins, most=self.most)
        return grow({host: count // each for host, count in may.items()}, sought.begins, has)

    def _stand_ins(self, search: HostSearch, sought: PlacesSought, now_s: float) -> Mapping[HostId, int] | None:
        each = search.spec.gpus_per_worker
        free = self._known_free(search, now_s) if each else self._ranks_now(search, now_s)
        every = {host: count // each if each else -count for host, count in free.items()}
        wanted = {to for _, to in sought.places if to is not None and sought.joined(to) is not None}
        room = {host: count for host, count in every.items() if host not in sought.avoid or host in wanted}
        needs = [(len(place.ranks) if each else 0, to) for place, to in sought.places]
        hosts = _on_spares(room, needs, sought.prefer) or stand_in(room, needs)
        if hosts is None:
            may_join = {host: every[host] for host in every if sought.joined(host) is not None}
            hosts = stand_in({**room, **may_join}, needs)
        if hosts is None:
            return None
        search.goes = {host: place for host, (place, _) in zip(hosts, sought.places, strict=True)}
        return {host: len(place.ranks) for host, place in search.goes.items()}

    def _replaced(self, search: HostSearch, sought: PlacesSought) -> Replaced:
        goes = search.goes.items()
        new = {
            old.host: taken_over(Place(host, old.ranks, search.yes[host].gpus, sought.since), sought.joined(host))
            for host, old in goes
        }
        first = next((search.yes[host] for host, old in goes if 0 in old.ranks), None)
        return Replaced(
            wall_s=0.0,
            job=search.job,
            epoch=search.epoch,
            places=new,
            master_addr=first.address if first is not None else "",
            master_port=first.port if first is not None else 0,
        )

    def _arranged(self, search: HostSearch, sought: PlacesSought) -> Arranged:
        names = sorted(carried_after(sought.carried, (), sum(search.plan.values())).keys() - sought.carried.keys())
        new: dict[HostId, Place] = {}
        for host, count in search.plan.items():
            part = Place(host, tuple(names[:count]), search.yes[host].gpus, sought.since)
            new[host], names = taken_over(part, sought.joined(host)), names[count:]
        stay = [new.pop(place.host, place) for place in sought.stays]
        arrangement = Arrangement(search.epoch, sought.since - 1, (*stay, *new.values()))
        return Arranged(wall_s=0.0, jobs={search.job: arrangement})

    def _placed(self, search: HostSearch) -> Placed:
        places, rank = [], 0
        for host, workers in search.plan.items():
            places.append(Place(host, tuple(range(rank, rank + workers)), search.yes[host].gpus))
            rank += workers
        master = search.yes[places[0].host]
        return Placed(
            wall_s=0.0,
            job=search.job,
            epoch=search.epoch,
            places=tuple(places),
            master_addr=master.address,
            master_port=master.port,
        )

    def _fail(self, search: HostSearch, why: str) -> list[Action]:
        """End this attempt, so that no host holds GPUs for it; make another one after a pause, or put the job back into
        the queue."""
        actions = self._release(search)
        search.plan, search.yes, search.proposed, search.trouble = {}, {}, None, why
        if search.tries >= min(self.settings.place_attempts, ATTEMPTS // 2 - 1):
            search.proposed = PlaceFailed(wall_s=0.0, job=search.job, epoch=search.epoch, reason=why[:1000])
            return [*actions, ProposePlacement(search.proposed)]
        wait_s = RETRY_S[min(search.tries, len(RETRY_S)) - 1]
        timer = TryAgain(search.job, search.epoch, search.attempt)
        return [*actions, SetTimer[AttemptOver | TryAgain](wait_s, timer)]

    def _release(self, search: HostSearch) -> list[Action]:
        over = Release(search.job, search.epoch, search.attempt)
        return [Send(host, over) for host in search.plan]


def wrong_yes(host: HostId, answer: Reserved, gpus: int) -> str:
    """Why this yes to so many GPUs is none, in words; empty: it is one."""
    reserved = len(set(answer.gpus))
    return "" if reserved == gpus else f"{host} reserved {reserved} GPUs, not as many as requested"


def job_of(command: Placement) -> JobId:
    """The job that this proposal is about."""
    return next(iter(command.jobs)) if isinstance(command, Arranged) else command.job


def _on_spares(
    room: Mapping[HostId, int], needs: Sequence[tuple[int, HostId | None]], prefer: HostId | None
) -> list[HostId] | None:
    """A plan with the widest place that may go anywhere on the host where processes wait; None: that does not fit."""
    anywhere = [(slots, -at) for at, (slots, wanted) in enumerate(needs) if wanted is None]
    if prefer not in room or not anywhere:
        return None
    first = -max(anywhere)[1]
    return stand_in(room, [(slots, prefer if at == first else to) for at, (slots, to) in enumerate(needs)])
