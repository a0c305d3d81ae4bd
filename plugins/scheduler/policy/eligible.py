"""Which hosts a job may use: decided here, once, for the leader, coordinators, the log, spares and the words that
explain a wait.

`bars` is the rule: hosts where no rank of a job may start, and why. The rest applies it. A rule about single jobs
(hosts that a job excludes, say) is written there, and nowhere else.
"""

from collections.abc import Callable, Mapping, Set
from typing import NamedTuple, TypeVar

import msgspec

from covey.core.ids import HostId
from covey.core.units import format_size
from plugins.gossiped import MemoryHere
from plugins.scheduler.messages.spec import JobSpec, Pack
from plugins.scheduler.policy.place import slots

Known = TypeVar("Known")


class Drain(msgspec.Struct, frozen=True):
    """Why no rank starts on a host, and those that are there leave it, or stay."""

    by: str
    stop_jobs: bool
    """Ranks of jobs that can only begin again elsewhere leave the host too."""
    wall_s: float
    """When the drain began, on the wall clock, s."""
    cordon: bool = False
    """What is there stays: the host is cordoned, and not drained."""
    why: str = ""
    """Why, in words; empty: nobody says."""

    @property
    def told(self) -> str:
        return f"is {'cordoned' if self.cordon else 'drained'}, by {self.by}"


class GangShape(NamedTuple):
    """The shape of a gang: what it asks of hosts. Jobs of one shape fit where any of them fits."""

    workers: int
    gpus_per_worker: int
    pack: Pack
    barred: frozenset[HostId] = frozenset()
    """Hosts that this gang may not use for a reason of its own."""
    host_memory: int = 0
    """Memory that it may use on each host, bytes; 0: any."""
    cpus: int = 0
    """Processors of each worker; 0: any."""

    def slots(self, gpus: int) -> int:
        """The number of its workers that a host with `gpus` free GPUs takes."""
        return slots(gpus, self.workers, self.gpus_per_worker, self.pack)

    def missing(self, gpus: int) -> int | None:
        """GPUs that a host with `gpus` free ones lacks for one slot more; None: it never has one more."""
        if self.pack == "host":
            return self.workers * self.gpus_per_worker - gpus if not self.slots(gpus) else None
        if self.pack == "apart" and self.slots(gpus):
            return None
        return self.gpus_per_worker - gpus % self.gpus_per_worker


def shape_of(spec: JobSpec) -> GangShape:
    """The shape of a job: all that decides where it fits."""
    barred = frozenset(bars(spec, {}))
    return GangShape(spec.workers, spec.gpus_per_worker, spec.pack, barred, spec.host_memory, spec.cpus)


def bars(spec: JobSpec | None, drained: Mapping[HostId, Drain]) -> dict[HostId, str]:
    """Hosts that this job may not use, and why, in words; `spec` None: those that no job may use."""
    return {host: f"{host} {drain.told}" for host, drain in drained.items()}


def leaves(host: HostId, drained: Mapping[HostId, Drain]) -> bool:
    """Whether what is on this host is to leave it: it is drained, and not only cordoned."""
    drain = drained.get(host)
    return drain is not None and not drain.cordon


def memory_left(said: MemoryHere | None, promised_bytes: int) -> int:
    """The memory that another job may be promised on a host, bytes. `said`: what the host says of its memory;
    `promised_bytes`: what other jobs there may use. What is not known is never enough, so it counts as none."""
    return 0 if said is None else max(0, min(said.total_bytes - promised_bytes, said.free_bytes))


def lacks_memory(wanted_bytes: int, said: MemoryHere | None, promised_bytes: int) -> str:
    """Why a host cannot take a job that may use so much of its memory, in words that follow the host's name; empty: it
    can. `said`, `promised_bytes`: as for `memory_left`."""
    if wanted_bytes <= memory_left(said, promised_bytes):
        return ""
    if said is None or said.total_bytes <= 0:
        return "does not say how much memory it has"
    if said.total_bytes - promised_bytes < wanted_bytes:
        other = f" and other jobs there may use {format_size(promised_bytes)}" if promised_bytes else ""
        return f"has {format_size(said.total_bytes)} of memory{other}"
    return f"has {format_size(said.free_bytes)} of memory free"


def workers_left(each: int, said: MemoryHere | None, promised: int) -> int:
    """How many workers of `each` processors a host takes. `said`: what the host says that it has; `promised`:
    processors there that other jobs may use. What is not known is never enough."""
    return 0 if said is None else max(0, said.cpus - promised) // each


def lacks_cpus(each: int, said: MemoryHere | None, promised: int) -> str:
    """Why a host takes no worker of `each` processors, in words that follow the host's name; empty: it does. `said`,
    `promised`: as for `workers_left`."""
    if not each or workers_left(each, said, promised):
        return ""
    if said is None or said.cpus <= 0:
        return "does not say how many processors it has"
    return f"has {said.cpus} processors{f', {promised} of them promised to jobs' if promised else ''}"


def capped(
    spec: JobSpec,
    gpus: Mapping[HostId, int],
    most: Mapping[HostId, int] | None,
    host_of: Callable[[HostId], HostId] | None = None,
) -> Mapping[HostId, int]:
    """GPUs by host (or by name), no more on each host than this job's workers have processors for there; a host without
    any is left out. `most`: workers for which each host has processors; None: any number. `host_of`: as for
    `open_to`."""
    if most is None or not spec.gpus_per_worker:
        return gpus
    left = {host: workers * spec.gpus_per_worker for host, workers in most.items()}
    found: dict[HostId, int] = {}
    for unit, count in gpus.items():
        host = unit if host_of is None else host_of(unit)
        if (taken := min(count, left.get(host, 0))) > 0:
            found[unit] = taken
            left[host] -= taken
    return found


def open_to(
    spec: JobSpec | None,
    hosts: Mapping[HostId, Known],
    drained: Mapping[HostId, Drain],
    host_of: Callable[[HostId], HostId] | None = None,
    room: Set[HostId] | None = None,
) -> Mapping[HostId, Known]:
    """The hosts, with what is known of each, that this job may use. `host_of`: set when the keys are GPUs by name; it
    says whose each of them is. `room`: hosts that have room for the job's memory and processors; None: all, or nobody
    asks."""
    barred = bars(spec, drained)
    if not barred and room is None:
        return hosts

    def may_use(host: HostId) -> bool:
        return host not in barred and (room is None or host in room)

    return {unit: known for unit, known in hosts.items() if may_use(unit if host_of is None else host_of(unit))}


def open_gpus(gpus: Mapping[HostId, int], drained: Mapping[HostId, Drain]) -> dict[HostId, int]:
    """GPUs of hosts that may be given to jobs: none of a host that no job may use, though what runs there is known."""
    barred = bars(None, drained)
    return {host: 0 if host in barred else count for host, count in gpus.items()}
