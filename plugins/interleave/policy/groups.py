"""Who shares hosts with whom, as the replicated log has it (Harmony §4.3.2).

A *pool* is all jobs that may share hosts with one another: those of one tenant that were submitted with one name
(`--share-host NAME`), or those of all tenants that say `auto`. A *group* is the jobs of one pool that
the log has on the same hosts: two jobs are in one group when they have a host in common, or a chain of such jobs joins
them. So a host is in one group of a pool, whatever anybody decides, and nobody keeps a second record.

Every host of the rack has the log and computes the same groups from it, the same order of turns and the same
coordinators: whoever is to decide knows it, and so do the others.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from covey.core.ids import HostId, JobId
from plugins.facts import Place, coordinator_place
from plugins.interleave.policy.turn_order import numbered

AUTO = "auto"
"""The pool of jobs, of any tenant, that leave it to Covey with whom they share hosts."""


def pool_of(tenant: str, share_host: str) -> str:
    """The pool of a job: `auto`, or `TENANT/NAME`; empty: it shares no hosts."""
    return share_host if share_host in ("", AUTO) else f"{tenant}/{share_host}"


class PlacedJob(msgspec.Struct, frozen=True):
    """A job that shares its hosts in turns, as the log has it."""

    job: JobId
    pool: str
    epoch: int
    config: int
    """The number of its configuration (`plugins.facts.JobPlaced.config`)."""
    places: tuple[Place, ...]
    fewest: int = 0
    """The fewest processes of an elastic job; 0: the job is not elastic, and is never moved."""
    most: int = 0
    """The most processes of an elastic job."""
    first: int = 0
    """The process that carries rank 0."""

    @property
    def hosts(self) -> frozenset[HostId]:
        return frozenset(place.host for place in self.places)

    @property
    def processes(self) -> dict[HostId, int]:
        """The number of its processes on each of its hosts."""
        return {place.host: len(place.ranks) for place in self.places}

    @property
    def keeps(self) -> frozenset[HostId]:
        """Hosts of which it must keep one, in every arrangement: where the process is that carries rank 0, which ends
        only with its host."""
        return frozenset(place.host for place in self.places if self.first in place.ranks)


class PlacedGroup(msgspec.Struct, frozen=True):
    """The jobs of a pool on the same hosts, and these hosts."""

    name: str
    """The pool and the lowest job, `auto/j3`: the same on every host."""
    pool: str
    jobs: tuple[JobId, ...]
    """The jobs, the lowest number first."""
    hosts: tuple[HostId, ...]


def groups_of(jobs: Iterable[PlacedJob]) -> tuple[PlacedGroup, ...]:
    """The groups of these jobs, by pool and lowest job."""
    found: list[tuple[str, list[PlacedJob], set[HostId]]] = []
    for job in sorted(jobs, key=lambda each: numbered(each.job)):
        joined, rest = [job], []
        hosts = set(job.hosts)
        for pool, members, theirs in found:
            if pool == job.pool and theirs & job.hosts:
                joined, hosts = [*members, *joined], hosts | theirs
            else:
                rest.append((pool, members, theirs))
        found = [*rest, (job.pool, joined, hosts)]
    groups = []
    for pool, members, hosts in found:
        ids = tuple(sorted((job.job for job in members), key=numbered))
        groups.append(PlacedGroup(f"{pool}/{ids[0]}", pool, ids, tuple(sorted(hosts))))
    return tuple(sorted(groups, key=lambda group: (group.pool, numbered(group.jobs[0]))))


def coordinator_of(job: PlacedJob, live: Collection[HostId]) -> HostId | None:
    """The host that speaks for the job: of its live hosts the one with its lowest process; None: no host lives."""
    found = coordinator_place(job.places, {place.host for place in job.places if place.host not in live})
    return found.host if found is not None else None


def proposer_of(group: PlacedGroup, jobs: Mapping[JobId, PlacedJob], live: Collection[HostId]) -> HostId | None:
    """The host that proposes a small change of this group: the coordinator of its lowest job that has a live host."""
    for job in group.jobs:
        if (host := coordinator_of(jobs[job], live)) is not None:
            return host
    return None


def arranger_of(jobs: Iterable[PlacedJob], live: Collection[HostId]) -> HostId | None:
    """The host that proposes to arrange a whole pool anew: the lowest live host that has a job of it."""
    return min((host for job in jobs for host in job.hosts if host in live), default=None)


def processes_on(job: PlacedJob, hosts: Sequence[HostId]) -> dict[HostId, int]:
    """How many processes the job has on each of these hosts once it is on them: as many as now where that is enough
    for one on each, spread evenly; hosts that have most of them now get the odd ones."""
    now = job.processes
    count = min(job.most, max(sum(now.values()), job.fewest, len(hosts)))
    each, more = divmod(count, len(hosts))
    ranked = sorted(hosts, key=lambda host: (-now.get(host, 0), host))
    return {host: each + (at < more) for at, host in enumerate(ranked) if each + (at < more)}
