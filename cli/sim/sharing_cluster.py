"""Jobs of a trace on a cluster whose GPUs are shared: who is guaranteed on which GPU, and how fast everybody gets on.

The order is 2DAS: two queues by attained service, first come first inside a queue. Down this order every gang becomes
guaranteed whose GPUs nobody before it has; the others are opportunistic where they are. So a job that falls behind is
not checkpointed but shrinks in place (AntMan §3.1), and one that comes first again is upgraded in place (§3.3). Only
where a job cannot come beside others (memory, or devices used for more than M already) does 2DAS preempt as ever. With
`classes` the order is AntMan's own instead: jobs of the tenant with quota are guaranteed, those of the other never.

The model of one GPU. A job works on the device for a share `busy` of its own time and waits for the rest. Alone it
runs at speed 1. Guaranteed beside others it runs at 1 / (1 + interference): the assumption that is swept. The others
have the time that it leaves: each of n opportunistic jobs needs its device time out of 1/n of the idle phases, while
its own waits go on beside: speed `used` / (n busy / idle + 1 - busy). Without `used` that is the mean of what the
ladder gives in the device model (`pairs` in `cli/sim/sharing_reports.py`). A gang goes at the speed of its slowest
rank, and is guaranteed only where all its ranks are. `packing` replaces this by processor sharing without control.

Jobs share a GPU only if their memory fits together. Nobody migrates, except (at the price `move_s`) who was preempted
or leaves a shared place for an empty one. `cli/sim/engine_sharing.py` is the coarser model behind `covey-sim jobs`:
all guests are alike there, and places have no neighbours.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cli.sim.engine import SimJob

Mode = Literal["ladder", "packing"]
GUARANTEED = "a"
"""The tenant with quota, when tenants say the class (AntMan §5.2)."""
SPILLED = 0.2
"""Speed of a job whose memory had to go to the host because a guaranteed one came. AntMan's figure 10: between nearly
all of it and less than 40 %, depending on the model."""
NEVER = math.inf


@dataclass(frozen=True)
class Sharing:
    """What is assumed of jobs and devices."""

    interference: float = 0.05
    """How much slower a guaranteed job is for every minute that somebody is beside it: the whole tolerance."""
    used: float = 0.9
    """How much an opportunistic job gets of what the device model gives on average: measuring baselines takes time."""
    own_waits: bool = True
    """An opportunistic job's own waits go on while the guaranteed job is busy. False: the worst case, they never do."""
    per_gpu_max: int = 2
    """Jobs on one GPU, the guaranteed one included."""
    busy: tuple[float, float] = (0.1, 0.9)
    """Share of its time in which a job works on the device, uniform between these. AntMan's figure 1: one GPU in ten is
    used for more than 80 % of the time; here one in eight."""
    busy_max: float = 0.8
    """M: a GPU used more than this takes nobody else (AntMan §3.3)."""
    memory_large: float = 0.2
    """Share of the jobs that need more than half of the device memory (AntMan figure 1: 20 %)."""
    threshold_gpu_s: float = 3200.0
    """Between the two queues, GPU·s (Tiresias's testbed)."""
    move_s: float | None = 60.0
    """What it costs to checkpoint a job here and restart it there; None: nobody moves."""
    mode: Mode = "ladder"
    classes: bool = False
    """The job's tenant says its class (`GUARANTEED` or another), not the order."""


@dataclass(eq=False)
class Running:
    """A job of the trace and what it needs."""

    at: int
    """Its place in the trace."""
    job: SimJob
    busy: float
    memory: float
    gpus: list[int] = field(default_factory=list)
    done_s: float = 0.0
    """Progress, in seconds of running alone."""
    speed: float = 0.0
    since_s: float = 0.0
    queue: int = 0
    held_until_s: float = 0.0
    """It is being moved."""
    first_s: float = NEVER

    @property
    def attained(self) -> float:
        return self.done_s * self.job.gpus


@dataclass
class Outcome:
    """By place in the trace; s."""

    end_s: list[float]
    first_s: list[float]
    moves: int = 0
    shared_gpu_s: float = 0.0
    """GPU time on which two jobs or more lived."""


def speeds(busy: Sequence[float], leader: int | None, sharing: Sharing) -> list[float]:
    """How fast each of the jobs of one GPU gets on, by their shares of device time; `leader` is guaranteed there, None:
    nobody is."""
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
    """How many times as long a job takes that works on the device for a share `busy` of its time, when it may only for
    a share `idle` of it. At worst, without `own_waits`, its waits all fall into the idle time and it gets 1 / idle."""
    return busy / idle + 1 - busy if own_waits else 1 / idle


class Cluster:
    """One run; `gpus` of one kind, jobs drawn by `seed`."""

    def __init__(self, jobs: Sequence[SimJob], gpus: int, sharing: Sharing, seed: int) -> None:
        rng = random.Random(f"sharing/{seed}")
        self.sharing, self.gpus = sharing, gpus
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
        """Memory that they need, and device time."""
        self.arrivals = sorted(self.jobs, key=lambda running: (running.job.submit_s, running.at))
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.preempted: list[Running] = []
        self.leader: list[Running | None] = [None] * gpus
        """Who is guaranteed on each GPU."""
        self.now_s = 0.0
        self.outcome = Outcome([0.0] * len(jobs), [0.0] * len(jobs))

    def run(self, progress: Callable[[float, str], None] | None = None) -> Outcome:
        arrived, steps = 0, 0
        while arrived < len(self.arrivals) or self.running or self.waiting:
            next_s = min((self._next_s(job) for job in self.running), default=NEVER)
            if arrived < len(self.arrivals):
                next_s = min(next_s, float(self.arrivals[arrived].job.submit_s))
            assert next_s < NEVER, "jobs wait, and nothing will ever happen"
            self._pass(next_s)
            while arrived < len(self.arrivals) and self.arrivals[arrived].job.submit_s <= self.now_s:
                self.waiting.append(self.arrivals[arrived])
                arrived += 1
            self._end()
            self._set_speeds()
            self._place()
            self._set_speeds()
            steps += 1
            if progress is not None and steps % 64 == 0:
                progress(1 - (len(self.jobs) - arrived + len(self.waiting)) / len(self.jobs), f"{self.now_s:.0f} s")
        return self.outcome

    # ---- time ----

    def _next_s(self, running: Running) -> float:
        """When something changes with this job by itself: it ends, falls into the lower queue, or is moved."""
        if running.held_until_s > self.now_s:
            return running.held_until_s
        left = running.job.duration_s - running.done_s
        if running.queue == 0:
            left = min(left, max(0.0, self.sharing.threshold_gpu_s / running.job.gpus - running.done_s) + 1e-6)
        return self.now_s + max(left, 0.0) / running.speed

    def _pass(self, to_s: float) -> None:
        passed = to_s - self.now_s
        self.outcome.shared_gpu_s += passed * sum(len(jobs) > 1 for jobs in self.on)
        for running in self.running:
            if running.held_until_s <= self.now_s:
                running.done_s += passed * running.speed
            if running.attained >= self.sharing.threshold_gpu_s:
                running.queue = 1
        self.now_s = to_s

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
        """Smaller is first."""
        if self.sharing.classes:
            return (0.0 if running.job.tenant == GUARANTEED else 1.0, float(running.job.submit_s), float(running.at))
        return (float(running.queue), running.first_s, float(running.job.submit_s), float(running.at))

    def _set_speeds(self) -> None:
        """In order, every job leads whose GPUs nobody leads yet; a gang goes at the speed of its slowest rank."""
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
        """Waiting jobs in order, each whole or not at all; then jobs that are better off on empty GPUs."""
        self.waiting.sort(key=self._key)
        still = []
        for running in self.waiting:
            gpus = self._gpus_for(running) or self._gpus_of_others(running)
            if gpus is None:
                still.append(running)
                continue
            again = running.first_s < NEVER
            running.first_s = min(running.first_s, self.now_s)
            self._put(running, gpus)
            self.running.append(running)
            self._set_speeds()
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
        """The GPUs where it gets on best and harms least; None when there are not enough to which it may come."""
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
        """Memory fits, and the GPU is not used for more than M already (AntMan Algorithm 1)."""
        jobs = self.on[gpu]
        if self.sharing.classes and running.job.tenant == GUARANTEED:
            return all(job.job.tenant != GUARANTEED for job in jobs)  # the others shrink (AntMan §3.3)
        return (
            len(jobs) < self.sharing.per_gpu_max
            and self.full[gpu] + running.memory <= 1
            and self.used[gpu] < self.sharing.busy_max
        )

    def _cost(self, running: Running, gpu: int) -> float:
        """Speed lost, in GPUs: by the job itself or, if it comes first there, by the gang that came first so far."""
        jobs, leader = self.on[gpu], self.leader[gpu]
        busy = [job.busy for job in jobs]
        if self._may_lead(running) and (leader is None or self._key(leader) > self._key(running)):
            after = speeds([*busy, running.busy], len(jobs), self.sharing)
            widest = max(job.job.gpus * (1 - speed) for job, speed in zip(jobs, after[:-1], strict=True))
            return widest + 1 - after[-1]
        at = None if leader is None else jobs.index(leader)
        return (1 - speeds([*busy, running.busy], at, self.sharing)[-1]) * running.job.gpus

    def _gpus_of_others(self, running: Running) -> list[int] | None:
        """Where nothing can be shared 2DAS preempts: jobs of lower queues are checkpointed, the last one first."""
        if self.sharing.move_s is None or self.sharing.classes:
            return None
        victims = [other for other in self.running if other.queue > running.queue]
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
        self.outcome.moves += 1

    def _move(self, cost_s: float) -> None:
        """A job at less than 70 % of its speed goes to empty GPUs if it has much left to do."""
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
