"""The GPUs of the hosts that are alive, by host: free, open to guaranteed jobs, kept for a gang.

    total = free + held by opportunistic jobs + held by jobs that stop + held by guaranteed jobs
            `------------------------- open -------------------------'

GPUs are not shared between jobs here (where they are: `machine/leader/shared_capacity.py`), so an opportunistic job on
an open GPU has to stop before a guaranteed one starts there. The log says how many open GPUs of a host are kept for
one gang, not which ones: opportunistic jobs run on them until the gang is complete. All counts come from the log, which
does not know yet which GPUs the gangs that are being placed will hold.

`Capacity` and `SharedCapacity` stay two classes, since they count two things. Without sharing the log counts GPUs of a
host and does not name them until a gang is placed: there is no GPU by which a gang that is being placed, or one that
keeps GPUs, could be counted, and victims are chosen by host. With sharing the log must name GPUs, since a job that is
upgraded stays on its own GPUs, and no job is stopped. What both have in common (what each job holds, which gang keeps
what, where ranks may start) is in `Capacity` alone; `stops` is the one question that admission asks. Counting by GPU
everywhere would also cost time: to draft a look and plan one gang on 256 hosts of 8 GPUs takes 0.08 ms by host and 1.2
ms by GPU.

A job is put in again whenever it changed, so this map is never drawn anew. Hosts where nothing is free, open or
staying are not in those maps: in a full rack a decision looks at the few where something is.
"""

import bisect
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from covey.core.ids import HostId, JobId
from plugins.scheduler.machine.leader.promises import HostPromises
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.policy import classes
from plugins.scheduler.policy.eligible import capped, open_to
from plugins.scheduler.policy.place import fits, has_room, place

Gpus = dict[HostId, int]
"""GPUs by host."""


class Guest(NamedTuple):
    """An opportunistic job that runs, and the GPUs that it holds."""

    id: JobId
    gpus: Gpus


class HeldGpus(NamedTuple):
    """What one job holds, as far as it is counted."""

    gpus: Gpus
    guaranteed: bool
    """Whether the job is guaranteed and does not stop: then the GPUs are not open."""
    age: int | None
    """The place among the guests of an opportunistic job that nobody told to stop."""
    placing: int
    """GPUs of a gang that is being placed."""
    alone: bool = False
    """Whether no guaranteed job starts on these GPUs before the job has ended, where GPUs are shared."""


class Capacity:
    """The GPUs of the rack by host. `totals`: GPUs of each host that is alive. `jobs`: those that are not over, if they
    are known already."""

    stops = True
    """Whether opportunistic jobs have to stop where a guaranteed one starts."""

    def __init__(self, queue: JobTable, totals: Mapping[HostId, int], jobs: Iterable[Job] | None = None) -> None:
        self.queue = queue
        self.totals = dict(sorted(totals.items()))
        self.size = sum(self.totals.values())
        self.free: Gpus = {host: gpus for host, gpus in self.totals.items() if gpus > 0}
        """GPUs that no job holds."""
        self.open: Gpus = dict(self.free)
        """GPUs that no guaranteed job holds, or one that stops: its GPUs are about to be free."""
        self.staying: Gpus = {}
        """GPUs held by opportunistic jobs that nobody told to stop."""
        self.opportunistic: list[Guest] = []
        """Opportunistic jobs that run and that nobody told to stop, newest first."""
        self.keeper = queue.keeper
        self.kept = dict(queue.kept)
        self.withheld = self.kept
        """GPUs that are kept and not claimed, as far as they are in `open`."""
        self.claimed = False
        """Whether gangs count on GPUs that are about to be free: what is free may be spoken for."""
        self.placing = 0
        """GPUs of gangs that are being placed, on whatever hosts."""
        self._ages: list[int] = []
        """The negative job numbers of `opportunistic`, so that they ascend."""
        self._held: Gpus = {}
        self._guaranteed: Gpus = {}
        self._holdings: dict[JobId, HeldGpus] = {}
        self.promises = HostPromises()
        """What jobs may use of each host's memory and processors."""
        for job in queue.live() if jobs is None else jobs:
            self.put(job)

    def put(self, job: Job) -> None:
        """Count the job as it is now."""
        self.promises.put(job)
        gpus = self.held_by(job)
        is_guest = self.stops and gpus and not job.counts and job.state == "running"
        holding = HeldGpus(
            gpus,
            guaranteed=job.counts and job.state != "stopping",
            age=-job.number if is_guest else None,
            placing=job.spec.gpus if job.state == "placing" else 0,
            alone=not self.stops and self.holds_alone(job),
        )
        if self._holdings.get(job.id) == holding:
            return
        self._release(job.id)
        if not gpus and not holding.placing:
            return
        self._holdings[job.id] = holding
        self.placing += holding.placing
        if holding.age is not None:
            at = bisect.bisect_left(self._ages, holding.age)
            self._ages.insert(at, holding.age)
            self.opportunistic.insert(at, Guest(job.id, gpus))
        self._count(holding, 1)

    def drop(self, id: JobId) -> None:
        """Count the job no longer: it holds nothing."""
        self.promises.drop(id)
        self._release(id)

    def _release(self, id: JobId) -> None:
        """Count the job's GPUs no longer."""
        if id not in self._holdings:
            return
        holding = self._holdings.pop(id)
        self.placing -= holding.placing
        if holding.age is not None:
            at = bisect.bisect_left(self._ages, holding.age)
            del self._ages[at], self.opportunistic[at]
        self._count(holding, -1)

    def _count(self, holding: HeldGpus, sign: int) -> None:
        for host, gpus in holding.gpus.items():
            self._held[host] = self._held.get(host, 0) + sign * gpus
            _set(self.free, host, self.totals[host] - self._held[host])
            if holding.guaranteed:
                self._guaranteed[host] = self._guaranteed.get(host, 0) + sign * gpus
                _set(self.open, host, self.totals[host] - self._guaranteed[host])
            elif holding.age is not None:
                _set(self.staying, host, self.staying.get(host, 0) + sign * gpus)

    def takers(self, job: Job) -> Set[HostId]:
        """Hosts where ranks of this job may start, with GPUs or without."""
        return open_to(job.spec, self.totals, self.queue.drained, None, self.promises.room_for(job)).keys()

    def usable(self, job: Job, gpus: Mapping[HostId, int]) -> Mapping[HostId, int]:
        """The GPUs among these that are on hosts which this job may use."""
        found = open_to(job.spec, gpus, self.queue.drained, None, self.promises.room_for(job))
        return capped(job.spec, found, self.promises.workers_for(job))

    @property
    def vacant(self) -> int:
        """GPUs that no job holds, also when every gang that is being placed has found its own."""
        return max(0, sum(self.free.values()) - self.placing)

    @property
    def kept_whole(self) -> bool:
        """Whether the gang that keeps GPUs has as many as it asks for: it is about to start on them."""
        gang = self.queue.jobs.get(self.keeper) if self.keeper is not None else None
        return gang is not None and sum(self.kept.values()) == gang.spec.gpus

    def free_for(self, job: Job) -> Mapping[HostId, int]:
        """GPUs that this job may start on now."""
        return self.usable(job, self._free_for(job))

    def _free_for(self, job: Job) -> Gpus:
        mine = classes.may_keep(job.id, self.keeper) or (not job.counts and not self.kept_whole)
        if mine and not self.claimed:
            return self.free
        staying = self.staying if self.kept_whole or self.claimed else {}
        withheld = {} if mine else self.withheld
        found: Gpus = {}
        for host, free in self.free.items():
            left = self.open.get(host, 0) - staying.get(host, 0) - withheld.get(host, 0)
            if left > 0:
                found[host] = min(free, left)
        return found

    def open_for(self, job: Job) -> Mapping[HostId, int]:
        """GPUs that a guaranteed job may wait for: opportunistic ones would stop for it."""
        return self.usable(job, self._open_for(job))

    def _open_for(self, job: Job) -> Gpus:
        if classes.may_keep(job.id, self.keeper):
            return self.open
        return {host: max(0, gpus - self.withheld.get(host, 0)) for host, gpus in self.open.items()}

    def held_by(self, job: Job) -> Gpus:
        """GPUs that a gang holds."""
        return held_by(job, self.totals)

    def holds_alone(self, job: Job) -> bool:
        """Whether no other job may hold this job's GPUs."""
        return True

    def has_hosts(self, job: Job) -> bool:
        """Whether there are hosts enough for a job without GPUs; True for one with GPUs, which needs these."""
        spec, most = job.spec, self.promises.workers_for(job)
        if spec.gpus_per_worker:
            return True
        if most is not None:
            takers = self.takers(job)
            return has_room({host: count for host, count in most.items() if host in takers}, spec.workers, spec.pack)
        least = spec.workers if spec.pack == "apart" else int(spec.host_memory > 0)
        return not least or len(self.takers(job)) >= least

    def fits(self, job: Job, free: Mapping[HostId, int]) -> bool:
        """Whether the whole gang fits into these free GPUs."""
        return self.has_hosts(job) and fits_whole(job, self.usable(job, free))

    def plan(self, job: Job, free: Mapping[HostId, int], skew: float | None, packlimit: float) -> Gpus:
        """GPUs where the job's coordinator would put it; empty when it does not fit whole, or asks for none."""
        spec = job.spec
        if not spec.gpus_per_worker:
            return {}
        workers = place(self.usable(job, free), spec.workers, spec.gpus_per_worker, skew, packlimit, spec.pack) or {}
        return {host: count * spec.gpus_per_worker for host, count in workers.items()}

    def to_keep(self, job: Job, there: Mapping[HostId, int]) -> Gpus:
        """GPUs among these that a gang keeps while it does not fit."""
        spec = job.spec
        mine = self.kept if self.keeper == job.id else {}
        there = self.usable(job, there)
        return classes.gpus_to_keep(mine, there, self.totals, spec.workers, spec.gpus_per_worker, spec.pack)

    def victims(self, job: Job, coming: Mapping[HostId, int], most: Mapping[HostId, int]) -> list[JobId] | None:
        """Opportunistic jobs that have to stop so that this gang fits; None when that would not help."""
        spec, most = job.spec, self.usable(job, most)
        return classes.victims(coming, self.opportunistic, most, spec.workers, spec.gpus_per_worker, spec.pack)

    def closed(self, job: Job) -> bool:
        """Whether a running job holds a GPU that is kept for a gang: upgraded, it would take that GPU from the gang."""
        held = self.held_by(job)
        return any(self.open.get(host, 0) - gpus < self.withheld.get(host, 0) for host, gpus in held.items())

    # ---- changes within one look ----

    def upgrade(self, job: Job) -> None:
        """Count an opportunistic job that runs as guaranteed from now on."""
        for host, gpus in self.held_by(job).items():
            self.open[host] = self.open.get(host, 0) - gpus
            self.staying[host] = self.staying.get(host, 0) - gpus

    def take(self, gpus: Mapping[HostId, int], counts: bool) -> None:
        """Take these GPUs for a job from now on."""
        for host, count in gpus.items():
            _set(self.free, host, self.free.get(host, 0) - count)
            if counts:
                _set(self.open, host, self.open.get(host, 0) - count)

    def keep(self, job: JobId | None, gpus: Mapping[HostId, int]) -> None:
        """Keep these GPUs for a gang from now on, and none for any other."""
        self.keeper, self.kept = job, dict(gpus)
        self.withheld = self.kept

    def claim(self, job: Job, gpus: Mapping[HostId, int]) -> None:
        """Let a guaranteed gang start on these GPUs once they are free; if it keeps them already, it does so now for
        good."""
        self.claimed = True
        self.withheld = {} if self.keeper == job.id else self.withheld
        for host, count in gpus.items():
            _set(self.open, host, self.open.get(host, 0) - count)

    def stop_opportunistic(self, guests: Sequence[Guest]) -> Gpus:
        """Count these jobs as told to stop, and return the GPUs that they hold."""
        coming: Gpus = {}
        for guest in guests:
            add(coming, guest.gpus)
            for host, gpus in guest.gpus.items():
                self.staying[host] = self.staying.get(host, 0) - gpus
        told = {guest.id for guest in guests}
        self.opportunistic = [guest for guest in self.opportunistic if guest.id not in told]
        return coming

    def draft(self) -> "Capacity":
        """A copy from which one look may give GPUs away."""
        return CapacityPlan(self)

    def anew(self) -> "Capacity":
        """A capacity drawn anew from the queue, with the same totals."""
        return Capacity(self.queue, self.totals)

    def check(self) -> None:
        """Raise AssertionError unless this is what it would be if it were drawn anew."""
        anew = self.anew()
        for name in ("free", "open", "staying", "opportunistic", "placing"):
            assert getattr(self, name) == getattr(anew, name), f"{name}: {getattr(self, name)}, {getattr(anew, name)}"


class CapacityPlan(Capacity):
    """A copy for one look, in which GPUs may be given away; no job is put into it."""

    def __init__(self, capacity: Capacity) -> None:
        queue = self.queue = capacity.queue
        self.totals, self.size, self.placing = capacity.totals, capacity.size, capacity.placing
        self.free, self.open, self.staying = dict(capacity.free), dict(capacity.open), dict(capacity.staying)
        self.opportunistic, self.promises = capacity.opportunistic, capacity.promises
        self.claimed = False
        self.keep(queue.keeper, queue.kept)


def _set(gpus: Gpus, host: HostId, count: int) -> None:
    if count > 0:
        gpus[host] = count
    else:
        gpus.pop(host, None)


def add(gpus: Gpus, more: Mapping[HostId, int]) -> None:
    """Add these counts to `gpus`, host by host."""
    for host, count in more.items():
        gpus[host] = gpus.get(host, 0) + count


def held_by(job: Job, hosts: Mapping[HostId, int]) -> Gpus:
    """GPUs of these hosts that a gang holds, or is about to move to, by host."""
    held = {place.host: len(place.gpus) for place in job.awaited if hosts.get(place.host) and place.gpus}
    return (
        {**held, **{host: gpus for host, gpus in job.arriving.items() if hosts.get(host)}}
        if job.healing.moving
        else held
    )


def fits_whole(job: Job, free: Mapping[HostId, int]) -> bool:
    """Whether the whole gang fits into these free GPUs; one without GPUs always does."""
    spec = job.spec
    return not spec.gpus_per_worker or fits(free, spec.workers, spec.gpus_per_worker, spec.pack)
