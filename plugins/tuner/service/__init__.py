"""The tuner at work: every host of an elastic job measures, and the coordinator of a tuned one decides.

The log says which jobs are tuned (`TunerAsked`), so that survives restarts of agents and another coordinator, which is
the host of the job's lowest process that is alive: the one that also decides about its sums. It begins to measure then
from nothing.

    StepTimed, bytes of the card --every few seconds--> HostTimed --> the coordinator's machine
    the machine --> ArrangementsWanted --> the scheduler's log --> ArrangementsAnswered, JobPlaced

Steps of a job that nobody tunes are timed all the same, so that the event log has what each change of it did
(`machine/changes.py`). The card is looked at for tuned jobs alone.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from covey.core.errors import Refused
from covey.core.events import Fact, Send
from covey.core.ids import HostId, JobId
from plugins import facts
from plugins.base import Command, Host, PluginService
from plugins.facts import JobPlaced, Place, TunerAsked
from plugins.tuner import messages
from plugins.tuner.machine.changes import JobChanges
from plugins.tuner.machine.tuner import (
    HostMeasured,
    HostNow,
    JobDivided,
    TensorsNow,
    Tuner,
    TunerEvent,
    TunerTicked,
    WishAnswered,
)
from plugins.tuner.messages import HostTimed, TunedHere, TunedNow
from plugins.tuner.service.measured import CardWindow, HostMeasures
from plugins.tuner.service.view import tuned_view
from plugins.views import TunedJobView

LOOK_S = 0.05
"""Seconds between two looks at the card while a tuned job uses this host: a burst that is shorter makes the card seem
slower, so windows are short; a token bucket in front of it makes it seem faster, so they are not shorter still."""
TOLD_S = 5.0
"""Seconds after which a report is not sent again: the next one has newer figures."""
ASK_S = 2.0
"""Seconds that another coordinator may take to answer what people ask."""
EARLY_MAX = 64
"""Most jobs that are not known to run, and whose tensors are known all the same: ranks may be heard before the log says
that their job runs, and after it is over."""


class JobTensors:
    """What ranks of one start of a job push, as far as this host has heard."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.total_bytes = 0
        """The most that was heard: another owner of a table, and a rank that begins again, tell anew from the first
        tensor on."""
        self.tables: set[int] = set()
        """The tables that have tensors in them."""


class TunerService(PluginService):
    name: ClassVar[str] = "tuner"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.settings = host.settings(messages.TunerSettings)
        self.tuners: dict[JobId, Tuner] = {}
        """The tuners of jobs whose coordinator is here."""
        self.changes: dict[JobId, JobChanges] = {}
        """What changes of elastic jobs do whose coordinator is here."""
        self._placed: dict[JobId, JobPlaced] = {}
        """Elastic jobs that run."""
        self._asked: dict[JobId, TunerAsked] = {}
        self._begun: dict[JobId, int] = {}
        """`TunerAsked.asked` of each tuner."""
        self._tensors: dict[JobId, JobTensors] = {}
        self._measures: dict[JobId, HostMeasures] = {}
        """Elastic jobs that use this host."""
        self._gone: set[HostId] = set()
        self._card = CardWindow()
        self._looks = False
        self._reported_s = 0.0

    # ---- facts ----

    def on_fact(self, fact: Fact) -> None:
        match fact:
            case JobPlaced() if fact.carried:
                self._placed[fact.job] = fact
                self._settle(fact.job)
            case TunerAsked():
                self._asked[fact.job] = fact
                self._settle(fact.job)
            case facts.JobUnplaced():
                for known in (self._placed, self._asked, self._tensors):
                    known.pop(fact.job, None)
                self._settle(fact.job)
            case facts.StepTimed():
                measures, here = self._measures.get(fact.job), self._here(fact.job)
                if measures is not None and here is not None:
                    measures.timed(fact, here)
            case facts.TableUsed():
                self._tensors_of(fact.job, fact.epoch).tables.add(fact.table)
            case facts.TensorsSeen():
                tensors = self._tensors_of(fact.job, fact.epoch)
                tensors.total_bytes = max(tensors.total_bytes, fact.total_bytes)
            case facts.ArrangementsAnswered():
                for job in sorted(self.tuners):
                    self._feed(job, WishAnswered(fact.ask, fact.refused, fact.full))
            case facts.HostGone():
                self._gone.add(fact.host)
                self._settle_all()
            case facts.HostSeen():
                self._gone.discard(fact.host)
                self._settle_all()
            case facts.SecondPassed():
                self._second_passed(fact.now_s)
            case _:
                pass

    def _tensors_of(self, job: JobId, epoch: int) -> JobTensors:
        """Where to note what a rank of this start of the job pushes; of an older one nothing is kept."""
        found = self._tensors.get(job)
        if found is not None and found.epoch > epoch:
            return JobTensors(epoch)
        if found is None or found.epoch < epoch:
            found = self._tensors[job] = JobTensors(epoch)
            others = [each for each in self._tensors if each not in self._placed]
            for each in others[: max(0, len(others) - EARLY_MAX)]:
                del self._tensors[each]
        return found

    def _settle_all(self) -> None:
        for job in sorted({*self._placed, *self.tuners}):
            self._settle(job)

    def _settle(self, job: JobId) -> None:
        """Measure here, and run the tuner here, if that is what the log and the hosts that are alive say."""
        placed, asked = self._placed.get(job), self._tuned(job)
        if placed is None:
            self._measures.pop(job, None)
            self.changes.pop(job, None)
            self._end_tuner(job)
            return
        if self._uses(placed):
            measures = self._measures.get(job)
            if measures is None:
                self._measures[job] = HostMeasures(placed)
            elif measures.placed != placed:
                measures.place(placed)
            if asked is not None:
                self._look_at_card()
        else:
            self._measures.pop(job, None)
        if self._coordinator(placed) != self.host.id:
            self.changes.pop(job, None)
            self._end_tuner(job)
            return
        now = job_now(placed)
        if job not in self.changes:
            self.changes[job] = JobChanges(job, now)
        self._watch(job, now)
        if asked is None:
            self._end_tuner(job)
            return
        if job not in self.tuners or self._begun.get(job) != asked.asked:
            self.tuners[job] = Tuner(job, now, f"{self.host.id}.{self.host.boot}.{asked.asked}.", self.settings.gain)
            self._begun[job] = asked.asked
        self._feed(job, now)

    def _tuned(self, job: JobId) -> TunerAsked | None:
        """Who asked for the tuner of this start of the job; None: nobody has."""
        placed, asked = self._placed.get(job), self._asked.get(job)
        on = placed is not None and asked is not None and asked.asked and asked.epoch == placed.epoch
        return asked if on else None

    def _end_tuner(self, job: JobId) -> None:
        self.tuners.pop(job, None)
        self._begun.pop(job, None)

    def _uses(self, placed: JobPlaced) -> bool:
        return self.host.id in (*owners_of_job(placed), *(place.host for place in placed.places))

    def _coordinator(self, placed: JobPlaced) -> HostId | None:
        place = facts.coordinator_place(placed.places, self._gone)
        return place.host if place is not None else None

    def _here(self, job: JobId) -> Place | None:
        placed = self._placed.get(job)
        places = placed.places if placed is not None else ()
        return next((place for place in places if place.host == self.host.id), None)

    # ---- measuring ----

    def _look_at_card(self) -> None:
        if not self._looks:
            self._looks = True
            self.env.spawn("tuner looks at the card", self._looking())

    async def _looking(self) -> None:
        try:
            while any(self._tuned(job) for job in self._measures):
                self._card.look(self.env.probes.card(self.host.advertise), self.env.clock.now_s())
                await asyncio.sleep(LOOK_S)
        finally:
            self._looks = False

    def _second_passed(self, now_s: float) -> None:
        if now_s - self._reported_s < self.settings.report_s:
            return
        self._reported_s = now_s
        carried = self._card.taken() if self._looks else 0.0
        for job, measures in sorted(self._measures.items()):
            report, to = measures.report(self._here(job), carried), self._coordinator(measures.placed)
            if not report.steps and self._tuned(job) is None:
                continue
            if to == self.host.id:
                self._heard(to, report)
            elif to is not None:
                self.perform(Send(to, report, TOLD_S), lambda back: None)
        for job in sorted(self.tuners):
            self._feed(job, TunerTicked())

    # ---- messages ----

    async def on_message(self, sender: HostId, message: Any) -> None:
        if isinstance(message, HostTimed):
            self._heard(sender, message)

    def _heard(self, sender: HostId, report: HostTimed) -> None:
        job = JobId(report.job)
        if job not in self.changes:
            return
        times = report.step_s, report.pass_s, report.communicate_s
        measured = HostMeasured(sender, report.epoch, report.config, report.steps, *times, report.card_bytes_per_s)
        self._watch(job, measured)
        if job not in self.tuners:
            return
        tensors = self._tensors.get(job)
        placed = self._placed[job]
        if tensors is not None and tensors.epoch == placed.epoch:
            tables = tuple(sorted(each for each in tensors.tables if each < placed.tables))
            self._feed(job, TensorsNow(tensors.total_bytes, tables))
        self._feed(job, measured)

    def _watch(self, job: JobId, event: JobDivided | HostMeasured) -> None:
        """Note what a change of the job did, unless its tuner made it: that one says what it had predicted, too."""
        wish = self.tuners[job].wish if job in self.tuners else None
        config = self._placed[job].config
        for note in self.changes[job].handle(event):
            by_tuner = wish is not None and wish.granted and wish.config == config
            if not (by_tuner and isinstance(event, HostMeasured)):
                self.perform(note, lambda back: None)

    def _feed(self, job: JobId, event: TunerEvent) -> None:
        for action in self.tuners[job].handle(event, self.env.clock.now_s()):
            self.perform(action, lambda back: None)

    async def answer(self, sender: HostId, question: Any) -> TunedNow:
        if isinstance(question, TunedHere):
            return TunedNow(self.view(JobId(question.job)))
        what = f"{self.name} does not answer {type(question).__name__}"
        raise Refused(2, what, "this agent does not know the question", "upgrade the older host")

    # ---- what people ask ----

    def view(self, job: JobId) -> TunedJobView | None:
        """What the tuner of this job knows; None: it does not run here."""
        tuner = self.tuners.get(job)
        return tuned_view(tuner, self.host.id, self._begun[job]) if tuner is not None else None

    def commands(self) -> Mapping[str, Command]:
        return {"show": self._show}

    async def _show(self, given: Mapping[str, Any]) -> TunedJobView:
        """What the tuner of a job knows, from the job's coordinator."""
        job = JobId(str(given.get("id", ""))[:80])
        placed, asked = self._placed.get(job), self._asked.get(job)
        what = f"there are no figures of the tuner for {job}"
        if placed is None or asked is None:
            why = "no elastic job of that name runs, as far as this host knows"
            raise Refused(3, what, why, f"agentctl job {job}")
        if not asked.asked:
            raise Refused(4, what, "the tuner is off", f"agentctl tune {job}")
        at = self._coordinator(placed)
        found = self.view(job) if at == self.host.id else await self._asked_of(at, job) if at is not None else None
        if found is None:
            raise Refused(75, what, f"its coordinator {at} has not begun, or does not answer", "try again")
        return found

    async def _asked_of(self, at: HostId, job: JobId) -> TunedJobView | None:
        try:
            answer = await self.host.ask(self.name, at, TunedHere(job), ASK_S)
        except (TimeoutError, Refused):
            return None
        return answer.view if isinstance(answer, TunedNow) else None

    def status(self) -> Mapping[str, str]:
        return {f"tuner of {job}": tuner.doing for job, tuner in sorted(self.tuners.items())}


def owners_of_job(placed: JobPlaced) -> Sequence[HostId]:
    """The host of each table."""
    return [host for table in range(placed.tables) if (host := facts.owner_of_table(placed, table)) is not None]


def job_now(placed: JobPlaced) -> JobDivided:
    """The job's arrangement as its tuner needs it."""
    hosts = {
        place.host: HostNow(len(place.ranks), sum(len(placed.carried.get(process, ())) for process in place.ranks))
        for place in placed.places
    }
    first = next(
        (place.host for place in placed.places if any(0 in placed.carried.get(each, ()) for each in place.ranks)),
        placed.places[0].host,
    )
    owners = tuple(owners_of_job(placed))
    return JobDivided(placed.epoch, placed.config, hosts, owners, first, placed.workers)
