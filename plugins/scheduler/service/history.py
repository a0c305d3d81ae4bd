"""Records of ended jobs on this host, and what any host answers of all jobs that ever ended: `agentctl history` and
`report`.

Every agent receives the log, so each makes the record of each job that ends, by itself: the books survive as long as
one agent's disk does. The log forgets ended jobs (it keeps the newest 1000), so a host that joined later, was away for
long or lost its file lacks some. Which ones it knows, since jobs are numbered: it asks the other hosts for those, in
the background and whenever somebody reads. What no host that answered has, while others did not answer, is *not known*,
and the hosts are named.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from covey.core.errors import Refused
from covey.core.ids import HostId, JobId
from covey.core.job_records import (
    GpuSeconds,
    JobRecord,
    Range,
    RecordsAsked,
    lacking,
    ranges_of,
)
from plugins.askers import OwnerUser, asker_of
from plugins.base import Command, Host
from plugins.history_views import HistoryView, JobReportView, ReportRow, ReportView, gpu_seconds, history_row
from plugins.scheduler.machine.books import asked_for
from plugins.scheduler.machine.books.job_record import record_of
from plugins.scheduler.machine.log.job_table import ENDED_MAX, JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.wire import RANGES_MAX, RECORDS_MAX, RecordsAnswer, RecordsWanted
from plugins.scheduler.service.log import QueueLog

FILL_S = 30.0
"""Seconds between two times that other hosts are asked for records that this one lacks."""
RETRY_S = 5.0
"""Seconds after which records are written again that could not be."""
ASK_S = 2.0
"""Seconds for which another host is waited for."""
ANSWER_BYTES_MAX = 1 << 20
"""The most bytes of records in one answer, about."""
T = TypeVar("T")


class JobHistory:
    """The records of this host. `plugin`: whose questions other hosts answer."""

    def __init__(self, plugin: str, host: Host, queue: JobTable, log: QueueLog) -> None:
        self._plugin, self._host, self._queue, self._log = plugin, host, queue, log
        self._records = host.env.records
        self._new: dict[JobId, JobRecord] = {}
        """Records that are not written yet."""
        self._news = asyncio.Event()
        self._ranges: tuple[Range, ...] = ()
        """The numbers of all records that are, or were, in the data base."""
        self._told: str | None = None
        """What was said of a damaged file when `_ranges` was read; None: it was not read yet."""
        self._nowhere: tuple[Range, ...] = ()
        """Numbers of which all of `_asked` said that they have no record."""
        self._asked: frozenset[HostId] = frozenset()
        self._filling = asyncio.Lock()
        self.trouble = ""
        """Why records cannot be written or read now; empty: they can."""

    # ---- writing ----

    def look(self, changed: Sequence[JobId]) -> None:
        """Take note of jobs that ended, among those that changed, and of those that the log has forgotten since."""
        here = [job for id in changed if (job := self._queue.jobs.get(id)) is not None]
        for job in [*self._queue.unseen(), *here]:
            if job.over:
                self._new[job.id] = record_of(job, self._queue.rack_s, 0.0)
                self._news.set()
        while len(self._new) > 2 * ENDED_MAX:
            del self._new[next(iter(self._new))]  # a sick disk: other hosts have it

    async def keep_on(self) -> None:
        """Write what is new, and fetch now and then what is lacking."""
        next_s = 0.0
        while True:
            pause_s = RETRY_S if self.trouble else FILL_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._news.wait()
            except TimeoutError:
                self._news.set()
            self._news.clear()
            await self._write()
            now_s = self._host.env.clock.now_s()
            if now_s >= next_s and not self._log.behind:
                next_s = now_s + FILL_S
                await self._fill(ASK_S)
            if self.trouble:
                await asyncio.sleep(RETRY_S)

    async def _write(self) -> bool:
        """Bring what is new to disk; whether all of it is there."""
        try:
            if self._told != self._records.told:
                self._ranges, self._told = await self._records.ranges(), self._records.told
                self._again()
            while self._new:
                part = dict(list(self._new.items())[:RECORDS_MAX])
                await self._records.put(list(part.values()))
                self._new = {id: record for id, record in self._new.items() if part.get(id) is not record}
                self._has([record.number for record in part.values()])
        except OSError as error:
            if not self.trouble:
                self._host.env.log.error("records of jobs cannot be written", why=str(error))
            self.trouble = str(error)
            return False
        self.trouble = ""
        return True

    def _again(self) -> None:
        """Write what the log knows of ended jobs: the file is another one than before."""
        self._nowhere = ()
        self.look([JobId(id) for id in self._queue.ended])

    def _has(self, numbers: Sequence[int]) -> None:
        self._ranges = asked_for.joined(self._ranges, ranges_of(sorted(set(numbers))))

    # ---- what this host lacks ----

    def lacks(self) -> tuple[Range, ...]:
        """Numbers of ended jobs that have no record here, without those that were dropped to make room, and those that
        no host has."""
        live = ranges_of(sorted(job.number for job in self._queue.live()))
        written = ranges_of(sorted(record.number for record in self._new.values()))
        here = asked_for.joined(asked_for.joined(self._ranges, live), written)
        below = self._records.trimmed
        here = asked_for.joined(here, ((1, below),)) if below else here
        return lacking(self._queue.next_number, asked_for.joined(here, self._nowhere))

    async def _fill(self, wait_s: float) -> dict[HostId, str]:
        """Fetch what this host lacks from the others; those that did not answer, and why."""
        async with self._filling:
            silent: dict[HostId, str] = {}
            views = [view for view in self._host.hosts() if view.host != self._host.id]
            if self._asked != (asked := frozenset(view.host for view in views)):
                self._asked, self._nowhere = asked, ()
            for view in views:
                if not (missing := self.lacks()):
                    return {}
                if view.state not in ("alive", "suspect"):
                    silent[view.host] = f"it is {view.state}"
                elif not await self._from(view.host, missing, wait_s):
                    silent[view.host] = f"no answer within {wait_s:g} s"
            if not silent and self._told is not None and not self._log.behind:
                self._nowhere = asked_for.joined(self._nowhere, self.lacks())
            return silent if self.lacks() else {}

    async def _from(self, host: HostId, missing: tuple[Range, ...], wait_s: float) -> bool:
        """Fetch records of these numbers from one host; whether it said all that it has of them."""
        while missing:
            asks = missing[-RANGES_MAX:]
            try:
                answer = await self._host.ask(self._plugin, host, RecordsWanted(asks), wait_s)
            except (TimeoutError, Refused):
                return False
            if not isinstance(answer, RecordsAnswer):
                return False
            try:
                await self._records.put(answer.records)
            except OSError as error:
                self.trouble = str(error)
                return False
            self._has([record.number for record in answer.records])
            if answer.more and not answer.records:
                return False
            missing = asked_for.without(missing, self._ranges) if answer.more else missing[:-RANGES_MAX]
        return True

    async def answer(self, wanted: RecordsWanted) -> RecordsAnswer:
        """The records that another host asks for."""
        await self._write()
        try:
            found = await self._records.find(RecordsAsked(numbers=wanted.numbers, limit=RECORDS_MAX + 1))
        except OSError as error:
            next = f"look at {self._host.id}'s disk, and try again"
            raise Refused(75, "records of jobs cannot be read now", f"its disk fails: {error}", next) from error
        taken = asked_for.fitting(found[:RECORDS_MAX], ANSWER_BYTES_MAX)
        return RecordsAnswer(tuple(taken), len(taken) < len(found))

    async def newest(self, limit: int) -> list[JobRecord]:
        """The newest ended jobs of which this host has records; none while its disk fails."""
        await self._write()
        try:
            return await self._records.find(RecordsAsked(limit=limit))
        except OSError as error:
            self.trouble = str(error)
            return []

    def notes(self) -> list[str]:
        """What is wrong with the records of this host, for `agentctl status`."""
        failing = [f"records of ended jobs cannot be written: {self.trouble}"] if self.trouble else []
        return [*failing, *([self._records.told] if self._records.told else [])]

    # ---- what people ask ----

    def commands(self) -> dict[str, Command]:
        return {"history": self.history, "report": self.report, "report_job": self.report_job}

    async def history(self, given: Mapping[str, Any]) -> HistoryView:
        """Ended jobs, the newest first, of the asker or, for operators, of all."""
        asks = asked_for.own(asked_for.records(given), asker_of(given))
        silent = await self._whole()
        rows = [history_row(record) for record in await self._read(self._records.find(asks))]
        missing, trimmed = asked_for.count(self.lacks()), self._records.trimmed
        return HistoryView(jobs=rows, unanswered=silent, missing=missing, trimmed=trimmed, damaged=self._records.told)

    async def report(self, given: Mapping[str, Any]) -> ReportView:
        """GPU·s by user, tenant or GPU: of jobs that ended, and of those that run now up to now."""
        asks, by = asked_for.own(asked_for.records(given), asker_of(given)), asked_for.by(given)
        silent = await self._whole()
        sums = await self._read(self._records.sums(asks, by))
        now = [self._now(job) for job in self._queue.live() if job.tally.attempt]
        live = [record for record in now if asked_for.matches(asks, record)]
        rows = asked_for.added(sums, live, by)
        return ReportView(
            by=by,
            rows=[ReportRow(row.of, row.jobs, gpu_seconds(row.seconds)) for row in rows],
            total=gpu_seconds(sum((row.seconds for row in rows), GpuSeconds())),
            live=len(live),
            unanswered=silent,
            missing=asked_for.count(self.lacks()),
            trimmed=self._records.trimmed,
            damaged=self._records.told,
        )

    async def report_job(self, given: Mapping[str, Any]) -> JobReportView:
        """What is known of one job, also of one that the log has forgotten. Refused when nothing is."""
        asker, id = asker_of(given), str(given.get("id", ""))
        job, silent = self._queue.jobs.get(JobId(id)), {}
        found = None if job is None else self._now(job)
        if found is None and self._queue.was(JobId(id)):
            silent = await self._whole()
            found = next(iter(await self._read(self._records.find(RecordsAsked(number=int(id[1:]))))), None)
        if found is None:
            why = "no host has a record of it" if not silent else f"no answer from {', '.join(silent)}"
            raise Refused(3, f"nothing is known about {id[:80]!r}", why, "agentctl history")
        if not (asker.role == "operator" or asker.reads_all or OwnerUser(found.user, found.uid).is_user(asker)):
            whose = found.user or "the agent's own user"
            why = f"{id} belongs to {whose}, and {asker.name} is somebody else"
            raise Refused(4, "this request is not allowed", why, "ask its owner or an operator")
        over = job is None or job.over
        return JobReportView(job=history_row(found, over), over=over)

    def _now(self, job: Job) -> JobRecord:
        return record_of(job, self._log.rack_clock.now_s(), self._host.env.clock.wall_s())

    async def _whole(self) -> dict[HostId, str]:
        """Write and fetch what is lacking; hosts that did not answer while something is."""
        await self._write()
        return await self._fill(ASK_S) if self.lacks() else {}

    async def _read(self, reading: Awaitable[T]) -> T:
        try:
            return await reading
        except OSError as error:
            next = "look at the disk of its state_dir, or ask another host: agentctl --agent https://HOST:8470 history"
            what = f"records of jobs on {self._host.id} cannot be read now"
            raise Refused(75, what, f"the disk fails: {error}", next) from error
