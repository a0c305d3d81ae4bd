"""The jobs whose tensors this host sums: accepted or declined when offered, dropped when `aggd` dies.

An offer is accepted only after it is on disk and the process serves it, so what was accepted survives a restart of the
agent. It does not survive a restart of the process: the sums are gone, and the job's coordinator is told at once. That
offers the job again, perhaps here, under a higher epoch.

For its trial iterations a job is accepted by how busy this host is. Once its coordinator says what it needs, this host
checks exactly (`ledger`), on what it has promised itself and nobody's gossip, and keeps the job or declines it: then
the coordinator looks elsewhere while the sums go on here. A job that is offered with its demand is checked before it is
accepted.
"""

from collections.abc import Sequence
from typing import assert_never

import msgspec

from covey.core.events import Heard, LogEvent, Send, SetTimer, Undelivered
from covey.core.ids import HostId, JobId
from covey.tensors.numbers.tensor_wire import epoch_text, grant_of
from plugins.aggregator import policy
from plugins.aggregator.machine.consolidator import Consolidator, EmptyingEnds
from plugins.aggregator.machine.cycle_ledger import RESERVE_S, CycleLedger, Reservation
from plugins.aggregator.machine.events import AskQuestion, GangPlaced, Keep, QuestionAnswered, RackUpdated, Unplaced
from plugins.aggregator.machine.process_words import ForgetJob, LoadChanged, ProcessDown, ProcessUp, Served, ServeJob
from plugins.aggregator.machine.served_job import ServedJob
from plugins.aggregator.messages import (
    Accepted,
    AggregatorSettings,
    AssignmentDropped,
    AssignmentKept,
    Coordinates,
    CycleNotReserved,
    CycleNow,
    CycleReserved,
    Declined,
    Demand,
    FromOwner,
    Handover,
    JobDemand,
    LossReport,
    MoveTensors,
    Offer,
    Profiled,
    ReleaseCycle,
    ReserveCycle,
    Retire,
    ToOwner,
)
from plugins.aggregator.policy import Candidate
from plugins.aggregator.policy.measured import BARRED, reverted

OVER_MAX = 4096
"""Jobs whose end is remembered, so that a late offer is refused."""
RUN_OVER = "that run of the job has ended"
LEAVE_S = 15.0
"""Seconds that a job that was asked to leave may take before another one is asked."""


Event = (
    Heard | ProcessUp | ProcessDown | LoadChanged | Served | GangPlaced | Unplaced | RackUpdated | QuestionAnswered |
    EmptyingEnds
    | Undelivered
)  # fmt: skip
Action = Send | AskQuestion | LogEvent | SetTimer[EmptyingEnds] | Keep | ServeJob | ForgetJob


class Owner:
    takes = ToOwner
    """Types of messages that may be heard."""

    def __init__(
        self, settings: AggregatorSettings, held: Sequence[ServedJob] = (), me: HostId = HostId(""), lanes: int = 1
    ) -> None:
        self.settings, self.me = settings, me
        self.jobs: dict[JobId, ServedJob] = {one.job: one for one in held}
        self._promise_again(lanes)
        self.emptier = Consolidator(me, settings.scale_s)
        self.judged: dict[JobId, float] = {}
        """Job -> part of its speed that it lost here by its last measurement."""
        self.refused: dict[JobId, str] = {}
        """Job held here -> why it was not promised what it needs."""
        self.changes = max((one.order for one in held), default=0)
        """Number that grows when a job comes or leaves: measurements from before do not hold afterwards."""
        self.address = ""
        """Address at which the process listens; empty while it is down."""
        self.load = 0.0
        self.drained = False
        """This host is drained: no new job is summed here, and those that are go elsewhere."""
        self._idle: frozenset[JobId] = frozenset()
        self._barred: set[JobId] = set()
        """Jobs that left because they hurt another one here; when a job leaves they may come back."""
        self._leaving: dict[JobId, float] = {}
        """Job that was asked to leave -> when, seconds."""
        self._serving: set[tuple[JobId, int]] = set()
        self._over: dict[JobId, int] = {}
        """Job -> grant that is over."""

    def _promise_again(self, lanes: int) -> None:
        """Make promises anew after a change of settings or process: old promises as far as they fit, but no room held
        for others."""
        known = {job: one.demand for job, one in self.jobs.items() if one.demand is not None}
        self.ledger = CycleLedger(self.settings.cycles_max, known, lanes)
        for job in known.keys() - self.ledger.demands.keys():
            self.jobs[job] = msgspec.structs.replace(self.jobs[job], demand=None)

    def serves(self, job: JobId, epoch: int) -> bool:
        return (job, epoch) in self._serving and bool(self.address)

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        match event:
            case Heard():
                return self._heard(event.sender, event.message, now_s)
            case ProcessUp():
                return self._up(event)
            case ProcessDown():
                return [*self.emptier.stop("its process is down"), *self._down(event.why)]
            case LoadChanged():
                self.load, self._idle = event.load, event.idle
                return ()
            case RackUpdated():
                return self._look(event, now_s)
            case QuestionAnswered():
                return self.emptier.answered(event, self.jobs, self.ledger)
            case EmptyingEnds():
                return self.emptier.ended(event)
            case Served():
                return self._served(event)
            case GangPlaced():
                instead = event.grant << 32
                return self._runs_over(event.job, event.grant - 1, instead, "the job was taken back and runs again")
            case Unplaced():
                return self._runs_over(event.job, event.grant, 0, "the job's run is over")
            case Undelivered():
                return self._undelivered(event)
            case _:
                assert_never(event)

    def check(self) -> None:
        assert self._serving <= {(one.job, one.epoch) for one in self.jobs.values()}
        assert self.address or not self._serving
        assert all(grant_of(one.epoch) > self._over.get(one.job, 0) for one in self.jobs.values())
        self.ledger.check()
        promised = {job for job, held in self.jobs.items() if held.demand is not None}
        assert promised <= self.ledger.demands.keys() <= promised | self.ledger.reserved.keys()
        assert all(self.jobs[job].demand == self.ledger.demands[job] for job in promised)
        assert not self.ledger.reserved.keys() & self.jobs.keys()
        assert not any(self._is_over(job, held.epoch) for job, held in self.ledger.reserved.items())
        assert self.refused.keys() <= self.jobs.keys() and self.emptier.refused.keys() <= self.jobs.keys()

    # ---- what it has promised ----

    def promised(self) -> CycleNow:
        """Answer to an aggregator that wants to empty itself into this host."""
        takes = not self._closed() and not self.emptier.busy
        jobs = [JobDemand(job, demand) for job, demand in sorted(self.ledger.demands.items())]
        cycle = self.ledger.cycle
        return CycleNow(takes, cycle.us, cycle.lanes, cycle.times, jobs, sorted(self._barred))

    def _look(self, rack: RackUpdated, now_s: float) -> Sequence[Action]:
        self.ledger.expire(now_s)
        self._leaving = {job: since_s for job, since_s in self._leaving.items() if now_s - since_s < LEAVE_S}
        self.drained = rack.drained
        if not self.address:
            return ()
        if self.drained:
            return [*self.emptier.stop("it is drained"), *self._drain(rack.candidates, now_s)]
        return self.emptier.look(rack, self.jobs, self._idle, self.ledger, now_s)

    def _drain(self, candidates: Sequence[Candidate], now_s: float) -> Sequence[Action]:
        """Send each job to the best other host, by its coordinator; a job that finds none stays here."""
        actions: list[Action] = []
        for held in self.jobs.values():
            others = [one for one in candidates if one.host != self.me and not one.suspect]
            if held.job in self._leaving or not others:
                continue
            self._leaving[held.job] = now_s
            to, why = policy.ranked(held.job, others)[0], f"{self.me} is drained"
            actions.append(LogEvent(held.job, "tensors must leave", why))
            actions.append(Send(held.coordinator, Handover(held.job, held.epoch, to, why)))
        return actions

    def _reserve(self, sender: HostId, message: ReserveCycle, now_s: float) -> Sequence[Action]:
        why = self._no_room(sender, message, now_s)
        if why:
            return (Send(sender, CycleNotReserved(message.job, message.attempt, why[:300])),)
        return (Send(sender, CycleReserved(message.job, message.attempt)),)

    def _no_room(self, sender: HostId, message: ReserveCycle, now_s: float) -> str:
        if self.emptier.busy:
            return "it empties itself"
        if message.job in self._barred:
            return BARRED
        if message.job in self.jobs:
            return "it sums that job itself"
        if self._is_over(message.job, message.epoch):
            return RUN_OVER
        why = self._closed() or self._full(len(self.ledger.reserved.keys() - {message.job}))
        reservation = Reservation(sender, message.epoch, message.attempt, now_s + RESERVE_S)
        return why or self.ledger.reserve(message.job, message.demand, reservation)

    def _closed(self) -> str:
        if not self.settings.serve:
            return "it does not sum tensors (serve = false)"
        if self.drained:
            return "it is drained"
        return "" if self.address else "its process is not up"

    def _full(self, reserved: int) -> str:
        return policy.refusal(len(self.jobs) + reserved, self.settings.jobs_max, 0.0, 1.0)

    def _undelivered(self, event: Undelivered) -> Sequence[Action]:
        """A message was not delivered. A coordinator that is away asks when it is back, and so does its successor. One
        that never heard of our acceptance may have found another aggregator, and says so when it hears."""
        message: FromOwner = event.message
        match message:
            case ReserveCycle():
                said = CycleNotReserved(message.job, message.attempt, "no answer")
                return self.emptier.not_reserved(event.to, said, self.jobs)
            case Accepted():
                return (Send(event.to, message),) if self.serves(message.job, message.epoch) else ()
            case (
                Declined()
                | AssignmentKept()
                | Handover()
                | AssignmentDropped()
                | CycleReserved()
                | CycleNotReserved()
                | ReleaseCycle()
            ):
                return ()  # an aggregator that is away asks again, and a reservation ends by itself
            case _:
                assert_never(message)

    def _profiled(self, sender: HostId, message: Profiled) -> Sequence[Action]:
        """Check exactly the demand of a job that is here already. A declined job is summed here until another host has
        accepted it."""
        held = self.jobs.get(message.job)
        if held is None or held.epoch != message.epoch:
            return ()
        why = self.ledger.take(held.job, message.demand)
        if why:
            return self._not_kept(sender, held, why)
        self.refused.pop(held.job, None)
        self.jobs[held.job] = msgspec.structs.replace(held, demand=message.demand)
        said = LogEvent(
            held.job, "tensors keep their place", f"on {self.me}: {self._plan_words(message.demand, held.job)}"
        )
        return (Send(sender, AssignmentKept(held.job, held.epoch)), said, Keep())

    def _not_kept(self, sender: HostId, held: ServedJob, why: str) -> Sequence[Action]:
        self.refused[held.job] = why
        declined = Send(sender, Declined(held.job, held.epoch, why[:300], held.epoch))
        if held.demand is None:
            return (declined,)
        self.ledger.leave(held.job)  # it needs something else than it was promised
        self.jobs[held.job] = msgspec.structs.replace(held, demand=None)
        return (declined, Keep())

    def _plan_words(self, demand: Demand, job: JobId) -> str:
        cycle = self.ledger.cycle
        return (
            f"D {demand.period_us} us, e {demand.work_us} us; a cycle of {cycle.us} us is {float(cycle.load):.0%} full "
            f"and takes {self.ledger.loss(job):.1%} of its speed"
        )

    def _judged(self, message: LossReport, now_s: float) -> Sequence[Action]:
        """A job lost more than its limit here: the newest of it and the jobs beside it goes, one at a time (AutoPS
        §4.5.2.3)."""
        held = self.jobs.get(message.job)
        if held is None or held.epoch != message.epoch:
            return ()
        self.judged[held.job] = message.lost_permille / 1000
        beside = sorted(self.jobs.keys() - {held.job} - self._idle)
        if not message.hurt or not beside or self._leaving:
            return ()
        newest = self.jobs[reverted(held.job, beside, {job: one.order for job, one in self.jobs.items()})]
        self._leaving[newest.job] = now_s
        self._barred.add(newest.job)
        lost = f"{message.lost_permille / 10:g} % of its speed over {message.iterations} iterations"
        why = f"{held.job} lost {lost} on {self.me}, and {newest.job} came last"
        return (
            LogEvent(newest.job, "tensors must leave", why),
            Send(newest.coordinator, Handover(newest.job, newest.epoch, None, why)),
        )

    def _asked_away(self, message: MoveTensors) -> Sequence[Action]:
        """A person wants the job elsewhere: its coordinator offers it there."""
        held = self.jobs.get(message.job)
        if held is None or held.epoch != message.epoch or message.to == self.me:
            return ()
        why = f"moved by request to {message.to}"
        return (Send(held.coordinator, Handover(held.job, held.epoch, message.to, why, wished=True)),)

    def _has_coordinator(self, sender: HostId, message: Coordinates) -> Sequence[Action]:
        """Another host coordinates the job now: the earlier one may never have heard what it was asked."""
        held = self.jobs.get(message.job)
        if held is None or held.epoch != message.epoch or held.coordinator == sender:
            return ()
        self.jobs[held.job] = msgspec.structs.replace(held, coordinator=sender)
        self._leaving.pop(held.job, None)
        return (Keep(),)

    # ---- jobs come and go ----

    def _heard(self, sender: HostId, message: ToOwner, now_s: float) -> Sequence[Action]:
        match message:
            case Offer():
                return () if message.direct else self._offered(sender, message)
            case Retire():
                return self._retired(message)
            case Profiled():
                return self._profiled(sender, message)
            case LossReport():
                return self._judged(message, now_s)
            case Coordinates():
                return self._has_coordinator(sender, message)
            case MoveTensors():
                return self._asked_away(message)
            case ReserveCycle():
                return self._reserve(sender, message, now_s)
            case ReleaseCycle():
                self.ledger.release(message.job, sender, message.attempt)
                return ()
            case CycleReserved():
                return self.emptier.reserved(sender, message, self.jobs)
            case CycleNotReserved():
                return self.emptier.not_reserved(sender, message, self.jobs)
            case _:
                assert_never(message)

    def _offered(self, sender: HostId, offer: Offer) -> Sequence[Action]:
        known = self.jobs.get(offer.job)
        if known is not None and (known.epoch, known.secret, known.coordinator) == (offer.epoch, offer.secret, sender):
            return (Send(sender, Accepted(offer.job, offer.epoch, self.address)),) if self._is_served(known) else ()
        above = known.epoch if known is not None else self._awaited(offer.job)
        refusal = self._refusal(known, offer)
        if refusal:
            return (Send(sender, Declined(offer.job, offer.epoch, refusal[:300], above)),)
        if known is not None:
            self._serving.discard((known.job, known.epoch))
        if offer.demand is None:
            self.ledger.leave(offer.job)
        self._changed(offer.job)
        held = self._held_of(sender, offer)
        self.jobs[offer.job] = held
        return (ServeJob(held),)

    def _held_of(self, sender: HostId, offer: Offer) -> ServedJob:
        order = self.changes
        what = offer.job, offer.epoch, offer.workers, offer.secret, sender
        how = offer.refused, offer.stays, offer.size_bytes, offer.unpromised, offer.not_direct
        return ServedJob(*what, offer.demand, order, *how)

    def _refusal(self, known: ServedJob | None, offer: Offer) -> str:
        """Why the offer is declined; empty: it is accepted, and what the job needs is promised."""
        if closed := self._closed():
            return closed
        if self._is_over(offer.job, offer.epoch):
            return RUN_OVER
        if known is not None and known.epoch >= offer.epoch:
            return f"it knows epoch {epoch_text(known.epoch)}"
        if self._awaited(offer.job) >= offer.epoch:
            return f"it has reserved room for what comes after epoch {epoch_text(self._awaited(offer.job))}"
        if known is None and (full := self._full(len(self.ledger.reserved.keys() - {offer.job}))):
            return full
        if offer.demand is not None:
            return BARRED if offer.job in self._barred else self._promise(offer)
        return policy.refusal(0, 1, self.load, self.settings.load_max) if known is None else ""

    def _promise(self, offer: Offer) -> str:
        assert offer.demand is not None
        why = self.ledger.take(offer.job, offer.demand)
        if why:
            self.ledger.let_go(offer.job)
        return why

    def _is_over(self, job: JobId, epoch: int) -> bool:
        return grant_of(epoch) <= self._over.get(job, 0)

    def _awaited(self, job: JobId) -> int:
        """Epoch of the job above which room is held for an assignment; 0: no room is held."""
        reserved = self.ledger.reserved.get(job)
        return reserved.epoch if reserved is not None else 0

    def _changed(self, job: JobId) -> None:
        self.changes += 1  # before `order` is taken from it
        self.judged.clear()
        self.refused.pop(job, None)

    def _is_served(self, held: ServedJob) -> bool:
        return self.serves(held.job, held.epoch)

    def _served(self, event: Served) -> Sequence[Action]:
        held = self.jobs.get(event.job)
        if held is None or held.epoch != event.epoch or not self.address:
            return ()
        self._serving.add((event.job, event.epoch))
        return (
            Send(held.coordinator, Accepted(held.job, held.epoch, self.address)),
            LogEvent(held.job, "tensors summed here", f"epoch {epoch_text(held.epoch)}, offered by {held.coordinator}"),
        )

    def _retired(self, message: Retire) -> Sequence[Action]:
        held = self.jobs.get(message.job)
        if held is None or held.epoch > message.epoch:
            return ()
        self._remove(held)
        return (
            ForgetJob(held.job, held.epoch, message.instead, message.handed_over, message.to),
            Keep(),
            LogEvent(held.job, "tensors no longer summed here", message.reason),
        )

    def _runs_over(self, job: JobId, grant: int, instead: int, why: str) -> Sequence[Action]:
        if grant > self._over.get(job, 0):
            self._over[job] = grant
            while len(self._over) > OVER_MAX:
                del self._over[next(iter(self._over))]
        if grant_of(self._awaited(job)) <= grant:
            self.ledger.let_go(job)
        held = self.jobs.get(job)
        if held is None or grant_of(held.epoch) > grant:
            return ()
        return self._retired(Retire(job, held.epoch, instead, why))

    def _up(self, event: ProcessUp) -> Sequence[Action]:
        """The process answers, also after a restart of this agent: it has to serve the jobs that are on disk."""
        self.address = event.address
        if event.lanes != self.ledger.cycle.lanes:
            self._promise_again(event.lanes)
        held_here = {(held.job, held.epoch) for held in self.jobs.values()}
        self._serving = held_here & set(event.serves.items())
        unknown = [
            ForgetJob(job, epoch, 0)
            for job, epoch in sorted(event.serves.items())
            if job not in self.jobs or self.jobs[job].epoch != epoch
        ]
        lost = [held for _, held in sorted(self.jobs.items()) if not self._is_served(held)]
        return [*unknown, *self._drop(lost, "its process does not know the job")]

    def _down(self, why: str) -> Sequence[Action]:
        self.address = ""
        self._serving.clear()
        return self._drop([held for _, held in sorted(self.jobs.items())], why)

    def _drop(self, lost: Sequence[ServedJob], why: str) -> Sequence[Action]:
        actions: list[Action] = []
        for held in lost:
            self._remove(held)
            actions.append(Send(held.coordinator, AssignmentDropped(held.job, held.epoch, why)))
            actions.append(LogEvent(held.job, "tensors dropped", why))
        return [*actions, Keep()] if lost else ()

    def _remove(self, held: ServedJob) -> None:
        """Remove a job. Jobs that were hurt beside this one, or hurt it, may come back."""
        del self.jobs[held.job]
        self.ledger.leave(held.job)
        self._barred = self._barred & {held.job}
        self._leaving.pop(held.job, None)
        self.emptier.refused.pop(held.job, None)
        self._changed(held.job)
        self._serving.discard((held.job, held.epoch))
