"""The GPUs of hosts that share them: one guaranteed job on each, and opportunistic ones beside it (AntMan §3.3).

    guaranteed    0 or 1          open: 0
    beside it     0 .. beside     free: fewer, and the GPU is not busy

It answers what `Capacity` answers, by GPU instead of by host (`host/gpu`, a *unit*), because here it matters which GPU
it is: a job that is upgraded stays where it is, and a reservation names its GPUs. No job stops for another: guaranteed
and opportunistic jobs take from different maps.

The log names GPUs by UUID, gossip by a few digits of each (`SharedGpus`), and what no host names is no unit: a GPU that
vanished, and whatever a host has that says nothing of its GPUs. Jobs that hold such GPUs are counted on no unit.
"""

from collections.abc import Iterable, Mapping

import msgspec

from covey.core.ids import HostId, JobId
from plugins.scheduler.machine.leader.capacity import Capacity, Gpus, HeldGpus
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.policy import classes, shared
from plugins.scheduler.policy.eligible import capped, open_to
from plugins.scheduler.policy.place import fits, place


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """How GPUs are shared between jobs."""

    beside: int = 1
    """The most opportunistic jobs on one GPU."""
    busy: float = shared.BUSY
    """Utilisation, 0..1, from which on a GPU takes no more opportunistic jobs."""

    def __post_init__(self) -> None:
        if self.beside < 0:
            raise ValueError("beside must be 0 or more opportunistic jobs")


class SharedGpus(msgspec.Struct, frozen=True, kw_only=True):
    """What one host says of its GPUs, in the order of their numbers."""

    names: tuple[str, ...] = ()
    """GPU names by `shared.short_name`; without any they are named by their numbers, as in rehearsals."""
    utilisation: tuple[float, ...] = ()
    """Utilisation over the last 10 s, 0..1."""
    refusing: tuple[str, ...] = ()
    """Names of the GPUs that take no job now."""
    beside: int | None = None
    """The most opportunistic jobs on one GPU there; None: as many as on other hosts."""


class SharedCapacity(Capacity):
    """The capacity of a rack whose hosts share GPUs. `hosts`: what each host says of its GPUs."""

    stops = False

    def __init__(
        self,
        queue: JobTable,
        totals: Mapping[HostId, int],
        jobs: Iterable[Job] | None,
        sharing: Sharing,
        hosts: Mapping[HostId, SharedGpus],
    ) -> None:
        self.sharing = sharing
        self.hosts = {host: hosts[host] for host in sorted(totals) if host in hosts}
        self.units = {unit: host for host, gpus in self.hosts.items() for unit in _units(host, totals[host], gpus)}
        """The GPUs ("units") -> the host of each."""
        self.beside: Gpus = {}
        """The number of opportunistic jobs on each GPU."""
        self.alone: Gpus = {}
        """GPUs of guaranteed jobs that stop, and of jobs that began here when no GPU was shared: until they end no
        guaranteed job starts there."""
        self.utilisation: dict[HostId, float] = {}
        self.refusing: dict[HostId, None] = {}
        self._measure()
        super().__init__(queue, totals, jobs)
        self.size = len(self.units)
        self.open = {unit: 1 for unit in self.units if not self._guaranteed.get(unit)}
        self.free = {}
        self._free_again(self.units)

    def names_the_same(self, hosts: Mapping[HostId, SharedGpus]) -> bool:
        """Whether these are the GPUs that are counted here, shared as before; only how busy they are may differ."""
        known = {host: gpus for host, gpus in hosts.items() if host in self.totals}
        alike = known.keys() == self.hosts.keys()
        return alike and all(_lasting(gpus) == _lasting(self.hosts[host]) for host, gpus in known.items())

    def heard(self, hosts: Mapping[HostId, SharedGpus]) -> None:
        """Take in how busy the same GPUs are now."""
        self.hosts = {host: hosts[host] for host in self.hosts}
        self._measure()
        self._free_again(self.units)

    def _measure(self) -> None:
        self.utilisation, self.refusing = {}, {}
        for host, gpus in self.hosts.items():
            units = _units(host, len(gpus.utilisation), gpus)
            self.utilisation.update(zip(units, gpus.utilisation, strict=False))
            self.refusing.update(dict.fromkeys(_unit(host, name) for name in gpus.refusing))

    def _free_again(self, units: Iterable[HostId]) -> None:
        for unit in units:
            if unit in self.units:
                _set(self.free, unit, int(unit not in self.refusing and self._has_room_beside(unit)))

    def _has_room_beside(self, unit: HostId) -> bool:
        says = self.hosts[self.units[unit]].beside
        most = self.sharing.beside if says is None else min(says, self.sharing.beside)
        busy = self.utilisation.get(unit, 0.0)
        return shared.has_room_beside(busy, self.beside.get(unit, 0), most, self.sharing.busy)

    def held_by(self, job: Job) -> Gpus:
        places = [place for place in job.awaited if place.host in self.hosts]
        return {self._unit_of(place.host, gpu): 1 for place in places for gpu in place.gpus}

    def _unit_of(self, host: HostId, gpu: str) -> HostId:
        device = shared.device_of(gpu)
        return _unit(host, shared.short_name(device) if self.hosts[host].names else device)

    def holds_alone(self, job: Job) -> bool:
        return job.counts or any(not shared.is_part(gpu) for place in job.awaited for gpu in place.gpus)

    def _count(self, holding: HeldGpus, sign: int) -> None:
        holders = self._guaranteed if holding.guaranteed else self.alone if holding.alone else self.beside
        for unit in holding.gpus:
            if unit in self.units:
                _set(holders, unit, holders.get(unit, 0) + sign)
                if holding.guaranteed:
                    _set(self.open, unit, 1 - holders.get(unit, 0))
        self._free_again(holding.gpus)

    # ---- questions ----

    def usable(self, job: Job, gpus: Mapping[HostId, int]) -> Mapping[HostId, int]:
        found = open_to(job.spec, gpus, self.queue.drained, host_of, self.promises.room_for(job))
        return capped(job.spec, found, self.promises.workers_for(job), host_of)

    def _free_for(self, job: Job) -> Gpus:
        if job.counts:
            found = self._open_for(job)
            if not self.alone and not self.refusing:
                return found
            return {unit: 1 for unit in found if unit not in self.alone and unit not in self.refusing}
        barred = self._barred(job)
        return {unit: 1 for unit in self.free if unit not in barred} if barred else self.free

    def _barred(self, job: Job) -> Gpus:
        """GPUs of guaranteed jobs that were measured to suffer from this job, or from one of its name."""
        others = [self.queue.jobs[id] for id in self.queue.apart_from(job)]
        return {unit: 1 for other in others for unit in self.held_by(other)}

    def _open_for(self, job: Job) -> Gpus:
        if classes.may_keep(job.id, self.keeper):
            return self.open
        return {unit: 1 for unit in self.open if unit not in self.kept}

    def closed(self, job: Job) -> bool:
        if any(place.host not in self.hosts for place in job.awaited if place.gpus):
            return True  # nobody there could be told, and another job may hold the GPU by the log
        own = int(self.holds_alone(job))
        return any(
            unit not in self.open or unit in self.kept or self.alone.get(unit, 0) > own for unit in self.held_by(job)
        )

    def fits(self, job: Job, free: Mapping[HostId, int]) -> bool:
        spec, free = job.spec, self.usable(job, free)
        if not spec.gpus:
            return self.has_hosts(job)
        if spec.gpus > len(free):
            return False
        if _wherever(job):
            return True
        return fits(self.by_host(free), spec.workers, spec.gpus_per_worker, spec.pack)

    def by_host(self, units: Iterable[HostId]) -> Gpus:
        """The number of these GPUs on each host."""
        found: Gpus = {}
        for unit in units:
            host = host_of(unit)
            found[host] = found.get(host, 0) + 1
        return found

    def plan(self, job: Job, free: Mapping[HostId, int], skew: float | None, packlimit: float) -> Gpus:
        spec, free = job.spec, self.usable(job, free)
        if not spec.gpus or spec.gpus > len(free):
            return {}
        if _wherever(job):
            return dict.fromkeys(self._best(job, list(free), spec.gpus), 1)
        if spec.pack == "host" and spec.gpus_per_worker == 1:
            return dict.fromkeys(shared.least_shared(list(free), spec.gpus, self.beside, host_of), 1)
        room = self.by_host(free)
        workers = place(room, spec.workers, spec.gpus_per_worker, skew, packlimit, spec.pack) or {}
        chosen: list[HostId] = []
        for host, count in sorted(workers.items()):
            there = [unit for unit in free if host_of(unit) == host]
            chosen += self._best(job, there, count * spec.gpus_per_worker)
        return dict.fromkeys(chosen, 1)

    def _best(self, job: Job, units: list[HostId], gpus: int) -> list[HostId]:
        if job.counts:
            return shared.least_shared(units, gpus, self.beside)
        return shared.least_busy(units, gpus, self.utilisation, self.beside)

    def to_keep(self, job: Job, there: Mapping[HostId, int]) -> Gpus:
        spec, there = job.spec, self.usable(job, there)
        mine = [unit for unit in self.kept if unit in there] if self.keeper == job.id else []
        if spec.gpus_per_worker == 1 and spec.pack != "apart":
            one = host_of if spec.pack == "host" else None
            return dict.fromkeys(shared.which_to_keep(mine, list(there), spec.gpus, self.beside, one), 1)
        has, open_there = self.by_host(mine), self.by_host(there)
        counts = classes.gpus_to_keep(has, open_there, self.totals, spec.workers, spec.gpus_per_worker, spec.pack)
        kept: list[HostId] = []
        for host, count in counts.items():
            here = [unit for unit in there if host_of(unit) == host]
            kept += shared.which_to_keep([unit for unit in mine if unit in here], here, count, self.beside)
        return dict.fromkeys(sorted(kept), 1)

    def victims(self, job: Job, coming: Mapping[HostId, int], most: Mapping[HostId, int]) -> list[JobId] | None:
        return []

    # ---- changes within one look ----

    def upgrade(self, job: Job) -> None:
        for unit in self.held_by(job):
            _set(self.open, unit, 0)
            _set(self.beside, unit, self.beside.get(unit, 0) - 1)

    def take(self, gpus: Mapping[HostId, int], counts: bool) -> None:
        for unit in gpus:
            if counts:
                _set(self.open, unit, 0)
            else:
                self.beside[unit] = self.beside.get(unit, 0) + 1
        self._free_again(gpus)

    def claim(self, job: Job, gpus: Mapping[HostId, int]) -> None:
        self.take(gpus, True)

    def draft(self) -> "SharedDraft":
        return SharedDraft(self)

    def anew(self) -> "SharedCapacity":
        return SharedCapacity(self.queue, self.totals, None, self.sharing, self.hosts)


class SharedDraft(SharedCapacity):
    """A copy for one look, in which GPUs may be given away; no job is put into it."""

    def __init__(self, capacity: SharedCapacity) -> None:
        queue = self.queue = capacity.queue
        self.sharing, self.hosts, self.units = capacity.sharing, capacity.hosts, capacity.units
        self.utilisation, self.refusing, self.alone = capacity.utilisation, capacity.refusing, capacity.alone
        self.totals, self.size, self.placing = capacity.totals, capacity.size, capacity.placing
        self.free, self.open, self.staying = dict(capacity.free), dict(capacity.open), {}
        self.beside, self.opportunistic, self.promises = dict(capacity.beside), [], capacity.promises
        self.claimed = False
        self.keep(queue.keeper, queue.kept)


def unit_of(host: HostId, gpu: str) -> HostId:
    """One GPU of a host whose GPUs are named by number, whichever part of it a job holds."""
    return _unit(host, shared.device_of(gpu))


def host_of(unit: HostId) -> HostId:
    """The host of a GPU."""
    return HostId(unit.rpartition("/")[0])


def gpu_name(number: int, gpus: int) -> str:
    """The name of a GPU by its number, padded so that GPUs of a host sort by their numbers."""
    return f"{number:0{len(str(gpus))}}"


def _unit(host: HostId, name: str) -> HostId:
    return HostId(f"{host}/{name}")


def _units(host: HostId, count: int, gpus: SharedGpus) -> list[HostId]:
    names = gpus.names or tuple(gpu_name(number, count) for number in range(count))
    return [_unit(host, name) for name in names]


def _lasting(gpus: SharedGpus) -> tuple[tuple[str, ...], int | None]:
    return gpus.names, gpus.beside


def _wherever(job: Job) -> bool:
    """Whether the job takes the best GPUs of the rack, on whatever hosts they are."""
    spec = job.spec
    if spec.gpus_per_worker != 1 or spec.pack == "apart":
        return False
    return not job.counts or spec.pack == "any"


def _set(gpus: Gpus, unit: HostId, count: int) -> None:
    if count > 0:
        gpus[unit] = count
    else:
        gpus.pop(unit, None)
