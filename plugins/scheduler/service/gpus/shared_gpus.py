"""GPUs that are shared: what a host gossips of its own, and what a coordinator and its leader make of it.

    GpusMeasured (once a second) --> GpuGossip: key `gpus_shared`, at most 256 bytes --> SharedGpus of each host

A host takes jobs beside others only while its sharing measures: otherwise it says 0. Nothing is gossiped in a rack
where every host says 0 in agent.toml.
"""

from collections.abc import Mapping, Sequence

from covey.core.ids import HostId
from plugins.base import Host
from plugins.facts import GpusMeasured, GpuUse, HostView
from plugins.gossiped import GpusNow, GpusShared
from plugins.scheduler.machine.leader.capacity import Capacity, Gpus
from plugins.scheduler.machine.leader.shared_capacity import SharedCapacity, SharedGpus, host_of
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.policy.shared import short_name

KEY = "gpus_shared"
GPUS_MAX = 36
"""The number of GPUs of one host that fit into 256 bytes; a host with more shares none."""
MEASURED_S = 5.0
"""Seconds without a word of its sharing after which a host takes no more jobs beside others."""
DIFFERS_S = 10.0
"""Seconds for which hosts must differ before that is said: a host that has just begun has not gossiped yet."""
STEP = 5
"""The step of gossiped utilisation in percent, so that not every second brings news."""
REFUSES = 127


class GpuGossip:
    """What this host gossips of its GPUs, and which other hosts differ from it."""

    def __init__(self, host: Host, settings: SchedulerSettings) -> None:
        self.host, self.settings = host, settings
        self.measured: tuple[GpuUse, ...] = ()
        self.measured_s: float | None = None
        self.differs: tuple[str, ...] = ()
        """The hosts that do not share as this one does, in words."""
        self._said: GpusShared | None = None
        self._seen: tuple[tuple[str, ...], float] = ((), 0.0)
        """What differed at the last look, and since when."""

    def heard(self, fact: GpusMeasured) -> None:
        self.measured, self.measured_s = fact.gpus, self.host.env.clock.now_s()

    @property
    def measures(self) -> bool:
        """Whether this host's sharing measured within the last `MEASURED_S` seconds."""
        return self.measured_s is not None and self.host.env.clock.now_s() - self.measured_s <= MEASURED_S

    def publish(self, gpus: Sequence[str]) -> None:
        """Gossip how the GPUs are used. `gpus`: UUIDs, by number."""
        others = {view.host: _said_by(view) for view in self.host.hosts() if view.host != self.host.id}
        shared = self.settings.beside > 0 or any(said is not None and said.setting > 0 for said in others.values())
        if not shared and self._said is None:
            return
        said = self._now(gpus)
        if said != self._said:
            self._said = said
            self.host.spread(KEY, said)
        self._compare(others)

    def _now(self, gpus: Sequence[str]) -> GpusShared:
        names = tuple(int(short_name(gpu), 16) for gpu in gpus[:GPUS_MAX])
        uses = {use.uuid: use for use in self.measured}
        alike = len(set(names)) < len(gpus)  # also when there are too many to be named
        takes = self.settings.beside if self.measures and not alike else 0
        return GpusShared(self.settings.beside, takes, () if alike else names, tuple(map(_use, map(uses.get, gpus))))

    def _compare(self, others: Mapping[HostId, GpusShared | None]) -> None:
        has_gpus = {view.host: _has_gpus(view) for view in self.host.hosts() if view.state == "alive"}
        found = [
            f"{host} {'does not say' if said is None else f'has {said.setting}'}"
            for host, said in sorted(others.items())
            if has_gpus.get(host) and (said is None or said.setting != self.settings.beside)
        ]
        differs, now_s = tuple(found), self.host.env.clock.now_s()
        if differs != self._seen[0]:
            self._seen = (differs, now_s)
        if differs and now_s - self._seen[1] < DIFFERS_S:
            return
        if differs != self.differs and differs:
            why = f"[scheduler] beside is {self.settings.beside} here; {', '.join(differs[:8])}"
            next_step = "the leader's value counts, and a host with 0 shares no GPUs: set the same value on all hosts"
            self.host.env.log.warning("hosts share GPUs differently", why=why, next=next_step)
            self.host.note(f"host/{self.host.id}", "hosts share GPUs differently", f"{why}; {next_step}")
        self.differs = differs


def _said_by(view: HostView) -> GpusShared | None:
    said = view.value(KEY, GpusShared)
    return said if isinstance(said, GpusShared) else None


def _has_gpus(view: HostView) -> bool:
    gpus = view.value("gpus", GpusNow)
    return isinstance(gpus, GpusNow) and gpus.total > 0


def _use(use: GpuUse | None) -> int:
    """What is gossiped of a GPU. One whose use is not known counts as busy once a job is there: no other is placed
    beside it."""
    if use is None:
        return 0
    if use.refusal:
        return REFUSES
    if use.utilization is None:
        return 100 if use.jobs else 0
    return min(100, max(0, round(100 * use.utilization / STEP) * STEP))


def heard(view: HostView) -> SharedGpus | None:
    """What another host says of its GPUs; None: it says nothing."""
    said = _said_by(view)
    if said is None:
        return None
    names = tuple(f"{name:08x}" for name in said.names)
    busy = tuple(min(100, use) / 100 if use != REFUSES else 0.0 for use in said.use)
    refusing = tuple(name for name, use in zip(names, said.use, strict=False) if use == REFUSES)
    return SharedGpus(names=names, utilisation=busy, refusing=refusing, beside=said.takes)


def where(
    capacity: SharedCapacity, job: Job, skew: float | None, packlimit: float, said: Mapping[HostId, int]
) -> dict[HostId, int]:
    """GPUs of each host that a gang is to have, or, when it does not fit whole, may have. `said`: GPUs that hosts which
    refused a moment ago really have."""
    free: Gpus = {}
    taken: dict[HostId, int] = {}
    for unit in sorted(capacity.free_for(job), key=lambda unit: (capacity.utilisation.get(unit, 0.0), unit)):
        host = host_of(unit)
        taken[host] = taken.get(host, 0) + 1
        if taken[host] <= said.get(host, taken[host]):
            free[unit] = 1
    return capacity.by_host(capacity.plan(job, free, skew, packlimit) or free)


def left_where_kept(capacity: Capacity, job: Job, kept: Mapping[HostId, int]) -> dict[HostId, int]:
    """GPUs that a gang may still start on, of each host where some are kept for another one."""
    free = capacity.free_for(job)
    if not isinstance(capacity, SharedCapacity):
        return {host: free.get(host, 0) for host in kept}
    if not job.counts:
        return {}
    left = capacity.by_host(free)
    return {host: left.get(host, 0) for host in capacity.by_host(kept)}
