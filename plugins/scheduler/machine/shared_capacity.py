"""The GPUs of hosts that share them: one guaranteed job on each, and opportunistic ones beside it (AntMan §3.3).

    guaranteed    0 or 1          open: 0
    beside it     0 .. beside     free: fewer, and the GPU is not busy

It answers what `Capacity` answers, by GPU instead of by host (`host/gpu`), because here it matters which GPU it is: a
job that is upgraded stays where it is, and a reservation names its GPUs. No job stops for another: guaranteed
and opportunistic jobs take from different maps.

Hosts of a rack share no GPU yet (`plugins/sharing` has no service), so agents construct a `Leader` without `Sharing`.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from covey.core import HostId, JobId
from plugins.scheduler.machine.capacity import Capacity, Gpus, HeldGpus
from plugins.scheduler.machine.jobs import Job
from plugins.scheduler.machine.queue import Queue
from plugins.scheduler.policy import classes, shared

GUEST = "+"
"""`3+1` is the part of GPU 3 that an opportunistic job holds: the log gives one name to one job."""


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """How GPUs are shared."""

    beside: int = 1
    """Opportunistic jobs on one GPU at most."""
    busy: float = shared.BUSY
    """Utilisation from which on a GPU takes no more of them."""

    def __post_init__(self) -> None:
        if self.beside < 0:
            raise ValueError("beside must be 0 or more opportunistic jobs")


class SharedCapacity(Capacity):
    """`utilisation`: of each host's GPUs over the last 10 s, 0..1, in the order of their numbers."""

    stops = False

    def __init__(
        self,
        queue: Queue,
        totals: Mapping[HostId, int],
        jobs: Iterable[Job] | None,
        sharing: Sharing,
        utilisation: Mapping[HostId, tuple[float, ...]],
    ) -> None:
        self.sharing = sharing
        self.units = [unit for host, gpus in sorted(totals.items()) for unit in _units(host, gpus)]
        self.utilisation = _by_unit(utilisation)
        self.beside: dict[HostId, int] = {}
        """Opportunistic jobs on each GPU."""
        super().__init__(queue, totals, jobs)
        self.open = {unit: 1 for unit in self.units if not self._guaranteed.get(unit)}
        self.free = {}
        self._free_again(self.units)

    def heard(self, utilisation: Mapping[HostId, tuple[float, ...]]) -> None:
        """How busy GPUs are now."""
        self.utilisation = _by_unit(utilisation)
        self._free_again(self.units)

    def _free_again(self, units: Iterable[HostId]) -> None:
        for unit in units:
            busy, count = self.utilisation.get(unit, 0.0), self.beside.get(unit, 0)
            has_room = shared.has_room_beside(busy, count, self.sharing.beside, self.sharing.busy)
            _set(self.free, unit, int(has_room))

    def held_by(self, job: Job) -> Gpus:
        return {unit_of(place.host, gpu): 1 for place in job.awaited if place.host in self.totals for gpu in place.gpus}

    def _count(self, holding: HeldGpus, sign: int) -> None:
        holders = self._guaranteed if holding.guaranteed else self.beside
        for unit in holding.gpus:
            _set(holders, unit, holders.get(unit, 0) + sign)
            if holding.guaranteed:
                _set(self.open, unit, 1 - holders.get(unit, 0))
        self._free_again(holding.gpus)

    # ---- questions ----

    def free_for(self, job: Job) -> Gpus:
        return self.open_for(job) if job.counts else self.free

    def open_for(self, job: Job) -> Gpus:
        if classes.may_keep(job.id, self.keeper):
            return self.open
        return {unit: 1 for unit in self.open if unit not in self.kept}

    def closed(self, job: Job) -> bool:
        return any(unit not in self.open or unit in self.kept for unit in self.held_by(job))

    def fits(self, job: Job, free: Mapping[HostId, int]) -> bool:
        return not job.spec.gpus or bool(self.plan(job, free, None, 1.0))

    def plan(self, job: Job, free: Mapping[HostId, int], skew: float | None, packlimit: float) -> Gpus:
        if not job.counts:
            chosen = shared.least_busy(list(free), job.spec.gpus, self.utilisation, self.beside)
        else:
            chosen = shared.least_shared(list(free), job.spec.gpus, self.beside, _host_if_one(job))
        return dict.fromkeys(chosen, 1)

    def to_keep(self, job: Job, there: Mapping[HostId, int]) -> Gpus:
        mine = list(self.kept) if self.keeper == job.id else []
        return dict.fromkeys(shared.which_to_keep(mine, list(there), job.spec.gpus, self.beside, _host_if_one(job)), 1)

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
        utilisation = {host: tuple(self.utilisation.get(unit, 0.0) for unit in _units(host, gpus))
                       for host, gpus in self.totals.items()}  # fmt: skip
        return SharedCapacity(self.queue, self.totals, None, self.sharing, utilisation)


class SharedDraft(SharedCapacity):
    """A copy for one look, in which GPUs may be given away; no job is put into it."""

    def __init__(self, capacity: SharedCapacity) -> None:
        queue = self.queue = capacity.queue
        self.sharing, self.units, self.utilisation = capacity.sharing, capacity.units, capacity.utilisation
        self.totals, self.size, self.placing = capacity.totals, capacity.size, capacity.placing
        self.free, self.open, self.staying = dict(capacity.free), dict(capacity.open), {}
        self.beside, self.opportunistic = dict(capacity.beside), []
        self.claimed = False
        self.keep(queue.keeper, queue.kept)


def unit_of(host: HostId, gpu: str) -> HostId:
    """One GPU of a host as capacity and reservations name it, whichever part of it a job holds."""
    return HostId(f"{host}/{gpu.partition(GUEST)[0]}")


def host_of(unit: HostId) -> HostId:
    return HostId(unit.rpartition("/")[0])


def gpu_name(number: int, gpus: int) -> str:
    """GPUs of a host sort by their numbers."""
    return f"{number:0{len(str(gpus))}}"


def _units(host: HostId, gpus: int) -> list[HostId]:
    return [unit_of(host, gpu_name(number, gpus)) for number in range(gpus)]


def _by_unit(utilisation: Mapping[HostId, tuple[float, ...]]) -> dict[HostId, float]:
    found: dict[HostId, float] = {}
    for host, shares in utilisation.items():
        found.update(zip(_units(host, len(shares)), shares, strict=True))
    return found


def _host_if_one(job: Job) -> Callable[[HostId], HostId] | None:
    """How to tell hosts apart, when a gang wants one for all its GPUs; workers of several GPUs want it too."""
    return host_of if job.spec.pack == "host" or job.spec.gpus_per_worker > 1 else None


def _set(gpus: Gpus, unit: HostId, count: int) -> None:
    if count > 0:
        gpus[unit] = count
    else:
        gpus.pop(unit, None)
