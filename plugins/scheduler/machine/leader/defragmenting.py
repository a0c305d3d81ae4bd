"""Moves that the leader asks for so that a gang which waits fits, or fits on one host: for one gang at a time, and what
is under way of it.

lacks GPUs, or would be spread --departures, and they pay--> MoveAsked to each; the gang keeps what is free where it is
   ^                                          |              to run
   '-- none, or `LASTS_S` passed: as without -+-- all through: it starts

For a gang that could start anyway others move only in a rack where nothing else changes, and seldom: what is gained
then is not certain, and what moves is slower for a moment. A gang that runs on several hosts and would fit on one moves
there under these conditions too, place after place.
"""

from collections.abc import Container, Iterable, Mapping, Sequence

import msgspec

from covey.core.ids import HostId, JobId
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.machine.log.replacing import leaves_to, move_asked
from plugins.scheduler.messages.commands import MoveAsked
from plugins.scheduler.policy import eligible
from plugins.scheduler.policy.defragment import (
    Apart,
    Departure,
    Movable,
    departures,
    gains,
    merging,
    merging_gains,
    pays,
    together,
)
from plugins.scheduler.policy.explain import gpus as in_words
from plugins.scheduler.policy.shared import is_part

HEARD_S = 1.0
"""Seconds within which the log has what was asked for."""
LASTS_S = 15.0
"""Seconds for which a gang waits for moves before it is treated as if there were none."""
AGAIN_S = 60.0
"""Seconds between two times that others move for one gang, and that one gang moves for others."""
SETTLES_S = 2.0
"""Seconds for which a gang that could have started without moves waits after them: until coordinators have heard by
gossip that all its GPUs are free on one host, they would spread it."""
TOGETHER_AGAIN_S = 300.0
"""Seconds between two times that others move for a gang that could have started without moves."""

Gpus = Mapping[HostId, int]


class Clearing(msgspec.Struct):
    """The moves that are under way for one gang."""

    gang: JobId
    keeps: dict[HostId, int]
    """GPUs where the gang is to run."""
    movers: tuple[JobId, ...]
    since_s: float
    spread: bool
    """Whether the gang could have started without moves."""
    through_s: float | None = None
    """The time since when no gang moves any more; None: some do."""


class Defragmenting:
    def __init__(self, queue: JobTable) -> None:
        self.queue = queue
        self.now_s, self.quiet = 0.0, False
        self.waiting_since: Mapping[JobId, float] = {}
        self.clearing: Clearing | None = None
        self.rests_until_s: dict[JobId, float] = {}
        """Gangs that waited for moves, or moved, a while ago, and until when they rest."""

    def begin(self, now_s: float, waiting_since: Mapping[JobId, float], quiet: bool) -> None:
        """Begin a look of the leader. `waiting_since`: since when jobs wait, seconds. `quiet`: no host is drained,
        suspected, away, or gone since a short while."""
        self.now_s, self.waiting_since, self.quiet = now_s, waiting_since, quiet
        self.rests_until_s = {id: until_s for id, until_s in self.rests_until_s.items() if until_s > now_s}
        if self.clearing is not None and not self._goes_on(self.clearing):
            self.clearing = None

    def _goes_on(self, clearing: Clearing) -> bool:
        gang, since_s = self.queue.jobs.get(clearing.gang), self.now_s - clearing.since_s
        movers = [self.queue.jobs[id] for id in clearing.movers if id in self.queue.jobs]
        moving = since_s < HEARD_S or any(job.seeks or job.healing.leaving for job in movers)
        if not moving and clearing.through_s is None:
            clearing.through_s = self.now_s
        settles = clearing.spread and clearing.through_s is not None and self.now_s - clearing.through_s < SETTLES_S
        return gang is not None and gang.state == "queued" and (moving or settles) and since_s < LASTS_S

    def kept_by(self, job: Job) -> Gpus | None:
        """The GPUs that a job keeps while others move for it; None: none do."""
        return self.clearing.keeps if self.clearing is not None and self.clearing.gang == job.id else None

    def steps(self, job: Job, free: Gpus, hosts: Iterable[HostId], others: Iterable[Job]) -> list[Departure]:
        """Moves that would make room for the job, and pay. `free`: GPUs that it may start on; `hosts`: where ranks may
        start; `others`: jobs that run."""
        spec = job.spec
        if self.clearing is not None or job.id in self.rests_until_s or job.tally.place_failures:
            return []
        takers = {host: free.get(host, 0) for host in hosts}
        movable = [place for other in others for place in self._movable(other, takers)]
        found = departures(eligible.shape_of(spec), takers, movable) if movable else None
        waited_s = self.now_s - self.waiting_since.get(job.id, self.now_s)
        return found if found and pays(spec.gpus, waited_s, found) else []

    def steps_together(
        self, job: Job, loss: float, free: Gpus, hosts: Iterable[HostId], others: Sequence[Job]
    ) -> list[Departure]:
        """Moves after which a gang that has room on several hosts fits on one, if that gains more than it costs.
        `loss`: the part of a step that it loses when it is spread; the rest as in `steps`."""
        if self.clearing is not None or not self.quiet or job.id in self.rests_until_s or job.tally.place_failures:
            return []
        if any(other.seeks or other.healing.leaving for other in others):
            return []
        takers = {host: free.get(host, 0) for host in hosts}
        movable = [place for other in others for place in self._movable(other, takers)]
        found = together(job.spec.workers, job.spec.gpus_per_worker, takers, movable) if movable else None
        ran_s = job.ran_s(self.queue.rack_s)
        return found if found and gains(job.spec.gpus, ran_s, loss, found) else []

    def merge(self, job: Job, loss: float, free: Gpus, hosts: Container[HostId], wall_s: float) -> MoveAsked | None:
        """The next move after which a running gang lies on one of its hosts, if these moves gain more than they cost;
        None: there is none. `loss`: the part of a step that it loses since it is spread; the rest as in `steps`."""
        spec, places = job.spec, job.start.places
        if (
            self.clearing is not None
            or not self.quiet
            or job.seeks
            or job.healing.leaving
            or job.id in self.rests_until_s
        ):
            return None
        gang = Apart(tuple((place.host, len(place.gpus)) for place in places))
        if spec.pack not in ("few", "host") or not all(gpus for _, gpus in gang.places):
            return None
        if any(is_part(gpu) for place in places for gpu in place.gpus):
            return None
        found = merging(gang, {host: gpus for host, gpus in free.items() if host in hosts})
        if not found or not merging_gains(gang, job.ran_s(self.queue.rack_s), loss, len(found)):
            return None
        leaves, to = found[0]
        coordinator = leaves_to(job, leaves, hosts)
        if coordinator is None:
            return None
        self.rests_until_s[job.id] = self.now_s + (LASTS_S if len(found) > 1 else AGAIN_S)
        by = f"the leader, so that it lies on one host, not on {len(places)},"
        return move_asked(job, leaves, to, coordinator, by, wall_s)

    def _movable(self, job: Job, takers: Gpus) -> list[Movable]:
        if job.state != "running" or job.seeks or job.healing.leaving or job.id in self.rests_until_s:
            return []
        hosts = frozenset((*(place.host for place in job.start.places), *eligible.bars(job.spec, self.queue.drained)))
        return [
            Movable(job.id, place.host, len(place.gpus), job.width, hosts)
            for place in job.start.places
            if place.gpus and place.host in takers and leaves_to(job, place.host, takers) is not None
            if not any(map(is_part, place.gpus))
        ]

    def ask(
        self, job: Job, steps: Sequence[Departure], keeps: Gpus, alive: Gpus, wall_s: float, spread: int = 0
    ) -> list[MoveAsked]:
        """Ask for these moves for the job. `spread`: the number of hosts on which it could start without them."""
        movers = tuple(step.place.job for step in steps)
        self.clearing = Clearing(job.id, dict(keeps), movers, self.now_s, spread > 0)
        rests_s = TOGETHER_AGAIN_S if spread else AGAIN_S
        self.rests_until_s |= dict.fromkeys((job.id, *movers), self.now_s + rests_s)
        gain = f"lies on one host, not on {spread}" if spread else "fits"
        by = f"the leader, so that {job.id} (tenant {job.spec.tenant}, {in_words(job.spec.gpus)}) {gain},"
        found = []
        for step in steps:
            mover = self.queue.jobs[step.place.job]
            coordinator = leaves_to(mover, step.place.host, alive)
            assert coordinator is not None
            found.append(move_asked(mover, step.place.host, step.to, coordinator, by, wall_s, job.id))
        return found
