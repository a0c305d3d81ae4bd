"""The GPUs of the hosts that are alive, by host: free, open to guaranteed jobs, kept for a gang.

    total = free + held by opportunistic jobs + held by guaranteed jobs
            `---------------- open ---------'

GPUs are not shared between jobs yet, so an opportunistic job on an open GPU has to stop before a guaranteed one starts
there. A reservation says how many open GPUs of a host are kept, not which: opportunistic jobs run on them until the
gang is complete. Counted from the log: gangs that are being placed hold GPUs that nobody knows yet.
"""

from collections.abc import Mapping

from covey.core import HostId, JobId
from plugins.scheduler.machine.jobs import Job
from plugins.scheduler.machine.queue import Queue
from plugins.scheduler.policy import classes

Gpus = dict[HostId, int]


class Ground:
    """At one look. `totals`: GPUs of each host that is alive."""

    def __init__(self, queue: Queue, totals: Mapping[HostId, int]) -> None:
        self.queue = queue
        self.totals = dict(sorted(totals.items()))
        self.free: Gpus = dict(self.totals)
        """Nobody's."""
        self.open: Gpus = dict(self.totals)
        """No guaranteed job's."""
        self.staying: Gpus = dict.fromkeys(self.totals, 0)
        """Held by opportunistic jobs that nobody told to stop."""
        self.guests: list[tuple[JobId, Gpus]] = []
        """Opportunistic jobs that run, newest first, and the GPUs of each."""
        self.reserving = queue.reserving
        self.reserved = dict(queue.reserved)
        self.placing = 0
        """GPUs of gangs that are being placed, wherever."""
        for job in queue.live():
            self._count(job)
        self.guests.reverse()
        for gpus in (self.free, self.open):
            gpus.update({host: 0 for host, count in gpus.items() if count < 0})  # a host whose GPU broke

    def _count(self, job: Job) -> None:
        if job.state == "placing":
            self.placing += job.spec.gpus
        held = held_by(job, self.totals)
        for host, gpus in held.items():
            self.free[host] -= gpus
            if job.counts:
                self.open[host] -= gpus
            elif job.state == "running":
                self.staying[host] += gpus
        if held and not job.counts and job.state == "running":
            self.guests.append((job.id, held))

    @property
    def kept(self) -> bool:
        """Whether all GPUs of a gang are reserved: it is about to start on them."""
        gang = self.queue.jobs.get(self.reserving) if self.reserving is not None else None
        return gang is not None and sum(self.reserved.values()) == gang.spec.gpus

    def free_for(self, job: Job) -> Gpus:
        """GPUs that this job may start on now."""
        if classes.may_reserve(job.id, self.reserving) or (not job.counts and not self.kept):
            return self.free
        after = {host: self.open[host] - (self.staying[host] if self.kept else 0) for host in self.open}
        return {host: max(0, min(free, after[host] - self.reserved.get(host, 0))) for host, free in self.free.items()}

    def open_for(self, job: Job) -> Gpus:
        """GPUs that a guaranteed job may wait for: opportunistic ones would stop for it."""
        if classes.may_reserve(job.id, self.reserving):
            return self.open
        return {host: max(0, gpus - self.reserved.get(host, 0)) for host, gpus in self.open.items()}

    def closed(self, job: Job) -> bool:
        """Whether a job that runs holds a GPU that is kept for a gang: counting it would break the reservation."""
        held = held_by(job, self.totals)
        return any(self.open[host] - gpus < self.reserved.get(host, 0) for host, gpus in held.items())

    def count(self, job: Job) -> None:
        """An opportunistic job that runs is guaranteed from now on."""
        for host, gpus in held_by(job, self.totals).items():
            self.open[host] -= gpus
            self.staying[host] -= gpus

    def take(self, gpus: Mapping[HostId, int], counts: bool) -> None:
        """From now on these are somebody's."""
        for host, count in gpus.items():
            self.free[host] = max(0, self.free[host] - count)
            if counts:
                self.open[host] = max(0, self.open[host] - count)


def held_by(job: Job, hosts: Mapping[HostId, int]) -> Gpus:
    """GPUs of these hosts that a gang holds, by host."""
    places = job.places if job.placed else ()
    return {
        place.host: len(place.gpus) for place in places if place.host in hosts and place.gpus and job.awaits(place.host)
    }


def takes(job: Job, free: Mapping[HostId, int]) -> bool:
    """Whether the whole gang fits into this."""
    each = job.spec.gpus_per_worker
    return not each or sum(gpus // each for gpus in free.values()) >= job.spec.workers
