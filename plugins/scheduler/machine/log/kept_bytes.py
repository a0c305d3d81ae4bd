"""How much of a snapshot the jobs in the log take: bounded, so that the log can always be cut."""

from collections.abc import Iterable

import msgspec

from covey.core.ids import JobId
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.spec import JobSpec

LIVE_BYTES_MAX = 64 * 1024 * 1024
"""The most bytes of submissions of jobs that wait or run. Together with the ended jobs, and with what is known of each
job, this stays below half of the longest snapshot (256 MiB)."""
ENDED_BYTES_MAX = 32 * 1024 * 1024
"""The most bytes of ended jobs; the oldest are forgotten first."""

_encode = msgspec.msgpack.Encoder().encode


def size_of(spec: JobSpec) -> int:
    """Bytes of a spec in a snapshot, the same on every host."""
    return len(_encode(spec))


class KeptBytes:
    """Bytes of live and of ended jobs, kept up to date as jobs come, end and are forgotten."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.live = self.ended = 0
        self._sizes: dict[JobId, int] = {}
        for job in jobs:
            self.submitted(job)
            if job.over:
                self.over(job)

    def submitted(self, job: Job) -> None:
        self._sizes[job.id] = size = size_of(job.spec)
        self.live += size

    def over(self, job: Job) -> None:
        """Count a job as ended; its spec may have become shorter."""
        self.live -= self._sizes[job.id]
        self._sizes[job.id] = size = size_of(job.spec)
        self.ended += size

    def forgotten(self, job: JobId) -> None:
        """Count an ended job no longer."""
        self.ended -= self._sizes.pop(job)
