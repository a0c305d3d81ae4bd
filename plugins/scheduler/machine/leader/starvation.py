"""How long jobs wait, and which of them are promoted or demoted for it.

Each job has a time at which that may come, in a heap, so a look reads the few whose time has come and no others.

A time that was computed when a job began to wait may be too early, because the job changed since. So the policy is
asked again once the time has come, and the job waits on when it says no.
"""

import heapq
from collections.abc import Iterable, Mapping

from covey.core.ids import JobId
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.policy import classes
from plugins.scheduler.policy.order import EARLY_S, due_second, promoted_after, queue_of
from plugins.scheduler.policy.settings import SchedulerSettings


class StarvationTimers:
    """The waits of jobs that wait for GPUs or are being placed."""

    def __init__(self, queue: JobTable, settings: SchedulerSettings) -> None:
        self.queue, self.settings = queue, settings
        self.since: dict[JobId, float] = {}
        self._promotions: list[tuple[float, JobId]] = []
        self._demotions: list[tuple[float, JobId]] = []
        """Heaps of (time, job) at which a promotion, or a demotion, may be due; an entry may be out of date."""
        self._starved: dict[JobId, int] = {}
        """Jobs that are to be promoted, and the second in which that became due."""
        self._late: dict[str, dict[JobId, None]] = {}
        """Jobs of class auto that waited too long, by tenant."""

    def put(self, job: Job, now_s: float, known_s: float) -> None:
        """Take in the job as it is now. `known_s`: seconds for which it waits, if nothing is remembered of it."""
        self._settle(job.id, job.spec.tenant)
        if not job.may_start and job.state != "placing":
            self.since.pop(job.id, None)
            return
        since_s = self.since.setdefault(job.id, now_s - max(0.0, known_s))
        if job.state != "queued":
            return
        after_s = self._promoted_after(job)
        if after_s is not None:
            heapq.heappush(self._promotions, (since_s + after_s, job.id))
        late_s = self.settings.demote_after_s
        if late_s is not None and job.job_class == "auto":
            heapq.heappush(self._demotions, (since_s + late_s, job.id))

    def drop(self, id: JobId) -> None:
        """Forget a job that is over."""
        self.since.pop(id, None)
        job = self.queue.jobs.get(id)
        self._starved.pop(id, None)
        for tenant in [job.spec.tenant] if job is not None else list(self._late):
            self._settle(id, tenant)

    def _settle(self, id: JobId, tenant: str) -> None:
        self._starved.pop(id, None)
        late = self._late.get(tenant)
        if late is not None:
            late.pop(id, None)
            if not late:
                del self._late[tenant]

    def starved(self, now_s: float) -> Mapping[JobId, int]:
        """Guaranteed jobs that STARVELIMIT or PROMOTEKNOB promote, and the seconds in which they became due."""
        for id in _due(self._promotions, now_s):
            job = self.queue.jobs.get(id)
            after_s = self._promoted_after(job) if job is not None and id in self.since else None
            if job is None or not job.may_start or after_s is None:
                continue
            if now_s - self.since[id] >= after_s:
                self._starved[id] = due_second(self.since[id], after_s)
            else:
                heapq.heappush(self._promotions, (self.since[id] + after_s, id))
        return self._starved

    def late(self, now_s: float) -> list[tuple[Job, float]]:
        """Jobs of class auto that waited too long for their tenant's quota, and for how many seconds."""
        late_s = self.settings.demote_after_s
        for id in _due(self._demotions, now_s) if late_s is not None else ():
            job = self.queue.jobs.get(id)
            if job is None or not job.may_start or id not in self.since:
                continue
            if classes.is_late(job.job_class, now_s - self.since[id], late_s):
                self._late.setdefault(job.spec.tenant, {})[id] = None
            elif job.job_class == "auto" and late_s is not None:
                heapq.heappush(self._demotions, (self.since[id] + late_s, id))
        if not self._late:
            return []
        bound = [ids for tenant, ids in self._late.items() if self.queue.has_quota(tenant)]
        return [(job, now_s - self.since[job.id]) for job in self._jobs(id for ids in bound for id in ids)]

    def next_s(self) -> list[float]:
        """When the next promotion and the next demotion may be due."""
        return [heap[0][0] for heap in (self._promotions, self._demotions) if heap]

    def _promoted_after(self, job: Job) -> float | None:
        """Seconds of the present wait after which the job is promoted; None: never, or it is promoted already. Jobs
        outside the order never are."""
        thresholds = self.settings.queue_thresholds_gpu_s
        attained = max(0.0, job.attained_gpu_s - job.priority.base_gpu_s)
        queue = queue_of(attained, thresholds)
        if not job.counts or (job.priority.promoted is not None and (job.priority.lasts or queue == 0)):
            return None
        ran_s = job.ran_since_promotion_s(self.queue.rack_s)
        return promoted_after(queue, ran_s, job.priority.waited_s, self.settings.knob, self.settings.starve_limit_s)

    def _jobs(self, ids: Iterable[JobId]) -> list[Job]:
        return sorted((self.queue.jobs[id] for id in ids), key=lambda job: job.number)


def _due(heap: list[tuple[float, JobId]], now_s: float) -> list[JobId]:
    found: dict[JobId, None] = {}
    while heap and heap[0][0] <= now_s + EARLY_S:
        found[heapq.heappop(heap)[1]] = None
    return list(found)
