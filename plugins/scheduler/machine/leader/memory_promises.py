"""What jobs may use of each host's memory (`submit --host-memory`), and which hosts have room for another one.

The log says which jobs are where, so it says what was promised; each host says how much memory it has. A host that
says nothing has no room: what is not known is never enough. The hosts decide in the end
(`machine/host/reservations.py`).
"""

from collections.abc import Callable, Iterable, Mapping

from covey.core.ids import HostId, JobId
from plugins.facts import MemoryHere
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.policy.eligible import lacks_memory


class MemoryPromises:
    """The promises of all jobs that are put in, and what hosts say of their memory."""

    def __init__(self, jobs: Iterable[Job] = (), said: Mapping[HostId, MemoryHere] | None = None) -> None:
        """`said`: by host; None: nobody asks what hosts have, and each has room."""
        self.said = said
        self._of: dict[JobId, tuple[HostId, ...]] = {}
        self._by_host: dict[HostId, dict[JobId, int]] = {}
        for job in jobs:
            self.put(job)

    def put(self, job: Job) -> None:
        """Count the job as it is now."""
        self.drop(job.id)
        if not job.spec.host_memory or job.over:
            return
        hosts = tuple(sorted({place.host for place in job.awaited} | set(job.arriving)))
        self._of[job.id] = hosts
        for host in hosts:
            self._by_host.setdefault(host, {})[job.id] = job.spec.host_memory

    def drop(self, id: JobId) -> None:
        """Count the job no longer."""
        for host in self._of.pop(id, ()):
            del self._by_host[host][id]

    def lacks(self, job: Job | None) -> Callable[[HostId], str] | None:
        """Returns why a host has no room for this job, in words that follow its name, or nothing; None: nobody asks. A
        host where ranks of the job are has room for more of them: they share what it may use there."""
        if job is None or not job.spec.host_memory or self.said is None:
            return None
        said, wanted = self.said, job.spec.host_memory

        def lacks(host: HostId) -> str:
            promised = self._by_host.get(host, {})
            return "" if job.id in promised else lacks_memory(wanted, said.get(host), sum(promised.values()))

        return lacks
