"""What plugins on this host want of elastic jobs: `ArrangementsWanted` comes in, and what became of it goes out.

People may say the same of one job (`POST /v1/jobs/ID/arrange`). A wish is refused in words where this host's copy of
the log, or gossip, says that it cannot be; then hosts where processes are to begin are asked
(`machine/gang/wishes.py`), and the log decides.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from covey.core.errors import NoLeader, OutcomeUnknown, Refused
from covey.core.events import Send, SetTimer
from covey.core.ids import HostId, JobId
from plugins.base import Host
from plugins.facts import ArrangementsAnswered, ArrangementsWanted, WantedArrangement
from plugins.scheduler.machine.gang.wishes import (
    JOBS_MAX,
    NOT_NOW,
    AnswerWish,
    Event,
    PlannedJob,
    ProposeWish,
    Wishes,
    WishLate,
    WishProposed,
    WishRefused,
    WishSeen,
    planned,
)
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import Applied, Result
from plugins.scheduler.messages.wire import APART_MAX
from plugins.scheduler.policy import eligible, explain
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.service import asked
from plugins.scheduler.service.log import RETRY_S, QueueLog

TRIES = 3
"""The number of times that an arrangement is proposed while nobody says what became of it."""
SHOWN_S = 2.0
"""Seconds for which what is in force is waited for in this host's own copy of the log."""

WHY_MAX = 500
"""The most characters of why somebody asks."""

Perform = Callable[[Send | SetTimer[WishLate], Callable[[Event], None]], None]


class Arrangements:
    """Wishes of plugins on this host. `free_for`: GPUs of each host that a job may have, as
    `CoordinatedGangs.free_for`; `perform`: sends and sets timers."""

    def __init__(
        self,
        host: Host,
        queue: JobTable,
        queue_log: QueueLog,
        settings: SchedulerSettings,
        free_for: Callable[[Job], Mapping[HostId, int]],
        perform: Perform,
    ) -> None:
        self.host, self.queue, self.queue_log = host, queue, queue_log
        self.wishes = Wishes(settings)
        self._free_for, self._perform = free_for, perform
        self._number = 0
        self._asked: dict[str, asyncio.Future[AnswerWish]] = {}
        """What people asked for that is under way, by the name of the wish."""

    def wanted(self, fact: ArrangementsWanted) -> None:
        try:
            jobs = self._planned(fact)
        except WishRefused as refused:
            self._answer(AnswerWish(fact.ask, str(refused), refused.code, refused.full))
            return
        self.feed(WishSeen(fact.ask, jobs, fact.by, fact.why))

    async def arrange(self, job: Job, given: Mapping[str, Any]) -> None:
        """Arrange an elastic job as a person says, and return once that is in force. `given`: `processes`, `shares`,
        `owners` as in `WantedArrangement`, each of which may be missing. Refused says why it stays as it is."""
        what, by = f"{job.id} was not arranged anew", asked.by(given)
        said = {name: given[name] for name in ("processes", "shares", "owners") if given.get(name) is not None}
        try:
            wanted = msgspec.convert(
                {"epoch": job.grant.epoch, "replaces": job.healing.healed, **said}, WantedArrangement
            )
        except msgspec.ValidationError as error:
            next = (
                'processes and shares are numbers by host, owners a list of hosts: {"shares": {"gpu1": 11, "gpu2": 5}}'
            )
            raise Refused(2, what, str(error), next) from error
        self._number += 1
        ask = f"{self.host.id}.{self._number}"
        answer = self._asked[ask] = asyncio.get_running_loop().create_future()
        self.wanted(ArrangementsWanted(ask, {job.id: wanted}, by, str(given.get("why", ""))[:WHY_MAX]))
        if (said := await answer).refused:
            again = "try again in a few seconds: " if said.code == NOT_NOW else ""
            raise Refused(said.code, what, said.refused, f"{again}agentctl job {job.id}")

    def _planned(self, fact: ArrangementsWanted) -> tuple[PlannedJob, ...]:
        """What the wish means for each of its jobs. WishRefused."""
        if not 1 <= len(fact.jobs) <= JOBS_MAX:
            raise WishRefused(f"{len(fact.jobs)} jobs are to be arranged at once, and the log takes 1 to {JOBS_MAX}")
        if self.queue_log.behind:
            raise WishRefused(f"the copy of the log on {self.host.id} is not current", NOT_NOW)
        self._number = max(self._number + 1, int(1000 * self.queue_log.rack_clock.now_s()))
        return tuple(self._planned_job(id, wanted) for id, wanted in sorted(fact.jobs.items()))

    def _planned_job(self, id: JobId, wanted: WantedArrangement) -> PlannedJob:
        job = self.queue.jobs.get(id)
        if job is None:
            raise WishRefused(f"{id}: there is no such job")
        try:
            found = planned(job, wanted, self._number)
            self._refuse_hosts(job, found)
        except WishRefused as refused:
            raise WishRefused(f"{id}: {refused}", refused.code, refused.full) from refused
        apart_from = tuple(self.queue.apart_from(job)[:APART_MAX])
        return found.counted(not job.counts, apart_from)

    def _refuse_hosts(self, job: Job, plan: PlannedJob) -> None:
        """WishRefused where gossip does not know a host as alive, or no room there; or a host of the job is away, and
        those whose processes are to end may be the last that have its state."""
        states = {view.host: view.state for view in self.host.hosts()}
        for host in sorted({*plan.names, *(owner for owner in plan.wanted.owners or () if owner)}):
            if states.get(host) != "alive":
                raise WishRefused(f"{host} is {states.get(host) or 'not known as a host'}")
        away = sorted(place.host for place in job.start.places if states.get(place.host) != "alive")
        if away and sum(len(place.ranks) for place in plan.stay) < job.processes:
            raise WishRefused(explain.too_few_left(away), NOT_NOW)
        free = self._free_for(job) if plan.names else {}
        for host, names in sorted(plan.names.items()):
            needed = len(names) * job.spec.gpus_per_worker
            if host not in free:
                barred = eligible.bars(job.spec, self.queue.drained)
                raise WishRefused(barred.get(host, f"{host} takes no jobs now"), full=host)
            if free[host] < needed:
                why = f"{host} has no room: {needed} GPUs are needed and {free[host]} are free"
                raise WishRefused(why, full=host)

    def feed(self, event: Event) -> None:
        for action in self.wishes.handle(event, self.host.env.clock.now_s()):
            match action:
                case ProposeWish():
                    self.host.env.spawn(f"propose {action.ask}", self._propose(action))
                case AnswerWish():
                    self._answer(action)
                case Send() | SetTimer():
                    self._perform(action, self.feed)

    def _answer(self, answer: AnswerWish) -> None:
        if (asked := self._asked.pop(answer.ask, None)) is not None:
            if not asked.done():  # whoever asked may be gone
                asked.set_result(answer)
            return
        self.host.publish(ArrangementsAnswered(answer.ask, answer.refused, answer.full))

    async def _propose(self, action: ProposeWish) -> None:
        result = await self._proposed(action)
        if isinstance(result, Applied):
            await self.queue_log.until(lambda: self._shows(action), SHOWN_S)
        self.feed(WishProposed(action.ask, result))

    async def _proposed(self, action: ProposeWish) -> Result | str:
        """What the log answered, or why it did not."""
        for _ in range(TRIES):
            try:
                return await self.queue_log.propose(action.command)
            except NoLeader as error:
                return str(error) or "no leader is known"
            except OutcomeUnknown:
                await asyncio.sleep(RETRY_S)
        return "the leader did not confirm it in time; it may still come into force"

    def _shows(self, action: ProposeWish) -> bool:
        """Whether this host's copy of the log has what was proposed."""
        jobs = ((self.queue.jobs.get(id), new) for id, new in action.command.jobs.items())
        return all(job is None or job.healing.healed > new.replaces for job, new in jobs)
