"""Who starts and who stops, at one look of the leader: 2DAS within quotas, then GPUs that are really there.

First the order says who should run (`policy/classes.py: choose`): guaranteed jobs, each tenant within its quota. Then,
down that order, each of them that waits

- is granted, when a place for it is free;
- has opportunistic jobs stopped for it, when a place would be free without them, and keeps that place;
- keeps what there is, when it does not fit even so: GPUs of jobs that end, or scattered ones. One gang at a time.

Opportunistic jobs come last, oldest first, on what is left. Nobody is stopped for them, and they do not stop one
another: they lose their GPUs to guaranteed jobs only, as often as it takes (there is no sharing of a GPU yet).
"""

from collections.abc import Mapping, Sequence, Set

import msgspec

from covey.core import HostId, JobId
from plugins.scheduler.machine.ground import Ground, held_by, takes
from plugins.scheduler.machine.jobs import Job, row_of
from plugins.scheduler.machine.queue import Queue
from plugins.scheduler.messages.commands import AboutJob, GpusReserved, Granted, TakenBack
from plugins.scheduler.policy import classes, order, words
from plugins.scheduler.policy.place import place
from plugins.scheduler.policy.settings import Settings


class Admission:
    """One look. `pausing`: jobs that sit this decision out and hold nothing up."""

    def __init__(
        self, queue: Queue, settings: Settings, totals: Mapping[HostId, int], pausing: Set[JobId], wall_s: float
    ) -> None:
        self.queue, self.settings, self.wall_s = queue, settings, wall_s
        self.ground = Ground(queue, totals)
        self.pausing = pausing
        self.packlimit = packlimit(queue, settings)
        self.homes = dict.fromkeys(totals, 0)
        """Gangs that each host looks for a place for."""
        self.spent: dict[str, int] = {}
        """Quota given away in this look, per tenant."""
        self.commands: list[AboutJob] = []
        self.short: list[Job] = []
        """Chosen, and not granted for want of GPUs or quota."""
        self.lacks_gpus: list[Job] = []
        """Those of them that are within their quota."""
        for job in queue.live():
            if job.state == "placing" and job.home in self.homes:
                self.homes[job.home] += 1

    def decide(self, live: Sequence[Job]) -> list[AboutJob]:
        """`live`: jobs that are not over and that nothing else was decided about."""
        jobs = {job.id: job for job in live}
        apart = [job for job in live if _away(job, self.ground.totals)]
        fixed = {job.id for job in apart} | {job.id for job in live if job.state == "stopping"}
        may_run = [job for job in live if job.id not in fixed and job.id not in self.pausing]
        guaranteed = [job for job in may_run if job.counts]
        chosen = self._choose(guaranteed, apart, live)
        if self.homes:
            self._give_back_if_stale(chosen.run)
            for id in chosen.run:
                if jobs[id].state == "queued":
                    self._admit(jobs[id])
            self._preempt(chosen.preempt, jobs)
            for job in may_run:
                if not job.counts and job.state == "queued" and self._fits(job):
                    self._grant(job)
        return self.commands

    def _choose(self, guaranteed: Sequence[Job], apart: Sequence[Job], live: Sequence[Job]) -> order.Selection:
        queue, thresholds = self.queue, self.settings.queue_thresholds_gpu_s
        default = queue.quotas.get("*")
        totals = self.ground.totals
        within = sum(totals.values()) - sum(sum(held_by(job, totals).values()) for job in apart if job.counts)
        rows = [row_of(job, thresholds) for job in guaranteed]
        rows = order.ordered(rows, thresholds, queue.quotas, default, self.settings.narrow_first)
        return classes.choose(rows, within, self._quotas_beside(apart, live), default)

    def _quotas_beside(self, apart: Sequence[Job], live: Sequence[Job]) -> dict[str, int | None]:
        """What is left of each tenant's quota beside its jobs that wait for a host."""
        quotas = {job.spec.tenant: self.queue.quota(job.spec.tenant) for job in live}
        for job in apart:
            quota = quotas[job.spec.tenant]
            if quota is not None and job.counts:
                quotas[job.spec.tenant] = max(0, quota - job.spec.gpus)
        return quotas

    # ---- one job ----

    def _admit(self, job: Job) -> None:
        """A guaranteed job that should run: grant it, or see to it that it can be granted."""
        quota = self.queue.quota(job.spec.tenant)
        used = self.queue.used(job.spec.tenant) + self.spent.get(job.spec.tenant, 0)
        if quota is not None and used + job.spec.gpus > quota:
            self.short.append(job)
        elif self._fits(job):
            self._grant(job)
        else:
            self.short.append(job)
            self.lacks_gpus.append(job)
            self._clear_the_way(job)

    def _fits(self, job: Job) -> bool:
        free = self.ground.free_for(job)
        return job.spec.gpus <= max(0, sum(free.values()) - self.ground.placing) and takes(job, free)

    def _plan(self, job: Job, free: Mapping[HostId, int]) -> dict[HostId, int]:
        """GPUs by host where its home would put it; empty when it does not fit whole."""
        spec = job.spec
        if not spec.gpus_per_worker:
            return {}
        skew = self.queue.models.skew(spec, job.tensors)
        workers = place(free, spec.workers, spec.gpus_per_worker, skew, self.packlimit) or {}
        return {host: count * spec.gpus_per_worker for host, count in workers.items()}

    def _grant(self, job: Job) -> None:
        self.ground.take(self._plan(job, self.ground.free_for(job)), job.counts)
        if job.counts:
            self.spent[job.spec.tenant] = self.spent.get(job.spec.tenant, 0) + job.spec.gpus
        home = min((count, host) for host, count in self.homes.items())[1]
        self.homes[home] += 1
        self.commands.append(Granted(wall_s=self.wall_s, job=job.id, epoch=job.epoch + 1, home=home))

    def _clear_the_way(self, job: Job) -> None:
        """It is within its quota, and no place is free: stop opportunistic jobs when that helps, or keep what is
        there."""
        ground, spec = self.ground, job.spec
        open_gpus = ground.open_for(job)
        coming = {host: ground.open[host] - ground.staying[host] for host in open_gpus}
        stop = classes.victims(coming, ground.guests, lambda free: takes(job, _least(free, open_gpus)))
        if stop is None:
            mine = ground.reserved if ground.reserving == job.id else {}
            self._reserve(job, classes.grown(mine, open_gpus, ground.totals, spec.workers, spec.gpus_per_worker))
            return
        for id, held in [guest for guest in ground.guests if guest[0] in stop]:
            said = f"{job.id} (tenant {spec.tenant}, {words.gpus(spec.gpus)}) is guaranteed and comes first"
            self.commands.append(taken(self.queue.jobs[id], "preempted", said, self.wall_s))
            for host, gpus in held.items():
                coming[host] += gpus
                ground.staying[host] -= gpus
        ground.guests = [guest for guest in ground.guests if guest[0] not in stop]
        plan = self._plan(job, _least(coming, open_gpus))
        if stop or not takes(job, ground.free_for(job)):
            self._reserve(job, plan)
        ground.take(plan, True)

    def _reserve(self, job: Job, gpus: Mapping[HostId, int]) -> None:
        """Keep these, all that the gang has, unless another gang keeps some. A promise outdoes a tenant without."""
        ground = self.ground
        other = self.queue.jobs.get(ground.reserving) if ground.reserving not in (None, job.id) else None
        if other is not None and other.state == "queued" and self._promised(job) and not self._promised(other):
            self._give_back(other)
        if gpus and classes.may_reserve(job.id, ground.reserving) and gpus != ground.reserved:
            self.commands.append(GpusReserved(wall_s=self.wall_s, job=job.id, epoch=job.epoch, gpus=dict(gpus)))
            ground.reserving, ground.reserved = job.id, dict(gpus)

    def _give_back(self, job: Job) -> None:
        self.commands.append(GpusReserved(wall_s=self.wall_s, job=job.id, epoch=job.epoch, gpus={}))
        self.ground.reserving, self.ground.reserved = None, {}

    def _give_back_if_stale(self, chosen: Sequence[JobId]) -> None:
        """Whoever keeps GPUs and should not run any more, because its tenant's other jobs come first now."""
        id = self.ground.reserving
        job = self.queue.jobs.get(id) if id is not None else None
        if job is not None and job.state == "queued" and job.id not in chosen and job.id not in self.pausing:
            self._give_back(job)

    def _promised(self, job: Job) -> bool:
        return self.queue.quota(job.spec.tenant) is not None

    def _preempt(self, unchosen: Sequence[JobId], jobs: Mapping[JobId, Job]) -> None:
        """Guaranteed jobs that the order passed over stop for those it chose: of the same tenant, or, without a quota,
        for anybody's. Not for one that could not be placed before: what it lacks is not GPUs."""
        able = [job for job in self.short if not job.place_failures]
        if not self.settings.preemption:
            return
        for other in [jobs[id] for id in unchosen if jobs[id].state == "running"]:
            first = next((job for job in able if self._may_displace(job, other)), None)
            if first is not None:
                said = f"{first.id} (tenant {first.spec.tenant}, {words.gpus(first.spec.gpus)}) comes first"
                self.commands.append(taken(other, "preempted", said, self.wall_s))

    def _may_displace(self, job: Job, other: Job) -> bool:
        return job.spec.tenant == other.spec.tenant or (job in self.lacks_gpus and not self._promised(other))


def packlimit(queue: Queue, settings: Settings) -> float:
    """The limit that placement goes by: as set, or as gangs of the past say."""
    return queue.models.packlimit(settings.packlimit) if settings.packlimit_refit else settings.packlimit


def taken(job: Job, cause: str, reason: str, wall_s: float, lost: tuple[HostId, ...] = ()) -> TakenBack:
    return msgspec.convert(
        {"wall_s": wall_s, "job": job.id, "epoch": job.epoch, "cause": cause, "reason": reason, "lost": lost}, TakenBack
    )


def _least(one: Mapping[HostId, int], other: Mapping[HostId, int]) -> dict[HostId, int]:
    return {host: max(0, min(gpus, other.get(host, 0))) for host, gpus in one.items()}


def _away(job: Job, alive: Mapping[HostId, int]) -> bool:
    """Whether a running gang waits for a host that is not alive."""
    return job.state == "running" and any(place.host not in alive for place in job.places if job.awaits(place.host))
