"""What people ask of a job that waits, or is to wait again: hold, release, requeue, its place, its time limit."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from covey.core.errors import Refused
from plugins.askers import asker_of
from plugins.base import Command
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages import options
from plugins.scheduler.messages.arrays import ranges_of
from plugins.scheduler.messages.commands import (
    ByPeople,
    CancelAsked,
    HoldAsked,
    PriorityAsked,
    ReleaseAsked,
    RequeueAsked,
    TimeLimitSet,
)
from plugins.scheduler.service import asked
from plugins.scheduler.service.log import QueueLog

SHOWN_S = 2.0
"""Seconds for which a change waits to be seen in this host's own copy of the log."""
Seek = Callable[[Mapping[str, Any]], Awaitable[Job]]


class QueueChanges:
    """The commands of one host. `seek` finds the job that a request is about; `show` answers with its view."""

    def __init__(self, log: QueueLog, seek: Seek, show: Command) -> None:
        self._log, self._seek, self._show = log, seek, show

    def commands(self) -> Mapping[str, Command]:
        return {
            "hold": self._hold,
            "release": self._release,
            "requeue": self._requeue,
            "priority": self._priority,
            "update": self._update,
            "cancel": self._cancel,
        }

    async def _hold(self, given: Mapping[str, Any]) -> Any:
        job = await self._seek(given)
        return await self._changed(given, job, "hold", HoldAsked(wall_s=0.0, job=job.id, by=asked.by(given)))

    async def _release(self, given: Mapping[str, Any]) -> Any:
        job = await self._seek(given)
        return await self._changed(given, job, "release", ReleaseAsked(wall_s=0.0, job=job.id, by=asked.by(given)))

    async def _requeue(self, given: Mapping[str, Any]) -> Any:
        job = await self._seek(given)
        said = {name: given.get(name, False) for name in ("hold", "test")}
        for name, value in said.items():
            if not isinstance(value, bool):
                next = "agentctl requeue ID --hold"
                raise Refused(2, f"invalid {name}: {str(value)[:40]!r}", "expected true or false", next)
        command = RequeueAsked(wall_s=0.0, job=job.id, epoch=job.grant.epoch, by=asked.by(given), **said)
        return await self._changed(given, job, "requeue", command)

    async def _priority(self, given: Mapping[str, Any]) -> Any:
        job, up = await self._seek(given), given.get("up")
        if not isinstance(up, bool):
            raise Refused(2, f"invalid up: {str(up)[:40]!r}", "expected true or false", "agentctl priority ID --up")
        own = asker_of(given).role != "operator"
        command = PriorityAsked(wall_s=0.0, job=job.id, up=up, own=own, by=asked.by(given))
        return await self._changed(given, job, "move", command)

    async def _update(self, given: Mapping[str, Any]) -> Any:
        job = await self._seek(given)
        if "time_limit_s" not in given:
            why, next = "the one thing that can be changed is the time limit", f"agentctl update {job.id} --time 4h"
            raise Refused(2, f"nothing to change about {job.id}", why, next)
        said = {"wall_s": 0.0, "job": job.id, "time_limit_s": given["time_limit_s"], "by": asked.by(given)}
        try:
            command = msgspec.convert(said, TimeLimitSet)
        except msgspec.ValidationError as error:
            what = f"invalid time_limit_s: {str(given['time_limit_s'])[:40]!r}"
            expected = f"expected {options.named('time_limit_s').expected}"
            raise Refused(2, what, expected, f"agentctl update {job.id} --time 4h") from error
        self._refuse_beyond_the_timer(job, command)
        return await self._changed(given, job, "update", command)

    @staticmethod
    def _refuse_beyond_the_timer(job: Job, command: TimeLimitSet) -> None:
        """Refuse more time for ranks that run as another user: their hosts set a timer when these started, which would
        end them all the same."""
        now_s, then_s = job.spec.time_limit_s, command.time_limit_s
        if job.placed and job.spec.owner is not None and now_s is not None and (then_s is None or then_s > now_s):
            why = "its ranks run under timers of their hosts, which were set by its limit when they started"
            next = f"agentctl requeue {job.id} --hold; agentctl update {job.id} --time ...; agentctl release {job.id}"
            raise Refused(4, f"{job.id} gets no more time while it runs", why, next)

    async def _cancel(self, given: Mapping[str, Any]) -> Any:
        job, text = await self._seek(given), given.get("tasks")
        tasks: tuple[tuple[int, int], ...] = ()
        if text is not None:
            tasks = self._tasks(job, str(text))
        command = CancelAsked(wall_s=0.0, job=job.id, by=asked.by(given), tasks=tasks)
        if not job.over:
            await self._log.change(command, f"cancel {job.id}")
        if not tasks:
            await self._log.until(lambda: job.over or job.ending.after == "cancelled" or _closed(job), SHOWN_S)
        return await self._show(given)

    @staticmethod
    def _tasks(job: Job, text: str) -> tuple[tuple[int, int], ...]:
        what, next = f"nothing of {job.id} was cancelled", f"agentctl cancel {job.id}[3-7]"
        if job.array is None:
            raise Refused(4, what, f"it is no array, and has no task {text[:40]}", f"agentctl cancel {job.id}")
        try:
            ranges = ranges_of(text)
        except ValueError as error:
            raise Refused(2, what, f"invalid tasks {text[:40]!r}: {error}", next) from error
        if any(step > 1 for _, _, step in ranges):
            raise Refused(2, what, f"invalid tasks {text[:40]!r}: a range here has no step", next)
        return tuple((first, last) for first, last, _ in ranges)

    async def _changed(self, given: Mapping[str, Any], job: Job, verb: str, command: ByPeople) -> Any:
        index = self._log.queue.index
        await self._log.change(command, f"{verb} {job.id}")
        await self._log.until(lambda: self._log.queue.index > index, SHOWN_S)
        return await self._show(given)


def _closed(job: Job) -> bool:
    return job.array is not None and bool(job.array.closed)
