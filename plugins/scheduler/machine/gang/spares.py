"""Spares of jobs on other hosts: which host is asked to keep some, and how long ranks that move wait for theirs.

    first host of a job --SparesWanted, again and again--> the host that would take ranks over --SparesWarm--> its hosts
    host that ranks leave --SparesWanted--> the host where they run on --SparesWarm--> it: now its ranks end

The log knows nothing of spares: a host that was not asked again forgets what it kept, and a spare that is not there
costs its rank the time that it takes to start.
"""

from collections.abc import Mapping, Sequence

import msgspec

from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.wire import SparesWarm
from plugins.scheduler.policy.place import stand_in

ASK_S = 5.0
"""Seconds between two requests for the same spares."""
KEEP_S = 15.0
"""Seconds after the last request at which the spares go."""
MOVE_WAITS_S = 15.0
"""The most seconds for which ranks that move keep running where they are until what takes their place has started."""

Key = tuple[JobId, int]


class AskedSpares(msgspec.Struct):
    """Spares that another host asked this one to keep."""

    by: HostId
    count: int
    modules: tuple[str, ...]
    until_s: float


class SparesOfOthers:
    """Spares that hosts keep for one another; `host` is this one."""

    def __init__(self, host: HostId) -> None:
        self.host = host
        self.asked: dict[Key, AskedSpares] = {}
        """Requests for spares on this host."""
        self.warm: dict[Key, dict[HostId, SparesWarm]] = {}
        """What other hosts said of the spares that they keep."""
        self.chosen: dict[JobId, HostId] = {}
        """The hosts that this one chose: job -> the host that keeps spares of it, and has no rank of it."""
        self._told_s: dict[tuple[JobId, HostId], float] = {}
        self._leaves_s: dict[tuple[JobId, int], float] = {}
        """The times since when ranks of a job, whose `Place.since` is the number, are to leave this host."""

    # ---- who is asked ----

    def chooses(self, job: Job) -> bool:
        """Whether this host asks another one for spares: the first host with ranks of the job does, which would also
        look for a stand-in."""
        left = [place.host for place in job.start.places if place.host not in job.healing.missing]
        return job.state == "running" and bool(job.spec.spares) and left[:1] == [self.host]

    def choose(self, job: Job, free: Mapping[HostId, int]) -> HostId | None:
        """The host that would take over the job's widest place; the previous choice, as long as it has room. `free`:
        GPUs that the job may have, or ranks of a job without GPUs, of each host that takes jobs."""
        each, width = job.spec.gpus_per_worker, max((len(place.ranks) for place in job.start.places), default=0)
        taken = {place.host for place in (*job.start.places, *job.healing.leaving)}
        room = {host: count // each if each else -count for host, count in free.items() if host not in taken}
        need, before = width if each else 0, self.chosen.get(job.id)
        found = stand_in(room, [(need, before)]) if before in room else None
        found = found or stand_in(room, [(need, None)])
        if found is None:
            self.chosen.pop(job.id, None)
            return None
        self.chosen[job.id] = found[0]
        return found[0]

    def is_due(self, job: JobId, host: HostId, now_s: float, every_s: float = ASK_S) -> bool:
        """Whether that host is to be asked (again) now."""
        if now_s - self._told_s.get((job, host), -every_s) < every_s:
            return False
        self._told_s[job, host] = now_s
        return True

    def kept_by(self, job: Job) -> HostId | None:
        """Another host where processes wait for the job."""
        taken = {place.host for place in (*job.start.places, *job.healing.leaving)}
        heard = self.warm.get((job.id, job.grant.epoch), {})
        return next((host for host, said in sorted(heard.items()) if said.warm and host not in taken), None)

    def heard(self, sender: HostId, said: SparesWarm) -> None:
        self.warm.setdefault((said.job, said.epoch), {})[sender] = said

    # ---- ranks that leave this host ----

    def may_leave(self, job: Job, place: Place, modules: Sequence[str], now_s: float) -> bool:
        """Whether ranks that are to continue elsewhere may end here now: what takes their place has started, will not,
        or takes too long; or the gang waits anyway."""
        since_s = self._leaves_s.setdefault((job.id, place.since), now_s)
        to = destination(job, place)
        if not modules or job.healing.missing or to is None or now_s - since_s > MOVE_WAITS_S:
            return True
        said = self.warm.get((job.id, job.grant.epoch), {}).get(to)
        return said is not None and (said.warm >= len(place.ranks) or bool(said.why))

    # ---- what is kept here ----

    def keep(self, sender: HostId, key: Key, count: int, modules: tuple[str, ...], now_s: float) -> None:
        self.asked[key] = AskedSpares(sender, count, modules, now_s + KEEP_S)

    def over(self, jobs: Mapping[JobId, Job], now_s: float) -> list[Key]:
        """Spares here that are not wanted any more; what is known of jobs that are over is forgotten."""
        gone = [key for key, asked in self.asked.items() if asked.until_s < now_s or not _runs(jobs, *key)]
        for key in gone:
            del self.asked[key]
        self.warm = {key: heard for key, heard in self.warm.items() if _runs(jobs, *key)}
        self.chosen = {id: host for id, host in self.chosen.items() if id in jobs}
        self._told_s = {key: at_s for key, at_s in self._told_s.items() if key[0] in jobs}
        self._leaves_s = {key: at_s for key, at_s in self._leaves_s.items() if key[0] in jobs}
        return gone


def destination(job: Job, place: Place) -> HostId | None:
    """The host where ranks that leave this place continue."""
    return next((other.host for other in job.start.places if set(place.ranks) <= set(other.ranks)), None)


def _runs(jobs: Mapping[JobId, Job], id: JobId, epoch: int) -> bool:
    job = jobs.get(id)
    return job is not None and job.grant.epoch == epoch and job.state == "running"
