"""What jobs may use of each host's memory and processors (`submit --mem`, `--cpus`), and which hosts have room for
another one.

The log says which jobs are where, so it says what was promised; each host says what it has. A host that says nothing
has no room: what is not known is never enough. The hosts decide in the end (`machine/host/reservations.py`).
"""

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from covey.core.ids import HostId, JobId
from plugins.gossiped import MemoryHere
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.policy.eligible import lacks_cpus, lacks_memory, memory_left, workers_left


class Promise(NamedTuple):
    """What one job may use of one host."""

    memory_bytes: int
    cpus: int


class HostPromises:
    """The promises of all jobs that are put in, and what hosts say that they have."""

    def __init__(self, jobs: Iterable[Job] = (), said: Mapping[HostId, MemoryHere] | None = None) -> None:
        """`said`: by host; None: nobody asks what hosts have, and each has room."""
        self._said = said
        self._of: dict[JobId, tuple[HostId, ...]] = {}
        self._by_host: dict[HostId, dict[JobId, Promise]] = {}
        self._room: dict[int, frozenset[HostId]] = {}
        """Hosts that have room for another job, by its memory: in a full rack thousands of jobs ask for the same."""
        self._most: dict[int, Mapping[HostId, int]] = {}
        """How many workers more each host takes, by their processors."""
        for job in jobs:
            self.put(job)

    def heard(self, said: Mapping[HostId, MemoryHere] | None) -> None:
        """From now on hosts have this, by their own word."""
        if said != self._said:
            self._said = said
            self._forget_room()

    def put(self, job: Job) -> None:
        """Count the job as it is now."""
        self.drop(job.id)
        if not (job.spec.host_memory or job.spec.cpus) or job.over:
            return
        workers = {place.host: len(place.ranks) for place in job.awaited}
        for host, ranks in job.bound_for.items():
            workers[host] = workers.get(host, 0) + ranks
        self._of[job.id] = tuple(sorted(workers))
        self._forget_room()
        for host, count in workers.items():
            promise = Promise(job.spec.host_memory, job.spec.cpus * count)
            self._by_host.setdefault(host, {})[job.id] = promise

    def drop(self, id: JobId) -> None:
        """Count the job no longer."""
        for host in self._of.pop(id, ()):
            del self._by_host[host][id]
            self._forget_room()

    def _forget_room(self) -> None:
        self._room.clear()
        self._most.clear()

    def room_for(self, job: Job | None) -> Set[HostId] | None:
        """Hosts with room for this job's memory, and for the processors of one worker; None: all have, or nobody asks.
        A host where ranks of the job are has memory for more of them: they share what it may use there."""
        if job is None or self._said is None:
            return None
        found: Set[HostId] | None = None
        if wanted := job.spec.host_memory:
            if wanted not in self._room:
                left = {host: memory_left(said, self._memory(host)) for host, said in self._said.items()}
                self._room[wanted] = frozenset(host for host in left if left[host] >= wanted)
            found = self._room[wanted].union(self._of.get(job.id, ()))
        most = self.workers_for(job)
        return found if most is None else {host for host in most if found is None or host in found}

    def workers_for(self, job: Job | None) -> Mapping[HostId, int] | None:
        """How many workers more of this job each host has processors for, without those that have none; None: any
        number, or nobody asks."""
        if job is None or not job.spec.cpus or self._said is None:
            return None
        each = job.spec.cpus
        if each not in self._most:
            left = {host: workers_left(each, said, self._cpus(host)) for host, said in self._said.items()}
            self._most[each] = {host: count for host, count in left.items() if count}
        return self._most[each]

    def lacks(self, job: Job, host: HostId) -> str:
        """Why a host has no room for this job, in words that follow its name; empty: it has."""
        room = self.room_for(job)
        if room is None or host in room or self._said is None:
            return ""
        said = self._said.get(host)
        short = lacks_memory(job.spec.host_memory, said, self._memory(host))
        return short or lacks_cpus(job.spec.cpus, said, self._cpus(host))

    def _memory(self, host: HostId) -> int:
        """Memory of this host that jobs may use."""
        return sum(promise.memory_bytes for promise in self._by_host.get(host, {}).values())

    def _cpus(self, host: HostId) -> int:
        """Processors of this host that jobs may use."""
        return sum(promise.cpus for promise in self._by_host.get(host, {}).values())
