"""The coordinator of jobs: finds an aggregator for each job whose lowest live rank runs on this host, and another
if that one is gone.

The states of a job and what leads from one to the next: `TRANSITIONS` in `tracked_job.py`, which
docs/design/STATES.md draws.

The first owner sums the trial iterations (`gauge`). Then the coordinator tells it what the job needs, and the owner
checks. If it declines, or later asks the job away because a job is hurt, or empties itself, the job moves: it is
offered with its demand, best fit first, and the old owner is retired once another has accepted. If no host has room
the job stays, and room is looked for again. A job that has lost its owner is offered with its demand first, and if no
host has room without it, to the least busy: one must sum it.

A coordinator keeps nothing on disk. When it becomes one (a start, or the hosts before it are gone) it asks all hosts of
the job which assignment they know; the highest epoch counts. It need not hear all of them: two coordinators never use
the same epoch (`policy.next_epoch`), and a host that knows a higher one than it is told says so.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import assert_never

import msgspec

from covey.core.events import Heard, LogEvent, Publish, Send, SetTimer, Undelivered
from covey.core.ids import HostId, JobId
from covey.tensors.numbers.tensor_wire import SECRET_BYTES, epoch_text
from covey.wire.sums import NextOwner
from plugins.aggregator import policy
from plugins.aggregator.machine.events import AskQuestion, GangPlaced, QuestionAnswered, RackUpdated, Unplaced
from plugins.aggregator.machine.profiler import Profiler
from plugins.aggregator.machine.tracked_job import (
    Away,
    ChangingOwner,
    MoveSearch,
    Nobody,
    Offering,
    OwnerSearch,
    Summed,
    Surveying,
    TrackedJob,
)
from plugins.aggregator.messages import (
    Accepted,
    AggregatorSettings,
    Assigned,
    AssignmentDropped,
    AssignmentKept,
    Coordinates,
    Declined,
    Demand,
    FromCoordinator,
    GetOwner,
    Handover,
    KnownOwner,
    LossReport,
    Lost,
    Offer,
    Probe,
    Profiled,
    Retire,
    Serving,
    ToCoordinator,
    WorkCounters,
    WorkOf,
)
from plugins.aggregator.policy import Candidate
from plugins.facts import TensorsSeen, coordinator_place

SURVEY_S = 2.0
"""Seconds that a host may take to say which assignment it knows."""
OFFER_S = 4.0
"""Seconds that an aggregator may take to accept, the start of its process included."""
SERVE_S = 1.5
"""Seconds that an aggregator may take to say that it still sums a job."""
COMPLAINTS_S = 5.0
"""Seconds of complaints by ranks after which an aggregator is replaced although it says that it serves."""

NO_ROOM = "no known aggregator has room for it"
AGAIN_S = 30.0
"""Seconds between two attempts to find room for a job whose demand no host promised."""


class Expired(msgspec.Struct, frozen=True):
    """Timer: the offer of this epoch was not answered."""

    job: JobId
    epoch: int


class JobStepped(msgspec.Struct, frozen=True):
    """The job's lowest rank here finished an iteration."""

    job: JobId
    grant: int
    step: int
    period_us: int


Event = GangPlaced | Unplaced | RackUpdated | Heard | QuestionAnswered | Undelivered | Expired | JobStepped
Action = Send | AskQuestion | SetTimer[Expired] | LogEvent | Publish


class JobCoordinator:
    takes = ToCoordinator
    """Types of messages that may be heard."""

    def __init__(
        self, me: HostId, entropy: Callable[[int], bytes], settings: AggregatorSettings = AggregatorSettings()
    ) -> None:
        self.me, self._entropy, self._settings = me, entropy, settings
        self.jobs: dict[JobId, TrackedJob] = {}
        self._gone: frozenset[HostId] = frozenset()
        self._candidates: tuple[Candidate, ...] = ()

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        match event:
            case GangPlaced():
                return self._placed(event)
            case Unplaced():
                return self._unplaced(event)
            case RackUpdated():
                return self._rack(event, now_s)
            case JobStepped():
                return self._stepped(event, now_s)
            case Heard():
                return self._heard(event.sender, event.message, now_s)
            case QuestionAnswered():
                return self._answered(event, now_s)
            case Undelivered():
                return self._undelivered(event)
            case Expired():
                return self._expired(event)
            case _:
                assert_never(event)

    def check(self) -> None:
        for job in self.jobs.values():
            job.check()

    # ---- whose coordinator we are ----

    def _placed(self, event: GangPlaced) -> Sequence[Action]:
        known = self.jobs.get(event.job)
        if known is not None and known.placed.grant >= event.grant:
            known.restay(event)  # some of its ranks may be on other hosts now
            return self._come_or_go(known, frozenset())
        self.jobs[event.job] = TrackedJob(event, Profiler(self._settings))
        if known is not None and known.placed.world_size == event.world_size:
            self.jobs[event.job].gauge.demand = known.gauge.demand  # it runs again, and needs the same
        return self._come_or_go(self.jobs[event.job], frozenset())

    def _unplaced(self, event: Unplaced) -> Sequence[Action]:
        known = self.jobs.get(event.job)
        if known is not None and known.placed.grant <= event.grant:
            del self.jobs[event.job]  # its aggregator hears the same from the log
        return ()

    def _rack(self, event: RackUpdated, now_s: float) -> Sequence[Action]:
        back = self._gone - event.gone
        self._gone, self._candidates = event.gone, event.candidates
        actions: list[Action] = []
        for _, job in sorted(self.jobs.items()):
            actions += self._come_or_go(job, back)
            if not isinstance(job.state, Away):
                actions += [*self._look_again(job, back), *self._look_after(job, now_s)]
        return actions

    def _come_or_go(self, job: TrackedJob, back: frozenset[HostId]) -> Sequence[Action]:
        place = coordinator_place(job.placed.places, self._gone)
        if place is not None and place.host == self.me:
            return self._survey(job) if isinstance(job.state, Away) else ()
        state = job.state
        if isinstance(state, Away):
            return ()
        told: Sequence[Action] = ()
        if isinstance(state, Summed) and state.assigned.owner not in self._gone:
            told = self._tell_those_back(job, state.assigned, back)
        job.leave(Profiler(self._settings))
        return told

    def _survey(self, job: TrackedJob) -> Sequence[Action]:
        hosts = [place.host for place in job.placed.places if place.host not in self._gone]
        job.survey(hosts)
        return [AskQuestion(host, GetOwner(job.job), SURVEY_S) for host in hosts]

    def _asked_less(
        self, job: TrackedJob, state: Surveying, hosts: Sequence[HostId], found: Assigned | None
    ) -> Sequence[Action]:
        """Note that these hosts have answered the survey, or are gone."""
        if not hosts:
            return ()
        left = [host for host in state.asked if host not in hosts]
        if left:
            job.wait_for(left, found)
            return ()
        if found is not None:
            return self._adopt(job, found)
        return self._look(job, self._search(job), "no host sums this job yet")

    def _adopt(self, job: TrackedJob, found: Assigned) -> Sequence[Action]:
        job.adopt(found)
        job.gauge.begin(0.0)
        told = Send(found.owner, Coordinates(job.job, found.epoch))
        return [*self._broadcast(job, found), told, *self._look_again(job, frozenset())]

    # ---- an owner for it ----

    def _look(self, job: TrackedJob, search: OwnerSearch | MoveSearch, why: str) -> Sequence[Action]:
        """Offer the job to the best of the hosts that may be asked: those of its own ranks, then aggregators."""
        hosts = self._hosts_to_ask(job, search)
        needed = isinstance(search, MoveSearch) or search.some_cannot
        if not hosts and search.direct and search.or_aggd and needed:
            where = search.wanted if isinstance(search, MoveSearch) else "a host that may be asked"
            job.not_direct = _words(search.declined) or f"none of its ranks is on {where}"
            return self._look(job, search.asks_aggregators(), f"no rank owns it ({job.not_direct})")
        if not hosts:
            return self._stays(job, search) if isinstance(search, MoveSearch) else self._nobody(job, search)
        era = policy.era_of(job.placed.config)
        epoch = policy.next_epoch(job.placed.grant, job.placed.world_size, self._rank(job), job.epoch, era)
        known, secret = None if search.direct else job.gauge.demand, self._entropy(SECRET_BYTES)
        demand = known if search.promised else None
        job.offer(search, hosts[0], epoch, secret)
        home, unpromised = hosts[0] == job.home, demand != known
        what = job.job, epoch, job.placed.world_size, secret, demand, job.refused, home, job.seen[1], unpromised
        offer = Offer(*what, search.direct, self._not_direct(job, search))
        return (
            LogEvent(job.job, "tensors offered", f"to {hosts[0]} as epoch {epoch_text(epoch)}: {why}"),
            Send(hosts[0], offer, OFFER_S),
            SetTimer(OFFER_S, Expired(job.job, epoch)),
        )

    def _hosts_to_ask(self, job: TrackedJob, search: OwnerSearch | MoveSearch) -> Sequence[HostId]:
        if policy.is_old(job.placed.config, job.epoch):
            return ()
        if search.direct:
            return search.rank_hosts(job.placed, self._gone)
        alive = [one for one in self._candidates if one.host not in self._gone]
        return search.hosts_to_ask(job.placed, job.gauge.demand, alive)

    def _not_direct(self, job: TrackedJob, search: OwnerSearch | MoveSearch) -> str:
        """Why an offer is not to a rank of the job, for people."""
        if search.direct:
            return ""
        if job.placed.direct:
            return job.not_direct[:300]
        several = len({place.host for place in job.placed.places}) > 1
        return f'direct = "never" is set in [aggregator] of {self.me}' if several else "all its ranks are on one host"

    def _search(self, job: TrackedJob, avoid: HostId | None = None) -> OwnerSearch:
        """A search for an owner of a job that nobody sums."""
        return OwnerSearch(promised=job.gauge.demand is not None, avoid=avoid, direct=job.placed.direct)

    def _nobody(self, job: TrackedJob, search: OwnerSearch) -> Sequence[Action]:
        """No host takes the job. Without an owner it is offered again each second, also to hosts that declined."""
        if search.promised and job.gauge.demand is not None:
            anybody = OwnerSearch(promised=False, avoid=search.avoid)
            return self._look(job, anybody, f"no host has room for it ({job.refused or NO_ROOM}), and one must sum it")
        if isinstance(job.state, Nobody):
            return ()  # said before
        job.give_up()
        reasons = _words(search.declined) or "no host offered"
        return (LogEvent(job.job, "no host sums its tensors", f"{reasons}; the hosts are asked again each second"),)

    def _next(
        self, job: TrackedJob, state: Offering | ChangingOwner, why: str, no_ranks: bool = False
    ) -> Sequence[Action]:
        if not state.search.direct:
            job.refused = f"{state.to}: {why}"[:300]
        said = LogEvent(job.job, "tensors declined", f"by {state.to}: {why}")
        return [
            said,
            *self._look(job, state.search.declining(state.to, why, no_ranks), "the host asked before declined"),
        ]

    def _replace(self, job: TrackedJob, former: Assigned, why: str, avoid: bool = True) -> Sequence[Action]:
        job.superseded[former.owner] = former.epoch
        return self._look(job, self._search(job, former.owner if avoid else None), why)

    def _accepted(self, job: TrackedJob, sender: HostId, message: Accepted, now_s: float) -> Sequence[Action]:
        state = job.open_offer(sender, message.epoch)
        if state is None:
            if message.epoch == job.newest_epoch:
                return ()  # said twice
            instead = job.state.assigned.epoch if isinstance(job.state, Summed) else 0
            return (self._retire(job, sender, message.epoch, instead, "another host was found meanwhile"),)
        if state.epoch < job.epoch:  # hosts that know the higher one would not use this one
            job.superseded[sender] = state.epoch
            return self._look(job, state.search, f"a host knows epoch {epoch_text(job.epoch)}")
        former, assigned = job.assigned, job.accept(state, message.address)
        job.not_direct = "" if assigned.direct else job.not_direct
        job.again_s = now_s + AGAIN_S
        job.assigned_at(now_s)
        job.gauge.begin(now_s)
        return [
            LogEvent(job.job, "tensors assigned", f"to {sender} at {message.address}, epoch {epoch_text(state.epoch)}"),
            *self._broadcast(job, assigned),
            *self._retire_former(job, assigned, job.superseded.keys(), former),
        ]

    def _broadcast(self, job: TrackedJob, assigned: Assigned) -> Sequence[Action]:
        """Messages that tell all hosts of the job its assignment, this host first: what it tells others must be on its
        own disk."""
        hosts = [place.host for place in job.placed.places if place.host not in self._gone and place.host != self.me]
        return [Send(host, assigned) for host in [self.me, *hosts]]

    def _retire(self, job: TrackedJob, owner: HostId, epoch: int, instead: int, why: str) -> Send:
        return Send(owner, Retire(job.job, epoch, instead, why))

    def _retire_former(
        self, job: TrackedJob, assigned: Assigned, hosts: Collection[HostId], before: Assigned | None = None
    ) -> Sequence[Action]:
        """Messages that retire former owners: reachable ones are told once, those that were gone again when they are
        back. A former owner that got the job back is not retired, unless a rank and the `aggd` of one host may have
        followed each other. The owner of `before` keeps summing until now, and has the state that the present one
        needs."""
        if not job.placed.direct:
            job.superseded.pop(assigned.owner, None)
        told = [host for host in job.superseded if host in hosts and host not in self._gone]
        why = f"{assigned.owner} sums it"
        former = [(host, job.superseded.pop(host)) for host in told]
        takes, last = NextOwner(assigned.address, assigned.secret), None if before is None else before.epoch
        end = assigned.epoch, why, assigned.handed_over
        return [Send(host, Retire(job.job, epoch, *end, takes if epoch == last else None)) for host, epoch in former]

    # ---- what it needs, and whether it gets that ----

    def _stepped(self, event: JobStepped, now_s: float) -> Sequence[Action]:
        job = self.jobs.get(event.job)
        if job is None or not isinstance(job.state, Summed) or job.placed.grant != event.grant:
            return ()
        if job.state.assigned.direct:
            return ()  # nothing is promised to it
        return self._ask_work(job.state.assigned) if job.gauge.stepped(event.step, event.period_us, now_s) else ()

    def _ask_work(self, assigned: Assigned) -> Sequence[Action]:
        return (AskQuestion(assigned.owner, WorkOf(assigned.job, assigned.epoch), SERVE_S),)

    def _look_after(self, job: TrackedJob, now_s: float) -> Sequence[Action]:
        """Once a second, look after a job that is summed."""
        state = job.state
        if not isinstance(state, Summed):
            return ()
        asks = self._ask_work(state.assigned) if job.gauge.due(now_s) else ()
        search = job.due_home(state.assigned, self._gone, now_s)
        if search is not None:
            return [*asks, *self._look(job, search, f"it is to be summed on {search.wanted}")]
        if state.assigned.direct or job.gauge.demand is None or state.promised or now_s < job.again_s:
            return asks
        job.again_s = now_s + AGAIN_S
        return [*asks, self._tell_demand(state.assigned, job.gauge.demand)]

    def _tell_demand(self, assigned: Assigned, demand: Demand) -> Send:
        return Send(assigned.owner, Profiled(assigned.job, assigned.epoch, demand), OFFER_S)

    def _weighed(self, job: TrackedJob, state: Summed, work: WorkCounters, now_s: float) -> Sequence[Action]:
        """Take in the owner's counters; a new coordinator takes over what the owner was told by the earlier one."""
        gauge, seen = job.gauge, self._sizes(job, work)
        if state.assigned.direct:
            return seen
        promised = state.promised and work.demand is not None  # an `AssignmentKept` that came late may have said so
        if work.demand is not None and gauge.demand in (None, work.demand):
            gauge.demand, promised = work.demand, True
        told: list[Action] = [*seen]
        found = gauge.heard(work, now_s)
        if found == "profiled" and gauge.demand is not None:
            promised, job.again_s = False, now_s + AGAIN_S
            told.append(self._tell_demand(state.assigned, gauge.demand))
        elif found:
            told.append(self._judgement(gauge, state.assigned, found == "hurt"))
        job.promise(state, promised)
        return told

    def _sizes(self, job: TrackedJob, work: WorkCounters) -> Sequence[Action]:
        if not work.total_bytes or job.seen == (work.largest_bytes, work.total_bytes):
            return ()
        job.seen = (work.largest_bytes, work.total_bytes)
        return (Publish(TensorsSeen(job.job, job.placed.grant, *job.seen)),)

    def _judgement(self, gauge: Profiler, assigned: Assigned, hurt: bool) -> Send:
        lost_permille = min(1000, int(gauge.lost * 1000))
        return Send(assigned.owner, LossReport(assigned.job, assigned.epoch, gauge.iterations, lost_permille, hurt))

    def _not_kept(
        self, job: TrackedJob, state: Summed, sender: HostId, message: Declined, now_s: float
    ) -> Sequence[Action]:
        """The job's trial is over, and its owner has no room for it: look for another."""
        job.promise(state, False)
        job.again_s = now_s + AGAIN_S
        refused, job.refused = job.refused, f"{sender}: {message.reason}"[:300]
        told = () if refused == job.refused else (LogEvent(job.job, "tensors without a reserved share", job.refused),)
        return [*told, *self._move(job, state.assigned, None, f"{sender} has not enough room for it", quiet=False)]

    def _move(self, job: TrackedJob, assigned: Assigned, to: HostId | None, why: str, quiet: bool) -> Sequence[Action]:
        """Move the job to another owner under a higher epoch; the present one keeps summing until then."""
        promised = job.gauge.demand is not None
        if not promised and to is None:
            return ()  # its trial is not over: it is on the least busy host already
        return self._look(job, MoveSearch(assigned=assigned, promised=promised, wanted=to, quiet=quiet), why)

    def _stays(self, job: TrackedJob, search: MoveSearch) -> Sequence[Action]:
        """No host takes the job: it stays with its owner, which has never stopped."""
        told: Sequence[Action] = ()
        if isinstance(job.state, ChangingOwner):  # somebody was asked
            said = f"on {search.assigned.owner}: {job.refused or NO_ROOM}"
            told = (LogEvent(job.job, "tensors stay", said),)
            job.stay(job.state)
        return [*told, *self._retire_former(job, search.assigned, job.superseded.keys())]

    # ---- what happens to the owner ----

    def _look_again(self, job: TrackedJob, back: frozenset[HostId]) -> Sequence[Action]:
        state, assigned = job.state, job.assigned
        if assigned is not None and assigned.owner in self._gone:
            return self._replace(job, assigned, f"{assigned.owner} is gone")
        match state:
            case Surveying():
                return self._asked_less(job, state, [host for host in state.asked if host in self._gone], state.found)
            case Offering() | ChangingOwner():
                return self._next(job, state, "it is gone") if state.to in self._gone else ()
            case Nobody():
                return self._look(job, OwnerSearch(promised=False, direct=job.placed.direct), "nobody sums it")
            case Summed():
                return self._tell_those_back(job, state.assigned, back)
            case Away():
                return ()
            case _:
                assert_never(state)

    def _tell_those_back(self, job: TrackedJob, assigned: Assigned, back: frozenset[HostId]) -> Sequence[Action]:
        """Messages to hosts that were gone when the job was assigned: hosts of its ranks, which may use a former owner,
        and former owners."""
        ranks = [Send(place.host, assigned) for place in job.placed.places if place.host in back]
        return [*ranks, *self._retire_former(job, assigned, back)]

    def _heard(self, sender: HostId, message: ToCoordinator, now_s: float) -> Sequence[Action]:
        job = self.jobs.get(message.job)
        if job is None:
            return ()
        if isinstance(job.state, Away):
            if not isinstance(message, Accepted) or job.state.offered != (sender, message.epoch):
                return ()
            return (self._retire(job, sender, message.epoch, 0, "another host is its coordinator now"),)
        present = job.summed_as(message.epoch)
        match message:
            case Accepted():
                return self._accepted(job, sender, message, now_s)
            case Declined():
                asked = job.open_offer(sender, message.epoch)
                job.epoch = max(job.epoch, message.known) if job.is_of_run(message.known) else job.epoch
                if present is not None:
                    return self._not_kept(job, present, sender, message, now_s)
                return self._next(job, asked, message.reason, message.no_ranks) if asked is not None else ()
            case AssignmentKept():
                if present is not None:
                    job.promise(present, True)
                return ()
            case Handover():
                if present is None:
                    return ()
                if message.wished and message.to is not None:
                    job.wish(message.to)
                    return self._look(job, job.move_search(present.assigned, message.to), message.reason)
                return self._move(job, present.assigned, message.to, message.reason, quiet=message.to is None)
            case AssignmentDropped():
                if job.assigned is None or job.assigned.epoch != message.epoch:
                    return ()
                others_first = not job.assigned.direct  # another rank of its host may take it
                return self._replace(job, job.assigned, f"{sender} dropped it: {message.reason}", others_first)
            case Lost():
                return self._lost(job, present, sender, message, now_s) if present is not None else ()
            case Assigned():
                if message.epoch <= job.epoch or not job.is_of_run(message.epoch):
                    return ()
                return self._adopt(job, message)
            case _:
                assert_never(message)

    def _lost(self, job: TrackedJob, state: Summed, sender: HostId, message: Lost, now_s: float) -> Sequence[Action]:
        """A rank cannot use its aggregator: find out whether that is the rank's trouble, or the aggregator's."""
        assigned = state.assigned
        after, since_s = job.complain(state, now_s)
        if since_s > COMPLAINTS_S:
            return self._replace(job, assigned, f"{sender} cannot use {assigned.owner}: {message.reason}")
        if after.checking:
            return ()
        job.question(after, True)
        return (AskQuestion(assigned.owner, Probe(job.job, assigned.epoch), SERVE_S),)

    def _answered(self, event: QuestionAnswered, now_s: float) -> Sequence[Action]:
        question, answer = event.question, event.answer
        job = self.jobs.get(question.job) if isinstance(question, GetOwner | Probe | WorkOf) else None
        if job is None:
            return ()
        if isinstance(question, GetOwner):
            return self._surveyed(job, event.host, answer)
        present = job.summed_as(question.epoch) if isinstance(question, Probe | WorkOf) else None
        if present is None:
            return ()
        if isinstance(question, Probe):
            return self._checked(job, present, answer)
        return self._weighed(job, present, answer, now_s) if isinstance(answer, WorkCounters) and answer.known else ()

    def _surveyed(self, job: TrackedJob, host: HostId, answer: msgspec.Struct | None) -> Sequence[Action]:
        state = job.state
        if not isinstance(state, Surveying) or host not in state.asked:
            return ()
        found = answer.assigned if isinstance(answer, KnownOwner) else None
        if found is None or found.job != job.job or found.epoch <= job.epoch or not job.is_of_run(found.epoch):
            return self._asked_less(job, state, [host], state.found)
        job.epoch = job.newest_epoch = found.epoch
        return self._asked_less(job, state, [host], found)

    def _checked(self, job: TrackedJob, state: Summed, answer: msgspec.Struct | None) -> Sequence[Action]:
        job.question(state, False)
        if isinstance(answer, Serving) and answer.yes:
            return ()  # the rank tries again, and complains again if it must
        why = "does not serve it" if isinstance(answer, Serving) else f"did not answer within {SERVE_S:g} s"
        return self._replace(job, state.assigned, f"{state.assigned.owner} {why}")

    def _undelivered(self, event: Undelivered) -> Sequence[Action]:
        """Send a message again that was not delivered. A host that was cut off while its job moved, and whose old
        aggregator still answers its ranks, would never complain: it is told the present assignment, and a former owner
        of its end, until it has heard."""
        message: FromCoordinator = event.message
        match message:
            case Offer():
                return self._no_answer(message.job, message.epoch)
            case Assigned() | Coordinates() | Retire():
                job = self.jobs.get(message.job)
                epoch = message.instead if isinstance(message, Retire) else message.epoch
                return (Send(event.to, message),) if job is not None and job.summed_as(epoch) is not None else ()
            case Profiled() | LossReport():
                return ()  # the next timings of its ranks are told again
            case _:
                assert_never(message)

    def _expired(self, event: Expired) -> Sequence[Action]:
        return self._no_answer(event.job, event.epoch)

    def _no_answer(self, name: JobId, epoch: int) -> Sequence[Action]:
        job = self.jobs.get(name)
        state = job.state if job is not None else None
        if job is None or not isinstance(state, Offering | ChangingOwner) or state.epoch != epoch:
            return ()
        job.superseded[state.to] = epoch  # its answer may have been lost
        return self._next(job, state, f"no answer within {OFFER_S:g} s")

    def _rank(self, job: TrackedJob) -> int:
        return min(min(place.ranks) for place in job.placed.places if place.host == self.me)


def _words(declined: Mapping[HostId, str]) -> str:
    return "; ".join(f"{host}: {why}" for host, why in declined.items())
