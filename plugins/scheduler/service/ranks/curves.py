"""Curves of jobs that run, or ran, on this host: kept in memory while steps come, and beside the job's output for as
long as that is kept."""

import asyncio
from collections.abc import Sequence

import msgspec

from covey.core.errors import Refused
from covey.core.ids import HostId, JobId
from plugins.base import Host
from plugins.facts import StepTimed
from plugins.scheduler.machine.host.curve import JobCurve, joined, of_all
from plugins.scheduler.messages.wire import CurvePoint, JobCurveAnswer, JobCurveWanted

JOBS_MAX = 256
"""The most jobs whose points are in memory; of others they are on disk alone."""


class Curves:
    """The curves of this host's jobs. `plugin`: whose questions other hosts answer."""

    def __init__(self, plugin: str, host: Host) -> None:
        self._plugin, self._host = plugin, host
        self._here: dict[JobId, JobCurve] = {}
        self._new: dict[JobId, None] = {}
        """Jobs with points that are not on disk."""

    def stepped(self, fact: StepTimed) -> None:
        curve = self._here.pop(fact.job, None) or JobCurve()
        self._here[fact.job] = curve
        curve.add(CurvePoint(fact.step, fact.step_s, fact.epoch, fact.rank, fact.metrics))
        self._new[fact.job] = None
        if len(self._here) > JOBS_MAX:
            forgotten = next(iter(self._here))
            del self._here[forgotten]
            self._new.pop(forgotten, None)

    async def save(self, *only: JobId) -> None:
        """Bring to disk what is new of all jobs, or of these, which have ended here."""
        for job in [job for job in self._new if not only or job in only]:
            self._new.pop(job, None)
            try:
                await self._host.runner.keep_curve(job, msgspec.msgpack.encode(await self._of(job)))
            except OSError as error:
                self._host.env.log.debug("a curve is not written", job=job, why=str(error))
        for job in only:
            if job not in self._new:
                self._here.pop(job, None)

    async def answer(self, job: JobId) -> JobCurveAnswer:
        try:
            return JobCurveAnswer(tuple(await self._of(job)))
        except OSError as error:
            what, next = f"the curve of {job} cannot be read now", f"look at {self._host.id}'s disk, and try again"
            raise Refused(75, what, f"its disk fails: {error}", next) from error

    async def ask(self, job: JobId, hosts: Sequence[HostId], wait_s: float) -> tuple[list[CurvePoint], list[HostId]]:
        """The curve of a job from these hosts, and those that did not answer."""
        answers = await asyncio.gather(*(self._ask(host, job, wait_s) for host in hosts))
        silent = [host for host, answer in zip(hosts, answers, strict=True) if answer is None]
        return of_all(answer.points for answer in answers if answer is not None), silent

    async def _ask(self, host: HostId, job: JobId, wait_s: float) -> JobCurveAnswer | None:
        try:
            if host == self._host.id:
                return await self.answer(job)
            found = await self._host.ask(self._plugin, host, JobCurveWanted(job), wait_s)
        except (TimeoutError, Refused):
            return None
        return found if isinstance(found, JobCurveAnswer) else None

    async def _of(self, job: JobId) -> list[CurvePoint]:
        kept = await self._host.runner.curve(job)
        here = self._here.get(job)
        try:
            older = [] if kept is None else _decoder.decode(kept)
        except msgspec.MsgspecError:
            older = []  # damaged: what it had is lost, and what comes is kept
        return joined(older, [] if here is None else here.points)


_decoder: msgspec.msgpack.Decoder[list[CurvePoint]] = msgspec.msgpack.Decoder(list[CurvePoint])
