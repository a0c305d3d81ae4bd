"""GPUs at one look of the plain leader: whose they are, what is kept and claimed; counted anew each time."""

from collections.abc import Mapping

from covey.core.ids import HostId, JobId
from plugins.scheduler.machine.leader.capacity import Gpus, held_by
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.policy import classes


class PlainGround:
    """The GPUs at one look. `totals`: GPUs of each host that is alive."""

    def __init__(self, queue: JobTable, totals: Mapping[HostId, int]) -> None:
        self.queue = queue
        self.totals = dict(sorted(totals.items()))
        self.free: Gpus = dict(self.totals)
        """GPUs that no job holds."""
        self.open: Gpus = dict(self.totals)
        """GPUs that no guaranteed job holds."""
        self.staying: Gpus = dict.fromkeys(self.totals, 0)
        """GPUs held by opportunistic jobs that nobody told to stop."""
        self.opportunistic: list[tuple[JobId, Gpus]] = []
        """Opportunistic jobs that run, newest first, and the GPUs of each."""
        self.keeper = queue.keeper
        self.kept = dict(queue.kept)
        self.claims: list[tuple[JobId, Gpus]] = []
        """GPUs that gangs of this look count on once they are free."""
        self.placing = 0
        """GPUs of gangs that are being placed, on whatever hosts."""
        for job in queue.live():
            self._count(job)
        self.opportunistic.reverse()
        for gpus in (self.free, self.open):
            gpus.update({host: 0 for host, count in gpus.items() if count < 0})  # a host whose GPU broke

    def _count(self, job: Job) -> None:
        if job.state == "placing":
            self.placing += job.spec.gpus
        held = held_by(job, self.totals)
        for host, gpus in held.items():
            self.free[host] -= gpus
            if job.counts and job.state != "stopping":
                self.open[host] -= gpus
            elif job.state == "running":
                self.staying[host] += gpus
        if held and not job.counts and job.state == "running":
            self.opportunistic.append((job.id, held))

    @property
    def kept_whole(self) -> bool:
        """Whether all GPUs of a gang are reserved: it is about to start on them."""
        gang = self.queue.jobs.get(self.keeper) if self.keeper is not None else None
        return gang is not None and sum(self.kept.values()) == gang.spec.gpus

    def free_for(self, job: Job) -> Gpus:
        """GPUs that this job may start on now."""
        mine = classes.may_keep(job.id, self.keeper) or (not job.counts and not self.kept_whole)
        if mine and not self.claims:
            return self.free
        stay = self.kept_whole or self.claims
        kept = {} if mine else self._reserved_and_unclaimed()
        left = {host: gpus - (self.staying[host] if stay else 0) for host, gpus in self._unclaimed().items()}
        return {host: max(0, min(free, left[host] - kept.get(host, 0))) for host, free in self.free.items()}

    def _unclaimed(self) -> Gpus:
        claimed = {host: sum(gpus.get(host, 0) for _, gpus in self.claims) for host in self.open}
        return {host: max(0, gpus - claimed[host]) for host, gpus in self.open.items()}

    def _reserved_and_unclaimed(self) -> Gpus:
        return {} if any(id == self.keeper for id, _ in self.claims) else self.kept

    def open_for(self, job: Job) -> Gpus:
        """GPUs that a guaranteed job may wait for: opportunistic ones would stop for it."""
        if classes.may_keep(job.id, self.keeper):
            return self._unclaimed()
        kept = self._reserved_and_unclaimed()
        return {host: max(0, gpus - kept.get(host, 0)) for host, gpus in self._unclaimed().items()}

    def closed(self, job: Job) -> bool:
        """Whether a job that runs holds a GPU that is kept for a gang: counting it would break the reservation."""
        held = held_by(job, self.totals)
        return any(self.open[host] - gpus < self.kept.get(host, 0) for host, gpus in held.items())

    def count(self, job: Job) -> None:
        """Count an opportunistic job that runs as guaranteed from now on."""
        for host, gpus in held_by(job, self.totals).items():
            self.open[host] -= gpus
            self.staying[host] -= gpus

    def take(self, gpus: Mapping[HostId, int], counts: bool) -> None:
        """Take these GPUs for a job from now on."""
        for host, count in gpus.items():
            self.free[host] = max(0, self.free[host] - count)
            if counts:
                self.open[host] = max(0, self.open[host] - count)
