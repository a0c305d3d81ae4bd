"""The home of jobs: finds somebody to sum each job whose lowest live rank runs on this host, and finds somebody else
when that one is gone.

        Placed, or it became ours                       all answered, nobody sums it
    away ------------------------> surveying ---------------------------------------> offering <--+ declined,
                                       | somebody sums it                      accepted |   |     | no answer:
                                       v                                                v   +-----+ next epoch
                                   assigned <-------------------------------------------+
                                       |   owner gone, dropped it, or does not serve it: offering, next epoch

A home keeps nothing on disk. When it becomes one (a start, or the hosts before it are gone) it asks all hosts of the
job which assignment they know; the highest epoch counts. It need not hear all of them: two homes never use the same
epoch (`policy.next_epoch`), and a host that knows a higher one than it is told says so.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, assert_never

import msgspec

from covey.core import Heard, HostId, JobId, Note, Send, SetTimer, Undelivered
from covey.tensorwire import SECRET_BYTES, epoch_text
from plugins.aggregator import policy
from plugins.aggregator.machine.events import Answered, Ask, Placed, Rack, Unplaced
from plugins.aggregator.messages import (
    Accepted,
    Assigned,
    Declined,
    DoYouServe,
    Dropped,
    Known,
    Lost,
    Offer,
    Retire,
    Serving,
    WhoSums,
)
from plugins.aggregator.policy import Candidate

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

State = Literal["away", "surveying", "offering", "assigned", "nobody"]


class Expired(msgspec.Struct, frozen=True):
    """Timer: the offer of this epoch was not answered."""

    job: JobId
    epoch: int


Event = Placed | Unplaced | Rack | Heard | Answered | Undelivered | Expired
Action = Send | Ask | SetTimer[Expired] | Note


class _Job:
    def __init__(self, placed: Placed) -> None:
        self.placed = placed
        self.state: State = "away"
        self.epoch = 0
        """Highest epoch seen or used."""
        self.assigned: Assigned | None = None
        self.asked: list[HostId] = []
        """Hosts of the survey that have not answered."""
        self.offered_to: HostId | None = None
        self.secret = b""
        self.declined: dict[HostId, str] = {}
        self.avoid: HostId | None = None
        self.complaints: tuple[float, float] | None = None
        """First and last of the present series, seconds."""
        self.checking = False
        self.superseded: dict[HostId, int] = {}
        """Former owners that may not know it yet -> their epoch."""

    @property
    def job(self) -> JobId:
        return self.placed.job


class Home:
    def __init__(self, me: HostId, entropy: Callable[[int], bytes]) -> None:
        self.me, self._entropy = me, entropy
        self.jobs: dict[JobId, _Job] = {}
        self._gone: frozenset[HostId] = frozenset()
        self._candidates: tuple[Candidate, ...] = ()

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        match event:
            case Placed():
                return self._placed(event)
            case Unplaced():
                return self._unplaced(event)
            case Rack():
                return self._rack(event)
            case Heard():
                return self._heard(event.sender, event.message, now_s)
            case Answered():
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
            if job.state == "assigned":
                assert job.assigned is not None and job.assigned.epoch <= job.epoch
                assert policy.of_run(job.assigned.epoch, job.placed.grant)

    # ---- whose home we are ----

    def _placed(self, event: Placed) -> Sequence[Action]:
        known = self.jobs.get(event.job)
        if known is not None and known.placed.grant >= event.grant:
            return ()
        self.jobs[event.job] = _Job(event)
        return self._come_or_go(self.jobs[event.job])

    def _unplaced(self, event: Unplaced) -> Sequence[Action]:
        known = self.jobs.get(event.job)
        if known is not None and known.placed.grant <= event.grant:
            del self.jobs[event.job]  # its aggregator hears the same from the log
        return ()

    def _rack(self, event: Rack) -> Sequence[Action]:
        back = self._gone - event.gone
        self._gone, self._candidates = event.gone, event.candidates
        actions: list[Action] = []
        for _, job in sorted(self.jobs.items()):
            actions += self._come_or_go(job)
            if job.state != "away":
                actions += self._look_again(job, back)
        return actions

    def _come_or_go(self, job: _Job) -> Sequence[Action]:
        place = policy.home(job.placed.places, self._gone)
        if place is None or place.host != self.me:
            self.jobs[job.job] = job if job.state == "away" else _Job(job.placed)
            return ()
        return self._survey(job) if job.state == "away" else ()

    def _survey(self, job: _Job) -> Sequence[Action]:
        job.state, job.offered_to = "surveying", None
        job.asked = [place.host for place in job.placed.places if place.host not in self._gone]
        return [Ask(host, WhoSums(job.job), SURVEY_S) for host in job.asked]

    def _surveyed(self, job: _Job) -> Sequence[Action]:
        found = job.assigned
        if found is None or not policy.of_run(found.epoch, job.placed.grant):
            return self._offer(job, "nobody sums this job yet")
        return self._adopt(job, found)

    def _adopt(self, job: _Job, found: Assigned) -> Sequence[Action]:
        job.state, job.assigned, job.offered_to, job.asked = "assigned", found, None, []
        job.epoch = max(job.epoch, found.epoch)
        return [*self._broadcast(job, found), *self._look_again(job, frozenset())]

    # ---- an owner for it ----

    def _offer(self, job: _Job, why: str) -> Sequence[Action]:
        avoid = () if job.avoid is None else (job.avoid,)
        usable = [c for c in self._candidates if c.host not in job.declined and c.host not in self._gone]
        hosts = policy.ranked(job.job, usable, avoid)
        if not hosts:
            return self._nobody(job)
        job.epoch = policy.next_epoch(job.placed.grant, job.placed.world_size, self._rank(job), job.epoch)
        job.state, job.offered_to, job.secret = "offering", hosts[0], self._entropy(SECRET_BYTES)
        job.complaints, job.checking, job.asked = None, False, []
        offer = Offer(job.job, job.epoch, job.placed.world_size, job.secret)
        return (
            Note(job.job, "tensors offered", f"to {hosts[0]} as epoch {epoch_text(job.epoch)}: {why}"),
            Send(hosts[0], offer, OFFER_S),
            SetTimer(OFFER_S, Expired(job.job, job.epoch)),
        )

    def _nobody(self, job: _Job) -> Sequence[Action]:
        """Tried again each second, with those that declined too."""
        told, job.state, job.offered_to = job.state == "nobody", "nobody", None
        reasons = "; ".join(f"{host}: {why}" for host, why in job.declined.items()) or "no host offers to"
        job.declined, job.avoid = {}, None
        return () if told else (Note(job.job, "nobody sums its tensors", f"{reasons}; asking again each second"),)

    def _next(self, job: _Job, why: str) -> Sequence[Action]:
        assert job.offered_to is not None
        job.declined[job.offered_to] = why
        said = Note(job.job, "tensors declined", f"by {job.offered_to}: {why}")
        return [said, *self._offer(job, "the one asked before declined")]

    def _replace(self, job: _Job, why: str) -> Sequence[Action]:
        assert job.assigned is not None
        job.superseded[job.assigned.owner] = job.assigned.epoch
        job.avoid, job.declined = job.assigned.owner, {}
        return self._offer(job, why)

    def _accepted(self, job: _Job, sender: HostId, message: Accepted) -> Sequence[Action]:
        if job.state != "offering" or (sender, message.epoch) != (job.offered_to, job.epoch):
            if job.assigned is not None and job.assigned.epoch == message.epoch:
                return ()  # said twice
            return (self._retire(job, sender, message.epoch, 0, "another was found meanwhile"),)
        assigned = Assigned(job.job, job.epoch, sender, message.address, job.secret)
        job.state, job.assigned, job.offered_to = "assigned", assigned, None
        job.declined, job.avoid = {}, None
        return [
            Note(job.job, "tensors assigned", f"to {sender} at {message.address}, epoch {epoch_text(job.epoch)}"),
            *self._broadcast(job, assigned),
            *self._retire_former(job, set(job.superseded)),
        ]

    def _broadcast(self, job: _Job, assigned: Assigned) -> Sequence[Action]:
        """This host first: what it tells others must be on its own disk."""
        hosts = [place.host for place in job.placed.places if place.host not in self._gone and place.host != self.me]
        return [Send(host, assigned) for host in [self.me, *hosts]]

    def _retire(self, job: _Job, owner: HostId, epoch: int, instead: int, why: str) -> Send:
        return Send(owner, Retire(job.job, epoch, instead, why))

    def _retire_former(self, job: _Job, hosts: set[HostId] | frozenset[HostId]) -> Sequence[Action]:
        """A former owner that got the job back is not one any more; those we reach are told once, those that were gone
        again when they are back."""
        if job.state != "assigned" or job.assigned is None:
            return ()
        job.superseded.pop(job.assigned.owner, None)
        told = [host for host in job.superseded if host in hosts and host not in self._gone]
        why = f"{job.assigned.owner} sums it now"
        return [self._retire(job, host, job.superseded.pop(host), job.assigned.epoch, why) for host in told]

    # ---- what happens to the owner ----

    def _look_again(self, job: _Job, back: frozenset[HostId]) -> Sequence[Action]:
        match job.state:
            case "assigned" if job.assigned is not None and job.assigned.owner in self._gone:
                return self._replace(job, f"{job.assigned.owner} is gone")
            case "offering" if job.offered_to in self._gone:
                return self._next(job, "it is gone")
            case "surveying":
                return self._asked_less(job, [host for host in job.asked if host in self._gone])
            case "nobody":
                return self._offer(job, "an aggregator appeared")
            case _:
                return [*self._tell_those_back(job, back), *self._retire_former(job, back)]

    def _tell_those_back(self, job: _Job, back: frozenset[HostId]) -> Sequence[Action]:
        """Hosts of its ranks that were gone when it was assigned, and may still use a former owner."""
        if job.state != "assigned" or job.assigned is None:
            return ()
        return [Send(place.host, job.assigned) for place in job.placed.places if place.host in back]

    def _asked_less(self, job: _Job, hosts: Sequence[HostId]) -> Sequence[Action]:
        if not hosts:
            return ()
        job.asked = [host for host in job.asked if host not in hosts]
        return () if job.asked else self._surveyed(job)

    def _heard(self, sender: HostId, message: Any, now_s: float) -> Sequence[Action]:
        job = self.jobs.get(message.job)
        if job is None or job.state == "away":
            return ()
        match message:
            case Accepted():
                return self._accepted(job, sender, message)
            case Declined():
                job.epoch = max(job.epoch, message.known) if self._ours(job, message.known) else job.epoch
                if job.state != "offering" or sender != job.offered_to:
                    return ()
                return self._next(job, message.reason)
            case Dropped():
                if not self._current(job, message.epoch):
                    return ()
                return self._replace(job, f"{sender} dropped it: {message.reason}")
            case Lost():
                return self._lost(job, sender, message, now_s)
            case Assigned():
                if message.epoch <= job.epoch or not self._ours(job, message.epoch):
                    return ()
                return self._adopt(job, message)
            case _:
                return ()

    def _ours(self, job: _Job, epoch: int) -> bool:
        return policy.of_run(epoch, job.placed.grant)

    def _current(self, job: _Job, epoch: int) -> bool:
        return job.state == "assigned" and job.assigned is not None and job.assigned.epoch == epoch

    def _lost(self, job: _Job, sender: HostId, message: Lost, now_s: float) -> Sequence[Action]:
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
        return (Ask(job.assigned.owner, DoYouServe(job.job, message.epoch), SERVE_S),)

    def _answered(self, event: Answered, now_s: float) -> Sequence[Action]:
        job = self.jobs.get(event.question.job) if isinstance(event.question, WhoSums | DoYouServe) else None
        if job is None:
            return ()
        if isinstance(event.question, DoYouServe):
            return self._checked(job, event.question.epoch, event.answer)
        if job.state != "surveying" or event.host not in job.asked:
            return ()
        found = event.answer.assigned if isinstance(event.answer, Known) else None
        if found is not None and found.job == job.job and found.epoch > job.epoch and self._ours(job, found.epoch):
            job.epoch, job.assigned = found.epoch, found
        return self._asked_less(job, [event.host])

    def _checked(self, job: _Job, epoch: int, answer: msgspec.Struct | None) -> Sequence[Action]:
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
        message = event.message
        match message:
            case Offer():
                return self._no_answer(message.job, message.epoch)
            case Assigned():
                job = self.jobs.get(message.job)
                return (Send(event.to, message),) if job is not None and self._current(job, message.epoch) else ()
            case Retire():
                job = self.jobs.get(message.job)
                return (Send(event.to, message),) if job is not None and self._current(job, message.instead) else ()
            case _:
                return ()

    def _expired(self, event: Expired) -> Sequence[Action]:
        return self._no_answer(event.job, event.epoch)

    def _no_answer(self, name: JobId, epoch: int) -> Sequence[Action]:
        job = self.jobs.get(name)
        if job is None or job.state != "offering" or job.epoch != epoch:
            return ()
        return self._next(job, f"no answer within {OFFER_S:g} s")

    def _rank(self, job: _Job) -> int:
        return min(place.ranks[0] for place in job.placed.places if place.host == self.me)
