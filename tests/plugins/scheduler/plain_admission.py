"""Who starts and who stops, plain: all jobs are looked at anew. `machine/admission.py` has to decide so too."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from covey.core.ids import HostId, JobId
from plugins.scheduler.machine.leader.admission import packlimit, taken_back
from plugins.scheduler.machine.leader.capacity import Gpus, fits_whole, held_by
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job, row_of
from plugins.scheduler.messages.commands import (
    AboutJob,
    GpusKept,
    Granted,
)
from plugins.scheduler.policy import classes, explain, order
from plugins.scheduler.policy.fair import FairTurns
from plugins.scheduler.policy.place import place
from plugins.scheduler.policy.settings import SchedulerSettings
from tests.plugins.scheduler.plain_ground import PlainGround


class Decided(NamedTuple):
    """What the plain leader knows of jobs beside what the log says of them."""

    pausing: Set[JobId]
    """Jobs that sit this decision out and hold nothing up."""
    firm: Set[JobId]
    """Jobs that run, and may not be stopped now because of what that would lose."""


class PlainAdmission:
    """One look of the plain leader."""

    def __init__(
        self,
        queue: JobTable,
        settings: SchedulerSettings,
        totals: Mapping[HostId, int],
        known: Decided,
        wall_s: float,
    ) -> None:
        self.queue, self.settings, self.wall_s = queue, settings, wall_s
        self.capacity = PlainGround(queue, totals)
        self.pausing, self.firm = known
        self.packlimit = packlimit(queue, settings)
        self.coordinators = dict.fromkeys(totals, 0)
        """For how many gangs each host looks for a place."""
        self.spent: dict[str, int] = {}
        """Quota given away in this look, per tenant."""
        self.commands: list[AboutJob] = []
        self.short: list[Job] = []
        """Jobs that were chosen, and not granted for want of GPUs or quota."""
        self.lacks_gpus: list[Job] = []
        """Jobs of `short` that are within their quota."""
        self.placing = [job for job in queue.live() if job.state == "placing"]
        for job in queue.live():
            if job.state == "placing" and job.grant.coordinator in self.coordinators:
                self.coordinators[job.grant.coordinator] += 1

    def decide(self, live: Sequence[Job]) -> list[AboutJob]:
        """`live`: jobs that are not over and that nothing else was decided about."""
        jobs = {job.id: job for job in live}
        apart = [job for job in live if _away(job, self.capacity.totals.keys() - self.queue.drained)]
        fixed = {job.id for job in apart} | {job.id for job in live if job.state == "stopping"}
        may_run = [job for job in live if job.id not in fixed and job.id not in self.pausing]
        guaranteed = [job for job in may_run if job.counts]
        chosen = self._choose(guaranteed, apart, live)
        self.unchosen = [jobs[id] for id in chosen.preempt if jobs[id].state == "running"]
        if self.coordinators:
            self._give_back_if_stale(chosen.run)
            for id in chosen.run:
                if jobs[id].state == "queued":
                    self._admit(jobs[id])
            self._preempt()
            for job in may_run:
                if not job.counts and job.state == "queued" and not self._would_be_in_the_way() and self._fits(job):
                    self._grant(job)
        return self.commands

    def _would_be_in_the_way(self) -> bool:
        """Whether gangs count on GPUs while the log keeps some for another one."""
        granted = {command.job for command in self.commands if isinstance(command, Granted)}
        count = {id for id, _ in self.capacity.claims}
        count |= {
            job.id
            for job in self.queue.live()
            if job.counts and job.tally.place_failures and (job.state == "placing" or job.id in granted)
        }
        keeper = self.capacity.keeper
        return keeper is not None and bool(count - {keeper})

    def _choose(self, guaranteed: Sequence[Job], apart: Sequence[Job], live: Sequence[Job]) -> order.Selection:
        queue, thresholds = self.queue, self.settings.queue_thresholds_gpu_s
        default = queue.quotas.get("*")
        totals = self.capacity.totals
        within = sum(totals.values()) - sum(sum(held_by(job, totals).values()) for job in apart if job.counts)
        rows = [row_of(job, thresholds) for job in guaranteed]
        if not self.settings.preemption:  # whoever runs stays, also beside those of a higher queue
            rows = [msgspec.structs.replace(row, attained_gpu_s=0.0) if row.running else row for row in rows]
        rows = [msgspec.structs.replace(row, firm=row.id in self.firm) for row in rows]
        rows = order.ordered(rows, thresholds, queue.quotas, default, self.settings.narrow_first)
        turns = FairTurns(thresholds, queue.tenant_use([row.tenant for row in rows]))
        return classes.choose(rows, within, self._quotas_beside(apart, live), default, turns)

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
        elif job.spec.gpus:
            self.short.append(job)
            self.lacks_gpus.append(job)
            self._clear_the_way(job)

    def _fits(self, job: Job) -> bool:
        if not job.spec.gpus and job.spec.pack == "apart":
            return len(self.capacity.totals.keys() - self.queue.drained) >= job.spec.workers
        free = self.capacity.free_for(job)
        return job.spec.gpus <= max(0, sum(free.values()) - self.capacity.placing) and fits_whole(job, free)

    def _plan(self, job: Job, free: Mapping[HostId, int]) -> dict[HostId, int]:
        """GPUs by host where its coordinator would put it; empty when it does not fit whole."""
        spec = job.spec
        if not spec.gpus_per_worker:
            return {}
        skew = self.queue.models.shown_skew(spec, job.measured.tensors)
        workers = place(free, spec.workers, spec.gpus_per_worker, skew, self.packlimit, spec.pack) or {}
        return {host: count * spec.gpus_per_worker for host, count in workers.items()}

    def _grant(self, job: Job) -> None:
        self.capacity.take(self._plan(job, self.capacity.free_for(job)), job.counts)
        if job.counts:
            self.spent[job.spec.tenant] = self.spent.get(job.spec.tenant, 0) + job.spec.gpus
        coordinator = min((count, host) for host, count in self.coordinators.items())[1]
        self.coordinators[coordinator] += 1
        self.commands.append(
            Granted(wall_s=self.wall_s, job=job.id, epoch=job.grant.epoch + 1, coordinator=coordinator)
        )

    def _clear_the_way(self, job: Job) -> None:
        """Stop opportunistic jobs for a job within its quota that no place is free for, when that helps, or keep what
        is there."""
        ground, spec = self.capacity, job.spec
        for other in sorted(self.placing, key=lambda other: other.grant.index):
            plan = self._plan(other, ground.free_for(other))
            ground.take(plan, other.counts)
            ground.placing -= sum(plan.values())
        self.placing = []
        if ground.keeper != job.id and not fits_whole(job, ground.free_for(job)):
            soon = self._soon_free(job)
            if fits_whole(job, soon):
                ground.claims.append((job.id, self._plan(job, soon)))
                return
        open_gpus, unclaimed = ground.open_for(job), ground._unclaimed()
        rival = self.queue.jobs.get(ground.keeper) if ground.keeper not in (None, job.id) else None
        if rival is not None and self._outranks(job, rival) and not fits_whole(job, ground.free_for(job)):
            open_gpus = unclaimed
        coming = {host: unclaimed[host] - ground.staying[host] for host in open_gpus}
        stop = victims(coming, ground.opportunistic, lambda free: fits_whole(job, _least(free, open_gpus)))
        if stop is None:
            mine = ground.kept if ground.keeper == job.id else {}
            kept = classes.gpus_to_keep(mine, open_gpus, ground.totals, spec.workers, spec.gpus_per_worker, spec.pack)
            self._keep(job, kept)
            return
        for id, held in [guest for guest in ground.opportunistic if guest[0] in stop]:
            said = f"{job.id} (tenant {spec.tenant}, {explain.gpus(spec.gpus)}) is guaranteed and comes first"
            self.commands.append(taken_back(self.queue.jobs[id], "preempted", said, self.wall_s))
            for host, gpus in held.items():
                coming[host] += gpus
                ground.staying[host] -= gpus
        ground.opportunistic = [guest for guest in ground.opportunistic if guest[0] not in stop]
        plan = self._plan(job, _least(coming, open_gpus))
        if stop or not fits_whole(job, ground.free_for(job)):
            self._keep(job, plan)
            ground.claims.append((job.id, plan))
        else:
            ground.take(plan, True)

    def _soon_free(self, job: Job) -> Gpus:
        """GPUs that are free, of jobs that stop, and of those that stop for the job."""
        ground = self.capacity
        soon = {host: gpus - ground.staying[host] for host, gpus in ground.open_for(job).items()}
        able = self.settings.preemption and not job.tally.place_failures
        for other in [other for other in self.unchosen if able and self._may_displace(job, other)]:
            soon = _plus(soon, held_by(other, ground.totals), 1)
        return {host: max(0, gpus) for host, gpus in soon.items()}

    def _keep(self, job: Job, gpus: Mapping[HostId, int]) -> None:
        """Keep these GPUs, all that the gang has, unless another gang keeps some. A tenant with a quota comes before
        one without."""
        ground = self.capacity
        other = self.queue.jobs.get(ground.keeper) if ground.keeper not in (None, job.id) else None
        if gpus and other is not None and self._outranks(job, other):
            self._give_back(other)
        if gpus and classes.may_keep(job.id, ground.keeper) and gpus != ground.kept:
            self.commands.append(GpusKept(wall_s=self.wall_s, job=job.id, epoch=job.grant.epoch, gpus=dict(gpus)))
            ground.keeper, ground.kept = job.id, dict(gpus)

    def _outranks(self, job: Job, other: Job) -> bool:
        return other.state == "queued" and self._has_quota(job) and not self._has_quota(other)

    def _give_back(self, job: Job) -> None:
        self.commands.append(GpusKept(wall_s=self.wall_s, job=job.id, epoch=job.grant.epoch, gpus={}))
        self.capacity.keeper, self.capacity.kept = None, {}

    def _give_back_if_stale(self, chosen: Sequence[JobId]) -> None:
        """Give kept GPUs back where the gang should not run any more, because its tenant's other jobs come first
        now."""
        id = self.capacity.keeper
        job = self.queue.jobs.get(id) if id is not None else None
        if job is not None and job.state == "queued" and job.id not in chosen and job.id not in self.pausing:
            self._give_back(job)

    def _has_quota(self, job: Job) -> bool:
        return self.queue.quota(job.spec.tenant) is not None

    def _preempt(self) -> None:
        """Stop guaranteed jobs that the order passed over for those it chose: of one tenant, or, without a quota, for
        any tenant's. Not for one that could not be placed before: what it lacks is not GPUs."""
        able = [job for job in self.short if not job.tally.place_failures]
        if not self.settings.preemption:
            return
        for other in self.unchosen:
            first = next((job for job in able if self._may_displace(job, other)), None)
            if first is not None:
                said = f"{first.id} (tenant {first.spec.tenant}, {explain.gpus(first.spec.gpus)}) comes first"
                self.commands.append(taken_back(other, "preempted", said, self.wall_s))

    def _may_displace(self, job: Job, other: Job) -> bool:
        return job.spec.tenant == other.spec.tenant or (job in self.lacks_gpus and not self._has_quota(other))


def victims(
    free: Mapping[HostId, int],
    guests: Sequence[tuple[JobId, Mapping[HostId, int]]],
    fits: Callable[[Mapping[HostId, int]], bool],
) -> list[JobId] | None:
    """The newest opportunistic jobs until the gang fits, without those that turn out not to be needed; every host is
    counted anew each time."""
    have, stopped = dict(free), 0
    while not fits(have):
        if stopped == len(guests):
            return None
        have = _plus(have, guests[stopped][1], 1)
        stopped += 1
    chosen = list(guests[:stopped])
    for guest in reversed(guests[:stopped]):
        without = _plus(have, guest[1], -1)
        if fits(without):
            have = without
            chosen.remove(guest)
    return [guest for guest, _ in chosen]


def _plus(free: Mapping[HostId, int], more: Mapping[HostId, int], sign: int) -> dict[HostId, int]:
    return dict(free) | {host: free.get(host, 0) + sign * gpus for host, gpus in more.items()}


def _least(one: Mapping[HostId, int], other: Mapping[HostId, int]) -> dict[HostId, int]:
    return {host: max(0, min(gpus, other.get(host, 0))) for host, gpus in one.items()}


def _away(job: Job, alive: Set[HostId]) -> bool:
    """Whether a running gang waits for a host that is not alive, or is to leave one."""
    return job.state == "running" and any(
        place.host not in alive for place in job.start.places if job.awaits(place.host)
    )
