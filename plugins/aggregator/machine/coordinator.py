"""The home of jobs: finds somebody to sum each job whose lowest live rank runs on this host, and finds somebody else
when that one is gone.

        Placed, or it became ours                       all answered, nobody sums it
    away ------------------------> surveying ---------------------------------------> offering <--+ declined,
                                       | somebody sums it                      accepted |   |     | no answer:
                                       v                                                v   +-----+ next epoch
                                   assigned <-------------------------------------------+
                                       |   owner gone, dropped it, or does not serve it: offering, next epoch
                                       |   moving (the owner goes on meanwhile): offering; nobody takes it: assigned

The first owner sums the trial iterations (`gauge`). Then the home tells it what the job needs, and the owner checks. If
it declines, or later asks the job away because somebody is hurt, or empties itself, the job moves: it is offered with
its demand, best fit first, and the old owner is retired once another has accepted. Where nobody has room the job stays,
and room is looked for again. What has lost its owner is offered with its demand first, and if nobody has room without
it, to the least busy: somebody must sum it.

A home keeps nothing on disk. When it becomes one (a start, or the hosts before it are gone) it asks all hosts of the
job which assignment they know; the highest epoch counts. It need not hear all of them: two homes never use the same
epoch (`policy.next_epoch`), and a host that knows a higher one than it is told says so.
"""

from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from covey.core import Heard, HostId, JobId, LogEvent, Publish, Send, SetTimer, Undelivered
from covey.tensorwire import SECRET_BYTES, epoch_text
from plugins.aggregator import policy
from plugins.aggregator.machine.events import AskQuestion, GangPlaced, QuestionAnswered, RackUpdated, Unplaced
from plugins.aggregator.machine.profiler import Profiler
from plugins.aggregator.machine.tracked_job import TrackedJob
from plugins.aggregator.messages import (
    Accepted,
    AggregatorSettings,
    Assigned,
    AssignmentDropped,
    AssignmentKept,
    Declined,
    FromHome,
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
    ToHome,
    WorkCounters,
    WorkOf,
)
from plugins.aggregator.policy import Candidate
from plugins.facts import TensorsSeen

SURVEY_S = 2.0
"""How long a host may take to say which assignment it knows."""
OFFER_S = 4.0
"""How long an aggregator may take to accept, its process included."""
SERVE_S = 1.5
"""How long an aggregator may take to say that it still sums a job."""
COMPLAINTS_S = 5.0
"""An aggregator that says it serves, but that ranks cannot use for this long, is replaced."""
FORGIVE_S = 10.0
"""Complaints further apart than this are separate ones."""

NO_ROOM = "no aggregator that gossip shows has room for it"
AGAIN_S = 30.0
"""Between two attempts to find room for a job that nobody promised what it needs, seconds."""


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
    takes = ToHome
    """Messages that may be heard."""

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
            assert (job.state == "offering") == (job.offered_to is not None)
            assert (job.state == "surveying") == bool(job.asked)
            assert not job.moving or (job.state == "offering" and job.assigned is not None)
            if job.state == "assigned":
                assert job.assigned is not None and job.assigned.epoch <= job.epoch
                assert policy.of_run(job.assigned.epoch, job.placed.grant)

    # ---- whose home we are ----

    def _placed(self, event: GangPlaced) -> Sequence[Action]:
        known = self.jobs.get(event.job)
        if known is not None and known.placed.grant >= event.grant:
            return ()
        self.jobs[event.job] = self._new(event)
        if known is not None and known.placed.world_size == event.world_size:
            self.jobs[event.job].gauge.demand = known.gauge.demand  # it runs again, and needs the same
        return self._come_or_go(self.jobs[event.job], frozenset())

    def _new(self, placed: GangPlaced) -> TrackedJob:
        return TrackedJob(placed, Profiler(self._settings))

    def _unplaced(self, event: Unplaced) -> Sequence[Action]:
        known = self.jobs.get(event.job)
        if known is not None and known.placed.grant <= event.grant:
            del self.jobs[event.job]  # its aggregator hears the same from the log
        return ()

    def _rack(self, event: RackUpdated, now_s: float) -> Sequence[Action]:
        back = self._gone - event.gone
        self._gone, self._candidates = event.gone, event.candidates
        actions: list[Action] = []
        for name in sorted(self.jobs):
            actions += self._come_or_go(self.jobs[name], back)
            job = self.jobs[name]
            if job.state != "away":
                actions += [*self._look_again(job, back), *self._look_after(job, now_s)]
        return actions

    def _come_or_go(self, job: TrackedJob, back: frozenset[HostId]) -> Sequence[Action]:
        place = policy.home(job.placed.places, self._gone)
        if place is not None and place.host == self.me:
            return self._survey(job) if job.state == "away" else ()
        if job.state != "away":
            self.jobs[job.job] = self._new(job.placed)
        if job.assigned is None or job.assigned.owner in self._gone:
            return ()
        return [*self._tell_those_back(job, back), *self._retire_former(job, back)]

    def _survey(self, job: TrackedJob) -> Sequence[Action]:
        job.state, job.offered_to, job.moving = "surveying", None, False
        job.asked = [place.host for place in job.placed.places if place.host not in self._gone]
        return [AskQuestion(host, GetOwner(job.job), SURVEY_S) for host in job.asked]

    def _surveyed(self, job: TrackedJob) -> Sequence[Action]:
        found = job.assigned
        if found is None or not policy.of_run(found.epoch, job.placed.grant):
            job.promised = job.gauge.demand is not None
            return self._offer(job, "nobody sums this job yet")
        return self._adopt(job, found)

    def _adopt(self, job: TrackedJob, found: Assigned) -> Sequence[Action]:
        job.state, job.assigned, job.offered_to, job.asked, job.moving = "assigned", found, None, [], False
        job.gauge.begin(0.0)
        job.promised = False  # what its owner promised it says with its counters
        job.epoch = max(job.epoch, found.epoch)
        return [*self._broadcast(job, found), *self._look_again(job, frozenset())]

    # ---- an owner for it ----

    def _offer(self, job: TrackedJob, why: str) -> Sequence[Action]:
        hosts = job.hosts_to_ask(self._candidates, self._gone)
        if not hosts:
            return self._nobody(job)
        job.epoch = policy.next_epoch(job.placed.grant, job.placed.world_size, self._rank(job), job.epoch)
        job.state, job.offered_to, job.secret = "offering", hosts[0], self._entropy(SECRET_BYTES)
        job.complaints, job.checking, job.asked = None, False, []
        demand = job.gauge.demand if job.promised else None
        offer = Offer(job.job, job.epoch, job.placed.world_size, job.secret, demand, job.refused)
        return (
            LogEvent(job.job, "tensors offered", f"to {hosts[0]} as epoch {epoch_text(job.epoch)}: {why}"),
            Send(hosts[0], offer, OFFER_S),
            SetTimer(OFFER_S, Expired(job.job, job.epoch)),
        )

    def _nobody(self, job: TrackedJob) -> Sequence[Action]:
        """Without an owner it is tried again each second, with those that declined too."""
        if job.moving:
            return self._stays(job)
        if job.promised and job.gauge.demand is not None:
            job.promised, job.declined = False, {}
            return self._offer(job, f"nobody has room for it ({job.refused or NO_ROOM}), and somebody must sum it")
        told, job.state, job.offered_to = job.state == "nobody", "nobody", None
        reasons = "; ".join(f"{host}: {why}" for host, why in job.declined.items()) or "no host offers to"
        job.declined, job.avoid = {}, None
        return () if told else (LogEvent(job.job, "nobody sums its tensors", f"{reasons}; asking again each second"),)

    def _next(self, job: TrackedJob, why: str) -> Sequence[Action]:
        assert job.offered_to is not None
        job.declined[job.offered_to] = why
        job.refused = f"{job.offered_to}: {why}"[:300]
        said = LogEvent(job.job, "tensors declined", f"by {job.offered_to}: {why}")
        return [said, *self._offer(job, "the one asked before declined")]

    def _replace(self, job: TrackedJob, why: str) -> Sequence[Action]:
        assert job.assigned is not None
        job.superseded[job.assigned.owner] = job.assigned.epoch
        job.settle()
        job.avoid = job.assigned.owner
        job.promised = job.gauge.demand is not None
        return self._offer(job, why)

    def _accepted(self, job: TrackedJob, sender: HostId, message: Accepted, now_s: float) -> Sequence[Action]:
        if job.state != "offering" or (sender, message.epoch) != (job.offered_to, job.epoch):
            if job.assigned is not None and job.assigned.epoch == message.epoch:
                return ()  # said twice
            instead = job.assigned.epoch if job.state == "assigned" and job.assigned is not None else 0
            return (self._retire(job, sender, message.epoch, instead, "another was found meanwhile"),)
        if job.moving and job.assigned is not None:
            job.superseded[job.assigned.owner] = job.assigned.epoch
        assigned = Assigned(job.job, job.epoch, sender, message.address, job.secret)
        job.state, job.assigned, job.offered_to = "assigned", assigned, None
        job.settle()
        job.again_s = now_s + AGAIN_S
        job.gauge.begin(now_s)
        return [
            LogEvent(job.job, "tensors assigned", f"to {sender} at {message.address}, epoch {epoch_text(job.epoch)}"),
            *self._broadcast(job, assigned),
            *self._retire_former(job, set(job.superseded)),
        ]

    def _broadcast(self, job: TrackedJob, assigned: Assigned) -> Sequence[Action]:
        """This host first: what it tells others must be on its own disk."""
        hosts = [place.host for place in job.placed.places if place.host not in self._gone and place.host != self.me]
        return [Send(host, assigned) for host in [self.me, *hosts]]

    def _retire(self, job: TrackedJob, owner: HostId, epoch: int, instead: int, why: str) -> Send:
        return Send(owner, Retire(job.job, epoch, instead, why))

    def _retire_former(self, job: TrackedJob, hosts: set[HostId] | frozenset[HostId]) -> Sequence[Action]:
        """A former owner that got the job back is not one any more; those we reach are told once, those that were gone
        again when they are back."""
        if job.state != "assigned" or job.assigned is None:
            return ()
        job.superseded.pop(job.assigned.owner, None)
        told = [host for host in job.superseded if host in hosts and host not in self._gone]
        why = f"{job.assigned.owner} sums it now"
        return [self._retire(job, host, job.superseded.pop(host), job.assigned.epoch, why) for host in told]

    # ---- what it needs, and whether it gets that ----

    def _stepped(self, event: JobStepped, now_s: float) -> Sequence[Action]:
        job = self.jobs.get(event.job)
        if job is None or job.state != "assigned" or job.placed.grant != event.grant:
            return ()
        return self._ask_work(job) if job.gauge.stepped(event.step, event.period_us, now_s) else ()

    def _ask_work(self, job: TrackedJob) -> Sequence[Action]:
        assert job.assigned is not None
        return (AskQuestion(job.assigned.owner, WorkOf(job.job, job.assigned.epoch), SERVE_S),)

    def _look_after(self, job: TrackedJob, now_s: float) -> Sequence[Action]:
        """Once a second."""
        if job.state != "assigned" or job.assigned is None:
            return ()
        asks = self._ask_work(job) if job.gauge.due(now_s) else ()
        if job.gauge.demand is None or job.promised or now_s < job.again_s:
            return asks
        job.again_s = now_s + AGAIN_S
        return [*asks, *self._tell_demand(job)]

    def _tell_demand(self, job: TrackedJob) -> Sequence[Action]:
        assert job.assigned is not None and job.gauge.demand is not None
        return (Send(job.assigned.owner, Profiled(job.job, job.assigned.epoch, job.gauge.demand), OFFER_S),)

    def _weighed(self, job: TrackedJob, work: WorkCounters, now_s: float) -> Sequence[Action]:
        """The owner's counters; a home that is new takes over what the owner was told by the one before."""
        assert job.assigned is not None
        if work.demand is not None and job.gauge.demand in (None, work.demand):
            job.gauge.demand, job.promised = work.demand, True
        if work.demand is None:
            job.promised = False  # a `AssignmentKept` that came late may have said otherwise
        told: list[Action] = []
        if work.total_bytes and job.seen != (work.largest_bytes, work.total_bytes):
            job.seen = (work.largest_bytes, work.total_bytes)
            told.append(Publish(TensorsSeen(job.job, job.placed.grant, *job.seen)))
        found = job.gauge.heard(work, now_s)
        if found == "profiled":
            job.promised, job.again_s = False, now_s + AGAIN_S
            return [*told, *self._tell_demand(job)]
        return [*told, self._judgement(job, found == "hurt")] if found else told

    def _judgement(self, job: TrackedJob, hurt: bool) -> Send:
        assert job.assigned is not None
        gauge = job.gauge
        judged = LossReport(job.job, job.assigned.epoch, gauge.iterations, min(1000, int(gauge.lost * 1000)), hurt)
        return Send(job.assigned.owner, judged)

    def _not_kept(self, job: TrackedJob, sender: HostId, why: str, now_s: float) -> Sequence[Action]:
        """Its trial is over, and its owner has no room for it."""
        job.promised, job.again_s = False, now_s + AGAIN_S
        refused, job.refused = job.refused, f"{sender}: {why}"[:300]
        told = () if refused == job.refused else (LogEvent(job.job, "tensors have no promised place", job.refused),)
        return [*told, *self._move(job, None, f"{sender} has no room for what it needs", quiet=False)]

    def _move(self, job: TrackedJob, to: HostId | None, why: str, quiet: bool) -> Sequence[Action]:
        """To another owner under a higher epoch; the present one goes on until then."""
        assert job.assigned is not None
        if job.gauge.demand is None and to is None:
            return ()  # its trial is not over: it is on the least busy host already
        before = job.promised
        job.moving, job.wanted, job.quiet, job.promised = True, to, quiet, job.gauge.demand is not None
        job.declined, job.avoid = {job.assigned.owner: "it is there now"}, None
        actions = self._offer(job, why)
        if job.state == "assigned":
            job.promised = before
        return actions

    def _stays(self, job: TrackedJob) -> Sequence[Action]:
        """Nobody took it: its owner has never stopped."""
        assert job.assigned is not None
        tried = len(job.declined) > 1
        job.settle()
        job.state, job.offered_to, job.promised = "assigned", None, False
        told = (
            (LogEvent(job.job, "tensors stay", f"on {job.assigned.owner}: {job.refused or NO_ROOM}"),) if tried else ()
        )
        return [*told, *self._retire_former(job, set(job.superseded))]

    # ---- what happens to the owner ----

    def _look_again(self, job: TrackedJob, back: frozenset[HostId]) -> Sequence[Action]:
        match job.state:
            case "assigned" if job.assigned is not None and job.assigned.owner in self._gone:
                return self._replace(job, f"{job.assigned.owner} is gone")
            case "offering" if job.moving and job.assigned is not None and job.assigned.owner in self._gone:
                return self._replace(job, f"{job.assigned.owner} is gone")
            case "offering" if job.offered_to in self._gone:
                return self._next(job, "it is gone")
            case "surveying":
                return self._asked_less(job, [host for host in job.asked if host in self._gone])
            case "nobody":
                return self._offer(job, "an aggregator appeared")
            case _:
                return [*self._tell_those_back(job, back), *self._retire_former(job, back)]

    def _tell_those_back(self, job: TrackedJob, back: frozenset[HostId]) -> Sequence[Action]:
        """Hosts of its ranks that were gone when it was assigned, and may still use a former owner."""
        if job.state != "assigned" or job.assigned is None:
            return ()
        return [Send(place.host, job.assigned) for place in job.placed.places if place.host in back]

    def _asked_less(self, job: TrackedJob, hosts: Sequence[HostId]) -> Sequence[Action]:
        if not hosts:
            return ()
        job.asked = [host for host in job.asked if host not in hosts]
        return () if job.asked else self._surveyed(job)

    def _heard(self, sender: HostId, message: ToHome, now_s: float) -> Sequence[Action]:
        job = self.jobs.get(message.job)
        if job is None or job.state == "away":
            return ()
        match message:
            case Accepted():
                return self._accepted(job, sender, message, now_s)
            case Declined():
                asked = job.state == "offering" and (sender, message.epoch) == (job.offered_to, job.epoch)
                job.epoch = max(job.epoch, message.known) if self._ours(job, message.known) else job.epoch
                if self._current(job, message.epoch):
                    return self._not_kept(job, sender, message.reason, now_s)
                return self._next(job, message.reason) if asked else ()
            case AssignmentKept():
                job.promised = job.promised or self._current(job, message.epoch)
                return ()
            case Handover():
                if not self._current(job, message.epoch):
                    return ()
                return self._move(job, message.to, message.reason, quiet=message.to is None)
            case AssignmentDropped():
                moving = job.moving and job.assigned is not None and job.assigned.epoch == message.epoch
                if not moving and not self._current(job, message.epoch):
                    return ()
                return self._replace(job, f"{sender} dropped it: {message.reason}")
            case Lost():
                return self._lost(job, sender, message, now_s)
            case Assigned():
                if message.epoch <= job.epoch or not self._ours(job, message.epoch):
                    return ()
                return self._adopt(job, message)
            case _:
                assert_never(message)

    def _ours(self, job: TrackedJob, epoch: int) -> bool:
        return policy.of_run(epoch, job.placed.grant)

    def _current(self, job: TrackedJob, epoch: int) -> bool:
        return job.state == "assigned" and job.assigned is not None and job.assigned.epoch == epoch

    def _lost(self, job: TrackedJob, sender: HostId, message: Lost, now_s: float) -> Sequence[Action]:
        """A rank cannot use its aggregator: is it the rank's trouble, or the aggregator's?"""
        if not self._current(job, message.epoch) or job.assigned is None:
            return ()
        first, last = job.complaints or (now_s, now_s)
        job.complaints = (first if now_s - last < FORGIVE_S else now_s, now_s)
        if now_s - job.complaints[0] > COMPLAINTS_S:
            return self._replace(job, f"{job.assigned.owner} cannot be used from {sender}: {message.reason}")
        if job.checking:
            return ()
        job.checking = True
        return (AskQuestion(job.assigned.owner, Probe(job.job, message.epoch), SERVE_S),)

    def _answered(self, event: QuestionAnswered, now_s: float) -> Sequence[Action]:
        job = self.jobs.get(event.question.job) if isinstance(event.question, GetOwner | Probe | WorkOf) else None
        if job is None:
            return ()
        if isinstance(event.question, WorkOf):
            if (
                not isinstance(event.answer, WorkCounters)
                or not event.answer.known
                or not self._current(job, event.question.epoch)
            ):
                return ()
            return self._weighed(job, event.answer, now_s)
        if isinstance(event.question, Probe):
            return self._checked(job, event.question.epoch, event.answer)
        if job.state != "surveying" or event.host not in job.asked:
            return ()
        found = event.answer.assigned if isinstance(event.answer, KnownOwner) else None
        if found is not None and found.job == job.job and found.epoch > job.epoch and self._ours(job, found.epoch):
            job.epoch, job.assigned = found.epoch, found
        return self._asked_less(job, [event.host])

    def _checked(self, job: TrackedJob, epoch: int, answer: msgspec.Struct | None) -> Sequence[Action]:
        if not self._current(job, epoch) or job.assigned is None:
            return ()
        job.checking = False
        if isinstance(answer, Serving) and answer.yes:
            return ()  # the rank tries again, and complains again if it must
        why = "does not serve it" if isinstance(answer, Serving) else f"did not answer within {SERVE_S:g} s"
        return self._replace(job, f"{job.assigned.owner} {why}")

    def _undelivered(self, event: Undelivered) -> Sequence[Action]:
        """A host that was cut off while its job moved, and whose old aggregator still answers its ranks, would never
        complain: it is told the present assignment, and a former owner of its end, until it has heard."""
        message: FromHome = event.message
        match message:
            case Offer():
                return self._no_answer(message.job, message.epoch)
            case Assigned():
                job = self.jobs.get(message.job)
                return (Send(event.to, message),) if job is not None and self._current(job, message.epoch) else ()
            case Retire():
                job = self.jobs.get(message.job)
                return (Send(event.to, message),) if job is not None and self._current(job, message.instead) else ()
            case Profiled() | LossReport():
                return ()  # the next timings of its ranks are told again
            case _:
                assert_never(message)

    def _expired(self, event: Expired) -> Sequence[Action]:
        return self._no_answer(event.job, event.epoch)

    def _no_answer(self, name: JobId, epoch: int) -> Sequence[Action]:
        job = self.jobs.get(name)
        if job is None or job.state != "offering" or job.epoch != epoch:
            return ()
        assert job.offered_to is not None
        job.superseded[job.offered_to] = epoch  # its answer may have been lost
        return self._next(job, f"no answer within {OFFER_S:g} s")

    def _rank(self, job: TrackedJob) -> int:
        return min(place.ranks[0] for place in job.placed.places if place.host == self.me)
