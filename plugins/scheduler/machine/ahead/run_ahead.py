"""One course that things may take from now on: the leader's own code, on a copy of the log, in virtual time.

What is not known is given: for how long jobs still hold their GPUs, and which jobs come. What follows from it is
decided by `Leader` and applied by the log's `apply`, as on hosts; gangs get places where their coordinators would put
them. Hosts are those that are alive now, none is lost, and no gang moves; a job that is stopped continues where it was.
A leader that begins knows no clocks of wide gangs (`machine/leader/gang_clocks.py`), and this one begins now.
"""

import copy
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.leader.admission import packlimit
from plugins.scheduler.machine.leader.capacity import Capacity
from plugins.scheduler.machine.leader.leader import Leader, RackHost, ScheduleTick, memory_of
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.messages.commands import (
    Attained,
    BeginReached,
    Command,
    Demoted,
    Elapsed,
    GpusKept,
    Granted,
    NotApplied,
    Placed,
    PlaceFailed,
    Promoted,
    RanksReported,
    Submitted,
    TakenBack,
    TaskBegun,
    Upgraded,
)
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy import eligible
from plugins.scheduler.policy.order import queue_of
from plugins.scheduler.policy.settings import SchedulerSettings

TAKEN = (Granted, TakenBack, GpusKept, Promoted, Demoted, Upgraded, Elapsed, BeginReached, TaskBegun)
"""The leader's commands that are applied. The others are about hosts, leases, and moves."""
AGAIN = (Promoted, Demoted, Upgraded, BeginReached, TaskBegun)
"""Commands after which the leader has more to decide at once."""
ROUGH, ROUGH_MAX_S = 20, 60.0
"""Seconds ahead are as exact as one part in so many of them, and as a minute at worst (chosen: what happens within one
such time is one decision, which makes a course three times as cheap)."""
LOOKS_MAX = 1000
"""Most looks of the leader within one second."""
COMPLETE, STOPPED, READY, ARRIVE, SINK = range(5)
"""Kinds of events, in their order within one second."""


class Moment(NamedTuple):
    """The state from which all courses begin."""

    log: bytes
    """A snapshot of the log's live jobs."""
    rack: tuple[RackHost, ...]
    """The hosts that are alive."""
    rack_s: float
    """The rack's clock, s."""
    wall_s: float


class Arrival(NamedTuple):
    """A job that comes."""

    after_s: float
    """Seconds from the moment on."""
    spec: JobSpec
    length_s: float
    """Seconds for which it will hold its GPUs."""


def moment(
    queue: JobTable, rack: Sequence[RackHost], rack_s: float, wall_s: float, more: JobSpec | None = None
) -> tuple[Moment, JobId | None]:
    """The present state without what no decision looks at. `more`: a job that is submitted now; its id is returned."""
    lean = copy.copy(queue)
    lean.jobs = {job.id: _lean(job) for job in queue.live()}
    lean.ended = []
    data = lean.snapshot()
    added: JobId | None = None
    if more is not None:
        table = JobTable()
        table.restore(data)
        table.rack_s = max(table.rack_s, rack_s)
        said = apply(table, table.index + 1, Submitted(wall_s=wall_s, key="foreseen-job", spec=_bare(more)))[0]
        added = None if isinstance(said, NotApplied) else said.job
        data = table.snapshot()
    alive = tuple(host for host in rack if host.gone_s is None)
    return Moment(data, alive, max(rack_s, queue.rack_s), wall_s), added


def _lean(job: Job) -> Job:
    return msgspec.structs.replace(job, spec=_bare(job.spec), env=None)


def _bare(spec: JobSpec) -> JobSpec:
    return msgspec.structs.replace(spec, argv=("job",), env={})


class RunAhead:
    """One course. `drawn_s`: for how many more seconds a job will hold its GPUs, asked once for each job, when it holds
    some; inf: it is not known, so it holds them. `comes`: jobs that come, ascending."""

    def __init__(
        self,
        begin: Moment,
        settings: SchedulerSettings,
        drawn_s: Callable[[Job], float],
        comes: Iterator[Arrival] = iter(()),
    ) -> None:
        self.begin, self.drawn_s, self.comes = begin, drawn_s, comes
        self.settings = msgspec.structs.replace(settings, defragment=False, elastic_grow_after_s=0.0)
        self.queue = JobTable()
        self.queue.restore(begin.log)
        self.queue.rack_s = begin.rack_s
        self.leader = Leader(self.queue, self.settings)
        self.now_s = begin.rack_s
        totals = eligible.open_gpus({host.host: host.usable for host in begin.rack}, self.queue.drained)
        self.ground = Capacity(self.queue, totals)
        self.ground.promises.heard(memory_of(begin.rack))
        self.placed_feed = self.queue.follow()
        self.left_s: dict[JobId, float] = {}
        """Seconds for which a job will still run, when it last began or stopped."""
        self.since_s: dict[JobId, float] = {}
        """Jobs that make progress, and since when."""
        self.attained: dict[JobId, float] = {}
        """GPU·s that each of these had attained then."""
        self.events: list[tuple[float, int, int, JobId, int]] = []
        """Heap of (second, kind, order, job, epoch)."""
        self.posted = 0
        self.named = 0
        """How many GPUs got a name."""
        self.granted: list[JobId] = []
        self.next_arrival = next(comes, None)
        self.first_s: dict[JobId, float] = {}
        """Jobs that started here -> seconds from the beginning until then."""
        for job in self.queue.live():
            self._take_up(job)

    def _take_up(self, job: Job) -> None:
        """Go on with a job as it is at the beginning."""
        if job.state == "placing":
            self.granted.append(job.id)
        elif job.state == "stopping":
            told_s = self.now_s if job.ending.told_rack_s is None else job.ending.told_rack_s
            self._post(max(self.now_s, told_s + self.settings.restart_s / 2), STOPPED, job)
        elif job.state == "running":
            self._go(job)

    # ---- the course ----

    def steps(self) -> Iterator[None]:
        """Decide at one second after the other; ends when nothing happens any more."""
        self._decide()
        yield
        while (now_s := self._next_s()) is not None:
            self.now_s = now_s
            for command in self.leader.elapsed(self._wall_s(), now_s):
                self._say(command)
            while self.events and self.events[0][0] <= now_s:
                _, kind, _, id, epoch = heapq.heappop(self.events)
                job = self.queue.jobs.get(id)
                if job is not None and not job.over and job.grant.epoch == epoch:
                    self._happens(kind, job)
            while self.next_arrival is not None and self._arrives_s() <= now_s:
                self._arrive(self.next_arrival)
            self._decide()
            yield

    def _arrives_s(self) -> float:
        return math.inf if self.next_arrival is None else self._roughly_s(self.begin.rack_s + self.next_arrival.after_s)

    def _next_s(self) -> float | None:
        wakes_s = self.leader.wakes_s()
        times = [self._arrives_s(), self.events[0][0] if self.events else math.inf]
        times += [] if wakes_s is None else [max(self.now_s + 1.0, math.ceil(wakes_s))]
        soonest_s = min(times)
        return None if soonest_s == math.inf else max(self.now_s, soonest_s)

    def _wall_s(self) -> float:
        return self.begin.wall_s + self.now_s - self.begin.rack_s

    def _decide(self) -> None:
        """Let the leader look until the log takes nothing more and every granted gang has its places."""
        for _ in range(LOOKS_MAX):
            event = ScheduleTick(self.begin.rack, self._wall_s())
            taken = [
                action.command for action in self.leader.handle(event, self.now_s) if self._perform(action.command)
            ]
            granted, self.granted = sorted([self.queue.jobs[id] for id in self.granted], key=lambda job: job.number), []
            placed = [self._place(job) for job in granted]
            if all(placed) and not any(isinstance(command, AGAIN) for command in taken):
                return

    def _perform(self, command: Command) -> bool:
        """Perform a command of the leader; whether the log took it."""
        if not isinstance(command, TAKEN):
            return False
        if isinstance(command, TakenBack):
            self._pause(command.job)
        if not self._say(command):
            return False
        if isinstance(command, Granted):
            self.granted.append(command.job)
        elif isinstance(command, TakenBack) and (job := self.queue.jobs[command.job]).state == "stopping":
            self._post(self.now_s + self.settings.restart_s / 2, STOPPED, job)
        return True

    def _say(self, command: Command) -> bool:
        self.queue.rack_s = self.now_s
        return not isinstance(apply(self.queue, self.queue.index + 1, command)[0], NotApplied)

    # ---- what happens to a job ----

    def _post(self, at_s: float, kind: int, job: Job) -> None:
        if at_s < math.inf:
            self.posted += 1
            heapq.heappush(self.events, (self._roughly_s(at_s), kind, self.posted, job.id, job.grant.epoch))

    def _roughly_s(self, at_s: float) -> float:
        """The next time that is looked at."""
        each_s = min(ROUGH_MAX_S, max(1.0, (self.now_s - self.begin.rack_s) // ROUGH))
        return math.ceil(at_s / each_s) * each_s

    def _happens(self, kind: int, job: Job) -> None:
        if kind == READY and job.state == "running":
            self._go(job)
        elif kind == SINK and job.id in self.since_s:
            self._pause(job.id)
            self._go(job)
        elif kind == COMPLETE and job.id in self.since_s and self._left_s(job.id) <= 0:
            self._pause(job.id)
            self._ranks_end(job, asked=False)
        elif kind == STOPPED and job.state == "stopping":
            self._ranks_end(job, asked=True)

    def _arrive(self, arrival: Arrival) -> None:
        self.next_arrival = next(self.comes, None)
        demotes = self.settings.demote_after_s is not None
        number = self.queue.next_number
        key = f"arrival-{number}"
        if self._say(Submitted(wall_s=self._wall_s(), key=key, spec=arrival.spec, may_demote=demotes)):
            self.left_s[JobId(f"j{number}")] = arrival.length_s

    def _left_s(self, id: JobId) -> float:
        return self.left_s[id] - (self.now_s - self.since_s[id])

    def _go(self, job: Job) -> None:
        """Let a job make progress from now on, and post what comes first: its end, or its fall into the next queue."""
        id, gpus, thresholds = job.id, job.spec.gpus, self.settings.queue_thresholds_gpu_s
        if id not in self.left_s:
            self.left_s[id] = self.drawn_s(job)
        self.since_s[id], self.attained[id] = self.now_s, job.attained_gpu_s
        attained = max(0.0, job.attained_gpu_s - job.priority.base_gpu_s)
        queue = queue_of(attained, thresholds)
        sinks_s = math.ceil((thresholds[queue] - attained) / gpus) if gpus and queue < len(thresholds) else math.inf
        if sinks_s < self.left_s[id]:
            self._post(self.now_s + max(1, sinks_s), SINK, job)
        else:
            self._post(self.now_s + self.left_s[id], COMPLETE, job)

    def _pause(self, id: JobId) -> None:
        """Tell the log what a job attained; it makes no progress from now on."""
        if id not in self.since_s:
            return
        job, ran_s = self.queue.jobs[id], self.now_s - self.since_s[id]
        self.left_s[id] = self._left_s(id)
        del self.since_s[id]
        host = job.start.places[0].host
        others = job.attained_gpu_s - job.measured.attained.get(host, 0.0)
        served = {id: max(0.0, self.attained[id] + ran_s * job.spec.gpus - others)}
        self._say(Attained(wall_s=self._wall_s(), host=host, service_gpu_s=served))

    def _ranks_end(self, job: Job, asked: bool) -> None:
        for place in [place for place in job.start.places if place.host not in job.ending.codes]:
            codes = dict.fromkeys(place.ranks, 0)
            epoch, host = job.grant.epoch, place.host
            self._say(
                RanksReported(wall_s=self._wall_s(), job=job.id, epoch=epoch, host=host, codes=codes, asked=asked)
            )

    def _place(self, job: Job) -> bool:
        """Find places for a granted gang, as its coordinator does; whether there are any."""
        changed = self.placed_feed.take()
        for id in self.queue.jobs if changed is None else changed:
            other = self.queue.jobs.get(id)
            if other is None or other.over:
                self.ground.drop(id)
            else:
                self.ground.put(other)
        self.ground.keep(self.queue.keeper, self.queue.kept)
        places = self._places(job)
        if not places:
            self._say(PlaceFailed(wall_s=self._wall_s(), job=job.id, epoch=job.grant.epoch, reason="no room"))
            return False
        epoch = job.grant.epoch
        self._say(Placed(wall_s=self._wall_s(), job=job.id, epoch=epoch, places=places, master_addr="", master_port=1))
        self.first_s.setdefault(job.id, self.now_s - self.begin.rack_s)
        if job.tally.attempt > 1 and self.settings.restart_s:
            self._post(self.now_s + self.settings.restart_s / 2, READY, job)
        else:
            self._go(job)
        return True

    def _places(self, job: Job) -> tuple[Place, ...]:
        spec, ground = job.spec, self.ground
        if not spec.gpus:
            return self._without_gpus(spec, sorted(ground.takers(job)))
        skew = self.queue.models.shown_skew(spec, job.measured.tensors)
        plan = ground.plan(job, ground.free_for(job), skew, packlimit(self.queue, self.settings))
        places, rank = [], 0
        for host, gpus in plan.items():
            ranks = gpus // spec.gpus_per_worker
            places.append(Place(host, tuple(range(rank, rank + ranks)), self._names(gpus)))
            rank += ranks
        return tuple(places)

    def _without_gpus(self, spec: JobSpec, hosts: Sequence[HostId]) -> tuple[Place, ...]:
        """Places of ranks without GPUs: all on one host, or each on its own."""
        if spec.pack == "apart":
            whole = len(hosts) >= spec.workers
            return tuple(Place(host, (at,), ()) for at, host in enumerate(hosts[: spec.workers])) if whole else ()
        return tuple(Place(host, tuple(range(spec.workers)), ()) for host in hosts[:1])

    def _names(self, count: int) -> tuple[str, ...]:
        """Names of GPUs: which ones of a host a gang gets makes no difference here."""
        self.named += count
        return tuple(f"ahead-{number}" for number in range(self.named - count, self.named))
