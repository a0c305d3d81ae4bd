"""What people ask of ranks that run: to move to another host, to be carried by more or fewer processes, or not to wait
for a host that is gone."""

from collections.abc import Mapping
from typing import Any

from covey.core.errors import Refused
from covey.core.ids import HostId
from plugins.base import Host
from plugins.scheduler.machine.leader.admission import taken_back
from plugins.scheduler.machine.log import replacing
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import PlacesLost, ScaleAsked, TuneAsked
from plugins.scheduler.policy import explain
from plugins.scheduler.service import asked
from plugins.scheduler.service.log import QueueLog

MOVED_S = 8.0
"""Seconds for which a move is waited for: asking a host takes milliseconds, three attempts that fail some seconds."""
WHY_MAX = 500
"""The most characters of why somebody asks."""
WORKERS_MAX = 4096
"""The most processes that the log is asked for; what a job may have is its own range."""


class RunningMoves:
    """Moves of ranks of the gangs that the log knows here."""

    def __init__(self, host: Host, queue: JobTable, log: QueueLog) -> None:
        self.host, self.queue, self.log = host, queue, log

    async def move(self, job: Job, given: Mapping[str, Any]) -> None:
        """Move ranks, and return once the log has their new place. `given`: `what`, a rank or a host of the job; `to`,
        a host, or nothing. Refused says why they stay."""
        leaves, to = self._leaves(job, str(given.get("what", ""))), self._wanted(given.get("to"))
        what, by = f"ranks of {job.id} on {leaves} were not moved", asked.by(given)
        alive = [place.host for place in job.start.places if self._state(place.host) == "alive"]
        if job.state != "running" or not alive:
            raise Refused(4, what, f"{job.id} is {job.state}", f"agentctl job {job.id}")
        command, sought = replacing.move_asked(job, leaves, to, alive[0], by), job.healing.sought
        await self.log.change(command, f"move ranks of {job.id}")

        def settled() -> bool:
            return job.healing.sought > sought and leaves not in job.healing.moving

        await self.log.until(settled, MOVED_S)
        if job.place_on(leaves) is None:
            return
        if leaves in job.healing.moving:
            raise Refused(75, what, "no host has been found yet; it may still move", f"agentctl why {job.id}")
        raise Refused(4, what, job.reason, f"name another host, or none: agentctl move {job.id} {leaves}")

    async def scale(self, job: Job, given: Mapping[str, Any]) -> None:
        """Give an elastic job more or fewer processes, and return once the log has them, or some of them where there is
        not room for all. `given`: `workers`, how many it is to have; `why`, for the event log. Refused says why their
        number stays."""
        workers, by = asked.whole(given, "workers", 0), asked.by(given)
        reason = asked.text(given, "why", WHY_MAX)
        what = f"{job.id} was not scaled"
        alive = [place.host for place in job.start.places if self._state(place.host) == "alive"]
        if job.state != "running" or not alive:
            next = f"agentctl job {job.id}" if job.over else f"try again once it runs: agentctl job {job.id}"
            raise Refused(4, what, f"{job.id} is {job.state}", next)
        if not 1 <= workers <= WORKERS_MAX:
            why = f"{workers} is not a number of processes"
            raise Refused(2, what, why, f"agentctl scale {job.id} {job.processes}")
        away = sorted({place.host for place in job.start.places} - set(alive))
        if away and workers < job.processes:
            raise Refused(
                75, what, explain.too_few_left(away), "try again once it is back, or given up: agentctl hosts"
            )
        before, sought = job.processes, job.healing.sought
        command = ScaleAsked(
            wall_s=0.0,
            job=job.id,
            epoch=job.grant.epoch,
            workers=workers,
            coordinator=alive[0],
            by=by,
            why=reason,
            replaces=job.healing.healed,
            sought=sought,
        )
        await self.log.change(command, f"scale {job.id}")
        if workers <= before:
            await self.log.until(lambda: job.processes <= workers and not job.healing.wanted, MOVED_S)
            return
        await self.log.until(lambda: job.healing.sought > sought and not job.healing.wanted, MOVED_S)
        if job.healing.wanted:
            why = f"it has {job.processes} processes, and no host has been found yet for more; it may still grow"
            raise Refused(75, f"{job.id} has not grown to {workers} processes", why, f"agentctl why {job.id}")
        if job.processes <= before:
            raise Refused(4, what, job.reason, "agentctl hosts: see where GPUs are free")

    async def tune(self, job: Job, given: Mapping[str, Any]) -> None:
        """Switch the tuner of an elastic job on or off, and return once the log has it. `given`: `on`. Refused says why
        it stays as it is."""
        on, by, what = given.get("on", True), asked.by(given), f"{job.id} is not tuned"
        if not isinstance(on, bool):
            raise Refused(2, what, f"{str(on)[:40]!r} is neither true nor false", "give on: true or false")
        if job.state != "running":
            next = f"agentctl job {job.id}" if job.over else f"try again once it runs: agentctl job {job.id}"
            raise Refused(4, what, f"{job.id} is {job.state}", next)
        before = job.healing.tuned
        if not on and not before[1]:
            return
        command = TuneAsked(wall_s=0.0, job=job.id, epoch=job.grant.epoch, on=on, by=by)
        await self.log.change(command, f"tune {job.id}")
        await self.log.until(lambda: job.healing.tuned != before, MOVED_S)

    def _leaves(self, job: Job, what: str) -> HostId:
        """The host that is named, or that has this rank."""
        found = [
            place.host
            for place in job.start.places
            if place.host == what or (what.isdecimal() and int(what[:6]) in place.ranks)
        ]
        if found:
            return found[0]
        where = (
            ", ".join(f"{place.host} ({' '.join(map(str, place.ranks))})" for place in job.start.places) or "nowhere"
        )
        why = f"{what[:80]!r} is neither a rank of it nor a host with its ranks, which are on {where}"
        raise Refused(3, f"no rank of {job.id} was moved", why, f"agentctl move {job.id} 0")

    def _wanted(self, given: Any) -> HostId | None:
        if given in (None, ""):
            return None
        host = HostId(str(given)[:63])
        state = self._state(host)
        if state != "alive":
            why = "no host of that name is known" if state is None else f"it is {state}"
            raise Refused(3 if state is None else 4, f"no rank can move to {host!r}", why, "agentctl hosts")
        return host

    def _state(self, host: HostId) -> str | None:
        return next((view.state for view in self.host.hosts() if view.host == host), None)

    async def give_up(self, host: HostId, given: Mapping[str, Any]) -> list[Job]:
        """Take a person's word that nothing runs on a host that is gone: jobs that heal continue without it now, others
        are taken back. Returns these jobs."""
        state, on_it = self._state(host), [job for job in self.queue.live() if job.awaits(host)]
        if state is None and not on_it:
            raise Refused(3, f"there is no host {str(host)[:80]!r}", "no host of that name is known", "agentctl hosts")
        if state in ("alive", "suspect"):
            why = f"it is {state}, and {len(on_it)} jobs have ranks on it"
            raise Refused(
                4, f"{host} was not given up", why, "stop its agent first, or cancel its jobs (agentctl cancel ID)"
            )
        by = asked.by(given)
        for job in on_it:
            said = f"{host} was given up by {by}"
            was = job.as_sure()
            left = [place.host for place in was.start.places if self._state(place.host) == "alive"]
            if was.heals_without((host,)) and left:
                await self.log.change(
                    PlacesLost(
                        wall_s=0.0, job=job.id, epoch=job.grant.epoch, hosts=(host,), coordinator=left[0], reason=said
                    ),
                    f"give up {host}",
                )
            else:
                await self.log.change(taken_back(job, "host lost", said, 0.0, (host,)), f"give up {host}")
        return [self.queue.jobs[job.id] for job in on_it if job.id in self.queue.jobs]
