"""A trace of jobs on shared aggregators, in virtual time: how much CPU, and how much slower (AutoPS §4.5.2.4).

A job runs its trial iterations on as many temporary servers as it would have had, then its tensors go to the pool. An
iteration takes what the longest of its cycles makes of it, so sharing also makes jobs end later, and that costs here
too. CPU is counted in server-seconds: aggregators and temporary servers, whether they have work or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from covey.core.ids import JobId
from plugins.aggregator.machine.pool import Exited, PeriodPassed, Pool, PoolJobArrived, PoolMove, PoolRules
from plugins.aggregator.policy.assign import AggregationProfile
from plugins.aggregator.policy.pools import best_pool, free_of, need_of
from sim.kernel import Kernel
from sim.tensors.jobs import TracedJob

TRIAL_ITERATIONS = 20
"""Iterations on servers of its own before a job's tensors are assigned; ours (the thesis: several)."""


@dataclass
class Outcome:
    dedicated_s: float = 0.0
    """Server-seconds with parameter servers of each job's own."""
    shared_s: float = 0.0
    loss_max: float = 0.0
    over_limit: int = 0
    """Jobs that were at or over their loss limit at any time."""
    slower: list[float] = field(default_factory=list)
    """For each job: run time over run time alone."""
    moves: int = 0
    running_max: int = 0
    aggregators_max: int = 0
    ratios: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, servers in use / servers that the running jobs ask for)."""

    @property
    def saved(self) -> float:
        return 1 - self.shared_s / self.dedicated_s if self.dedicated_s else 0.0


@dataclass
class _Running:
    profile: AggregationProfile
    left: float
    """Iterations left."""
    began_s: float
    alone_s: float
    pool: int
    period_s: float = 0.0
    """Seconds of one iteration now."""
    worst: float = 0.0


class Trace:
    def __init__(self, rules: PoolRules, pools: int = 1, period_s: float | None = None) -> None:
        self.pools = [Pool(rules) for _ in range(pools)]
        self.period_s = period_s
        self.outcome = Outcome()
        self._running: dict[JobId, _Running] = {}
        self._trial: dict[JobId, TracedJob] = {}
        self._kernel: Kernel[float, Callable[[], None]] = Kernel(0.0)

    def run(self, jobs: Sequence[TracedJob]) -> Outcome:
        """Let time pass from event to event: a submission, the end of trials, an exit, a period."""
        for job in jobs:
            trial_s = min(job.duration_s, TRIAL_ITERATIONS * job.profile.period_us / 1e6)
            self._kernel.post(job.submit_s, partial(self._submitted, job))
            self._kernel.post(job.submit_s + trial_s, partial(self._tried, job))
        if self.period_s is not None:
            self._kernel.post(self.period_s, partial(self._period_passed, self.period_s))
        while len(self.outcome.slower) < len(jobs):
            self._step()
            self._look()
        return self.outcome

    def _step(self) -> None:
        """Handle the next event. Periods of iterations change at every step, so the next exit is computed again."""
        kernel, exit_number = self._kernel, 0
        ends = [(kernel.now + one.left * one.period_s, name) for name, one in self._running.items()]
        if ends:
            end_s, name = min(ends)
            exit_number = kernel.post(end_s, partial(self._left, name), rank=1)
        before_s = kernel.now
        happens = kernel.pop()
        self._count(kernel.now - before_s)
        happens()
        kernel.cancel(exit_number)

    def _count(self, passed_s: float) -> None:
        """Count the seconds since the last event: servers were in use, jobs made progress."""
        shared, asked = self._servers()
        self.outcome.shared_s += shared * passed_s
        if asked and passed_s > 0:
            self.outcome.ratios.append((passed_s, shared / asked))
        for one in self._running.values():
            one.left = max(0.0, one.left - passed_s / one.period_s)

    def _servers(self) -> tuple[int, int]:
        trial = sum(job.profile.servers for job in self._trial.values())
        shared = sum(len(pool.cycles) for pool in self.pools) + trial
        # a job that waits for an aggregator goes on with the servers of its trial
        shared += sum(profile.servers for pool in self.pools for profile in pool.waiting.values())
        return shared, trial + sum(one.profile.servers for one in self._running.values())

    def _submitted(self, job: TracedJob) -> None:
        self._trial[job.profile.job] = job

    def _period_passed(self, period_s: float) -> None:
        for pool in self.pools:
            self._heed(pool, PeriodPassed())
        self._kernel.post(self._kernel.now + period_s, partial(self._period_passed, period_s))

    def _tried(self, job: TracedJob) -> None:
        profile = job.profile
        del self._trial[profile.job]
        self.outcome.dedicated_s += job.duration_s * profile.servers
        done_s = self._kernel.now - job.submit_s
        left = (job.duration_s - done_s) * 1e6 / profile.period_us
        if left <= 0:
            self.outcome.slower.append(1.0)
            return
        at = self._pool_for(profile)
        one = self._running[profile.job] = _Running(profile, left, job.submit_s, job.duration_s, at)
        one.period_s = profile.period_us / 1e6
        self._heed(self.pools[at], PoolJobArrived(profile))

    def _pool_for(self, profile: AggregationProfile) -> int:
        """The pool that suffices with the least free; else the one with the fewest aggregators, which starts more."""
        free = {f"{at:06}": free_of(pool.cycles.values()) for at, pool in enumerate(self.pools)}
        found = best_pool(free, need_of(profile))
        return int(
            found if found is not None else min(free, key=lambda name: (len(self.pools[int(name)].cycles), name))
        )

    def _left(self, name: JobId) -> None:
        one = self._running.pop(name)
        self.outcome.slower.append((self._kernel.now - one.began_s) / one.alone_s)
        self.outcome.over_limit += one.worst >= float(one.profile.limit)
        self._heed(self.pools[one.pool], Exited(name))

    def _heed(self, pool: Pool, event: PoolJobArrived | Exited | PeriodPassed) -> None:
        self.outcome.moves += sum(isinstance(action, PoolMove) for action in pool.handle(event, self._kernel.now))

    def _look(self) -> None:
        """Set each job's period to what it loses now."""
        for name, one in self._running.items():
            pool = self.pools[one.pool]
            lost = pool.loss(name) if name in pool.jobs else 0.0
            one.period_s = one.profile.period_us / 1e6 / (1 - lost)
            one.worst = max(one.worst, lost)
            self.outcome.loss_max = max(self.outcome.loss_max, lost)
        self.outcome.running_max = max(self.outcome.running_max, len(self._running) + len(self._trial))
        self.outcome.aggregators_max = max(self.outcome.aggregators_max, sum(len(pool.cycles) for pool in self.pools))
