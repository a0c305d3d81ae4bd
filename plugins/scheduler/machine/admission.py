"""Who starts and who stops, at one look of the leader: 2DAS within quotas, then GPUs that are really there.

First the order says who should run (`machine/run_queues.py`): guaranteed jobs, each tenant within its quota. Then,
down that order, each of them that waits

- is granted, when a place for it is free;
- has opportunistic jobs stopped for it, when a place would be free without them, and keeps that place;
- keeps what there is, when it does not fit even so: GPUs of jobs that end, or scattered ones. One gang at a time.

Opportunistic jobs come last, oldest first, on what is left. Nobody is stopped for them, and they do not stop one
another: they lose their GPUs to guaranteed jobs only, as often as it takes (there is no sharing of a GPU yet).
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence, Set

import msgspec

from covey.core import HostId, JobId
from plugins.scheduler.machine.capacity import Capacity, held_by
from plugins.scheduler.machine.jobs import Job
from plugins.scheduler.machine.queue import Queue
from plugins.scheduler.machine.run_queues import RunQueues
from plugins.scheduler.messages.commands import AboutJob, GpusKept, Granted, TakenBack
from plugins.scheduler.policy import classes, explain
from plugins.scheduler.policy.settings import SchedulerSettings


class Admission:
    """One look. `run_queues`: jobs that may run; `apart`: running ones that wait for a host; `capacity`: a draft."""

    def __init__(
        self,
        queue: Queue,
        settings: SchedulerSettings,
        run_queues: RunQueues,
        apart: Sequence[Job],
        pausing: Set[JobId],
        placing: Iterable[JobId],
        capacity: Capacity,
        homes: Mapping[HostId, int],
        wall_s: float,
    ) -> None:
        """`pausing`: jobs that sit this decision out and hold nothing up; `placing`: gangs that are being placed;
        `homes`: how many of them each host looks for a place for."""
        self.queue, self.settings, self.wall_s = queue, settings, wall_s
        self.placing = placing
        self.run_queues, self.capacity, self.apart, self.pausing = run_queues, capacity, apart, pausing
        self.homes = {host: count for host, count in homes.items() if host in capacity.totals}
        self._fewest: list[tuple[int, HostId]] = []
        """Heap of the same, once every host looks for some."""
        self.spent: dict[str, int] = {}
        """Quota given away in this look, per tenant."""
        self.commands: list[AboutJob] = []
        self.short: list[Job] = []
        """Chosen, and not granted for want of GPUs or quota."""
        self.lacks_gpus: dict[JobId, None] = {}
        """Those of them that are within their quota."""
        self.unchosen: Sequence[Job] = ()
        """Guaranteed jobs that run and that the order passed over."""

    def decide(self) -> list[AboutJob]:
        """Grants, reservations and stops, in this order for each job."""
        if not self.capacity.totals:
            return []
        jobs = self.queue.jobs
        run, stop = self._choose()
        self.unchosen = [jobs[id] for id in stop if jobs[id].state == "running"]
        self._give_back_if_stale(run)
        for id in run:
            self._admit(jobs[id])
        self._preempt()
        for id in self.run_queues.oldest_opportunistic(self.capacity.vacant, lambda id: self._fits(jobs[id])):
            self._grant(jobs[id])
        return self.commands

    def _choose(self) -> tuple[list[JobId], list[JobId]]:
        totals, beside = self.capacity.totals, dict[str, int]()
        within = self.capacity.size
        for job in self.apart:
            if job.counts:
                within -= sum(held_by(job, totals).values())
                beside[job.spec.tenant] = beside.get(job.spec.tenant, 0) + job.spec.gpus

        def left(tenant: str) -> int:
            """What is left of its quota beside its jobs that wait for a host."""
            return max(0, (self.queue.quota(tenant) or 0) - beside.get(tenant, 0))

        return self.run_queues.choose(within, left)

    # ---- one job ----

    def _admit(self, job: Job) -> None:
        """A guaranteed job that should run: grant it, or see to it that it can be granted."""
        quota = self.queue.quota(job.spec.tenant)
        used = self.queue.used(job.spec.tenant) + self.spent.get(job.spec.tenant, 0)
        if quota is not None and used + job.spec.gpus > quota:
            self.short.append(job)
        elif self._fits(job):
            self._grant(job)
        elif job.spec.gpus:  # one without waits for hosts, and nobody who stops makes more of them
            self.short.append(job)
            self.lacks_gpus[job.id] = None
            self._clear_the_way(job)

    def _fits(self, job: Job) -> bool:
        if not job.spec.gpus:
            return job.spec.pack != "apart" or len(self.capacity.totals) >= job.spec.workers
        free = self.capacity.free_for(job)
        if not free:
            return False
        return job.spec.gpus <= max(0, sum(free.values()) - self.capacity.placing) and self.capacity.fits(job, free)

    def _plan(self, job: Job, free: Mapping[HostId, int]) -> dict[HostId, int]:
        """GPUs where its home would put it; empty when it does not fit whole."""
        skew = self.queue.models.shown_skew(job.spec, job.tensors)
        return self.capacity.plan(job, free, skew, packlimit(self.queue, self.settings))

    def _grant(self, job: Job) -> None:
        self.capacity.take(self._plan(job, self.capacity.free_for(job)), job.counts)
        if job.counts:
            self.spent[job.spec.tenant] = self.spent.get(job.spec.tenant, 0) + job.spec.gpus
        home = self._home()
        self.commands.append(Granted(wall_s=self.wall_s, job=job.id, epoch=job.epoch + 1, home=home))

    def _home(self) -> HostId:
        """The host that looks for the fewest gangs' places."""
        totals = self.capacity.totals
        if not self._fewest and len(self.homes) < len(totals):
            host = next(host for host in totals if not self.homes.get(host))
            self.homes[host] = 1
            return host
        if not self._fewest:
            self._fewest = sorted((self.homes[host], host) for host in totals)
        count, host = self._fewest[0]
        heapq.heapreplace(self._fewest, (count + 1, host))
        return host

    def _clear_the_way(self, job: Job) -> None:
        """It is within its quota, and no place is free: wait for GPUs of guaranteed jobs that stop when these suffice,
        stop opportunistic jobs when that helps, or keep what is there."""
        capacity, spec = self.capacity, job.spec
        self._set_aside()
        if self._is_served_by_those_who_stop(job):
            return
        open_gpus = capacity.open_for(job)
        if capacity.fits(job, open_gpus):
            coming = {host: capacity.open[host] - capacity.staying.get(host, 0) for host in open_gpus}
            stop = capacity.victims(job, coming, open_gpus)
        else:
            coming, stop = {}, None
        if stop is None:
            self._keep(job, capacity.to_keep(job, open_gpus))
            return
        for id, held in [guest for guest in capacity.opportunistic if guest[0] in stop]:
            said = f"{job.id} (tenant {spec.tenant}, {explain.gpus(spec.gpus)}) is guaranteed and comes first"
            self.commands.append(taken_back(self.queue.jobs[id], "preempted", said, self.wall_s))
            for host, gpus in held.items():
                coming[host] = coming.get(host, 0) + gpus
                capacity.staying[host] = capacity.staying.get(host, 0) - gpus
        capacity.opportunistic = [guest for guest in capacity.opportunistic if guest[0] not in stop]
        plan = self._plan(job, _least(coming, open_gpus))
        if not stop and capacity.fits(job, capacity.free_for(job)):
            capacity.take(plan, True)
            return
        self._keep(job, plan)
        capacity.claim(job, plan)

    def _is_served_by_those_who_stop(self, job: Job) -> bool:
        """Whether it starts once they have stopped, without keeping anything: others may start meanwhile on what it
        does not need, also those that come before it in the order by then. One that keeps GPUs goes on to."""
        capacity = self.capacity
        if capacity.keeper == job.id or capacity.fits(job, capacity.free_for(job)):
            return False
        coming = {host: gpus - capacity.staying.get(host, 0) for host, gpus in capacity.open_for(job).items()}
        for other in self.unchosen if self.settings.preemption and not job.place_failures else ():
            if self._may_displace(job, other):
                for host, gpus in capacity.held_by(other).items():
                    coming[host] = coming.get(host, 0) + gpus
        plan = self._plan(job, {host: gpus for host, gpus in coming.items() if gpus > 0})
        if plan:
            capacity.claim(job, plan)
        return bool(plan)

    def _set_aside(self) -> None:
        """From now on gangs that are being placed hold GPUs where their homes would put them, in the order of their
        grants: nobody keeps, or stops others for, what they are about to take. One that fits nowhere is counted on."""
        jobs, capacity = [self.queue.jobs[id] for id in self.placing], self.capacity
        for job in sorted(jobs, key=lambda job: job.granted):
            plan = self._plan(job, capacity.free_for(job))
            capacity.take(plan, job.counts)
            capacity.placing -= sum(plan.values())
        self.placing = ()

    def _keep(self, job: Job, gpus: Mapping[HostId, int]) -> None:
        """Keep these, all that the gang has, unless another gang keeps some. A tenant with a quota comes before
        one without: what a gang of such a tenant keeps is given back for it."""
        capacity = self.capacity
        other = self.queue.jobs.get(capacity.keeper) if capacity.keeper not in (None, job.id) else None
        if (
            other is not None
            and other.state == "queued"
            and self.queue.has_quota(job.spec.tenant)
            and not self.queue.has_quota(other.spec.tenant)
        ):
            self._give_back(other)
        if gpus and classes.may_keep(job.id, capacity.keeper) and gpus != capacity.kept:
            self.commands.append(GpusKept(wall_s=self.wall_s, job=job.id, epoch=job.epoch, gpus=dict(gpus)))
            capacity.keep(job.id, gpus)

    def _give_back(self, job: Job) -> None:
        self.commands.append(GpusKept(wall_s=self.wall_s, job=job.id, epoch=job.epoch, gpus={}))
        self.capacity.keep(None, {})

    def _give_back_if_stale(self, chosen: Sequence[JobId]) -> None:
        """Whoever keeps GPUs and should not run any more, because its tenant's other jobs come first now."""
        id = self.capacity.keeper
        job = self.queue.jobs.get(id) if id is not None else None
        if job is not None and job.state == "queued" and job.id not in chosen and job.id not in self.pausing:
            self._give_back(job)

    def _preempt(self) -> None:
        """Guaranteed jobs that the order passed over stop for those it chose: of the same tenant, or, without a quota,
        for anybody's. Not for one that could not be placed before: what it lacks is not GPUs."""
        able = [job for job in self.short if not job.place_failures]
        if not self.settings.preemption:
            return
        for other in self.unchosen:
            first = next((job for job in able if self._may_displace(job, other)), None)
            if first is not None:
                said = f"{first.id} (tenant {first.spec.tenant}, {explain.gpus(first.spec.gpus)}) comes first"
                self.commands.append(taken_back(other, "preempted", said, self.wall_s))

    def _may_displace(self, job: Job, other: Job) -> bool:
        return job.spec.tenant == other.spec.tenant or (
            job.id in self.lacks_gpus and not self.queue.has_quota(other.spec.tenant)
        )


def packlimit(queue: Queue, settings: SchedulerSettings) -> float:
    """The limit that placement goes by: as set, or as gangs of the past say."""
    return queue.models.packlimit(settings.packlimit) if settings.packlimit_refit else settings.packlimit


def taken_back(
    job: Job, cause: str, reason: str, wall_s: float, lost: tuple[HostId, ...] = (), term: int = 0
) -> TakenBack:
    told = {"wall_s": wall_s, "job": job.id, "epoch": job.epoch, "cause": cause, "reason": reason}
    return msgspec.convert({**told, "lost": lost, "term": term}, TakenBack)


def _least(one: Mapping[HostId, int], other: Mapping[HostId, int]) -> dict[HostId, int]:
    return {host: max(0, min(gpus, other.get(host, 0))) for host, gpus in one.items()}
