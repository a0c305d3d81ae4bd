"""Two policies that are no walk down an order: EASY backfill and time-slicing. They share everything else with
`engine`."""

import bisect

from plugins.scheduler.machine.leader.order_book import JOB_BITS, JOB_MASK
from plugins.scheduler.policy.rules import OrderRules
from sim.jobs.engine import WAIT, Engine

LOOKED_AT_MAX = 1000
"""Most waiting jobs behind the first that one decision looks at, as Slurm's `bf_max_job_test` bounds it."""


class Backfill(Engine):
    """First come, first served; the first job that does not fit gets a start time from the requested limits of the
    running jobs, and a job behind it may start when that does not delay it (EASY). No job is stopped, not even at its
    limit."""

    def _prepare(self) -> None:
        self.line: list[int] = []
        """Jobs that wait, by arrival."""
        self.until: list[tuple[int, int]] = []
        """(second at which its limit is over, job) for each running job, ascending."""
        self.ends = [0] * len(self.jobs)
        self.limits = [job.duration_s if job.limit_s is None else job.limit_s for job in self.jobs]

    def _wait(self, job: int) -> None:
        self.state[job] = WAIT
        self.since[job] = self.now
        self.line.append(job)

    def _enter(self, job: int) -> None:
        super()._enter(job)
        self.ends[job] = self.now + self.limits[job]
        bisect.insort(self.until, (self.ends[job], job))

    def _vacate(self, job: int) -> None:
        super()._vacate(job)
        del self.until[bisect.bisect_left(self.until, (self.ends[job], job))]

    def _walk(self) -> tuple[list[int], list[int]]:
        free, line = self.capacity - self.book.held[0], self.line
        start: list[int] = []
        while len(start) < len(line) and self.width[line[len(start)]] <= free:
            start.append(line[len(start)])
            free -= self.width[start[-1]]
        del line[: len(start)]
        if line and free:
            passing = self._passing(line[0], free, start)
            for job in passing:
                del line[bisect.bisect_left(line, job)]
            start += passing
        return start, []

    def _passing(self, first: int, free: int, starting: list[int]) -> list[int]:
        """Jobs that may start before the first in line without delaying it. `free`: GPUs left now."""
        leaving = sorted([*self.until, *((self.now + self.limits[job], job) for job in starting)])
        at_s, there = self.now, free
        for end_s, job in leaving:
            there += self.width[job]
            at_s = max(end_s, self.now)
            if there >= self.width[first]:
                break
        spare = there - self.width[first]
        chosen: list[int] = []
        for job in self.line[1 : 1 + LOOKED_AT_MAX]:
            width = self.width[job]
            if width > free or (self.now + self.limits[job] > at_s and width > spare):
                continue
            if self.now + self.limits[job] > at_s:
                spare -= width
            free -= width
            chosen.append(job)
            if not free:
                break
        return chosen


class Slices(Engine):
    """Time slices: every `quantum_s` the waiting jobs take the places of those that ran, longest wait first; in
    between, free GPUs go to waiting jobs and no job is stopped. Gandiva does this when there are more jobs than GPUs;
    its packing and migration are left out. A stop costs nothing, a start after it `restore_s`."""

    def _prepare(self) -> None:
        self.slice_s = self.rules.quantum_s or 60

    def _key(self, job: int, running: bool) -> int:
        return self.now << JOB_BITS | job

    def _next(self) -> int:
        now = super()._next()
        if self.book.narrow[0]:
            now = min(now, (self.now // self.slice_s + 1) * self.slice_s)
        return now

    def _take(self) -> bool:
        return super()._take() or self.now % self.slice_s == 0

    def _walk(self) -> tuple[list[int], list[int]]:
        book = self.book
        if self.now % self.slice_s or not book.narrow[0]:
            return super()._walk()
        running, held = book.running[0], book.held[0]
        book.running[0], book.held[0] = [], 0
        start, _ = book.decide(self.capacity, self.capacity)
        book.running[0], book.held[0] = running, held
        free = self.capacity - sum(self.width[job] for job in start)
        stop = []
        for key in reversed(running):
            job = key & JOB_MASK
            if self.width[job] <= free:
                free -= self.width[job]
            else:
                stop.append(job)
        return start, stop


def engine_for(rules: OrderRules) -> type[Engine]:
    """The class of engine that runs these rules."""
    if rules.discipline == "backfill":
        return Backfill
    return Slices if rules.discipline == "gandiva" else Engine
