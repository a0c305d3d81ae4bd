"""A trace of jobs on shared aggregators, in virtual time: how much CPU, and how much slower (AutoPS §4.5.2.4).

A job runs its trial iterations on as many temporary servers as it would have had, then its tensors go to the pool. An
iteration takes what the longest of its cycles makes of it, so sharing also makes jobs end later, and that costs here
too. CPU is counted in server-seconds: aggregators and temporary servers, whether they have work or not.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from covey.core import JobId
from plugins.aggregator.machine.pool import Exited, PeriodPassed, Pool, PoolJobArrived, PoolMove, PoolRules
from plugins.aggregator.policy.assign import AggregationProfile
from plugins.aggregator.policy.pools import best_pool, free_of, need_of
from sim.aggregators_jobs import TracedJob

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
    """Iterations."""
    began_s: float
    alone_s: float
    pool: int
    period_s: float = 0.0
    """Of an iteration now."""
    worst: float = 0.0


class Trace:
    def __init__(self, rules: PoolRules, pools: int = 1, period_s: float | None = None) -> None:
        self.pools = [Pool(rules) for _ in range(pools)]
        self.period_s = period_s
        self.outcome = Outcome()
        self._running: dict[JobId, _Running] = {}
        self._trial: dict[JobId, TracedJob] = {}
        self._now_s = 0.0

    def run(self, jobs: Sequence[TracedJob]) -> Outcome:
        """Time passes from event to event: a submission, the end of trials, an exit, a period."""
        todo: list[tuple[float, int, str, TracedJob | None]] = []
        for at, one in enumerate(jobs):
            trial_s = min(one.duration_s, TRIAL_ITERATIONS * one.profile.period_us / 1e6)
            todo += [(one.submit_s, at, "submit", one), (one.submit_s + trial_s, at, "tried", one)]
        if self.period_s is not None:
            todo.append((self.period_s, len(jobs), "period", None))
        heapq.heapify(todo)
        while self._running or any(job is not None for *_, job in todo):
            leaves_s, leaving = min(
                ((self._now_s + one.left * one.period_s, name) for name, one in self._running.items()),
                default=(float("inf"), JobId("")),
            )
            if todo and todo[0][0] <= leaves_s:
                at_s, number, what, job = heapq.heappop(todo)
                self._pass(at_s)
                if job is not None and what == "submit":
                    self._trial[job.profile.job] = job
                elif job is not None:
                    self._tried(job)
                elif self.period_s is not None:
                    for pool in self.pools:
                        self._heed(pool, PeriodPassed())
                    heapq.heappush(todo, (at_s + self.period_s, number, what, None))
            else:
                self._pass(leaves_s)
                self._left(leaving)
            self._look()
        return self.outcome

    def _pass(self, until_s: float) -> None:
        passed_s = until_s - self._now_s
        shared, asked = self._servers()
        self.outcome.shared_s += shared * passed_s
        if asked and passed_s > 0:
            self.outcome.ratios.append((passed_s, shared / asked))
        for one in self._running.values():
            one.left = max(0.0, one.left - passed_s / one.period_s)
        self._now_s = until_s

    def _servers(self) -> tuple[int, int]:
        trial = sum(job.profile.servers for job in self._trial.values())
        shared = sum(len(pool.cycles) for pool in self.pools) + trial
        # a job that waits for an aggregator goes on with the servers of its trial
        shared += sum(profile.servers for pool in self.pools for profile in pool.waiting.values())
        return shared, trial + sum(one.profile.servers for one in self._running.values())

    def _tried(self, job: TracedJob) -> None:
        profile = job.profile
        del self._trial[profile.job]
        self.outcome.dedicated_s += job.duration_s * profile.servers
        done_s = self._now_s - job.submit_s
        left = (job.duration_s - done_s) * 1e6 / profile.period_us
        if left <= 0:
            self.outcome.slower.append(1.0)
            return
        at = self._pool_for(profile)
        one = self._running[profile.job] = _Running(profile, left, job.submit_s, job.duration_s, at)
        one.period_s = profile.period_us / 1e6
        self._heed(self.pools[at], PoolJobArrived(profile))

    def _pool_for(self, profile: AggregationProfile) -> int:
        """The pool that suffices with the least; else the freest, which starts aggregators."""
        free = {f"{at:06}": free_of(pool.cycles.values()) for at, pool in enumerate(self.pools)}
        found = best_pool(free, need_of(profile))
        return int(
            found if found is not None else min(free, key=lambda name: (len(self.pools[int(name)].cycles), name))
        )

    def _left(self, name: JobId) -> None:
        one = self._running.pop(name)
        self.outcome.slower.append((self._now_s - one.began_s) / one.alone_s)
        self.outcome.over_limit += one.worst >= float(one.profile.limit)
        self._heed(self.pools[one.pool], Exited(name))

    def _heed(self, pool: Pool, event: PoolJobArrived | Exited | PeriodPassed) -> None:
        self.outcome.moves += sum(isinstance(action, PoolMove) for action in pool.handle(event, self._now_s))

    def _look(self) -> None:
        """What every job loses now."""
        for name, one in self._running.items():
            pool = self.pools[one.pool]
            lost = pool.loss(name) if name in pool.jobs else 0.0
            one.period_s = one.profile.period_us / 1e6 / (1 - lost)
            one.worst = max(one.worst, lost)
            self.outcome.loss_max = max(self.outcome.loss_max, lost)
        self.outcome.running_max = max(self.outcome.running_max, len(self._running) + len(self._trial))
        self.outcome.aggregators_max = max(self.outcome.aggregators_max, sum(len(pool.cycles) for pool in self.pools))
