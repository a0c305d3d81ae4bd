"""When jobs that wait will start, for whoever asks: the leader run ahead on this host's copy of the log.

It is worked out only when somebody asks, at most once in `KEEP_S` for all jobs together, and in slices of a few
decisions, between which everything else of the agent has its turn. Any host answers: each has the log, and records of
ended jobs.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.core.errors import Refused
from covey.core.ids import JobId
from plugins.askers import Asker, asker_of
from plugins.base import Command, Host
from plugins.scheduler.machine.ahead.foreseen import Foreseeing, Past
from plugins.scheduler.machine.ahead.run_ahead import moment
from plugins.scheduler.machine.leader.leader import RackHost
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.messages.commands import Submitted
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy.foreseen.lengths import Lengths, PastJob, ended_job, kind_of
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.service import asked
from plugins.scheduler.service.history import JobHistory
from plugins.scheduler.service.log import QueueLog
from plugins.scheduler.service.views import rack_of
from plugins.start_views import StartsView, StartView

KEEP_S = 30.0
"""Seconds for which what was worked out is said again."""
SOON_S = 5.0
"""Seconds after which it is worked out anew for a job that it does not name."""
ANSWER_S, ANSWER_MAX_S = 3.0, 9.0
"""Seconds that whoever asks waits while it is worked out, and at most."""
SLICE = 4
"""Decisions between which nothing else of the agent has its turn: one to two milliseconds of processor time."""
RECORDS = 2000
"""The newest ended jobs that are looked at."""
RECORDS_SLICE = 50
JOBS_MAX = 300
"""The most jobs that wait or run for which the leader is run ahead: to begin a course with so many is one slice, and
took 5 to 28 ms."""


class Starts:
    """The commands of one host. `wanted`: the job that a request asks for, as it would be submitted."""

    def __init__(
        self,
        host: Host,
        queue: JobTable,
        log: QueueLog,
        settings: SchedulerSettings,
        history: JobHistory,
        wanted: Callable[[Mapping[str, Any]], tuple[JobSpec, Submitted]],
    ) -> None:
        self._host, self._queue, self._log, self._settings = host, queue, log, settings
        self._history, self._wanted = history, wanted
        self._said: Foreseeing | None = None
        """The newest that was worked out."""
        self._at_s = 0.0
        """When it was begun."""
        self._works = False
        """Whether it is being worked out."""
        self._done = asyncio.Event()
        self._one = asyncio.Lock()

    def commands(self) -> Mapping[str, Command]:
        return {"starts": self._starts, "start_of": self._start_of}

    async def _starts(self, given: Mapping[str, Any]) -> StartsView:
        """The starts of all jobs that wait, or of one."""
        id, asker = given.get("job"), asker_of(given)
        waiting = {job.id for job in self._queue.live() if job.state == "queued" and job.array is None}
        if id is not None:
            waiting &= {JobId(str(id))}
        if not waiting:
            return StartsView([], True)
        if (never := self._never()) is not None:
            return StartsView([StartView(job, None, None, f"not known: {never}") for job in sorted(waiting)], True)
        now_s = self._host.env.clock.now_s()
        lacks = self._said is None or (now_s - self._at_s >= SOON_S and not waiting <= self._said.waiting.keys())
        if lacks or now_s - self._at_s >= KEEP_S:
            if not self._works:
                self._works = True
                self._done.clear()
                self._host.env.spawn("starts of jobs", self._work_out())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(ANSWER_MAX_S, asked.seconds(given, "wait_s", ANSWER_S))):
                    await self._done.wait()
        said = self._said
        if said is None:
            return StartsView([], False)
        found = [each for each in views_of(said, asker) if each.id in waiting]
        return StartsView(found, len(found) == len(waiting), max(0.0, self._host.env.clock.now_s() - self._at_s))

    async def _work_out(self) -> None:
        clock = self._host.env.clock
        try:
            async with self._one:
                past, at_s = await self._past(), clock.now_s()
                begin, _ = moment(self._queue, self._rack(), self._log.rack_clock.now_s(), clock.wall_s())
                said = Foreseeing(begin, self._settings, past, self._queue.index)
                await in_slices(said)
            self._said, self._at_s = said, at_s
        finally:
            self._works = False
            self._done.set()

    async def _start_of(self, given: Mapping[str, Any]) -> StartView:
        """When a job would start that was submitted now."""
        spec, asker = self._wanted(given)[0], asker_of(given)
        if spec.array or spec.after or spec.begin_wall_s is not None or spec.elastic:
            why = "arrays, jobs with --after or --begin, and elastic ones are not run ahead"
            return StartView("", None, None, f"not known: {why}")
        if (never := self._never()) is not None:
            return StartView("", None, None, f"not known: {never}")
        async with self._one:
            past = await self._past()
            wall_s = self._host.env.clock.wall_s()
            begin, id = moment(self._queue, self._rack(), self._log.rack_clock.now_s(), wall_s, spec)
            if id is None:
                why = "the log would refuse it now: too many jobs wait, or it asks for more than its tenant's quota"
                raise Refused(4, f"cannot submit {spec.called}", why, "agentctl jobs, agentctl quota")
            said = Foreseeing(begin, self._settings, past, self._queue.index, {id})
            await in_slices(said)
        view = views_of(said, asker)[0]
        return StartView("", view.p50_s, view.p90_s, view.basis)

    def _rack(self) -> Sequence[RackHost]:
        return rack_of(self._host.hosts(), self._host.env.clock.now_s())

    def _never(self) -> str | None:
        """Why the leader cannot be run ahead here, in words."""
        live = self._queue.live()
        if self._settings.beside:
            return "jobs share GPUs here, and how they do is not run ahead"
        if len(live) > JOBS_MAX:
            return f"{len(live)} jobs wait or run, and the leader is run ahead for at most {JOBS_MAX}"
        elastic = next((job.id for job in live if job.spec.elastic), None)
        return None if elastic is None else f"{elastic} is elastic, and how it grows and shrinks is not run ahead"

    async def _past(self) -> Past:
        """What is known of ended jobs, and of all that were submitted."""
        lengths, submitted = Lengths(), list[PastJob]()
        records = await self._history.newest(RECORDS)
        for at, record in enumerate(records):
            if at % RECORDS_SLICE == 0:
                await asyncio.sleep(0)
            if (ended := ended_job(record)) is not None:
                lengths.add(ended)
                submitted.append(ended)
        live = [job for job in self._queue.live() if job.array is None]
        submitted += [PastJob(kind_of(job.spec), job.times.submitted_wall_s, None) for job in live]
        return Past(lengths, submitted)


async def in_slices(said: Foreseeing) -> None:
    """Run all courses; between each few decisions everything else has its turn."""
    for at, _ in enumerate(said.steps()):
        if at % SLICE == 0:
            await asyncio.sleep(0)


def views_of(said: Foreseeing, asker: Asker) -> list[StartView]:
    """What the asker may see of it: names of other users' jobs are for operators."""
    sees_all = asker.role == "operator" or asker.reads_all
    found = said.answers(lambda user: sees_all or user == asker.user)
    return [StartView(id, one.p50_s, one.p90_s, one.basis) for id, one in found.items()]
