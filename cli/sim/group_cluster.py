"""A cluster whose jobs compute and communicate in turns, in virtual time: what `covey-sim groups` runs.

A job repeats COMP (its work divided by the hosts of its group) and COMM (always as long) until its iterations are done.
Subtasks of one group meet in two ways:

    turns      one COMP and one COMM at a time, in the order of `plugins.interleave.machine.turns`
    naive      as it comes: n jobs in the same phase have 1/n of it each, and lose a share more to contention

Nothing is taken from the equations of the model: what a group achieves comes out of its subtasks, one after another,
and is compared with them.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from covey.core import JobId
from plugins.interleave.machine.turns import Asked, Finished, OrderChanged, Turns
from plugins.interleave.messages import Need
from plugins.interleave.policy.model import Profile

APPS = {
    "NMF": (48.3, 0.64, (45.6, 91.2)),
    "LDA": (94.5, 0.60, (4.3, 0.6)),
    "MLR": (32.4, 0.70, (78.4, 155.0)),
    "Lasso": (28.9, 0.56, (78.4, 155.0)),
}
"""Seconds of an iteration on 16 hosts (Harmony, table 2.1), share of computing in it (ours: figure 4.9 gives no
numbers), input in GB of the two data sets (table 4.1)."""
PROFILED_ON = 16
"""Hosts on which the paper measured its jobs (§4.4.2)."""


@dataclass
class Work:
    """One job: what it is, and how far it is."""

    profile: Profile
    """The truth; what the scheduler believes is measured from it."""
    iterations: int
    app: str = ""
    submit_s: float = 0.0
    need: Need = "comp"
    left: float = 1.0
    """Of the subtask at hand, 0..1."""
    done: int = 0
    from_s: float = 0.0
    """It moves until then."""
    end_s: float | None = None
    group_iterations: list[float] = field(default_factory=list)


@dataclass
class Shared:
    """Jobs on hosts, from one cluster event to the next."""

    jobs: list[Work]
    hosts: int
    naive: bool = False
    contention: float = 0.0
    turns: Turns = field(default_factory=Turns)
    version: int = 0
    since_s: float = 0.0
    lead_done: int = 0

    def reorder(self) -> None:
        """The jobs or hosts changed."""
        self.version += 1
        if not self.naive:
            names = [job.profile.job for job in self.jobs]
            self.turns.handle(OrderChanged(tuple(names)), 0.0)
            self._ask(-math.inf)

    def _ask(self, now_s: float) -> None:
        for job in self.jobs:
            if job.from_s <= now_s or (now_s == -math.inf and job.from_s == 0.0):
                self.turns.handle(Asked(job.profile.job, job.need), 0.0)

    def rates(self, now_s: float) -> list[tuple[Work, float, Need]]:
        """Who goes on now, in shares of its subtask per second."""
        active = [job for job in self.jobs if job.from_s <= now_s + 1e-9 and job.end_s is None]
        if not self.naive:
            self._ask(now_s + 1e-9)
            going = {self.turns.holds.get("comp"), self.turns.holds.get("primary")}
            return [(job, 1 / self.length(job), job.need) for job in active if job.profile.job in going]
        found = []
        for job in active:
            same = sum(1 for other in active if other.need == job.need)
            speed = 1 / (same * (1 + self.contention * (same - 1)))
            found.append((job, speed / self.length(job), job.need))
        return found

    def length(self, job: Work) -> float:
        """Seconds of the subtask at hand when it is alone."""
        return max(1e-6, job.profile.work_s / self.hosts if job.need == "comp" else job.profile.net_s)

    def next_subtask(self, job: Work) -> bool:
        """The subtask is over. Is it the last of an iteration?"""
        last = job.need == "comm"
        job.need, job.left = ("comp" if last else "comm"), 1.0
        if not self.naive:
            self.turns.handle(Finished(job.profile.job), 0.0)
            if not (last and job.done + 1 >= job.iterations):
                self.turns.handle(Asked(job.profile.job, job.need), 0.0)
        return last


@dataclass
class Outcome:
    jct_s: list[float]
    makespan_s: float
    cpu: float
    """Of all hosts from the first job to the last, 0..1."""
    net: float
    running: float
    """Jobs at once, mean over time."""
    groups: float
    moves: int = 0
    curve: list[tuple[float, float, float]] = field(default_factory=list)
    """(time, CPU, network): use in each stretch between two cluster events."""


class Cluster:
    """Groups side by side. `arrange(cluster, event)` is called whenever a job ends, arrives or has run `profile_after`
    iterations, and changes `groups`."""

    def __init__(
        self, jobs: Sequence[Work], hosts: int, arrange: "Callable[[Cluster, str, Work], None]", profile_after: int = 0
    ) -> None:
        self.jobs, self.hosts, self.arrange, self.profile_after = list(jobs), hosts, arrange, profile_after
        self.groups: list[Shared] = []
        self.now_s = 0.0
        self.busy = {"comp": 0.0, "comm": 0.0}
        self.moves = 0
        self.curve: list[tuple[float, float, float]] = []

    def run(self, progress: Callable[[float], None] = lambda share: None) -> Outcome:
        coming = sorted(self.jobs, key=lambda job: job.submit_s)
        mark = (0.0, 0.0, 0.0)
        running = groups = 0.0
        ended = 0
        while ended < len(self.jobs):
            while coming and coming[0].submit_s <= self.now_s + 1e-9:
                self.arrange(self, "came", coming.pop(0))
            plan = [(group, group.rates(self.now_s)) for group in self.groups]
            wake = [job.from_s for group in self.groups for job in group.jobs if job.from_s > self.now_s + 1e-9]
            wake += [coming[0].submit_s] if coming else []
            step = min(
                [left for _, rates in plan for job, rate, _ in rates if (left := job.left / rate) > 0]
                + [at - self.now_s for at in wake],
                default=math.inf,
            )
            if math.isinf(step):
                raise RuntimeError("jobs are left and nothing runs")
            running += step * sum(len(group.jobs) for group in self.groups)
            groups += step * len(self.groups)
            self.now_s += step
            over: list[tuple[Shared, Work]] = []
            for group, rates in plan:
                for job, rate, need in rates:
                    self.busy[need] += step * rate * group.length(job) * group.hosts
                    job.left -= step * rate
                    if job.left <= 1e-9:
                        over.append((group, job))
            for group, job in over:
                if not group.next_subtask(job):
                    continue
                job.done += 1
                if job.done >= job.iterations:
                    job.end_s = self.now_s
                    ended += 1
                    mark = self._mark(mark)
                    self.arrange(self, "ended", job)
                    progress(ended / len(self.jobs))
                elif job.done == self.profile_after:
                    mark = self._mark(mark)
                    self.arrange(self, "profiled", job)
        total = self.now_s * self.hosts
        return Outcome(
            jct_s=[(job.end_s or 0.0) - job.submit_s for job in self.jobs],
            makespan_s=self.now_s,
            cpu=self.busy["comp"] / total,
            net=self.busy["comm"] / total,
            running=running / self.now_s,
            groups=groups / self.now_s,
            moves=self.moves,
            curve=self.curve,
        )

    def _mark(self, last: tuple[float, float, float]) -> tuple[float, float, float]:
        since, cpu, net = last
        if self.now_s - since < 600:
            return last
        span = (self.now_s - since) * self.hosts
        use = (self.busy["comp"] - cpu) / span, (self.busy["comm"] - net) / span
        self.curve.append(((since + self.now_s) / 2, *use))
        return self.now_s, self.busy["comp"], self.busy["comm"]


def workload(count: int, rng: random.Random, arrival_s: float = 0.0, iterations: int = 150) -> list[Work]:
    """`count` jobs in the manner of the paper's 80: four applications, two data sets, ten settings of each;
    `iterations` in the mean; all at once, or `arrival_s` apart in the mean."""
    found: list[Work] = []
    at_s = 0.0
    for n in range(count):
        app = list(APPS)[n % 4]
        base_s, share, inputs = APPS[app]
        took_s = base_s * (inputs[(n // 4) % 2] / max(inputs)) ** 0.5 * 2 ** rng.uniform(-0.7, 0.7)
        computing = min(0.9, max(0.15, share + rng.uniform(-0.2, 0.2)))
        profile = Profile(JobId(f"j{n + 1}"), took_s * computing * PROFILED_ON, took_s * (1 - computing))
        turns = max(10, round(iterations * rng.lognormvariate(-0.06, 0.35)))
        found.append(Work(profile, turns, app, at_s))
        at_s += rng.expovariate(1 / arrival_s) if arrival_s else 0.0
    rng.shuffle(found)
    if arrival_s:
        for job, at in zip(found, sorted(job.submit_s for job in found), strict=True):
            job.submit_s = at
    return found
