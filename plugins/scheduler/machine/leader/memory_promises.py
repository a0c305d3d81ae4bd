"""What jobs may use of each host's memory (`submit --host-memory`), and which hosts have room for another one.

The log says which jobs are where, so it says what was promised; each host says how much memory it has. A host that
says nothing has no room: what is not known is never enough. The hosts decide in the end
(`machine/host/reservations.py`).
"""

from collections.abc import Iterable, Mapping, Set

from covey.core.ids import HostId, JobId
from plugins.facts import MemoryHere
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.policy.eligible import lacks_memory, memory_left


class MemoryPromises:
    """The promises of all jobs that are put in, and what hosts say of their memory."""

    def __init__(self, jobs: Iterable[Job] = (), said: Mapping[HostId, MemoryHere] | None = None) -> None:
        """`said`: by host; None: nobody asks what hosts have, and each has room."""
        self._said = said
        self._of: dict[JobId, tuple[HostId, ...]] = {}
        self._by_host: dict[HostId, dict[JobId, int]] = {}
        self._room: dict[int, frozenset[HostId]] = {}
        """Hosts that have room for another job, by its memory: in a full rack thousands of jobs ask for the same."""
        for job in jobs:
            self.put(job)

    def heard(self, said: Mapping[HostId, MemoryHere] | None) -> None:
        """From now on hosts have this memory, by their own word."""
        if said != self._said:
            self._said = said
            self._room.clear()

    def put(self, job: Job) -> None:
        """Count the job as it is now."""
        self.drop(job.id)
        if not job.spec.host_memory or job.over:
            return
        hosts = tuple(sorted({place.host for place in job.awaited} | set(job.arriving)))
        self._of[job.id] = hosts
        self._room.clear()
        for host in hosts:
            self._by_host.setdefault(host, {})[job.id] = job.spec.host_memory

    def drop(self, id: JobId) -> None:
        """Count the job no longer."""
        for host in self._of.pop(id, ()):
            del self._by_host[host][id]
            self._room.clear()

    def room_for(self, job: Job | None) -> Set[HostId] | None:
        """Hosts with room for this job's memory; None: all have, or nobody asks. A host where ranks of the job are has
        room for more of them: they share what it may use there."""
        if job is None or not job.spec.host_memory or self._said is None:
            return None
        wanted = job.spec.host_memory
        if wanted not in self._room:
            left = {host: memory_left(said, self._promised(host)) for host, said in self._said.items()}
            self._room[wanted] = frozenset(host for host in left if left[host] >= wanted)
        return self._room[wanted].union(self._of.get(job.id, ()))

    def lacks(self, job: Job, host: HostId) -> str:
        """Why a host has no room for this job's memory, in words that follow its name; empty: it has."""
        room = self.room_for(job)
        if room is None or host in room or self._said is None:
            return ""
        return lacks_memory(job.spec.host_memory, self._said.get(host), self._promised(host))

    def _promised(self, host: HostId) -> int:
        """Memory of this host that jobs may use."""
        return sum(self._by_host.get(host, {}).values())
