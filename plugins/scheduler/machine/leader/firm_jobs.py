"""Jobs that run and may not be stopped now, because of what that would lose.

A job that saves as it goes (a complete checkpoint of it was heard of) may be stopped only while what it has not saved,
and what a stop and a start cost, is at most a tenth of the time for which it has held its GPUs: so in a while after
each save, and all the time once these come often enough. Of one that never saved nothing is known: it may save when it
is told to end. It may be stopped `unsaved_stops` times; after that it runs on until it ends, or saves. Once stops lost
as often what jobs of its tenant had run (`TenantStops`), none of the tenant that never saved is stopped. One that saved
while it was being stopped loses nothing by a stop, nor does a gang that heals or is elastic: these may always be
stopped.

    starts --saves, and held its GPUs for long enough--> may be stopped --seconds later--> firm --saves--> ...

The leader of agents and the simulator's fast engine both decide by it.
"""

import heapq
from collections import Counter
from typing import NamedTuple

from covey.core.ids import JobId
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.policy.order import stoppable_for


def loses(job: Job) -> bool:
    """Whether a guaranteed job loses what it has not saved when it is stopped, as far as is known."""
    return job.counts and not (job.spec.elastic or job.healing.may_be_lost or job.measured.saves_at_stop)


def is_spent(job: Job, unsaved_stops: int | None) -> bool:
    """Whether the job was stopped so often without having saved that it is not stopped again before it saves."""
    spent = unsaved_stops is not None and job.tally.preemptions >= max(1, unsaved_stops)
    return spent and never_saved(job)


def never_saved(job: Job) -> bool:
    """Whether no checkpoint of the job is known, and it loses what it has not saved when it is stopped."""
    return loses(job) and job.measured.saved is None


class TenantStops:
    """What stops did to the jobs of each tenant: jobs that saved when they were told to end, and stops after which a
    job had not.

    Where `unsaved_stops` stops lost, what the tenant's other jobs have not saved is taken to be lost as well. Each job
    that saved when it was told to end makes good for as many again. What jobs say that the log has forgotten stays
    counted; a new leader counts the jobs that it finds in the log.
    """

    def __init__(self, unsaved_stops: int | None) -> None:
        self.unsaved_stops = unsaved_stops
        self.jobs: dict[JobId, tuple[int, bool]] = {}
        """How often each job was stopped and had not saved then, and whether it ever saved."""
        self._lost: Counter[str] = Counter()
        self._saved: Counter[str] = Counter()

    def put(self, job: Job) -> bool:
        """Take in a job as it is now; returns whether its tenant's jobs are to be looked at anew."""
        tenant, saves = job.spec.tenant, job.measured.saves_at_stop
        told = job.state == "stopping" and job.ending.cause == "preempted"  # it may save yet
        lost = 0 if saves else job.tally.preemptions - told
        if self.unsaved_stops is None or (lost, saves) == self.jobs.get(job.id, (0, False)):
            return False
        before = self.lose(tenant)
        was_lost, saved = self.jobs.get(job.id, (0, False))
        self.jobs[job.id] = lost, saves
        self._lost[tenant] += lost - was_lost
        self._saved[tenant] += saves - saved
        return self.lose(tenant) != before

    def forgotten(self, id: JobId) -> None:
        """The log has forgotten this job: what it did to its tenant stays."""
        self.jobs.pop(id, None)

    def lose(self, tenant: str) -> bool:
        """Whether stops are taken to lose what jobs of this tenant have not saved, if they never did."""
        most = self.unsaved_stops
        return most is not None and self._lost[tenant] >= most * (1 + self._saved[tenant])


class JobRun(NamedTuple):
    """What one run of a job has to lose."""

    since_s: float
    """When it got its GPUs."""
    saved_s: float | None
    """When its newest checkpoint was complete, also one before this run; None: it never saved."""
    spent: bool
    """Whether it was stopped so often, or stops lost so much of its tenant's jobs, that it is not stopped before it
    saves."""
    restart_s: float
    """Seconds that a stop and a start cost it beside what it has not saved."""


class FirmJobs:
    """Jobs by number, and which of them are firm."""

    def __init__(self, unsaved_stops: int | None) -> None:
        """`unsaved_stops` None: no job is ever firm."""
        self.unsaved_stops = unsaved_stops
        self.firm: set[int] = set()
        self.runs: dict[int, JobRun] = {}
        self._closes: list[tuple[float, int, JobRun]] = []
        """Heap of (when a job becomes firm, job, its run); some may be out of date."""

    def put(self, job: int, run: JobRun, now_s: float) -> bool:
        """Take in a job that runs, as it is now; returns whether it is firm."""
        if self.unsaved_stops is None:
            return False
        if self.runs.get(job) != run:
            self.runs[job] = run
            if run.saved_s is None:
                firm = run.spent
            else:
                unsaved_s = now_s - max(run.saved_s, run.since_s)
                left_s = stoppable_for(now_s - run.since_s, unsaved_s, run.restart_s)
                firm = left_s < 0
                if not firm:
                    heapq.heappush(self._closes, (now_s + left_s + 1, job, run))
            (self.firm.add if firm else self.firm.discard)(job)
        return job in self.firm

    def drop(self, job: int) -> None:
        """Forget a job that does not run."""
        self.runs.pop(job, None)
        self.firm.discard(job)

    def closed(self, now_s: float) -> list[int]:
        """Jobs that became firm by now, since they have not saved for too long."""
        found = []
        while self._closes and self._closes[0][0] <= now_s:
            _, job, run = heapq.heappop(self._closes)
            if self.runs.get(job) == run and job not in self.firm:
                self.firm.add(job)
                found.append(job)
        return found

    def next_s(self) -> float | None:
        """When the next job may become firm; None: nobody does."""
        while self._closes and self.runs.get(self._closes[0][1]) != self._closes[0][2]:
            heapq.heappop(self._closes)
        return self._closes[0][0] if self._closes else None
