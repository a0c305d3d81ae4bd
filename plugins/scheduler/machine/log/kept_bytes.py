"""How much of a snapshot the jobs in the log take: bounded, so that the log can always be cut."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from covey.core.ids import JobId
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.spec import JobSpec

LIVE_BYTES_MAX = 64 * 1024 * 1024
"""The most bytes of submissions of jobs that wait or run. Together with the ended jobs, and with what is known of each
job, this stays below half of the longest snapshot (256 MiB)."""
ENDED_BYTES_MAX = 32 * 1024 * 1024
"""The most bytes of ended jobs; the oldest are forgotten first."""
USER_PART = 4
"""One user's jobs that wait or run are at most 1/4 of what the log takes: no user keeps all others from submitting
(chosen)."""

_encode = msgspec.msgpack.Encoder().encode


def size_of(spec: JobSpec) -> int:
    """Bytes of a spec in a snapshot, the same on every host."""
    return len(_encode(spec))


class Live(NamedTuple):
    """The jobs of one user that wait or run."""

    jobs: int = 0
    bytes: int = 0


class KeptBytes:
    """Bytes of live and of ended jobs, kept up to date as jobs come, end and are forgotten."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.live = self.ended = 0
        self.users: dict[str, Live] = {}
        """The live jobs of each user who has some, beside the agent's own."""
        self._sizes: dict[JobId, int] = {}
        for job in jobs:
            self.submitted(job)
            if job.over:
                self.over(job)

    def submitted(self, job: Job) -> None:
        self._sizes[job.id] = size = size_of(job.spec)
        self.live += size
        self._count(job, 1, size)

    def changed(self, job: Job) -> None:
        """Count a live job whose spec is another one now."""
        size = size_of(job.spec)
        more, self._sizes[job.id] = size - self._sizes[job.id], size
        self.live += more
        self._count(job, 0, more)

    def over(self, job: Job) -> None:
        """Count a job as ended; its spec may have become shorter."""
        self.live -= self._sizes[job.id]
        self._count(job, -1, -self._sizes[job.id])
        self._sizes[job.id] = size = size_of(job.spec)
        self.ended += size

    def _count(self, job: Job, jobs: int, size: int) -> None:
        if job.spec.owner is None:
            return
        user = job.spec.owner.user
        now = self.users.pop(user, Live())
        if (left := Live(now.jobs + jobs, now.bytes + size)).jobs:
            self.users[user] = left

    def forgotten(self, job: JobId) -> None:
        """Count an ended job no longer."""
        self.ended -= self._sizes.pop(job)
