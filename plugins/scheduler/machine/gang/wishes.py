"""Wishes of plugins on this host for how elastic jobs are to be arranged: where processes begin, hosts are asked first.

    WishSeen --nothing begins--------------------------------------> propose Arranged, for all jobs of the wish
             --Reserve to each host where processes begin--> all yes --^        |
                                                          a no, silence         +-- applied, or refused by the log
                                                             |                             |
                                                    Release all; refused <-----------------+

A wish names its hosts, so nothing is looked for: a host without room refuses the whole wish, and whoever wished looks
again. Nothing is held for one that was refused. Several wishes may be under way, each for other jobs.

A `Reserve` of a wish has a number between those of the coordinator's searches before it and after it, by the rack's
clock: what is over on a host (`Reservations.released`) never bars the next one.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self, assert_never

import msgspec

from covey.core.events import Heard, Send, SetTimer, Undelivered
from covey.core.ids import HostId, JobId
from plugins.facts import Place, WantedArrangement
from plugins.scheduler.machine.gang.gang import ATTEMPTS, wrong_yes
from plugins.scheduler.machine.log.arranging import ended_in_part, lacks_state
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.machine.log.replacing import taken_over
from plugins.scheduler.messages.commands import Applied, Arranged, Arrangement, Result
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.messages.wire import NotReserved, Release, Reserve, Reserved, ToGang
from plugins.scheduler.policy import explain
from plugins.scheduler.policy.carrying import carried_by_shares, without
from plugins.scheduler.policy.settings import SchedulerSettings

JOBS_MAX = 64
"""The most jobs of one wish, as the log takes them (`Arranged`)."""


NOT_NOW = 75
"""agentctl's exit code of what is refused now, and may be asked again as it is (`Refused`)."""


class WishRefused(ValueError):
    """Why a wish cannot be, in words; `code` as in `Refused`, `full` as in `ArrangementsAnswered`."""

    def __init__(self, why: str, code: int = 4, full: HostId = HostId("")) -> None:
        super().__init__(why)
        self.code, self.full = code, full


class PlannedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job of a wish: where its processes are to be, and which of them begin."""

    job: JobId
    spec: JobSpec
    wanted: WantedArrangement
    stay: tuple[Place, ...]
    """Its places without the processes that end; not yet with those that begin."""
    names: Mapping[HostId, tuple[int, ...]]
    """Host -> the processes that begin there."""
    joins: frozenset[HostId]
    """Hosts where some of its processes run."""
    attempt: int
    opportunistic: bool = False
    apart_from: tuple[JobId, ...] = ()

    def counted(self, opportunistic: bool, apart_from: tuple[JobId, ...]) -> Self:
        """This job as hosts are to know what it may be beside (`Reserve`)."""
        return msgspec.structs.replace(self, opportunistic=opportunistic, apart_from=apart_from)


class WishSeen(msgspec.Struct, frozen=True):
    """Event: somebody on this host wants these jobs to be arranged so."""

    ask: str
    jobs: tuple[PlannedJob, ...]
    by: str
    why: str


class WishLate(msgspec.Struct, frozen=True):
    """Event (timer): the hosts had their time to answer."""

    ask: str


class WishProposed(msgspec.Struct, frozen=True):
    """Event: what the log answered, or why it did not."""

    ask: str
    result: Result | str


class ProposeWish(msgspec.Struct, frozen=True):
    """Action: propose this to the log, and come back with `WishProposed`."""

    ask: str
    command: Arranged


class AnswerWish(msgspec.Struct, frozen=True):
    """Action: tell whoever wished. `refused` empty: it is in force."""

    ask: str
    refused: str = ""
    code: int = 4
    """agentctl's exit code of a refusal (`Refused`)."""
    full: HostId = HostId("")
    """The host that has no room, if that is why."""


class AskedHost(NamedTuple):
    """A host that is asked for room for a job."""

    job: JobId
    host: HostId


class SearchedWish(msgspec.Struct):
    """A wish that is under way."""

    seen: WishSeen
    asked: dict[AskedHost, Reserve]
    yes: dict[AskedHost, tuple[str, ...]] = {}
    """The GPUs that each host reserved."""
    proposed: Arranged | None = None


Event = WishSeen | WishLate | WishProposed | Heard | Undelivered
Action = Send | SetTimer[WishLate] | ProposeWish | AnswerWish


class Wishes:
    """The wishes that are under way on this host."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.wishes: dict[str, SearchedWish] = {}

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        match event:
            case WishSeen():
                return self._seen(event)
            case Heard():
                return self._heard(event.sender, event.message)
            case Undelivered():
                return self._undelivered(event)
            case WishLate():
                return self._late(event)
            case WishProposed():
                return self._proposed(event)
            case _:
                assert_never(event)

    def check(self) -> None:
        """Raise AssertionError unless each wish is proposed whole, and no job is in two."""
        jobs = [job.job for wish in self.wishes.values() for job in wish.seen.jobs]
        assert len(jobs) == len(set(jobs)), f"a job is in two wishes: {jobs}"
        for wish in self.wishes.values():
            assert set(wish.yes) <= set(wish.asked)
            assert (wish.proposed is not None) == (len(wish.yes) == len(wish.asked))

    def knows(self, answer: ToGang) -> bool:
        """Whether this answer of a host is to a wish that is under way."""
        return self._of(answer) is not None

    # ---- events ----

    def _seen(self, event: WishSeen) -> Sequence[Action]:
        if event.ask in self.wishes:
            return ()
        under_way = {job.job: wish.seen.by for wish in self.wishes.values() for job in wish.seen.jobs}
        for job in event.jobs:
            if job.job in under_way:
                return [AnswerWish(event.ask, f"{job.job} is being arranged anew already, by {under_way[job.job]}")]
        asked = {
            AskedHost(job.job, host): Reserve(
                job.job,
                job.wanted.epoch,
                job.attempt,
                len(names),
                job.spec.gpus_per_worker,
                False,
                self.settings.reservation_lease_s,
                job.opportunistic,
                job.spec.gpu_memory,
                job.apart_from,
                host in job.joins,
                job.spec.host_memory,
                job.spec.cpus,
            )
            for job in event.jobs
            for host, names in sorted(job.names.items())
        }
        wish = self.wishes[event.ask] = SearchedWish(event, asked)
        if not asked:
            return self._propose(wish)
        deadline_s = self.settings.reserve_deadline_s
        sends = [Send(each.host, reserve, deadline_s) for each, reserve in asked.items()]
        return [*sends, SetTimer[WishLate](deadline_s, WishLate(event.ask))]

    def _heard(self, sender: HostId, answer: ToGang) -> Sequence[Action]:
        wish, each = self._of(answer), AskedHost(answer.job, sender)
        if wish is None or each not in wish.asked or wish.proposed is not None:
            return ()
        match answer:
            case NotReserved():
                return self._refuse(wish, f"{sender} has no room for {answer.job}: {answer.reason}", full=sender)
            case Reserved():
                reserve = wish.asked[each]
                if wrong := wrong_yes(sender, answer, reserve.workers * reserve.gpus_per_worker):
                    return self._refuse(wish, wrong)
                wish.yes[each] = answer.gpus
                return self._propose(wish) if len(wish.yes) == len(wish.asked) else ()
            case _:
                assert_never(answer)

    def _undelivered(self, event: Undelivered) -> Sequence[Action]:
        ask = event.message
        wish = self._of(ask) if isinstance(ask, Reserve) else None
        if wish is None or wish.proposed is not None:
            return ()
        return self._refuse(wish, f"{event.to} could not be reached", NOT_NOW)

    def _late(self, event: WishLate) -> Sequence[Action]:
        wish = self.wishes.get(event.ask)
        if wish is None or wish.proposed is not None:
            return ()
        silent = ", ".join(sorted({each.host for each in wish.asked if each not in wish.yes}))
        return self._refuse(wish, f"no answer from {silent} in {self.settings.reserve_deadline_s:g} s", NOT_NOW)

    def _proposed(self, event: WishProposed) -> Sequence[Action]:
        wish = self.wishes.get(event.ask)
        if wish is None:
            return ()
        if isinstance(event.result, Applied):
            del self.wishes[event.ask]
            return [AnswerWish(event.ask)]
        if isinstance(event.result, str):
            return self._refuse(wish, event.result, NOT_NOW)
        return self._refuse(wish, event.result.why, event.result.code)

    # ---- steps ----

    def _of(self, message: ToGang | Reserve) -> SearchedWish | None:
        """The wish under way that this message belongs to."""
        for wish in self.wishes.values():
            for job in wish.seen.jobs:
                if (job.job, job.wanted.epoch, job.attempt) == (message.job, message.epoch, message.attempt):
                    return wish
        return None

    def _propose(self, wish: SearchedWish) -> Sequence[Action]:
        seen = wish.seen
        gpus: dict[JobId, dict[HostId, tuple[str, ...]]] = {}
        for each, reserved in wish.yes.items():
            gpus.setdefault(each.job, {})[each.host] = reserved
        jobs = {job.job: _arrangement(job, gpus.get(job.job, {})) for job in seen.jobs}
        wish.proposed = Arranged(wall_s=0.0, jobs=jobs, by=seen.by[:1000], why=seen.why[:1000])
        return [ProposeWish(seen.ask, wish.proposed)]

    def _refuse(self, wish: SearchedWish, why: str, code: int = 4, full: HostId = HostId("")) -> Sequence[Action]:
        """Give the wish up, so that no host holds GPUs for it."""
        del self.wishes[wish.seen.ask]
        over = [Send(each.host, Release(each.job, ask.epoch, ask.attempt)) for each, ask in wish.asked.items()]
        return [*over, AnswerWish(wish.seen.ask, why, code, full)]


# ---- what a wish means for a job -------------------------------------------------------------------------------------


def planned(job: Job, wanted: WantedArrangement, number: int) -> PlannedJob:
    """Where the job's processes are to be, and which begin and end. `number`: of this wish for the job, growing from
    one to the next on any host, below half of `ATTEMPTS`. WishRefused, in words."""
    _refuse_at_once(job, wanted)
    counts = wanted.processes or {place.host: len(place.ranks) for place in job.start.places}
    if min(counts.values()) < 0:
        raise WishRefused(f"{min(counts.values())} is not a number of processes")
    total = sum(counts.values())
    if total > job.spec.workers_max or (total < job.spec.workers and total < job.processes):
        raise WishRefused(f"it has {explain.workers(job.spec)} processes, and would have {total}")
    ends = _ends(job, counts)
    stay = without(job.start.places, ends, job.spec.gpus_per_worker)
    has = {place.host: len(place.ranks) for place in stay}
    begins = [host for host, count in sorted(counts.items()) for _ in range(count - has.get(host, 0))]
    where = {process: place.host for place in job.start.places for process in place.ranks}
    try:
        carried, names = carried_by_shares(job.start.carried, ends, begins, where, wanted.shares)
    except ValueError as error:
        raise WishRefused(str(error)) from error
    vacated = [place.host for place in job.start.places if place.host not in has]
    if carried != job.start.carried and (why := lacks_state(job, vacated, ends)):
        raise WishRefused(why)
    each: dict[HostId, tuple[int, ...]] = {}
    for host, name in zip(begins, names, strict=True):
        each[host] = (*each.get(host, ()), name)
    return PlannedJob(
        job=job.id,
        spec=job.spec,
        wanted=wanted,
        stay=stay,
        names=each,
        joins=frozenset(place.host for place in job.start.places),
        attempt=ATTEMPTS * job.healing.sought + ATTEMPTS // 2 + number,
    )


def _refuse_at_once(job: Job, wanted: WantedArrangement) -> None:
    """WishRefused, in words, where the log cannot obey, whatever is wanted."""
    if not job.spec.elastic:
        raise WishRefused(explain.not_elastic(job.spec))
    if job.state != "running" or job.grant.epoch != wanted.epoch:
        raise WishRefused(f"it is {job.state} under epoch {job.grant.epoch}, and does not run under {wanted.epoch}")
    if job.healing.healed != wanted.replaces:
        raise WishRefused(f"its configuration is {job.healing.healed} by now, and not {wanted.replaces}")
    if job.seeks:
        raise WishRefused(f"{job.grant.coordinator} looks for hosts for it already")
    if wanted.owners and len(wanted.owners) != job.start.tables:
        raise WishRefused(f"the owners of {len(wanted.owners)} tables are said, and it has {job.start.tables}")
    if why := ended_in_part(job):
        raise WishRefused(why)


def _ends(job: Job, counts: Mapping[HostId, int]) -> list[int]:
    """The processes that end so that each host has at most so many: those that came last there."""
    first, ends = job.carriers([0]), list[int]()
    for place in job.start.places:
        more = len(place.ranks) - counts.get(place.host, 0)
        may_end = [process for process in reversed(place.ranks) if process not in first]
        if more > len(may_end):
            raise WishRefused(f"the process on {place.host} that carries rank 0 ends only with its host")
        ends += may_end[: max(0, more)]
    return ends


def _arrangement(job: PlannedJob, gpus: Mapping[HostId, tuple[str, ...]]) -> Arrangement:
    """How the job is arranged once hosts have reserved these GPUs for what begins there."""
    wanted, since = job.wanted, job.wanted.replaces + 1
    places = {place.host: place for place in job.stay}
    for host, names in job.names.items():
        places[host] = taken_over(Place(host, names, gpus[host], since), places.get(host))
    return Arrangement(wanted.epoch, wanted.replaces, tuple(places.values()), dict(wanted.shares), wanted.owners)
