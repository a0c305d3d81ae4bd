"""Rounds as they happen: ranks compute, push, wait for sums and continue; aggregators sum what is due first.

The cycles of `policy.cycle` are a plan; this is what the plan meets. A job computes, its tensors become ready one
after the other in the backward part, each is summed by its aggregator in the order of `policy.urgency`, as `aggd` does
it (a part of a tensor at a time, so that what is more urgent runs between; or in order of arrival, for comparison),
and the next iteration begins when the last sum is done. Whatever a job loses beside others comes from the waiting, so
it is measured here rather than assumed, also by the pool: it gets the time of every iteration (`PoolJobTimed`) and
reverts moves that cost too much.
"""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from covey.core.events import LogEvent
from covey.core.ids import HostId, JobId
from plugins.aggregator.machine.pool import Action, Event, Exited, Pool, PoolJobArrived, PoolJobTimed, PoolPlace
from plugins.aggregator.policy.assign import AggregationProfile
from plugins.aggregator.policy.urgency import MostUrgent, due, may_take
from sim.kernel import Kernel
from sim.tensors.jobs import PUSHING

JITTER = 0.02
"""Largest part by which the compute time of an iteration varies, up or down."""


@dataclass
class Job:
    profile: AggregationProfile
    compute_us: int
    """Microseconds from the start of an iteration to its last tensor, alone or not."""
    rng: random.Random
    waits_for: int = 0
    began_us: int = 0
    iterations: int = 0
    periods_us: list[int] = field(default_factory=list)
    over: bool = False
    works_us: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.works_us = {tensor.name: tensor.work_us for tensor in self.profile.tensors}


class Sum(NamedTuple):
    """The work left of one tensor's round, with other work between its parts or not."""

    name: JobId
    due_us: float
    left_us: int


@dataclass
class Aggregator:
    waiting: MostUrgent[Sum] = field(default_factory=MostUrgent)
    now: Sum | None = None
    since_us: int = 0
    begun: int = 0
    """How often the aggregator has begun to sum something; an end counts only for the sum that began last."""


class Rounds:
    """One clock for jobs and aggregators; `on` has the host that sums each tensor, and may change between two
    iterations."""

    def __init__(self, timed: Callable[[JobId, int], None], by_arrival: bool = False) -> None:
        self.kernel: Kernel[int, Callable[[], None]] = Kernel(0)
        self.jobs: dict[JobId, Job] = {}
        self.on: dict[JobId, dict[str, HostId]] = {}
        self._timed, self._by_arrival = timed, by_arrival
        self._aggregators: defaultdict[HostId, Aggregator] = defaultdict(Aggregator)

    @property
    def now_us(self) -> int:
        return self.kernel.now

    def add(self, job: Job, on: dict[str, HostId], start_us: int) -> None:
        self.jobs[job.profile.job], self.on[job.profile.job] = job, on
        self.kernel.post(start_us, partial(self._begin, job.profile.job))

    def remove(self, name: JobId) -> None:
        """End the job with the iteration it is in."""
        self.jobs[name].over = True

    def run_until(self, us: int) -> None:
        self.kernel.run_until(us, lambda happens: happens())

    def _begin(self, name: JobId) -> None:
        job = self.jobs[name]
        if job.over:
            return
        job.began_us = self.now_us
        compute_us = job.compute_us * job.rng.uniform(1 - JITTER, 1 + JITTER)
        tensors = job.profile.tensors
        job.waits_for = len(tensors)
        for at, tensor in enumerate(tensors, 1):
            ready = 1 - PUSHING + PUSHING * at / len(tensors)
            self.kernel.post(self.now_us + round(compute_us * ready), partial(self._ready, name, tensor.name))

    def _ready(self, name: JobId, tensor: str) -> None:
        job, host = self.jobs[name], self.on[name][tensor]
        allowed_us = may_take(job.profile.period_us, job.profile.limit)
        due_us = self.now_us if self._by_arrival else due(job.began_us, allowed_us, self.now_us)
        new = Sum(name, due_us, job.works_us[tensor])
        at = self._aggregators[host]
        if at.now is None:
            self._add(host, at, new)
        elif new.due_us < at.now.due_us:
            left_us = at.now.left_us - (self.now_us - at.since_us)
            at.waiting.put(at.now.due_us, at.now._replace(left_us=left_us))
            self._add(host, at, new)
        else:
            at.waiting.put(new.due_us, new)

    def _add(self, host: HostId, at: Aggregator, sum: Sum) -> None:
        at.now, at.since_us, at.begun = sum, self.now_us, at.begun + 1
        self.kernel.post(self.now_us + sum.left_us, partial(self._summed, host, at.begun))

    def _summed(self, host: HostId, begun: int) -> None:
        at = self._aggregators[host]
        if at.begun != begun or at.now is None:
            return  # something more urgent came between
        name, at.now = at.now.name, None
        if at.waiting:
            self._add(host, at, at.waiting.pop())
        job = self.jobs[name]
        job.waits_for -= 1
        if job.waits_for == 0:
            period_us = self.now_us - job.began_us
            job.iterations += 1
            job.periods_us.append(period_us)
            self._timed(name, period_us)
            self._begin(name)


def alone(profile: AggregationProfile, seed: int, window: bool = True, iterations: int = 50) -> Job:
    """The job as its trial iterations find it: on its own servers, tensors balanced, its iteration measured.

    Its compute time is what is left of the iteration of its model, so that the measured one nearly agrees with it.
    """
    hosts = [HostId(f"s{at}") for at in range(profile.servers)]
    loads = dict.fromkeys(hosts, 0)
    on: dict[str, HostId] = {}
    for tensor in profile.tensors:
        host = min(hosts, key=lambda one: (loads[one], one))
        loads[host] += tensor.work_us
        on[tensor.name] = host
    rounds = Rounds(lambda name, period_us: None)
    mixed = list(profile.tensors)
    random.Random(seed).shuffle(mixed)  # the order of layers is not that of their sizes
    job = Job(msgspec.structs.replace(profile, tensors=tuple(mixed)), profile.period_us, random.Random(seed))
    rounds.add(job, on, 0)
    while job.iterations < iterations:
        rounds.run_until(rounds.now_us + profile.period_us)
    period_us = sum(job.periods_us) // len(job.periods_us)
    window_us = round(PUSHING * profile.period_us) if window else 0
    found = msgspec.structs.replace(job.profile, period_us=period_us, window_us=window_us)
    return Job(found, profile.period_us, random.Random(seed + 1))


class Shared:
    """A pool and the rounds of its jobs, in one time."""

    def __init__(self, pool: Pool, by_arrival: bool = False) -> None:
        self.pool = pool
        self.rounds = Rounds(self._timed, by_arrival)
        self.story: list[tuple[float, str]] = []
        """(seconds, what happened)."""
        self.counts: list[tuple[float, int]] = []
        """(seconds, aggregators)."""

    def arrive(self, job: Job, phase_us: int = 0) -> None:
        """Let a job come: its tensors are assigned largest first, and pushed in the order of its layers."""
        ordered = sorted(job.profile.tensors, key=lambda tensor: (-tensor.work_us, tensor.name))
        self._heed(PoolJobArrived(msgspec.structs.replace(job.profile, tensors=tuple(ordered))))
        self.rounds.add(job, self.pool.on[job.profile.job], self.rounds.now_us + phase_us)

    def leave(self, name: JobId) -> None:
        self.rounds.remove(name)
        on = dict(self.pool.on[name])
        self._heed(Exited(name))
        self.rounds.on[name] = on  # the iteration it is in ends where it began

    def run(self, seconds: float) -> None:
        self.rounds.run_until(self.rounds.now_us + round(seconds * 1e6))

    def losses(self, last: int) -> dict[JobId, float]:
        """Loss of each job over its last `last` iterations."""
        found = {}
        for name, job in self.rounds.jobs.items():
            periods = job.periods_us[-last:]
            if periods:
                found[name] = 1 - job.profile.period_us * len(periods) / sum(periods)
        return found

    def _timed(self, name: JobId, period_us: int) -> None:
        if not self.rounds.jobs[name].over:
            self._heed(PoolJobTimed(name, period_us))

    def _heed(self, event: Event) -> None:
        """Give the pool an event. Moves take effect with the next tensor that is pushed: ranks look it up in
        `Pool.on`."""
        before = len(self.pool.cycles)
        actions: list[Action] = list(self.pool.handle(event, self.rounds.now_us / 1e6))
        now_s = self.rounds.now_us / 1e6
        notes = [one for one in actions if isinstance(one, LogEvent)]
        self.story += [(now_s, f"{note.subject}: {note.event}: {note.reason}") for note in notes]
        if len(self.pool.cycles) != before or any(isinstance(one, PoolPlace) for one in actions):
            self.counts.append((now_s, len(self.pool.cycles)))
