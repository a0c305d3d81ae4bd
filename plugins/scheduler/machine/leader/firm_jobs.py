"""Jobs that run and may not be stopped now, because of what that would lose.

A job that saves as it goes (a complete checkpoint of it was heard of) may be stopped only while what it has not saved,
and what a stop and a start cost, is at most a tenth of the time for which it has held its GPUs: so in a while after
each save, and all the time once these come often enough. Of one that never saved nothing is known: it may save when it
is told to end. It may be stopped `unsaved_stops` times; after that it runs on until it ends, or saves. One that saved
while it was being stopped loses nothing by a stop, nor does a gang that heals or is elastic: these may always be
stopped.

    starts --saves, and held its GPUs for long enough--> may be stopped --seconds later--> firm --saves--> ...

The leader of agents and the simulator's fast engine both decide by it.
"""

import heapq
from typing import NamedTuple

from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.policy.order import stoppable_for


def loses(job: Job) -> bool:
    """Whether a guaranteed job loses what it has not saved when it is stopped, as far as is known."""
    return job.counts and not (job.spec.elastic or job.healing.may_be_lost or job.measured.saves_at_stop)


def is_spent(job: Job, unsaved_stops: int | None) -> bool:
    """Whether the job was stopped so often without having saved that it is not stopped again before it saves."""
    spent = unsaved_stops is not None and job.tally.preemptions >= max(1, unsaved_stops)
    return spent and loses(job) and job.measured.saved is None


class JobRun(NamedTuple):
    """What one run of a job has to lose."""

    since_s: float
    """When it got its GPUs."""
    saved_s: float | None
    """When its newest checkpoint was complete, also one before this run; None: it never saved."""
    stops: int
    """How often it was stopped for another job."""


class FirmJobs:
    """Jobs by number, and which of them are firm."""

    def __init__(self, restart_s: float, unsaved_stops: int | None) -> None:
        """`restart_s`: seconds that a stop and a start cost; `unsaved_stops` None: no job is ever firm."""
        self.restart_s, self.unsaved_stops = restart_s, unsaved_stops
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
                firm = run.stops >= self.unsaved_stops
            else:
                unsaved_s = now_s - max(run.saved_s, run.since_s)
                left_s = stoppable_for(now_s - run.since_s, unsaved_s, self.restart_s)
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
