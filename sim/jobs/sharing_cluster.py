"""Jobs of a trace on a cluster whose GPUs are shared: which is guaranteed on which GPU, and how fast each runs.

The order is 2DAS by the given rules (queues, who stays, narrow first, the limit of waiting); attained service is the
progress that was made. Down this order every gang becomes guaranteed whose GPUs no gang before it has; the others are
opportunistic where they are. So a job that falls behind is not checkpointed but shrinks in place (AntMan §3.1), and one
that comes first again is upgraded in place (§3.3). Only where a job cannot come beside others (memory, or devices used
for more than M already) does 2DAS preempt as usual. With `classes` the order is AntMan's own instead: jobs of the
tenant with quota are guaranteed, those of the other never.

The model of one GPU. A job works on the device for a share `busy` of its own time and waits for the rest. Alone it
runs at speed 1. Guaranteed beside others it runs at 1 / (1 + interference): the assumption that is swept. The others
have the time that it leaves: each of n opportunistic jobs needs its device time out of 1/n of the idle phases, while
its own waits continue meanwhile: speed `used` / (n busy / idle + 1 - busy). Without `used` that is the mean of what the
ladder gives in the device model (`pairs` in `sim/sharing/reports.py`). A gang goes at the speed of its slowest
rank, and is guaranteed only where all its ranks are. `packing` replaces this by processor sharing without control.

Jobs share a GPU only if their memory fits together. No job migrates, except (at the price `move_s`) one that was
preempted or leaves a shared place for an empty one. Hosts are not looked at. `covey-sim jobs --policy covey --set
sharing=on` and the experiments of `bench/sharing/sharing.py` are this model.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from plugins.scheduler.policy.rules import COVEY, OrderRules
from sim.jobs import engine
from sim.jobs.engine import SimJob

Mode = Literal["ladder", "packing"]
GUARANTEED = "a"
"""The tenant with quota, when tenants say the class (AntMan §5.2)."""
SPILLED = 0.2
"""Speed of a job whose memory had to go to the host because a guaranteed one came. AntMan's figure 10: between nearly
all of it and less than 40 %, depending on the model."""
NEVER = math.inf


@dataclass(frozen=True)
class Sharing:
    """What a run assumes of jobs and devices."""

    interference: float = 0.05
    """How much slower a guaranteed job is all the time that another job is beside it: the whole tolerance."""
    used: float = 0.9
    """Share of what the device model gives on average that an opportunistic job gets: measuring baselines takes
    time."""
    own_waits: bool = True
    """Whether an opportunistic job's own waits continue while the guaranteed job is busy. False: the worst case, they
    never do."""
    per_gpu_max: int = 2
    """Most jobs on one GPU, the guaranteed one included."""
    busy: tuple[float, float] = (0.1, 0.9)
    """Share of its time in which a job works on the device, uniform between these. AntMan's figure 1: one GPU in ten is
    used for more than 80 % of the time; here one in eight."""
    busy_max: float = 0.8
    """M: a GPU used more than this takes no further job (AntMan §3.3)."""
    memory_large: float = 0.2
    """Share of the jobs that need more than half of the device memory (AntMan figure 1: 20 %)."""
    move_s: float | None = 60.0
    """Seconds that it costs to checkpoint a job here and restart it there; None: no job moves."""
    mode: Mode = "ladder"
    classes: bool = False
    """Whether the job's tenant says its class (`GUARANTEED` or another), not the order."""


@dataclass(eq=False)
class Running:
    """A job of the trace and what it needs."""

    at: int
    """Index of the job in the trace."""
    job: SimJob
    busy: float
    memory: float
    gpus: list[int] = field(default_factory=list)
    done_s: float = 0.0
    """Progress, in seconds of running alone."""
    speed: float = 0.0
    since_s: float = 0.0
    queue: int = 0
    counted_s: float = 0.0
    """Part of `done_s` since the job was promoted last, in seconds: its queue goes by this."""
    promoted_s: float = NEVER
    """Time at which the job was promoted for having waited too long; NEVER: it was not, or sank again."""
    waits_s: float = 0.0
    """Time at which the job began to wait."""
    waited_s: float = 0.0
    preempted: int = 0
    promotions: int = 0
    held_until_s: float = 0.0
    """Time until which the job is being moved."""
    first_s: float = NEVER

    @property
    def attained(self) -> float:
        return self.counted_s * self.job.gpus


@dataclass
class Outcome:
    """What became of each job, by its index in the trace; times in seconds."""

    end_s: list[float]
    first_s: list[float]
    moves: int = 0
    shared_gpu_s: float = 0.0
    """GPU-seconds in which a GPU had two jobs or more."""
    held_gpu_s: float = 0.0
    """GPU-seconds in which a GPU had one job or more."""
    decisions: int = 0


def speeds(busy: Sequence[float], leader: int | None, sharing: Sharing) -> list[float]:
    """Speeds of the jobs of one GPU, by their shares of device time; `leader` is the index of the guaranteed one,
    None: there is none."""
    if len(busy) == 1:
        return [1.0]
    if sharing.mode == "packing" or leader is None:
        total = sum(busy)
        return [1 / (1 + own * min(1.0, total - own)) for own in busy]
    idle, others = max(1e-3, 1 - busy[leader]), len(busy) - 1
    rest = [sharing.used / opportunistic_time(own, idle / others, sharing.own_waits) for own in busy]
    rest[leader] = 1 / (1 + sharing.interference)
    return rest


def opportunistic_time(busy: float, idle: float, own_waits: bool = True) -> float:
    """How many times as long a job takes that works on the device for a share `busy` of its time, when it may do so
    only for a share `idle` of it. At worst, without `own_waits`, its waits all fall into the idle time and it gets 1 /
    idle."""
    return busy / idle + 1 - busy if own_waits else 1 / idle


def _no_easier(asked: tuple[int, float, int, bool], other: tuple[int, float, int, bool]) -> bool:
    """Whether a job is at least as hard to place as another: (GPUs, memory, queue, promoted)."""
    return asked[0] >= other[0] and asked[1] >= other[1] and asked[2] >= other[2] and asked[3] <= other[3]


class Cluster:
    """One run on `gpus` GPUs of one kind; `seed` draws what jobs need."""

    def __init__(
        self, jobs: Sequence[SimJob], gpus: int, sharing: Sharing, seed: int, rules: OrderRules = COVEY
    ) -> None:
        if any(not 1 <= job.gpus <= gpus for job in jobs):
            raise ValueError(f"a job of no GPU, or of more than {gpus}, can never run")
        rng = random.Random(f"sharing/{seed}")
        self.sharing, self.gpus, self.rules = sharing, gpus, rules
        low, high = sharing.busy
        self.jobs = [
            Running(
                at,
                job,
                rng.uniform(low, high),
                rng.uniform(0.5, 1.0) if rng.random() < sharing.memory_large else rng.uniform(0.05, 0.5),
            )
            for at, job in enumerate(jobs)
        ]
        self.on: list[list[Running]] = [[] for _ in range(gpus)]
        """Jobs of each GPU."""
        self.full, self.used = [0.0] * gpus, [0.0] * gpus
        """Shares of each GPU's memory and of its time that its jobs need."""
        self.arrivals = sorted(self.jobs, key=lambda running: (running.job.submit_s, running.at))
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.preempted: list[Running] = []
        self.leader: list[Running | None] = [None] * gpus
        """The guaranteed job of each GPU; None: there is none."""
        self.now_s = 0.0
        self.outcome = Outcome([0.0] * len(jobs), [0.0] * len(jobs))

    def run(self, progress: Callable[[float, str], None] | None = None) -> Outcome:
        arrived, steps, total = 0, 0, len(self.jobs)
        while arrived < total or self.running or self.waiting:
            next_s = min((self._next_s(job) for job in self.running), default=NEVER)
            if arrived < total:
                next_s = min(next_s, float(self.arrivals[arrived].job.submit_s))
            if self.rules.starve_limit_s is not None:
                oldest = min((job.waits_s for job in self.waiting if job.promoted_s == NEVER), default=NEVER)
                next_s = min(next_s, max(self.now_s, oldest + self.rules.starve_limit_s))
            assert next_s < NEVER, "jobs wait, and nothing will ever happen"
            self._pass(next_s)
            while arrived < total and self.arrivals[arrived].job.submit_s <= self.now_s:
                self.arrivals[arrived].waits_s = self.now_s
                self.waiting.append(self.arrivals[arrived])
                arrived += 1
            self._end()
            self._promote()
            self._set_speeds()
            self._place()
            self._set_speeds()
            steps += 1
            if progress is not None and steps % 64 == 0:
                ended = arrived - len(self.waiting) - len(self.running)
                progress(ended / total, f"{ended} of {total} jobs ended, {self.now_s / 86400:.1f} days of virtual time")
        self.outcome.decisions = steps
        return self.outcome

    def whole(self) -> engine.Outcome:
        """The outcome in the form of the other engines: whole seconds, ends rounded up."""
        return engine.Outcome(
            end_s=[math.ceil(end_s - 1e-6) for end_s in self.outcome.end_s],
            first_s=[math.floor(first_s + 1e-6) for first_s in self.outcome.first_s],
            wait_s=[round(running.waited_s) for running in self.jobs],
            preempted=[running.preempted for running in self.jobs],
            promoted=[running.promotions for running in self.jobs],
            decisions=self.outcome.decisions,
            held_gpu_s=math.floor(self.outcome.held_gpu_s),
        )

    # ---- time ----

    def _next_s(self, running: Running) -> float:
        """Time at which something changes with this job by itself: it ends, falls into a lower queue, or is moved."""
        if running.held_until_s > self.now_s:
            return running.held_until_s
        left = running.job.duration_s - running.done_s
        thresholds = self.rules.thresholds_gpu_s
        if running.queue < len(thresholds):
            limit_s = thresholds[running.queue] / running.job.gpus
            left = min(left, max(0.0, limit_s - running.counted_s) + 1e-6)
        return self.now_s + max(left, 0.0) / running.speed

    def _pass(self, to_s: float) -> None:
        passed = to_s - self.now_s
        sizes = [len(jobs) for jobs in self.on]
        self.outcome.shared_gpu_s += passed * sum(size > 1 for size in sizes)
        self.outcome.held_gpu_s += passed * sum(size > 0 for size in sizes)
        thresholds = self.rules.thresholds_gpu_s
        for running in self.running:
            if running.held_until_s <= self.now_s:
                running.done_s += passed * running.speed
                running.counted_s += passed * running.speed
            if running.queue < len(thresholds) and running.attained >= thresholds[running.queue]:
                running.queue = bisect_right(thresholds, running.attained)
                running.promoted_s = NEVER
        self.now_s = to_s

    def _promote(self) -> None:
        """Put jobs that have waited longer than the limit at the head of everything (Tiresias §3.3.2.3)."""
        limit_s = self.rules.starve_limit_s
        if limit_s is None:
            return
        for running in self.waiting:
            if running.promoted_s == NEVER and self.now_s - running.waits_s >= limit_s:
                running.promoted_s, running.counted_s, running.queue = self.now_s, 0.0, 0
                running.promotions += 1

    def _end(self) -> None:
        ended = [running for running in self.running if running.done_s >= running.job.duration_s - 1e-6]
        for running in ended:
            self._take_off(running)
            self.running.remove(running)
            self.outcome.end_s[running.at] = self.now_s
            self.outcome.first_s[running.at] = running.first_s

    def _take_off(self, running: Running) -> None:
        for gpu in running.gpus:
            self.on[gpu].remove(running)
            self._sum_up(gpu)
        running.gpus = []

    def _sum_up(self, gpu: int) -> None:
        self.full[gpu] = sum(job.memory for job in self.on[gpu])
        self.used[gpu] = sum(job.busy for job in self.on[gpu])

    # ---- order and speed ----

    def _key(self, running: Running) -> tuple[float, ...]:
        """The job's key in the order: the smallest is first."""
        if self.sharing.classes:
            return (0.0 if running.job.tenant == GUARANTEED else 1.0, float(running.job.submit_s), float(running.at))
        if running.promoted_s < NEVER:
            return (0.0, 0.0, running.promoted_s, float(running.at))
        runs = 0.0 if running.gpus and self.rules.inside == "sticky" else 1.0
        width = running.job.gpus if self.rules.narrow_first and not running.gpus else 0
        by_age = (running.first_s, float(running.job.submit_s), float(running.at))
        return (float(running.queue), 1.0, runs, float(width), *by_age)

    def _set_speeds(self) -> None:
        """Set the speeds: in order, every job leads whose GPUs no other leads yet; a gang runs at the speed of its
        slowest rank."""
        self.running.sort(key=self._key)
        self.leader = [None] * self.gpus
        for running in self.running:
            running.speed = 1.0
            if self._may_lead(running) and all(self.leader[gpu] is None for gpu in running.gpus):
                for gpu in running.gpus:
                    self.leader[gpu] = running
        for jobs, leader in zip(self.on, self.leader, strict=True):
            if len(jobs) > 1:
                at = None if leader is None else jobs.index(leader)
                for running, speed in zip(jobs, speeds([job.busy for job in jobs], at, self.sharing), strict=True):
                    running.speed = min(running.speed, speed)
                if leader is not None and sum([job.memory for job in jobs]) > 1:
                    for running in jobs:
                        running.speed = running.speed if running is leader else min(running.speed, SPILLED)

    def _may_lead(self, running: Running) -> bool:
        return not self.sharing.classes or running.job.tenant == GUARANTEED

    # ---- placement ----

    def _place(self) -> None:
        """Place waiting jobs in order, each whole or not at all; then move jobs that are better off on empty GPUs."""
        self.waiting.sort(key=self._key)
        still: list[Running] = []
        failed: list[tuple[int, float, int, bool]] = []
        for running in self.waiting:
            asked = (running.job.gpus, running.memory, running.queue, running.promoted_s < NEVER)
            gpus = None
            if self.sharing.classes or not any(_no_easier(asked, other) for other in failed):
                gpus = self._gpus_for(running) or self._gpus_of_others(running)
            if gpus is None:
                still.append(running)
                failed.append(asked)
                continue
            again = running.first_s < NEVER
            running.waited_s += self.now_s - running.waits_s
            running.first_s = min(running.first_s, self.now_s)
            self._put(running, gpus)
            self.running.append(running)
            self._set_speeds()
            failed.clear()  # a job may have been stopped for it
            if again and self.sharing.move_s:
                running.held_until_s = self.now_s + self.sharing.move_s
        self.waiting = still + self.preempted
        self.preempted = []
        if self.sharing.move_s is not None and not self.waiting:
            self._move(self.sharing.move_s)

    def _put(self, running: Running, gpus: Sequence[int]) -> None:
        running.gpus = list(gpus)
        for gpu in gpus:
            self.on[gpu].append(running)
            self._sum_up(gpu)

    def _gpus_for(self, running: Running) -> list[int] | None:
        """The GPUs where the job runs fastest and slows others least; None when there are not enough that it may
        use."""
        costs = []
        for gpu, jobs in enumerate(self.on):
            if not jobs:
                costs.append((0.0, gpu))
            elif self._may_come(running, gpu):
                costs.append((self._cost(running, gpu), gpu))
        if len(costs) < running.job.gpus:
            return None
        return [gpu for _, gpu in sorted(costs)[: running.job.gpus]]

    def _may_come(self, running: Running, gpu: int) -> bool:
        """Whether the job's memory fits, and the GPU is used for no more than M already (AntMan Algorithm 1)."""
        jobs = self.on[gpu]
        if self.sharing.classes and running.job.tenant == GUARANTEED:
            return all(job.job.tenant != GUARANTEED for job in jobs)  # the others shrink (AntMan §3.3)
        return (
            len(jobs) < self.sharing.per_gpu_max
            and self.full[gpu] + running.memory <= 1
            and self.used[gpu] < self.sharing.busy_max
        )

    def _cost(self, running: Running, gpu: int) -> float:
        """Speed lost on this GPU, in GPUs: by the job itself or, if it comes first there, by the gang that was first
        until now."""
        jobs, leader = self.on[gpu], self.leader[gpu]
        busy = [job.busy for job in jobs]
        if self._may_lead(running) and (leader is None or self._key(leader) > self._key(running)):
            after = speeds([*busy, running.busy], len(jobs), self.sharing)
            widest = max(job.job.gpus * (1 - speed) for job, speed in zip(jobs, after[:-1], strict=True))
            return widest + 1 - after[-1]
        at = None if leader is None else jobs.index(leader)
        return (1 - speeds([*busy, running.busy], at, self.sharing)[-1]) * running.job.gpus

    def _gpus_of_others(self, running: Running) -> list[int] | None:
        """GPUs that 2DAS preempts where nothing can be shared: jobs of lower queues are checkpointed, the last one
        first."""
        if self.sharing.move_s is None or self.sharing.classes:
            return None
        first = running.promoted_s < NEVER
        victims = [
            other for other in self.running if other.promoted_s == NEVER and (first or other.queue > running.queue)
        ]
        victims.sort(key=self._key, reverse=True)
        gone: list[Running] = []
        for victim in victims:
            gone.append(victim)
            free = [gpu for gpu, jobs in enumerate(self.on) if all(job in gone for job in jobs)]
            if len(free) >= running.job.gpus:
                for job in gone:
                    if any(gpu in free[: running.job.gpus] for gpu in job.gpus):
                        self._preempt(job)
                return free[: running.job.gpus]
        return None

    def _preempt(self, running: Running) -> None:
        self._take_off(running)
        self.running.remove(running)
        self.preempted.append(running)
        running.preempted += 1
        running.waits_s = self.now_s
        self.outcome.moves += 1

    def _move(self, cost_s: float) -> None:
        """Move jobs at less than 70 % of their speed to empty GPUs if they have much left to do."""
        empty = [gpu for gpu, jobs in enumerate(self.on) if not jobs]
        for running in sorted(self.running, key=self._key):
            left_s = running.job.duration_s - running.done_s
            if len(empty) < running.job.gpus or running.speed >= 0.7 or running.held_until_s > self.now_s:
                continue
            if running.speed <= 0 or left_s / running.speed < left_s + 3 * cost_s:
                continue
            self._take_off(running)
            self._put(running, empty[: running.job.gpus])
            del empty[: running.job.gpus]
            running.held_until_s = self.now_s + cost_s
            self.outcome.moves += 1
