"""When a wide gang goes before everybody: nobody who is within a quota waits for ever (ours; the papers have no rule).

2DAS puts new jobs of few GPUs first, so a stream of them can keep a wide gang waiting, and stop it at every arrival,
for as long as the stream lasts. So each pool (the quota of a tenant, or what all tenants without one share) keeps a
clock for its wide gangs:

- *wide* is a gang of two GPUs or more that is at least an eighth of the pool. A narrower one finds room by itself.
- *by age* a gang could run when all older jobs of its pool, whether they run or wait, leave it room. That set only
  grows for a gang: who is older leaves, and nobody becomes older. All gangs that could run by age fit together.
- The clock of a wide gang runs while it waits, could run by age, and its pool is not overloaded: the other jobs there
  ask for at most twice its GPUs. Under a longer queue to bring a gang forward costs the others more than it gains.
- A gang whose clock has run for `gang_patience_s`, and as long again as the gang has run, is promoted, and stays so
  until it ends. (A job that STARVELIMIT or PROMOTEKNOB promotes is so for a first quantum.)

So, in a pool that is not overloaded, a wide gang waits for at most `gang_patience_s` plus its own length longer than by
age alone: what it ran counts up to its length. Only then jobs that may not be stopped now (`firm_jobs.py`) are waited
for. `tests/plugins/scheduler/test_patience.py` tries to break that.

A pool's clocks are told of every job of the pool when that changes, and look at the few that a change concerns: jobs
are kept by age, in front of and behind the first that would not fit beside all older ones, and at most eight gangs are
wide and in front. The leader of agents and the simulator's fast engine both decide by them.

    begin(now) -> put, drop, ... -> settle(GPUs) -> due()        each time that anything happened
"""

import bisect
import heapq

from covey.core.ids import JobId
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job, row_of
from plugins.scheduler.policy.order import due_after, is_calm, widest_narrow


class GangClocks:
    """The jobs of one pool, named by numbers that ascend with age: the smaller, the older."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.widths: dict[int, int] = {}
        """GPUs of every job of the pool that is not over."""
        self.asked = 0
        """The sum of these."""
        self.front: list[int] = []
        """The oldest jobs, ascending, as many as fit together."""
        self.front_gpus = 0
        self._behind: list[int] = []
        """Heap of the others; some may be over."""
        self.ran_s: dict[int, float] = {}
        """Gangs that wait, and for how many seconds each has run."""
        self._waiting: list[tuple[int, int]] = []
        """(GPUs, number) of the gangs that wait and are in front, ascending."""
        self.waited_s: dict[int, float] = {}
        """For how many seconds the clock of a gang has run before it last stood still."""
        self.began_s: dict[int, float] = {}
        """Gangs whose clock runs, and the reading of `calm_s` when it began to."""
        self.clocked_gpus = 0
        self.calm, self.calm_s, self.now_s = True, 0.0, 0.0
        """Whether the pool is not overloaded, and for how many seconds that was so until `now_s`."""
        self._due_s: dict[int, float] = {}
        """The reading of `calm_s` at which each of them is due."""
        self._settled: int | None = None
        """The pool's GPUs when all this was last brought up to date; None: something changed since."""

    def begin(self, now_s: float) -> None:
        """Let the clocks run until now, before anything is changed."""
        if self.calm:
            self.calm_s += max(0.0, now_s - self.now_s)
        self.now_s = now_s

    def put(self, job: int, gpus: int, waits: bool, ran_s: float = 0.0) -> None:
        """Take in a job as it is now. `waits`: whether it waits and was not promoted; `ran_s`: for how long it ran."""
        if job not in self.widths:
            self.widths[job] = gpus
            self.asked += gpus
            if self.front and job < self.front[-1]:
                self._to_front(job)
            else:
                heapq.heappush(self._behind, job)
            self._settled = None
        waits = waits and gpus > 1
        if waits == (job in self.ran_s) and (not waits or ran_s == self.ran_s[job]):
            return
        self._settled = None
        if waits and job in self.ran_s:
            self._stop(job)
            self.ran_s[job] = ran_s
        elif waits:
            self.ran_s[job] = ran_s
            if self._is_in_front(job):
                bisect.insort(self._waiting, (gpus, job))
        else:
            self._stop(job)
            if self._is_in_front(job):
                self._waiting.remove((gpus, job))
            del self.ran_s[job]

    def forgive(self, job: int) -> None:
        """Begin anew with a gang that was promoted; it does not wait, as far as the clocks go."""
        self.waited_s.pop(job, None)

    def drop(self, job: int) -> None:
        """Forget a job that is over, or belongs to another pool now."""
        if job not in self.widths:
            return
        self.put(job, self.widths[job], False)
        if self._is_in_front(job):
            del self.front[bisect.bisect_left(self.front, job)]
            self.front_gpus -= self.widths[job]
        self.asked -= self.widths.pop(job)
        self.waited_s.pop(job, None)
        self._settled = None

    def settle(self, gpus: int) -> None:
        """Let the clocks run, or stand still, that have to in a pool of so many GPUs."""
        if self._settled == gpus:
            return
        self._settled = gpus
        while self.front_gpus > gpus:
            self._to_behind()
        while self._behind:
            oldest = self._behind[0]
            known = oldest in self.widths and not self._is_in_front(oldest)
            if known and self.front_gpus + self.widths[oldest] > gpus:
                break
            heapq.heappop(self._behind)
            if known:
                self._to_front(oldest)
        wide = [job for _, job in self._waiting[bisect.bisect_left(self._waiting, (widest_narrow(gpus) + 1, 0)) :]]
        if len(wide) != len(self.began_s) or any(job not in self.began_s for job in wide):
            for job in [job for job in self.began_s if job not in wide]:
                self._stop(job)
            for job in wide:
                self._start(job)
        self.calm = is_calm(self.asked - self.clocked_gpus, gpus)

    def due(self) -> list[int]:
        """The gangs that are to be promoted, in order of age."""
        return sorted(job for job, due_s in self._due_s.items() if due_s <= self.calm_s)

    def next_s(self) -> float | None:
        """When the next gang is due if nothing changes; None: none is then."""
        return self.now_s + min(self._due_s.values()) - self.calm_s if self.calm and self._due_s else None

    def check(self) -> None:
        """Raise AssertionError when what is kept is not what follows from the jobs."""
        assert self.asked == sum(self.widths.values())
        assert self.front == sorted(self.front) and self.front_gpus == sum(self.widths[job] for job in self.front)
        assert self._waiting == sorted((self.widths[job], job) for job in self.ran_s if self._is_in_front(job))
        assert self.clocked_gpus == sum(self.widths[job] for job in self.began_s)

    def _is_in_front(self, job: int) -> bool:
        at = bisect.bisect_left(self.front, job)
        return at < len(self.front) and self.front[at] == job

    def _to_front(self, job: int) -> None:
        bisect.insort(self.front, job)
        self.front_gpus += self.widths[job]
        if job in self.ran_s:
            bisect.insort(self._waiting, (self.widths[job], job))

    def _to_behind(self) -> None:
        job = self.front.pop()
        self.front_gpus -= self.widths[job]
        heapq.heappush(self._behind, job)
        if job in self.ran_s:
            self._waiting.remove((self.widths[job], job))

    def _start(self, job: int) -> None:
        if job in self.began_s:
            return
        self.began_s[job] = self.calm_s
        self.clocked_gpus += self.widths[job]
        after_s = due_after(self.patience_s, self.ran_s[job], self.waited_s.get(job, 0.0))
        self._due_s[job] = self.calm_s + after_s

    def _stop(self, job: int) -> None:
        if job not in self.began_s:
            return
        self.waited_s[job] = self.waited_s.get(job, 0.0) + self.calm_s - self.began_s.pop(job)
        self.clocked_gpus -= self.widths[job]
        del self._due_s[job]


class PoolClocks:
    """The clocks of all pools of a rack: each tenant's with a quota, and the one of those without."""

    def __init__(self, queue: JobTable, patience_s: float | None, thresholds: tuple[float, ...]) -> None:
        """`patience_s` None: no gang is ever promoted by its clock. `thresholds`: those between queues, GPU·s."""
        self.queue, self.patience_s, self.thresholds = queue, patience_s, thresholds
        self.clocks: dict[str | None, GangClocks] = {}
        self.pools: dict[JobId, tuple[str | None, int]] = {}
        """The pool of each guaranteed job, and the job's number."""
        self.ids: dict[int, JobId] = {}
        """The ids of these jobs by their numbers."""
        self.now_s = 0.0

    def begin(self, now_s: float) -> None:
        """Let the clocks run until now, before anything is changed."""
        self.now_s = now_s
        for clocks in self.clocks.values():
            clocks.begin(now_s)

    def put(self, job: Job) -> None:
        """Take in the job as it is now."""
        if self.patience_s is None:
            return
        held = job.state == "queued" and not job.may_start
        if not job.counts or not job.spec.gpus or held:
            self.drop(job.id)
            return
        pool = job.spec.tenant if self.queue.has_quota(job.spec.tenant) else None
        if self.pools.get(job.id, (pool, 0))[0] != pool:
            self.drop(job.id)
        self.pools[job.id], self.ids[job.number] = (pool, job.number), job.id
        clocks = self.clocks.get(pool)
        if clocks is None:
            clocks = self.clocks[pool] = GangClocks(self.patience_s)
            clocks.begin(self.now_s)
        promoted = job.priority.promoted is not None and row_of(job, self.thresholds).promoted is not None
        waits = job.state == "queued" and not promoted
        clocks.put(job.number, job.spec.gpus, waits, job.ran_since_promotion_s(self.queue.rack_s) if waits else 0.0)
        if promoted:
            clocks.forgive(job.number)

    def drop(self, id: JobId) -> None:
        """Forget a job that is over, or counts against no quota."""
        pool, number = self.pools.pop(id, (None, -1))
        clocks = self.clocks.get(pool)
        if clocks is None or number < 0:
            return
        del self.ids[number]
        clocks.drop(number)
        if not clocks.widths:
            del self.clocks[pool]

    def quotas_changed(self) -> None:
        """Put every job into the pool that it belongs to by now."""
        for id in list(self.pools):
            self.put(self.queue.jobs[id])

    def due(self, size: int) -> list[JobId]:
        """The gangs that are to be promoted, in a rack of so many GPUs."""
        shared = size - sum(self.queue.used(tenant) for tenant in self.clocks if tenant is not None)
        found: list[int] = []
        for tenant, clocks in self.clocks.items():
            clocks.settle(max(0, shared if tenant is None else min(size, self.queue.quota(tenant) or 0)))
            found += clocks.due()
        return [self.ids[number] for number in found]

    def next_s(self) -> list[float]:
        """When a gang is due in each pool if nothing changes."""
        return [at_s for clocks in self.clocks.values() if (at_s := clocks.next_s()) is not None]

    def check(self) -> None:
        """Raise AssertionError when what is kept is not what follows from the jobs."""
        for clocks in self.clocks.values():
            clocks.check()
        assert sum(len(clocks.widths) for clocks in self.clocks.values()) == len(self.pools)
