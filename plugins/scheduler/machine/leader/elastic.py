"""Elastic jobs at the leader: which of them give processes back for a gang that waits, and which grow.

    a gang waits for GPUs --it fits once extras have ended--> ScaleAsked to fewer; it keeps the GPUs, and starts
    fewer processes than the gang has, and room ------------> ScaleAsked to as many as the gang has
    GPUs are free for `elastic_grow_after_s`, none waits ---> ScaleAsked to as many as there is room for

Extras are processes over the lower number of an elastic job. They are given back before any job is stopped: those of
opportunistic jobs first, then those of the newest jobs. One job grows at a time, and each at most every `REST_S`
seconds.
"""

from collections.abc import Callable, Mapping, Sequence

from covey.core.ids import HostId, JobId
from plugins.scheduler.machine.leader.capacity import Capacity, Gpus, add
from plugins.scheduler.machine.log.arranging import LEADER, refused_scale
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import ScaleAsked
from plugins.scheduler.policy.carrying import ending
from plugins.scheduler.policy.settings import SchedulerSettings

REST_S = 30.0
"""Seconds between two times that the leader has one job grow, and between giving processes back and growing again."""

Shrinks = list[tuple[Job, int]]
"""Jobs, and how many processes each of them gives back."""


class Elastic:
    """The elastic jobs that this leader let grow or shrink."""

    def __init__(self, queue: JobTable, settings: SchedulerSettings) -> None:
        self.queue, self.settings = queue, settings
        self.asked_s: dict[JobId, float] = {}
        """When the leader last asked each job to grow, or saw it shrink."""
        self._idle_since_s: float | None = None
        """Since when no job waits that could use free GPUs."""

    def commands(self, jobs: Sequence[Job], capacity: Capacity, wall_s: float, now_s: float) -> list[ScaleAsked]:
        """Commands that let a job grow. `jobs`: elastic ones that run, in order of admission; `capacity`: GPUs that are
        free when nothing else is decided."""
        self.asked_s = {id: at_s for id, at_s in self.asked_s.items() if id in self.queue.jobs}
        short = [job for job in jobs if job.processes < job.spec.workers]
        for job in [job for job in short if self._may_grow(job, now_s)]:
            if _room(job, capacity):
                why = f"it has {job.processes} of the {job.spec.workers} processes of its gang"
                return self._ask(job, job.spec.workers, why, capacity, wall_s, now_s)
        after_s = self.settings.elastic_grow_after_s
        if not after_s or not jobs or not capacity.stops or self._is_awaited(capacity):
            self._idle_since_s = None
            return []
        self._idle_since_s = now_s if self._idle_since_s is None else self._idle_since_s
        if now_s - self._idle_since_s < after_s:
            return []
        for job in [job for job in jobs if job.spec.gpus and self._may_grow(job, now_s)]:
            if (more := min(_room(job, capacity), _most(job) - job.processes)) > 0:
                said = f"GPUs have been free for {after_s:g} s, and no job waits for them"
                return self._ask(job, job.processes + more, said, capacity, wall_s, now_s)
        return []

    def shrank(self, jobs: Sequence[Job], now_s: float) -> None:
        """Let these jobs rest: they give processes back."""
        self.asked_s |= dict.fromkeys((job.id for job in jobs), now_s)

    def _may_grow(self, job: Job, now_s: float) -> bool:
        rests = now_s - self.asked_s.get(job.id, now_s - REST_S) < REST_S
        if rests or job.seeks or job.healing.leaving or job.processes >= job.spec.workers_max:
            return False
        return refused_scale(job, job.spec.workers_max) is None

    def _is_awaited(self, capacity: Capacity) -> bool:
        """Whether some job waits that could use free GPUs: one that its quota lets run, or that needs none."""
        if capacity.placing or self.queue.keeper is not None:
            return True

        def could(job: Job) -> bool:
            left = self.queue.free_quota(job.spec.tenant)
            return bool(job.spec.gpus) and (not job.counts or left is None or left >= job.spec.gpus)

        return any(job.state in ("queued", "placing") and could(job) for job in self.queue.jobs.values())

    def _ask(
        self, job: Job, workers: int, why: str, capacity: Capacity, wall_s: float, now_s: float
    ) -> list[ScaleAsked]:
        command = scale_asked(job, workers, why, capacity.totals, wall_s)
        if command is None:
            return []
        self.asked_s[job.id] = now_s
        return [command]


def scale_asked(job: Job, workers: int, why: str, alive: Mapping[HostId, int], wall_s: float) -> ScaleAsked | None:
    """The leader's command that the job is to have so many processes; None: none of its hosts is alive."""
    coordinator = next((place.host for place in job.start.places if place.host in alive), None)
    if coordinator is None:
        return None
    return ScaleAsked(
        wall_s=wall_s,
        job=job.id,
        epoch=job.grant.epoch,
        workers=workers,
        coordinator=coordinator,
        by=LEADER,
        why=why[:1000],
        replaces=job.healing.healed,
        sought=job.healing.sought,
    )


def leaving(jobs: Sequence[Job], alive: Mapping[HostId, int]) -> Gpus:
    """GPUs of processes that are being ended, by host: they are free as soon as their host has said so."""
    coming: Gpus = {}
    for job in jobs:
        add(coming, {place.host: len(place.gpus) for place in job.healing.leaving if alive.get(place.host)})
    return coming


def to_shrink(jobs: Sequence[Job], free: Gpus, fits: Callable[[Gpus], bool]) -> Shrinks | None:
    """How many processes which jobs give back, so that a gang fits into what is free then; None: it does not, whatever
    they give back. `free`: GPUs that it may have without."""
    found: Shrinks = []
    there = dict(free)
    for job in sorted(jobs, key=lambda job: (job.counts, -job.number)):
        if fits(there):
            break
        counts = _counts(job)
        enough = next((count for count in counts if fits(with_freed(there, [(job, count)]))), max(counts, default=0))
        if enough:
            found.append((job, enough))
            there = with_freed(there, [(job, enough)])
    if not fits(there):
        return None
    for shrink in list(found):
        rest = [other for other in found if other is not shrink]
        if fits(with_freed(free, rest)):
            found = rest
    return found


def freed(job: Job, count: int) -> Gpus:
    """GPUs by host that are free once the job has given back so many processes."""
    ends = set(ending(job.start.places, job.carriers([0]), count))
    each = job.spec.gpus_per_worker
    counts = {place.host: each * len(ends & set(place.ranks)) for place in job.start.places}
    return {host: gpus for host, gpus in counts.items() if gpus}


def most_shrinks(jobs: Sequence[Job]) -> Shrinks:
    """All that these jobs can give back."""
    return [(job, most) for job in jobs if (most := max(_counts(job), default=0))]


def _counts(job: Job) -> list[int]:
    """How many processes the job can give back: ascending, at most its extras."""
    extras = range(1, job.processes - job.spec.workers + 1)
    return [count for count in extras if not job.healing.moving and refused_scale(job, job.processes - count) is None]


def with_freed(free: Mapping[HostId, int], shrinks: Shrinks) -> Gpus:
    """These GPUs, and those that are given back."""
    there = dict(free)
    for job, count in shrinks:
        add(there, freed(job, count))
    return there


def _most(job: Job) -> int:
    """The most processes to which the job grows by itself: no more than a person or a plugin asked for."""
    return job.healing.at_most or job.spec.workers_max


def _room(job: Job, capacity: Capacity) -> int:
    """The number of new processes that there is room for, as far as the leader knows; for a job without GPUs 1 if there
    is a host."""
    if not job.spec.gpus_per_worker:
        return int(bool(capacity.takers(job)))
    free = capacity.free_for(job)
    return sum(gpus // job.spec.gpus_per_worker for gpus in free.values())
