"""How long jobs wait and how long it takes to place them, for `/metrics`. Only what this host sees happen counts: after
a restart the log is read again, and what it says until this copy has caught up happened before."""

from collections.abc import Iterable

from covey.core.ids import HostId, JobId
from covey.core.metrics import Distribution, MetricSeries, Tally
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.service import metrics


class JobWaits:
    """The histograms of one host. Each job is counted by its coordinator alone, so that the rack's sum is right."""

    def __init__(self, host: HostId, queue: JobTable) -> None:
        self._host, self._queue = host, queue
        self._waiting: set[JobId] = set()
        """Jobs that were seen to wait for their first start."""
        self._placing: dict[JobId, tuple[int, float]] = {}
        """Jobs that this host places -> epoch of the grant, and when it was seen, s."""
        self._waits, self._placements = Tally(metrics.JOB_WAIT_SECONDS), Tally(metrics.PLACEMENT_SECONDS)

    def look(self, changed: Iterable[JobId], now_s: float, behind: bool = False) -> None:
        """Take in which jobs changed in this host's copy of the log. `behind`: the copy may lack what was decided."""
        for id in changed:
            job = self._queue.jobs.get(id)
            if job is None or job.over:
                self._waiting.discard(id)
                self._placing.pop(id, None)
                continue
            times, spec = job.times, job.spec
            if spec.array or spec.after or spec.hold or spec.begin_wall_s or job.task is not None:
                self._look_at_placing(job, now_s, behind)
                continue  # it waits, or waited, for something else than GPUs
            if times.started_rack_s is None:
                self._waiting.add(id)
            elif id in self._waiting:
                self._waiting.discard(id)
                if job.grant.coordinator == self._host and not behind:
                    self._waits.see(max(0.0, times.started_rack_s - times.submitted_rack_s))
            self._look_at_placing(job, now_s, behind)

    def _look_at_placing(self, job: Job, now_s: float, behind: bool) -> None:
        id, epoch, known = job.id, job.grant.epoch, self._placing.get(job.id)
        if job.state == "placing" and job.grant.coordinator == self._host:
            if known is None or known[0] != epoch:
                self._placing[id] = epoch, now_s
        elif known is not None:
            del self._placing[id]
            if known[0] == epoch and job.placed and not behind:
                self._placements.see(max(0.0, now_s - known[1]))

    def longest_s(self, rack_s: float) -> float:
        """Wait in seconds of the job that has waited longest for its first start. `rack_s`: the rack's clock."""
        waiting = (self._queue.jobs.get(id) for id in self._waiting)
        return max((rack_s - job.times.submitted_rack_s for job in waiting if job is not None), default=0.0)

    def metrics(self, rack_s: float) -> dict[MetricSeries, float | Distribution]:
        found: dict[MetricSeries, float | Distribution] = {
            metrics.JOBS_WAIT_LONGEST_SECONDS.of(): max(0.0, self.longest_s(rack_s))
        }
        return found | self._waits.measured() | self._placements.measured()
